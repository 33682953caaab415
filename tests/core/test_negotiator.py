# SPDX-License-Identifier: Apache-2.0
"""The daemon's side of the negotiation: what it says when, and whatever happens in which order."""

import math
from dataclasses import replace

import pytest
from flowslot.protocol.negotiator import ORPHAN_SLOTS, PATIENCE_LEASES, Negotiator, News, aged
from hypothesis import given, settings
from hypothesis import strategies as st
from talk import CONFIG, Host, Lane, Talk

from flowslot.model.units import MILLISECOND, Nanos
from flowslot.protocol.messages import (
    Ack,
    Demand,
    Done,
    FromArbiter,
    FromDaemon,
    Grant,
    HeartbeatEcho,
    Refusal,
)

SLOT, LEASE = Nanos(60 * MILLISECOND), Nanos(240 * MILLISECOND)


def at(ms: float) -> Nanos:
    return Nanos(int(ms * MILLISECOND))


def negotiator(links: tuple[int, ...] = (3, 4)) -> Negotiator:
    return Negotiator("h1#1", links, slot_ns=SLOT, lease_ns=LEASE, first_session=7)


def demand(flow: int, remaining: int = 1000, links: tuple[int, ...] = (3,)) -> Demand:
    return Demand(flow, 1, "job", links, remaining, period_ns=50 * MILLISECOND)


def grant(flow: int, seq: int, rate: float, *, must_ack: bool = False) -> Grant:
    return Grant(flow, 1, seq, rate, 100.0, must_ack)


def said(one: Negotiator, ms: float) -> FromDaemon:
    message = one.take_message(at(ms), 0)
    assert message is not None
    return message


def begun() -> Negotiator:
    """Connected at 0, one flow with a grant at 1, live."""
    one = negotiator()
    one.demand(at(0), [demand(1)])
    one.connect(at(0))
    n = said(one, 0).heartbeat
    assert n is not None
    news = one.received(at(1), FromArbiter(7, [grant(1, 1, 50.0)], (), HeartbeatEcho(n.n)))
    assert news.began and one.live
    one.enforced(news)
    return one


def test_nothing_is_said_before_there_is_a_stream() -> None:
    one = negotiator()
    one.demand(at(0), [demand(1)])
    one.beat(at(1))
    assert one.take_message(at(1), 0) is None and one.next_wakeup(at(1)) is None
    assert one.session is None and not one.live and math.isnan(one.grant(1).rate)
    hello = one.connect(at(2))
    assert (hello.session, hello.held) == (7, ())
    first = said(one, 2)
    assert [d.flow for d in first.demands] == [1] and first.heartbeat is not None
    assert one.take_message(at(2), 0) is None, "all is said"


def test_only_the_newest_waits_to_be_said() -> None:
    one = begun()
    one.demand(at(2), [demand(1, 900), demand(2)])
    one.demand(at(3), [demand(1, 800)])
    one.done([Done(2, 1), Done(99, 1)])
    message = said(one, 4)
    assert [(d.flow, d.remaining) for d in message.demands] == [(1, 800)]
    assert message.dones == [Done(2, 1)]
    assert message.heartbeat is None, "one was sent only just"


def test_an_arbiter_is_not_asked_for_what_it_does_not_hold() -> None:
    one = begun()
    one.demand(at(2), [demand(2, links=(1, 2)), demand(3, links=(2, 4))])
    assert [d.flow for d in said(one, 2).demands] == [3]
    assert one.flows() == [1, 3] and one.is_asked_for((2, 4)) and not one.is_asked_for(())


def test_acknowledgements_wait_until_the_change_is_in_force() -> None:
    one = begun()
    news = one.received(at(2), FromArbiter(7, [grant(1, 2, 10.0, must_ack=True)]))
    assert [g.rate for g in news.changes.lowered] == [10.0]
    assert not one.has_news and one.take_message(at(3), 0) is None
    one.enforced(news)
    assert said(one, 4).acks == [Ack(1, 1, 2)]


@pytest.mark.parametrize("event", ["gone", "closed", "connected", "lost"])
def test_an_acknowledgement_that_comes_too_late_is_not_made(event: str) -> None:
    one = begun()
    news = one.received(at(2), FromArbiter(7, [grant(1, 2, 10.0, must_ack=True)]))
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


