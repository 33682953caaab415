# SPDX-License-Identifier: Apache-2.0
"""A daemon's end of one stream: what it says when, what it believes, and for how long. What must
hold whatever happens in whatever order is in test_protocol_properties."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from arbiters import at

from flowslot.model.units import MILLISECOND, Nanos
from flowslot.protocol import session as module
from flowslot.protocol.grants import MOST_HOLD_NS, Granted
from flowslot.protocol.messages import (
    Ack,
    Demand,
    Done,
    FromArbiter,
    FromDaemon,
    Grant,
    HeartbeatEcho,
    Held,
    Opening,
    Refusal,
)
from flowslot.protocol.session import (
    FIRST_RETRY_NS,
    LAST_RETRY_NS,
    ORPHAN_SLOTS,
    PATIENCE_LEASES,
    News,
    Session,
    aged,
)

SLOT, LEASE = at(60), at(240)
ORPHAN, PATIENCE = ORPHAN_SLOTS * 60, PATIENCE_LEASES * 240
"""ms"""


def demand(flow: int, remaining: int = 1000) -> Demand:
    return Demand(flow, 1, "job", (3,), remaining, period_ns=50 * MILLISECOND)


def grant(seq: int, rate: float, flow: int = 1, ack: bool = False, standing: bool = False) -> Grant:
    return Grant(flow, 1, seq, rate, 100.0, ack, standing)


class Talker:
    """A session with the arbiter of links 3 and 4; flow 1 is asked for from the beginning."""

    def __init__(self) -> None:
        self.one = Session(
            "h1#1", (4, 3), ("d", "c"), slot_ns=SLOT, lease_ns=LEASE, first_session=7
        )
        self.one.demand(at(0), [demand(1)])

    def say(self, ms: float) -> FromDaemon:
        message = self.one.take_message(at(ms), 0)
        assert message is not None
        return message

    def hear(
        self,
        ms: float,
        grants: Sequence[Grant] = (),
        refusals: Sequence[Refusal] = (),
        echo: int | None = None,
    ) -> News:
        """All of it is put into force."""
        session = self.one.session
        assert session is not None
        beat = None if echo is None else HeartbeatEcho(echo)
        news = self.one.received(at(ms), FromArbiter(session, grants, refusals, beat))
        self.one.enforced(news)
        return news

    def beat(self, ms: float) -> News:
        """A heartbeat, answered 1 ms later."""
        self.one.beat(at(ms))
        heartbeat = self.say(ms).heartbeat
        assert heartbeat is not None
        return self.hear(ms + 1, echo=heartbeat.n)


def begun() -> Talker:
    """Connected at 0; flow 1 has a grant since 1; live."""
    talker = Talker()
    talker.one.connect(at(0))
    assert talker.say(0).heartbeat is not None
    assert talker.hear(1, [grant(1, 50.0)], echo=1).began and talker.one.live
    return talker


# --- the table of states


class Walk(Talker):
    """Goes from state to state."""

    ms = 0.0
    closed_at = at(0)

    def connect(self) -> None:
        self.one.connect(at(self.ms))
        self.say(self.ms)

    def echo(self) -> None:
        self.hear(self.ms, echo=1)

    def grant(self) -> None:
        self.hear(self.ms, [grant(1, 50.0)])

    def refusal(self) -> None:
        self.hear(self.ms, refusals=[Refusal(1, 1, "no")])
        assert not self.one.live, "with the next echo"
        self.beat(self.ms + 120)

    def patience(self) -> None:
        since, self.ms = self.ms, self.ms + 119
        while self.ms - since < PATIENCE:
            assert not self.one.live, self.ms
            self.beat(self.ms)
            self.ms += 120
        self.beat(self.ms)

    def closed(self) -> None:
        self.closed_at = at(self.ms)
        self.one.closed(self.closed_at)

    def lease_ends(self) -> None:
        end = self.one.lease_end
        assert end in (LEASE, self.closed_at + ORPHAN_SLOTS * SLOT)
        assert end is not None
        was_live = self.one.live
        assert not self.one.check(Nanos(end - 1)) and self.one.lease_end == end
        assert self.one.check(end) == was_live and not self.one.check(end), "once"
        assert math.isnan(self.one.grant(1).rate) and self.one.take_message(end, 0) is None
        self.ms = end / MILLISECOND


TO_LIVE = (Walk.connect, Walk.echo, Walk.grant)
REACHED: dict[str, tuple[Callable[[Walk], None], ...]] = {
    "DOWN": (),
    "GREETED": TO_LIVE[:1],
    "SYNCED": TO_LIVE[:2],
    "LIVE": TO_LIVE,
    "ORPHANED": (*TO_LIVE, Walk.closed),
    "LOST": (*TO_LIVE, Walk.lease_ends),
}
LINES = [line.split("|")[1:-1] for line in (module.__doc__ or "").splitlines() if line[:2] == "| "]
TABLE = {state: columns for state, *columns in ([x.strip() for x in line] for line in LINES[2:])}


@pytest.mark.parametrize(
    ("state", "event", "then"),
    [
        ("DOWN", Walk.connect, "GREETED"),
        ("GREETED", Walk.echo, "SYNCED"),
        ("GREETED", Walk.closed, "DOWN"),
        ("GREETED", Walk.lease_ends, "LOST"),
        ("SYNCED", Walk.grant, "LIVE"),
        ("SYNCED", Walk.refusal, "LIVE"),
        ("SYNCED", Walk.patience, "LIVE"),
        ("SYNCED", Walk.closed, "DOWN"),
        ("SYNCED", Walk.lease_ends, "LOST"),
        ("LIVE", Walk.lease_ends, "LOST"),
        ("LIVE", Walk.closed, "ORPHANED"),
        ("ORPHANED", Walk.connect, "LIVE"),
        ("ORPHANED", Walk.lease_ends, "DOWN"),
        ("LOST", Walk.closed, "DOWN"),
    ],
)
def test_states_are_those_of_the_table(
    state: str, event: Callable[[Walk], None], then: str
) -> None:
    assert set(TABLE) == set(REACHED)
    walk = Walk()
    for step in REACHED[state]:
        step(walk)
        walk.ms += 1
    for expected, goes_on in ((state, True), (then, False)):
        stream, lease, live, exits = TABLE[expected]
        one = walk.one
        assert ((stream == "open"), (live == "yes")) == (one._open, one.live)
        assert one.lost == (expected == "LOST")
        if expected in {"GREETED", "SYNCED"}:
            assert (one._synced_at is None) == (expected == "GREETED")
        if lease != "rest":
            assert (lease != "no") == (one.lease_end is not None)
        if goes_on:
            assert then in exits or (event in (Walk.closed, Walk.lease_ends))
            event(walk)


# --- what is said


def test_nothing_is_said_before_there_is_a_stream() -> None:
    talker = Talker()
    one = talker.one
    one.beat(at(1))
    assert one.take_message(at(1), 0) is None and one.session is None
    assert not one.live and math.isnan(one.grant(1).rate)
    opening = one.connect(at(2))
    assert opening == Opening(replace(opening.hello, session=7, held=()), ("d", "c"), LEASE)
    first = talker.say(2)
    assert [d.flow for d in first.demands] == [1] and first.heartbeat is not None
    assert one.take_message(at(2), 0) is None, "all is said"


def test_only_the_newest_waits_to_be_said() -> None:
    talker = begun()
    talker.one.demand(at(2), [demand(1, 900), demand(2)])
    talker.one.demand(at(3), [demand(1, 800)])
    talker.one.done([Done(2, 1), Done(99, 1)])
    message = talker.say(4)
    assert [(d.flow, d.remaining) for d in message.demands] == [(1, 800)]
    assert message.dones == [Done(2, 1)]
    assert message.heartbeat is None, "one was sent only just"


def test_heartbeats_travel_with_messages_and_go_alone_when_overdue() -> None:
    talker = begun()
    one = talker.one
    assert one.next_wakeup(at(1)) == at(135)
    assert not one.beat(at(60)) and not one.has_news, "not in every slot"
    assert one.beat(at(120)) and talker.say(120).heartbeat is not None
    assert not one.beat(at(121)) and not one.has_news, "only just sent"
    one.demand(at(200), [demand(1, 1)])
    assert talker.say(200).heartbeat is None, "too soon"
    one.demand(at(215), [demand(1, 2)])
    assert talker.say(215).heartbeat is not None, "it may as well travel"
    assert one.beat(at(240)) and not one.has_news, "the slot of small news, with or without it"
    assert not one.beat(at(300))
    assert one.next_wakeup(at(224)) == at(240), "nothing was echoed: the lease comes first"
    assert one.take_message(at(349), 0) is None
    assert talker.say(350).heartbeat is not None, "overdue"


@pytest.mark.parametrize("news", ["done", "ack"])
def test_any_news_takes_a_heartbeat_along_that_is_due(news: str) -> None:
    talker = begun()
    if news == "done":
        talker.one.done([Done(1, 1)])
    else:
        talker.hear(100, [grant(2, 20.0, ack=True)])
    message = talker.say(100)
    assert message.dones or message.acks
    assert message.heartbeat is not None


def test_streams_are_dialled_once_and_then_less_and_less_often_until_one_is_answered() -> None:
    talker = Talker()
    one = talker.one
    assert one.next_wakeup(at(0)) == 1 and one.dial(at(0)) and not one.dial(at(999))
    assert one.next_wakeup(at(999)) is None
    wait, now = FIRST_RETRY_NS, at(1000)
    for _ in range(9):
        one.closed(now, 0.75)
        assert one.next_wakeup(now) == now + 0.75 * wait and not one.dial(Nanos(now + 1))
        now = Nanos(int(now + 0.75 * wait))
        assert one.dial(now)
        wait = Nanos(min(2 * wait, LAST_RETRY_NS))
    one.connect(now)
    talker.say(now / MILLISECOND)
    assert not one.dial(at(10**6))
    one.received(now, FromArbiter(7, (), (), HeartbeatEcho(1)))
    one.closed(now)
    assert not one.dial(Nanos(now + FIRST_RETRY_NS - 1)) and one.dial(Nanos(now + FIRST_RETRY_NS))


def test_demands_age() -> None:
    active, idle = demand(1), Demand(1, 1, "job", (3,), 0, next_in_ns=at(9))
    assert aged(active, at(20)).wait_ns == at(20)
    assert aged(active, at(90)).wait_ns == at(50), "at most a period"
    assert aged(idle, at(5)).next_in_ns == at(4) and aged(idle, at(5)).wait_ns == 0


# --- grants


def test_lowers_and_other_changes_are_told_apart() -> None:
    talker = begun()
    news = talker.hear(2, [grant(2, 20.0, 2), grant(3, 10.0, ack=True), grant(4, 0.0, 8)])
    assert (news.lowered, news.raised) == ([1], [2, 8]) and news.acks == [Ack(1, 1, 3)]
    assert talker.one.grant(1) == Granted(1, 10.0, 100.0)
    assert math.isnan(talker.one.grant(99).rate)
    for seq, standing in ((5, True), (7, False), (9, True)):
        news = talker.hear(3, [grant(seq, 10.0, standing=standing)])
        assert (news.lowered, news.raised, news.acks) == ([], [1], []), "of standing alone"
        assert talker.one.grant(1).standing is standing
        assert not talker.hear(3, [grant(seq + 1, 10.0, standing=standing)]).raised, "nothing new"
    assert talker.hear(4, [grant(11, 5.0, standing=True)]).lowered == [1]


@pytest.mark.parametrize("rate", [math.nan, math.inf, -1.0])
def test_nonsense_counts_as_nothing(rate: float) -> None:
    talker = begun()
    talker.hear(2, [replace(grant(2, rate), share=rate)])
    assert (talker.one.grant(1).rate, talker.one.grant(1).share) == (0.0, 0.0)


@pytest.mark.parametrize("event", ["gone", "closed", "connected", "lost"])
def test_an_acknowledgement_that_comes_too_late_is_not_made(event: str) -> None:
    one = begun().one
    news = one.received(at(2), FromArbiter(7, [grant(2, 10.0, ack=True)]))
    if event == "gone":
        one.done([Done(1, 1)])
    elif event in ("closed", "connected"):
        one.closed(at(3))
    if event == "connected":
        one.connect(at(4))
    if event == "lost":
        assert one.check(at(240))
    one.enforced(news)
    message = one.take_message(at(241), 0)
    assert message is None or not message.acks


def test_what_is_given_back_is_said_until_the_next_grant() -> None:
    talker = begun()
    one = talker.one
    assert one.give_back([1, 2]) == [1] and one.grant(1) == Granted(1, 0.0, 100.0)
    assert one.give_back([1]) == [], "once"
    assert [d.gave_back for d in talker.say(1).demands] == [1]
    assert not talker.hear(2, [grant(1, 50.0)]).raised, "the same again"
    one.demand(at(3), [demand(1, 0)])
    assert [d.gave_back for d in talker.say(3).demands] == [1]
    news = talker.hear(4, [grant(2, 9.0, ack=True)])  # was on its way
    assert news.raised == [1] and news.acks == [Ack(1, 1, 2)]
    one.demand(at(5), [demand(1, 0)])
    assert [d.gave_back for d in talker.say(5).demands] == [0]


def test_flows_that_get_no_answer_are_left_alone_until_they_do() -> None:
    talker = begun()
    one = talker.one
    one.demand(at(10), [demand(2), replace(demand(3), cap=0.0), demand(4, 0)])
    for ms in range(120, 601, 120):
        news = talker.beat(ms)
        overdue = ms + 1 - 10 >= PATIENCE
        assert news.left_alone == ([2] if overdue else []), "the others ask for nothing"
        assert one.refuses(2) == overdue
        if overdue:
            break
    assert news.refused == ["flows of job job left alone: no answer"]
    one.demand(at(590), [demand(2)])
    assert one.refuses(2) and not one.refuses(1)
    talker.hear(600, [grant(2, 5.0, 2)])
    assert not one.refuses(2) and one.grant(2).rate == 5.0
    news = talker.hear(601, refusals=[Refusal(2, 1, "no")])
    assert news.left_alone == [2] and news.refused == ["flows of job job refused: no"]


def test_how_long_a_flow_waited_and_a_heartbeat_took() -> None:
    talker = begun()
    talker.one.demand(at(10), [demand(2), demand(3)])
    talker.one.demand(at(12), [demand(2, 900)])
    beat = talker.say(100).heartbeat
    assert beat is not None
    news = talker.hear(102, [grant(2, 5.0, 2)], echo=beat.n)
    assert news.waited_ns == at(92) and news.round_trip_ns == at(2)
    assert talker.hear(103, [grant(3, 6.0, 2)]).waited_ns is None


# --- the lease, and the next stream


def test_the_lease_counts_from_the_sending_of_an_echoed_heartbeat() -> None:
    talker = begun()
    one = talker.one
    for ms in (120, 220):
        one.beat(at(ms))
        assert talker.say(ms).heartbeat is not None
    talker.hear(230, echo=2)
    assert one.lease_end == at(360)
    for n in (2, 1, 99):  # again, outdated, never sent
        talker.hear(231, echo=n)
        assert one.lease_end == at(360)
    late = FromArbiter(7, [grant(2, 60.0)], (), HeartbeatEcho(3))
    news = one.received(at(360), late)  # the arbiter may have given everything away
    assert not news.raised and one.lost and one.lease_end is None and one.check(at(360))
    one.closed(at(361))
    assert one.connect(at(370)).hello.held == () and one.lease_end == at(370 + 240)


def test_the_next_stream_takes_over_what_is_held_and_says_everything_again() -> None:
    talker = begun()
    one = talker.one
    talker.hear(5, [grant(2, 50.0, standing=True), grant(3, 20.0, 2), grant(4, 9.0, 1)])
    one.demand(at(10), [demand(1, 500)])
    one.give_back([2])
    talker.say(10)
    one.closed(at(20))
    assert one.lease_end == at(20 + ORPHAN)
    one.dial(at(40))
    assert one.next_wakeup(at(40)) == one.lease_end, "no heartbeat is due"
    hello = one.connect(at(40)).hello
    assert (hello.session, hello.held) == (8, (Held(1, 1, 9.0), Held(2, 1, 0.0)))
    again = talker.say(40)
    assert [(d.flow, d.remaining, d.wait_ns) for d in again.demands] == [(1, 500, at(30))]
    assert again.heartbeat is not None and one.live
    assert not one.grant(1).standing, "the rate is kept, the promise is not"
    assert one.give_back([2]) == [], "Hello has said it"
    one.received(at(50), FromArbiter(8, (), (), HeartbeatEcho(1)))
    assert one.lease_end == at(20 + ORPHAN), "a heartbeat of the old stream"
    assert talker.hear(51, [grant(1, 9.0, standing=True)]).raised == [1], "numbers begin anew"
    assert one.lease_end == at(40 + 240), "a grant proves that Hello has come"


# --- holds


def held(seq: int, ms: float, rate: float = 0.0, ack: bool = False) -> Grant:
    return replace(grant(seq, rate, ack=ack), hold_ns=int(at(ms)))


def test_a_held_flow_sends_nothing_until_the_time_is_over() -> None:
    talker = begun()
    news = talker.hear(3, [held(2, 30, 40.0, ack=True)])
    assert news.lowered == [1] and [ack.seq for ack in news.acks] == [2]
    assert talker.one.grant(1)[:3] == (1, 0.0, 0.0), "not even top-up"
    assert talker.one.opened(at(32)) == []
    assert (talker.one.next_wakeup(at(32)) or 0) <= at(33)
    assert talker.one.opened(at(33)) == [1] and talker.one.opened(at(33)) == []
    assert talker.one.grant(1)[:3] == (1, 40.0, 100.0)


def test_another_grant_or_the_end_of_the_stream_ends_a_hold() -> None:
    talker = begun()
    talker.hear(2, [held(2, 500)])
    news = talker.hear(3, [grant(3, 50.0)])
    assert news.raised == [1] and talker.one.grant(1).rate == 50.0
    talker.hear(4, [held(4, 500, 20.0)])
    talker.one.closed(at(5))
    assert talker.one.opened(at(5)) == [1]
    assert talker.one.grant(1)[:3] == (1, 20.0, 100.0)


def test_no_arbiter_holds_a_flow_for_ever() -> None:
    talker, most = begun(), MOST_HOLD_NS / MILLISECOND
    for k in range(1000):
        ms = 120.0 * (k + 1)
        talker.beat(ms)
        talker.hear(ms + 2, [held(k + 2, 10**9)])
        assert not talker.one.check(at(ms + 2)) and not talker.one.refuses(1)
        if talker.one.opened(at(ms + 2)):
            break
        assert talker.one.grant(1).ceiling == 0.0
    assert most <= ms <= most + 240


def test_a_hold_on_a_flow_that_asks_for_nothing_is_no_question() -> None:
    """Once it is withdrawn, nothing that the arbiter owes an answer is left."""
    for nothing in (demand(1, 0), replace(demand(1), cap=0.0)):
        talker = begun()
        talker.one.demand(at(2), [nothing])
        talker.hear(3, [held(2, 500)])
        talker.hear(4, [grant(3, 0.0)])
        for ms in range(120, 2 * PATIENCE, 120):
            assert talker.beat(ms).left_alone == [] and not talker.one.refuses(1)


def test_a_hold_is_an_answer() -> None:
    talker = Talker()
    talker.one.connect(at(0))
    talker.say(0)
    assert talker.hear(1, [held(1, 100)], echo=1).began and talker.one.live
