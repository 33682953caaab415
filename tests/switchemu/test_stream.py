# SPDX-License-Identifier: Apache-2.0
"""The negotiation stream, by hand, over real gRPC; hostile daemons included."""

from collections.abc import Iterator
from contextlib import ExitStack

import grpc
import pytest
from switchproc import GBPS, LINKS, Peer, Switch, until

from flowslot.model.units import goodput
from flowslot_proto import flowslot_pb2 as pb

RESERVABLE = 0.96 * goodput(GBPS * 1e9)
UP, DOWN = LINKS.index("h1->s1"), LINKS.index("s1->h2")
INVALID = grpc.StatusCode.INVALID_ARGUMENT
OVER = grpc.StatusCode.FAILED_PRECONDITION
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


class Peers:
    """Makes peers of one switch process, and ends them."""

    def __init__(self, switch: Switch) -> None:
        self.switch = switch
        self._stack = ExitStack()

    def __call__(self, session: int) -> Peer:
        peer = Peer(self._stack.enter_context(self.switch.channel()), session)
        self._stack.callback(peer.close)
        return peer

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def connect(patient_switch: Switch) -> Iterator[Peers]:
    peers = Peers(patient_switch)
    yield peers
    peers.close()


@pytest.fixture
def connect_shared(unhurried_switch: Switch) -> Iterator[Peers]:
    peers = Peers(unhurried_switch)
    yield peers
    peers.close()


def test_a_demand_alone_is_granted_all_that_may_be_reserved(connect: Peers) -> None:
    peer = connect(1)
    peer.hello()
    peer.demand(7, [UP, DOWN])
    peer.read_until(lambda: peer.rate(7) > 0.99 * RESERVABLE)
    assert peer.rate(7) <= RESERVABLE * (1 + 1e-9)
    assert connect.switch.load("s1->h2") == pytest.approx(peer.rate(7))
    [session] = connect.switch.describe().sessions
    assert (session.session, session.daemon) == (1, "h1")


def test_two_daemons_on_one_link_lower_first_then_raise(connect: Peers) -> None:
    first, second = connect(1), connect(2)
    first.hello("h1")
    first.demand(7, [UP, DOWN])
    first.read_until(lambda: first.rate(7) > 0.99 * RESERVABLE)
    before = first.rate(7)
    second.hello("h2")
    second.demand(8, [DOWN])
    first.read_until(lambda: first.rate(7) < before)
    assert first.grants[7][2], "a lower must be acknowledged"
    second.fence()
    assert second.rate(8) <= RESERVABLE - before + 1, "raised before the lower was in force"
    assert connect.switch.load("s1->h2") <= RESERVABLE * (1 + 1e-9)
    first.ack(7)
    second.read_until(lambda: second.rate(8) > 0)
    first.fence()
    assert first.rate(7) + second.rate(8) <= RESERVABLE * (1 + 1e-9)
    counters = connect.switch.describe().counters
    assert counters.granted >= 2
    assert counters.preempted >= 1


def test_done_gives_back_what_the_flow_held(connect: Peers) -> None:
    peer = connect(1)
    peer.hello()
    peer.demand(7, [UP, DOWN])
    peer.read_until(lambda: peer.rate(7) > 0)
    peer.say(dones=pb.DoneBatch(flow=[7], inc=[1]))
    peer.fence()
    assert connect.switch.load("s1->h2") == 0.0


def test_heartbeats_are_echoed_with_the_wall_clock(connect: Peers) -> None:
    peer = connect(1)
    peer.hello()
    peer.say(heartbeat=pb.Heartbeat(n=41, wall_ns=5))
    echo = peer.read().echo
    assert echo.n == 41
    assert echo.wall_ns > 1_600_000_000 * 10**9


def test_refused_demands_say_why(connect: Peers) -> None:
    peer = connect(1)
    peer.hello()
    peer.demand(7, [])
    [refusal] = peer.read().refusals
    assert refusal.flow == 7
    assert "path" in refusal.reason
    assert connect.switch.describe().counters.refused == 1


def test_an_old_incarnation_has_no_effect(connect: Peers) -> None:
    peer = connect(1)
    peer.hello()
    peer.demand(7, [UP], inc=5)
    peer.read_until(lambda: peer.rate(7) > 0.99 * RESERVABLE)
    peer.demand(7, [UP], remaining=0, inc=4)
    peer.say(dones=pb.DoneBatch(flow=[7], inc=[4]))
    peer.fence()
    assert connect.switch.load("h1->s1") == pytest.approx(peer.rate(7))
    assert peer.rate(7) > 0.99 * RESERVABLE


def test_a_new_stream_of_a_daemon_ends_the_old_one(connect: Peers) -> None:
    old = connect(1)
    old.hello("h1")
    old.demand(7, [UP])
    old.read_until(lambda: old.rate(7) > 0)
    new = connect(2)
    new.hello("h1", flow=[7], inc=[1], rate=[old.rate(7)])
    new.fence()
    code, details = old.status()
    assert code == OVER
    assert "Hello" in details
    outdated = connect(1)
    outdated.hello("h1")
    assert outdated.status()[0] == OVER
    new.fence()
    assert connect.switch.load("h1->s1") == pytest.approx(old.rate(7))


def test_hello_removes_what_it_does_not_list(connect: Peers) -> None:
    old = connect(1)
    old.hello("h1")
    old.demand(7, [UP])
    old.read_until(lambda: old.rate(7) > 0)
    new = connect(2)
    new.hello("h1")
    new.fence()
    assert connect.switch.load("h1->s1") == 0.0