def test_other_sessions_and_closed_streams_have_no_effect() -> None:
    one = begun()
    for session in (6, 8):
        news = one.received(at(2), FromArbiter(session, [grant(1, 9, 90.0)], (), HeartbeatEcho(1)))
        assert news == News(session)
    one.closed(at(3))
    assert one.received(at(4), FromArbiter(7, [grant(1, 9, 90.0)])) == News(7)
    assert one.grant(1).rate == 50.0 and one.live, "kept for the next stream"


def test_the_next_stream_takes_over_what_is_held_and_says_everything_again() -> None:
    one = begun()
    one.demand(at(10), [demand(1, 500)])
    said(one, 10)
    one.closed(at(20))
    assert one.lease_end == at(20 + ORPHAN_SLOTS * 60)
    assert one.next_wakeup(at(20)) == one.lease_end, "no heartbeat is due"
    hello = one.connect(at(30))
    assert hello.session == 8 and [(h.flow, h.rate) for h in hello.held] == [(1, 50.0)]
    again = said(one, 30)
    assert [(d.remaining, d.wait_ns) for d in again.demands] == [(500, 20 * MILLISECOND)]
    assert again.heartbeat is not None and one.live


def test_the_lease_ends_once() -> None:
    one = begun()
    assert one.lease_end == at(240)
    assert not one.check(at(239)) and one.live
    assert one.check(at(240)) and not one.live and one.session is None
    assert not one.check(at(241))
    assert one.take_message(at(242), 0) is None and math.isnan(one.grant(1).rate)
    assert one.connect(at(250)).held == ()


def test_heartbeats_travel_with_messages_and_go_alone_when_overdue() -> None:
    one = begun()
    assert one.next_wakeup(at(1)) == at(135)
    assert not one.beat(at(60)) and not one.has_news, "not in every slot"
    assert one.beat(at(120)) and said(one, 120).heartbeat is not None
    assert not one.beat(at(121)) and not one.has_news, "only just sent"
    one.demand(at(200), [demand(1, 1)])
    assert said(one, 200).heartbeat is None, "too soon"
    one.demand(at(215), [demand(1, 2)])
    assert said(one, 215).heartbeat is not None, "it may as well travel"
    assert one.beat(at(240)) and not one.has_news, "the slot of small news, with or without it"
    assert not one.beat(at(300))
    assert one.next_wakeup(at(224)) == at(240), "nothing was echoed: the lease comes first"
    assert one.take_message(at(349), 0) is None
    assert said(one, 350).heartbeat is not None, "overdue"


def test_live_with_the_first_grants_or_when_nobody_waits_or_after_a_while() -> None:
    one = negotiator()
    one.demand(at(0), [demand(1)])
    one.connect(at(0))
    patience = PATIENCE_LEASES * 240
    ms = 0.0
    while ms < patience:
        assert not one.live, ms
        one.beat(at(ms))
        beat = said(one, ms).heartbeat
        assert beat is not None
        one.received(at(ms + 1), FromArbiter(7, (), (), HeartbeatEcho(beat.n)))
        ms += 120
    one.beat(at(ms))
    beat = said(one, ms).heartbeat
    assert beat is not None
    assert one.received(at(ms + 2), FromArbiter(7, (), (), HeartbeatEcho(beat.n))).began
    refused = negotiator()
    refused.demand(at(0), [demand(1)])
    refused.connect(at(0))
    said(refused, 0)
    news = refused.received(at(1), FromArbiter(7, (), [Refusal(1, 1, "no")], HeartbeatEcho(1)))
    assert news.refused == ["flows of job job refused: no"] and news.synced and not news.began
    beat = said(refused, 150).heartbeat
    assert beat is not None
    assert refused.received(at(151), FromArbiter(7, (), (), HeartbeatEcho(beat.n))).began


def test_who_asks_for_nothing_is_not_left_alone_for_getting_nothing() -> None:
    one = begun()
    one.demand(at(10), [replace(demand(2), cap=0.0)])
    for ms in range(120, 1001, 120):
        one.beat(at(ms))
        beat = said(one, ms).heartbeat
        assert beat is not None
        news = one.received(at(ms + 1), FromArbiter(7, (), (), HeartbeatEcho(beat.n)))
        assert news.left_alone == []


def test_flows_that_get_no_answer_are_left_alone_until_they_do() -> None:
    one = begun()
    one.demand(at(10), [demand(2)])
    for ms in range(120, 601, 120):
        one.beat(at(ms))
        beat = said(one, ms).heartbeat
        assert beat is not None
        news = one.received(at(ms + 1), FromArbiter(7, (), (), HeartbeatEcho(beat.n)))
        overdue = ms + 1 - 10 >= PATIENCE_LEASES * 240
        assert (news.left_alone == [2]) == overdue == (one.refuses(2))
        if overdue:
            break
    assert news.refused == ["flows of job job left alone: no answer"]
    one.demand(at(590), [demand(2)])
    assert one.refuses(2) and not one.refuses(1)
    one.enforced(one.received(at(600), FromArbiter(7, [grant(2, 2, 5.0)])))
    assert not one.refuses(2) and one.grant(2).rate == 5.0


