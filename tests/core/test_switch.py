# SPDX-License-Identifier: Apache-2.0
"""An arbiter's end of its streams: who may join, what waits to be sent, and when it decides."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from arbiters import Counting
from hypothesis import given
from hypothesis import strategies as st

from flowslot.arbiter import ArbiterConfig
from flowslot.arbiter.config import GUARD_NS
from flowslot.model.errors import FlowslotError, LimitExceeded, ProtocolError, SessionEnded
from flowslot.model.units import MILLISECOND, Nanos
from flowslot.protocol.messages import (
    Ack,
    Demand,
    Done,
    FromArbiter,
    FromDaemon,
    Grant,
    Heartbeat,
    HeartbeatEcho,
    Hello,
    Opening,
    Refusal,
)
from flowslot.protocol.switch import REST_NS, SPACING_NS, Peer, Switch

CONFIG = ArbiterConfig()
LEASE = CONFIG.lease_ns
START = Nanos(LEASE + GUARD_NS)
"""Past the recovery of a process that begins at 0."""


def opening(session: int, *links: str, daemon: str = "d1", lease_ns: int = LEASE) -> Opening:
    return Opening(Hello(daemon, session), links or ("a", "b"), lease_ns)


def begun(config: ArbiterConfig = CONFIG) -> Switch[str]:
    """Past its recovery; stream "s" has joined, as session 1, and nothing waits for it."""
    switch = Switch[str](Nanos(0), ("a", "b"), (1e8, 1e8), config, Counting())
    switch.decide(Nanos(0))
    switch.join(START, "s", opening(1))
    switch.decide(START)
    return switch


def says(*flows: int, session: int = 1, links: Sequence[int] = (0,)) -> FromDaemon:
    return FromDaemon(session, demands=[Demand(f, 1, "job", tuple(links), 10**6) for f in flows])


# --- joining


@pytest.mark.parametrize(
    ("said", "error", "match"),
    [
        (opening(2, daemon="d2", lease_ns=LEASE + 1), ProtocolError, "hello.lease_ns.*300 ms"),
        (opening(2, "a", "c", daemon="d2"), ProtocolError, r'hello.links\[1\].*"c"'),
        (opening(1, daemon="d2"), SessionEnded, "already in use"),
        (opening(0), SessionEnded, "outdated"),
    ],
)
def test_who_may_not_join(said: Opening, error: type[FlowslotError], match: str) -> None:
    switch = begun()
    with pytest.raises(error, match=match):
        switch.join(START, "t", said)
    assert switch.arbiter.daemons() == ["d1"]
    with pytest.raises(SessionEnded, match="has not said Hello"):
        switch.received(START, "t", FromDaemon(2))


def test_a_second_hello_of_a_stream_has_no_effect_or_ends_it() -> None:
    switch = begun()
    switch.received(START, "s", says(7))
    switch.join(START, "s", opening(1))
    switch.decide(START)
    answer = switch.take("s")
    assert answer is not None and [g.flow for g in answer.grants] == [7]
    with pytest.raises(ProtocolError, match="only the first message"):
        switch.join(START, "s", opening(2))
    switch.leave(START, "s")
    with pytest.raises(SessionEnded):
        switch.join(START, "s", opening(1))
    switch.join(START, "s", opening(2))


def test_what_is_given_back_beside_an_acknowledgement_is_free() -> None:
    switch = begun()
    switch.received(START, "s", says(7))
    switch.decide(START)
    switch.take("s")
    switch.received(START, "s", says(8, links=(0, 1)))  # another path: it borrows nothing
    now = Nanos(START + CONFIG.slot_ns)
    switch.decide(now)
    answer = switch.take("s")
    assert answer is not None
    [lower] = answer.grants
    assert lower.flow == 7 and lower.must_ack and lower.rate > 0
    [asked] = says(7).demands
    back = replace(asked, remaining=0, gave_back=lower.seq)
    switch.received(now, "s", FromDaemon(1, demands=[back], acks=[Ack(7, lower.inc, lower.seq)]))
    assert switch.arbiter.commitments()[0] == 0.0


def test_each_stream_numbers_links_by_itself() -> None:
    switch = begun()
    switch.join(START, "t", opening(2, "b", daemon="d2"))
    switch.received(START, "t", says(7, session=2))
    switch.received(START, "s", says(7, links=(1,)))
    switch.decide(START)
    assert switch.arbiter.commitments().tolist() == pytest.approx([0.0, CONFIG.target * 1e8])
    for stream, session, links in (("s", 1, (2,)), ("t", 2, (1,))):
        with pytest.raises(ProtocolError, match=r"demands\.path"):
            switch.received(START, stream, says(8, session=session, links=links))
    with pytest.raises(ProtocolError, match="is 2, not 1"):
        switch.received(START, "s", says(8, session=2))


def test_streams_that_are_not_honoured_any_more_are_to_be_ended() -> None:
    switch = begun()
    now = Nanos(START + LEASE // 2)
    switch.join(now, "t", opening(5))  # the same daemon has begun anew
    switch.decide(now)
    [(stream, why)] = switch.take_ended()
    assert stream == "s" and isinstance(why, SessionEnded) and switch.take_ended() == []
    for _ in range(2):
        switch.leave(now, "s")
        assert switch.take("s") is None and switch.take_ready() == []
    switch.received(now, "t", says(7, session=5))
    switch.decide(now)
    assert switch.take_ended() == [] and switch.arbiter.commitments()[0] > 0
    now = Nanos(now + LEASE + GUARD_NS)
    with pytest.raises(SessionEnded, match="lease has ended"):
        switch.received(now, "t", FromDaemon(5, heartbeat=Heartbeat(1)))
    switch.decide(now)
    assert [stream for stream, _ in switch.take_ended()] == ["t"]
    assert not switch.arbiter.commitments().any()


# --- when it decides, and what is ready then


def test_what_has_come_is_decided_on_together_as_soon_as_it_is_passed_in() -> None:
    switch = begun()
    now = Nanos(START + REST_NS)
    assert switch.next_wakeup > now
    switch.received(now, "s", says(7))
    switch.received(now, "s", FromDaemon(1, heartbeat=Heartbeat(3)), wall_ns=9)
    assert switch.next_wakeup == now and switch.take_ready() == [], "the echo goes with it"
    switch.received(now, "s", says(8))
    switch.decide(now)
    assert switch.take_ready() == ["s"] and switch.take_ready() == []
    answer = switch.take("s")
    assert answer is not None and {grant.flow for grant in answer.grants} == {7, 8}
    assert answer.echo == HeartbeatEcho(3, 9) and switch.take("s") is None
    assert switch.next_wakeup > now and switch.steps == 3


def test_there_is_time_for_other_things_between_two_decisions() -> None:
    switch = begun()
    now = Nanos(START + MILLISECOND)
    switch.decided(now)  # it took a while
    switch.received(now, "s", says(7))
    assert switch.next_wakeup == now + SPACING_NS
    switch.received(Nanos(now + REST_NS - 1), "s", says(8))
    assert switch.next_wakeup == now + SPACING_NS
    switch.received(Nanos(now + REST_NS), "s", FromDaemon(1, dones=[Done(7, 1)]))
    assert switch.next_wakeup == now + REST_NS, "brought forward"


@pytest.mark.parametrize("news", ["dones", "demands", "acks", "join", "leave"])
def test_whatever_may_change_grants_is_decided_on(news: str) -> None:
    switch = begun()
    now = Nanos(START + REST_NS)
    match news:
        case "join":
            switch.join(now, "t", opening(2, daemon="d2"))
        case "leave":
            switch.leave(now, "s")
        case _:
            said = {"dones": Done(7, 1), "demands": says(7).demands[0], "acks": Ack(7, 1, 1)}
            switch.received(now, "s", FromDaemon(1, **{news: [said[news]]}))  # type: ignore[arg-type]
    assert switch.next_wakeup == now


def test_heartbeats_are_answered_at_once_and_change_nothing() -> None:
    switch = begun()
    steady = Demand(7, 1, "job", (0,), 0, period_ns=10**8, next_in_ns=5 * 10**7, next_bytes=10**6)
    switch.received(START, "s", FromDaemon(1, demands=[steady]))
    switch.decide(START)
    assert switch.take("s") is not None
    now = Nanos(START + MILLISECOND)
    switch.decide(now)
    allocator, due, _ = switch.arbiter._allocator, switch.next_wakeup, switch.take_ready()
    assert isinstance(allocator, Counting)
    calls = allocator.calls
    switch.received(now, "s", FromDaemon(1, heartbeat=Heartbeat(4)))
    assert switch.next_wakeup == due and switch.take_ready() == ["s"]
    assert switch.take("s") == FromArbiter(1, [], [], HeartbeatEcho(4))
    switch.decide(now)
    assert allocator.calls == calls, "all grants stand: nothing is to be weighed anew"


def test_a_daemon_that_provokes_too_many_refusals_is_ended() -> None:
    switch = begun(ArbiterConfig(max_flows_per_session=2))
    with pytest.raises(LimitExceeded, match="refused"):
        switch.received(START, "s", says(1, 2, 3, links=(0, 0)))


# --- what waits for a stream


def grant(flow: int, seq: int, *, must_ack: bool = False) -> Grant:
    return Grant(flow, 1, seq, 1.0, 9.0, must_ack)


def test_what_waits_is_taken_once_and_in_order_and_is_bounded() -> None:
    peer = Peer(5, (), most_refusals=2)
    assert not peer.waits
    peer.grant([grant(7, 1), grant(8, 2)])
    peer.refuse([Refusal(9, 1, "no")])
    peer.refuse([Refusal(8, 1, "no"), Refusal(9, 1, "never")])
    peer.echo = HeartbeatEcho(4)
    refusals = [Refusal(9, 1, "never"), Refusal(8, 1, "no")]
    assert peer.waits
    assert peer.take() == FromArbiter(5, [grant(7, 1), grant(8, 2)], refusals, HeartbeatEcho(4))
    assert not peer.waits
    peer.refuse([Refusal(8, 1, "no"), Refusal(9, 1, "no")])
    with pytest.raises(LimitExceeded):
        peer.refuse([Refusal(3, 1, "no")])


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=30))
def test_of_each_flow_the_newest_grant_waits_and_a_lower_stays_to_be_acknowledged(
    lowers: list[tuple[int, bool]],
) -> None:
    peer = Peer(1, (), most_refusals=0)
    for seq, (flow, must_ack) in enumerate(lowers, 1):
        peer.grant([grant(flow, seq, must_ack=must_ack)])
    expected: dict[int, Grant] = {}
    for seq, (flow, must_ack) in enumerate(lowers, 1):
        before = flow in expected and expected[flow].must_ack
        expected[flow] = grant(flow, seq, must_ack=must_ack or before)
    assert {g.flow: g for g in peer.take().grants} == expected
