# SPDX-License-Identifier: Apache-2.0
"""The negotiation stream, by hand, over real gRPC; hostile daemons included. What is decided, and
which sessions live: tests/core, whose objects these are (see test_same_decisions.py)."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from switchproc import GBPS, LEASE_NS, LINKS, Peer, Switch, one_demand
from waiting import settle

from flowslot.arbiter import TARGET
from flowslot.model.units import goodput
from flowslot_proto import flowslot_pb2 as pb
from flowslot_proto.grpcio import grpc

RESERVABLE = TARGET * goodput(GBPS * 1e9)
UP, DOWN = LINKS.index("h1->s1"), LINKS.index("s1->h2")
INVALID = grpc.StatusCode.INVALID_ARGUMENT
OVER = grpc.StatusCode.FAILED_PRECONDITION
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
SESSIONS = count(100)


@pytest.fixture
def peer(unhurried_switch: Switch) -> Iterator[Peer]:
    """A daemon on a connection of its own."""
    with unhurried_switch.channel() as channel:
        one = Peer(channel, next(SESSIONS))
        yield one
        one.close()


def test_what_is_said_is_answered_and_counted_until_the_lease_ends(tmp_path: Path) -> None:
    with Switch(tmp_path, slot_ms=500) as switch, switch.channel() as channel:
        switch.start().wait_recovered()
        peer = Peer(channel, 1).hello()
        peer.demand(7, [UP, DOWN])
        peer.read_until(lambda: peer.rate(7) > 0.99 * RESERVABLE)
        assert peer.rate(7) <= RESERVABLE * (1 + 1e-9)
        assert switch.load("s1->h2") == pytest.approx(peer.rate(7))
        peer.demand(8, [UP, DOWN])
        peer.read_until(lambda: peer.grants[7][2])
        peer.demand(9, [])
        while not (refusals := peer.read().refusals):
            pass
        assert refusals[0].flow == 9 and "path" in refusals[0].reason
        peer.say(heartbeat=pb.Heartbeat(n=41, wall_ns=5))
        while (echo := peer.read().echo).n != 41:
            pass
        assert echo.wall_ns > 1_600_000_000 * 10**9
        reply = switch.describe()
        [session] = reply.sessions
        assert (session.session, session.daemon) == (1, "h1")
        assert (session.messages_in, session.messages_out > 3) == (5, True)
        code, details = peer.status()
        assert code == OVER and "lease" in details
        assert Peer(channel, 1).hello().status()[0] == OVER
        assert switch.load("s1->h2") == 0.0
        counters = switch.describe().counters
        assert counters.granted > counters.preempted > 0
        assert (counters.refused, counters.expired) == (1, 1)
        assert counters.messages_out >= session.messages_out


# --- hostile


def changed(**fields: list[Any]) -> dict[str, object]:
    batch = one_demand(1, [0])
    for name, values in fields.items():
        getattr(batch, name)[:] = values
    return {"demands": batch}


HELLO: dict[str, object] = {"hello": pb.Hello(daemon="h1", links=LINKS, lease_ns=LEASE_NS)}


def held(flows: list[int], rate: float) -> pb.Hello:
    n = len(flows)
    return pb.Hello(daemon="h1", held=pb.HeldBatch(flow=flows, inc=[1] * n, rate=[rate] * n))


@pytest.mark.parametrize(
    ("said", "field"),
    [
        ([HELLO, changed(flow=[1, 2])], "`demands.inc`"),
        ([HELLO, changed(job=[9])], "`demands.job`"),
        ([HELLO, changed(path=[9])], "`demands.path`"),
        ([HELLO, changed(path_links=[99])], "`demands.path_links`"),
        ([HELLO, changed(path_hops=[3])], "`demands.path_hops`"),
        ([HELLO, changed(inc=[2**63])], "`demands.inc`"),
        ([HELLO, changed(cap=[float("nan")])], "`demands.cap`"),
        ([HELLO, {"acks": pb.AckBatch(flow=[1], inc=[1])}], "`acks.seq`"),
        ([HELLO, {"dones": pb.DoneBatch(flow=[1])}], "`dones.inc`"),
        ([HELLO, {"heartbeat": pb.Heartbeat(n=2**63)}], "`heartbeat.n`"),
        ([HELLO, {"hello": pb.Hello(daemon="h1")}], "`hello`"),
        ([{}], "`hello`"),
        ([{"hello": pb.Hello(daemon="")}], "`hello.daemon`"),
        ([{"hello": pb.Hello(daemon="x" * 65)}], "`hello.daemon`"),
        ([{"hello": pb.Hello(daemon="h1", links=["nowhere"])}], "`hello.links[0]`"),
        ([{"hello": pb.Hello(daemon="h1", links=["h1->s1", "h1->s1"])}], "`hello.links`"),
        ([{"hello": pb.Hello(daemon="h1", lease_ns=10**12)}], "`hello.lease_ns`"),
        ([{"hello": held([1, 1], 1.0)}], "`hello.held.flow`"),
        ([{"hello": held([1], float("inf"))}], "`hello.held.rate`"),
    ],
)
def test_what_makes_no_sense_ends_the_stream(
    unhurried_switch: Switch, peer: Peer, said: list[dict[str, object]], field: str
) -> None:
    before = unhurried_switch.describe().counters.rejected
    for parts in said:
        peer.say(**parts)
    code, details = peer.status()
    assert code == INVALID
    assert field in details
    assert unhurried_switch.describe().counters.rejected == before + 1


def test_garbage_and_oversized_messages_hurt_nobody_else(
    unhurried_switch: Switch, peer: Peer
) -> None:
    peer.hello("other")
    with unhurried_switch.channel() as channel:
        raw = channel.stream_stream("/flowslot.v1.EmulatedSwitch/Negotiate")
        for message, want in (
            (b"\xff\xff\xff\xffgarbage", INVALID),
            (b"\0" * (2 << 20), EXHAUSTED),
        ):
            with pytest.raises(grpc.RpcError) as error:
                list(raw(iter([message]), timeout=20))
            assert error.value.code() == want
    peer.fence()


def test_a_flood_of_messages_is_stopped(unhurried_switch: Switch, peer: Peer) -> None:
    peer.hello("flood")
    for _ in range(20_000):
        peer.say(heartbeat=pb.Heartbeat(n=1))
    code, details = peer.status()
    assert code == EXHAUSTED
    assert "per second" in details
    switch = unhurried_switch
    settle(lambda: peer.session not in {s.session for s in switch.describe().sessions}, what="gone")