def test_how_long_a_flow_waited_and_a_heartbeat_took() -> None:
    one = begun()
    one.demand(at(10), [demand(2), demand(3)])
    one.demand(at(12), [demand(2, 900)])
    beat = said(one, 100).heartbeat
    assert beat is not None
    news = one.received(at(102), FromArbiter(7, [grant(2, 2, 5.0)], (), HeartbeatEcho(beat.n)))
    assert news.waited_ns == at(92) and news.round_trip_ns == at(2)
    assert one.received(at(103), FromArbiter(7, [grant(2, 3, 6.0)])).waited_ns is None


def test_what_is_given_back_is_said_until_the_next_grant() -> None:
    one = begun()
    [left] = one.give_back([1, 2])
    assert (left.flow, left.rate) == (1, 0.0) and one.give_back([1]) == []
    for ms in (2, 3):
        one.demand(at(ms), [demand(1, 0)])
        assert [d.gave_back for d in said(one, ms).demands] == [1]
    one.enforced(one.received(at(4), FromArbiter(7, [grant(1, 2, 9.0)])))
    one.demand(at(5), [demand(1, 0)])
    assert [d.gave_back for d in said(one, 5).demands] == [0]


def test_demands_age() -> None:
    active, idle = demand(1), Demand(1, 1, "job", (3,), 0, next_in_ns=at(9))
    assert aged(active, 0) is active
    assert aged(active, at(20)).wait_ns == at(20)
    assert aged(active, at(90)).wait_ns == at(50), "at most a period"
    assert aged(idle, at(5)).next_in_ns == at(4) and aged(idle, at(5)).wait_ns == 0


# --- whatever happens, in whatever order

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                *("demand", "demand", "speak", "speak", "arrive", "arrive", "arrive", "step"),
                *("step", "send", "send", "hear", "hear", "enforce", "advance", "advance"),
                *("beat", "give_back", "done", "reconnect", "hear_again"),
            ]
        ),
        st.integers(0, 1),
        st.integers(0, 1),
        st.integers(0, 9),
    ),
    min_size=60,  # or they are five on average, and hardly ever get as far as an acknowledgement
    max_size=160,
)


def happen(talk: Talk, what: str, host: Host, lane: Lane, number: int) -> None:
    flow = number % 3
    match what:
        case "demand":
            talk.demand(host, flow, 10**7 if number % 4 else 0)
        case "give_back" | "done":
            getattr(talk, what)(host, flow)
        case "beat":
            host.shards.beat(talk.now)
        case "advance":
            talk.advance((0.1, 1, 3, 10, 30, 60, 100, 150, 240, 250)[number])
        case "step":
            talk.step()
        case "hear_again":
            talk.hear_again(lane, number)
        case _:
            getattr(talk, what)(lane)


@pytest.mark.parametrize("held", [[(0, 1, 2)], [(0,), (2, 1)]], ids=["one", "two"])
@settings(max_examples=100, deadline=None)
@given(EVENTS, st.booleans())
def test_in_any_order_what_is_enforced_is_committed(
    held: list[tuple[int, ...]], events: list[tuple[str, int, int, int]], busy: bool
) -> None:
    """Also: no acknowledgement before enforcement, stale messages have no effect (see Talk)."""
    talk = Talk(held=held)
    if busy:
        ask(talk)
        talk.exchange()
        assert talk.enforced(talk.processes[-1]).max() > 0.9 * CONFIG.target * 100e6
    for what, which, via, number in events:
        host = talk.hosts[which]
        happen(talk, what, host, host.lanes[via % len(host.lanes)], number)
        talk.check()
    ask(talk)
    talk.exchange(rounds=500)  # it finds its feet again
    assert all(lane.negotiator.live for lane in talk.lanes)
    for process in talk.processes:
        crossed = {link for host in talk.hosts for path in host.paths.values() for link in path}
        if crossed.intersection(process.links):  # a flow that begins anew takes another path
            assert talk.enforced(process).max() > 0


def ask(talk: Talk) -> None:
    for host in talk.hosts:
        for flow in range(3):
            talk.demand(host, flow, 10**8)