def test_a_silent_daemons_lease_ends(connect: Peers) -> None:
    peer = connect(1)
    peer.hello("silent")
    peer.demand(7, [UP])
    peer.read_until(lambda: peer.rate(7) > 0)
    code, details = peer.status()
    assert code == OVER
    assert "lease" in details
    assert connect.switch.load("h1->s1") == 0.0
    assert connect.switch.describe().counters.expired == 1


def test_state_is_rebuilt_from_hello_after_kill_9(connect: Peers) -> None:
    switch = connect.switch
    before = connect(1)
    before.hello("h1")
    before.demand(7, [UP, DOWN])
    before.read_until(lambda: before.rate(7) > 0.99 * RESERVABLE)
    pid = switch.pid
    switch.kill()
    assert before.status()[0] == grpc.StatusCode.UNAVAILABLE
    assert switch.start().pid != pid
    peer = connect(2)
    peer.hello("h1", flow=[7], inc=[1], rate=[before.rate(7)])
    peer.demand(7, [UP, DOWN])
    peer.fence()
    assert switch.load("s1->h2") == pytest.approx(before.rate(7))
    assert switch.load("h2->s1") == 0.0


# --- hostile


def nan_cap() -> dict[str, object]:
    batch = one_demand()
    batch.cap[0] = float("nan")
    return {"demands": batch}


def one_demand() -> pb.DemandBatch:
    return pb.DemandBatch(
        jobs=["j"],
        path_hops=[1],
        path_links=[0],
        flow=[1],
        inc=[1],
        job=[0],
        path=[0],
        remaining=[1],
        cap=[1.0],
        wait_ns=[0],
        period_ns=[0],
        next_in_ns=[0],
        next_bytes=[0],
    )


def changed(**fields: list[int]) -> dict[str, object]:
    batch = one_demand()
    for name, values in fields.items():
        getattr(batch, name)[:] = values
    return {"demands": batch}


@pytest.mark.parametrize(
    ("parts", "field"),
    [
        (changed(flow=[1, 2]), "`demands.inc`"),
        (changed(job=[9]), "`demands.job`"),
        (changed(path=[9]), "`demands.path`"),
        (changed(path_links=[99]), "`demands.path_links`"),
        (changed(path_hops=[3]), "`demands.path_hops`"),
        (changed(inc=[2**63]), "`demands.inc`"),
        (nan_cap(), "`demands.cap`"),
        ({"acks": pb.AckBatch(flow=[1], inc=[1])}, "`acks.seq`"),
        ({"dones": pb.DoneBatch(flow=[1])}, "`dones.inc`"),
        ({"heartbeat": pb.Heartbeat(n=2**63)}, "`heartbeat.n`"),
        ({"hello": pb.Hello(daemon="h1")}, "`hello`"),
    ],
)
def test_messages_that_make_no_sense_close_the_stream(
    connect_shared: Peers, parts: dict[str, object], field: str
) -> None:
    before = connect_shared.switch.describe().counters.rejected
    peer = connect_shared(next_session())
    peer.hello()
    peer.say(**parts)
    code, details = peer.status()
    assert code == INVALID
    assert field in details
    assert connect_shared.switch.describe().counters.rejected == before + 1


_sessions = iter(range(100, 10**6))


def next_session() -> int:
    return next(_sessions)


@pytest.mark.parametrize(
    ("hello", "field"),
    [
        (pb.Hello(daemon=""), "`hello.daemon`"),
        (pb.Hello(daemon="x" * 65), "`hello.daemon`"),
        (pb.Hello(daemon="h1", links=["nowhere"]), "`hello.links[0]`"),
        (pb.Hello(daemon="h1", links=["h1->s1", "h1->s1"]), "`hello.links`"),
        (pb.Hello(daemon="h1", lease_ns=10**12), "`hello.lease_ns`"),
        (
            pb.Hello(daemon="h1", held=pb.HeldBatch(flow=[1, 1], inc=[1, 1], rate=[1, 1])),
            "`hello.held.flow`",
        ),
        (
            pb.Hello(daemon="h1", held=pb.HeldBatch(flow=[1], inc=[1], rate=[float("inf")])),
            "`hello.held.rate`",
        ),
        (None, "`hello`"),
    ],
)
def test_a_bad_hello_is_refused(connect_shared: Peers, hello: pb.Hello | None, field: str) -> None:
    peer = connect_shared(next_session())
    peer.say(hello=hello)
    code, details = peer.status()
    assert code == INVALID
    assert field in details


def test_a_message_of_another_session_closes_the_stream(connect_shared: Peers) -> None:
    peer = connect_shared(next_session())
    peer.hello("stale")
    peer.fence()
    peer.session -= 1
    peer.say(demands=one_demand())
    peer.session += 1
    code, details = peer.status()
    assert code == INVALID
    assert "`session`" in details


def test_garbage_and_oversized_messages_hurt_nobody_else(connect_shared: Peers) -> None:
    switch = connect_shared.switch
    other = connect_shared(next_session())
    other.hello("other")
    with switch.channel() as channel:
        raw = channel.stream_stream("/flowslot.v1.EmulatedSwitch/Negotiate")
        for message, want in (
            (b"\xff\xff\xff\xffgarbage", INVALID),
            (b"\0" * (2 << 20), EXHAUSTED),
        ):
            with pytest.raises(grpc.RpcError) as error:
                list(raw(iter([message]), timeout=20))
            assert error.value.code() == want
    other.fence()


def test_a_flood_of_messages_is_stopped(connect_shared: Peers) -> None:
    peer = connect_shared(next_session())
    peer.hello("flood")
    for _ in range(20_000):
        peer.say(heartbeat=pb.Heartbeat(n=1))
    code, details = peer.status()
    assert code == EXHAUSTED
    assert "per second" in details
    switch = connect_shared.switch
    until(lambda: peer.session not in {s.session for s in switch.describe().sessions}, "gone")
