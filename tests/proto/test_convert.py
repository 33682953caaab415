# SPDX-License-Identifier: Apache-2.0
"""Messages survive the wire; what is malformed is refused by field name."""

import math
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowslot.model.errors import ProtocolError
from flowslot.protocol.messages import (
    Ack,
    Demand,
    Done,
    FromArbiter,
    FromDaemon,
    Grant,
    Heartbeat,
    HeartbeatEcho,
    Held,
    Hello,
    Opening,
    Refusal,
)
from flowslot_proto import convert
from flowslot_proto import flowslot_pb2 as pb

LINKS = 6
IDS = st.integers(0, 2**64 - 1)
COUNTS = st.integers(0, 2**62)
RATES = st.floats(0, 1e300)
NAMES = st.text(min_size=1, max_size=64).filter(lambda s: s.isprintable())
PATHS = st.lists(st.integers(0, LINKS - 1), max_size=4, unique=True).map(tuple)
DEMANDS = st.builds(
    Demand,
    flow=IDS,
    inc=COUNTS,
    job=NAMES,
    links=PATHS,
    remaining=IDS,
    cap=RATES | st.just(math.inf),
    wait_ns=COUNTS,
    period_ns=COUNTS,
    next_in_ns=st.integers(-(2**62), 2**62),
    next_bytes=COUNTS,
    gave_back=COUNTS,
    sockets=st.integers(0, 2**32 - 1),
)
GRANTS = st.builds(
    Grant,
    flow=IDS,
    inc=COUNTS,
    seq=COUNTS,
    rate=RATES,
    ceiling=RATES,
    must_ack=st.booleans(),
    standing=st.booleans(),
    share=RATES,
    hold_ns=st.just(0) | COUNTS,
)
FROM_DAEMON = st.builds(
    FromDaemon,
    session=COUNTS,
    dones=st.lists(st.builds(Done, flow=IDS, inc=COUNTS)),
    demands=st.lists(DEMANDS),
    acks=st.lists(st.builds(Ack, flow=IDS, inc=COUNTS, seq=COUNTS)),
    heartbeat=st.none() | st.builds(Heartbeat, n=COUNTS, wall_ns=COUNTS),
)
FROM_ARBITER = st.builds(
    FromArbiter,
    session=COUNTS,
    grants=st.lists(GRANTS),
    refusals=st.lists(st.builds(Refusal, flow=IDS, inc=COUNTS, reason=NAMES)),
    echo=st.none() | st.builds(HeartbeatEcho, n=COUNTS, wall_ns=COUNTS),
    policy=st.just("") | NAMES,
)


def plain(message: FromDaemon | FromArbiter) -> dict[str, Any]:
    """Empty parts of any kind are the same."""
    values = {name: getattr(message, name) for name in message.__slots__}
    return {k: list(v) if isinstance(v, list | tuple) else v for k, v in values.items()}


@given(FROM_DAEMON)
def test_what_a_daemon_says_survives(message: FromDaemon) -> None:
    # The daemon numbers its links from 100, the switch backwards: the wire's are their own.
    wire = {100 + i: i for i in range(LINKS)}
    meaning = [LINKS - 1 - i for i in range(LINKS)]
    sent = replace(message, demands=[relinked(d, 100, 1) for d in message.demands])
    data = convert.write_daemon(sent, wire).SerializeToString()
    got = convert.read_daemon(pb.DaemonMessage.FromString(data), meaning)
    expected = plain(message) | {"demands": [relinked(d, LINKS - 1, -1) for d in message.demands]}
    assert plain(got) == expected


def relinked(demand: Demand, start: int, sign: int) -> Demand:
    return replace(demand, links=tuple(start + sign * x for x in demand.links))


@given(FROM_ARBITER)
def test_what_the_arbiter_says_survives(message: FromArbiter) -> None:
    data = convert.write_arbiter(message).SerializeToString()
    assert plain(convert.read_arbiter(pb.ArbiterMessage.FromString(data))) == plain(message)


@given(COUNTS, NAMES, st.lists(st.builds(Held, flow=IDS, inc=COUNTS, rate=RATES), max_size=5))
def test_hello_survives(session: int, daemon: str, held: list[Held]) -> None:
    held = list({h.flow: h for h in held}.values())
    opening = Opening(Hello(daemon, session, tuple(held)), ("a", "b"), 120)
    message = convert.write_daemon(FromDaemon(session), {}, opening)
    data = message.SerializeToString()
    assert convert.read_opening(pb.DaemonMessage.FromString(data)) == opening


def test_links_that_the_stream_does_not_know_are_left_out_of_paths() -> None:
    demand = Demand(1, 1, "j", (3, 5, 4), 10)
    message = convert.write_daemon(FromDaemon(1, demands=[demand]), {3: 0, 4: 1})
    assert convert.read_daemon(message, (3, 4)).demands[0].links == (3, 4)


def test_a_demand_that_does_not_say_of_how_many_sockets_is_of_one() -> None:
    message = convert.write_daemon(FromDaemon(1, demands=[Demand(1, 1, "j", (0,), 10)]), {0: 0})
    message.demands.ClearField("sockets")
    assert convert.read_daemon(message, (0,)).demands[0].sockets == 1
    message.demands.sockets.extend([4, 4])
    with pytest.raises(ProtocolError, match="demands"):
        convert.read_daemon(message, (0,))


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_or_well_typed(data: bytes) -> None:
    message = pb.DaemonMessage()
    try:
        message.MergeFromString(data)
        got = convert.read_daemon(message, range(LINKS))
    except Exception as error:
        assert type(error).__name__ in ("ProtocolError", "DecodeError")
    else:
        assert all(not math.isnan(d.cap) for d in got.demands)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("rate", [-1.0]),
        ("ceiling", [math.inf]),
        ("must_ack", []),
        ("seq", [2**63]),
        ("hold_ns", [2**63]),
        ("hold_ns", [1, 1]),
    ],
)
def test_daemons_do_not_trust_switches_either(field: str, values: list[Any]) -> None:
    good = {key: [1] for key in ("flow", "inc", "seq", "rate", "ceiling", "must_ack")}
    batch = pb.GrantBatch(**good | {field: values})
    with pytest.raises(ProtocolError, match=f"`grants.{field}`"):
        convert.read_arbiter(pb.ArbiterMessage(session=1, grants=batch))


def feedback(**changes: Any) -> pb.FetchFeedbackReply:
    """Of links a and b; `changes`: of the second row, or of the whole."""
    row = {name: changes.pop(name) for name in ("link", "load", "reservable") if name in changes}
    rows = [
        pb.LinkLoad(link="a", load=[1.0, 2.0], reservable=9.0),
        pb.LinkLoad(**{"link": "b", "load": [0.0, 3.0], "reservable": 1.0, **row}),
    ]
    return pb.FetchFeedbackReply(**{"slot": 7, "slot_ns": 60, "links": rows, **changes})


def test_feedback_is_read_in_the_order_asked() -> None:
    got = convert.read_feedback(feedback(), ("a", "b"))
    assert (got.slot, got.slot_ns, got.reservable) == (7, 60, [9.0, 1.0])
    assert [list(row) for row in got.load] == [[1.0, 2.0], [0.0, 3.0]]


@pytest.mark.parametrize(
    ("reply", "field"),
    [
        (feedback(link="c"), "links"),
        (feedback(links=[]), "links"),
        (feedback(load=[1.0]), "links[1].load"),
        (feedback(load=[1.0, math.nan]), "links[1].load"),
        (feedback(load=[1.0, -1.0]), "links[1].load"),
        (feedback(load=[1.0, 1e300]), "links[1].load"),
        (feedback(links=[pb.LinkLoad(link="a"), pb.LinkLoad(link="b")]), "links[0].load"),
        (feedback(links=[pb.LinkLoad(link=x, load=[0.0] * 1001) for x in "ab"]), "links[0].load"),
        (feedback(reservable=math.nan), "links.reservable"),
        (feedback(reservable=-1.0), "links.reservable"),
        (feedback(reservable=5e-324), "links.reservable"),
        (feedback(slot=2**63), "slot"),
        (feedback(slot_ns=2**63), "slot_ns"),
    ],
)
def test_feedback_is_not_trusted_either(reply: pb.FetchFeedbackReply, field: str) -> None:
    with pytest.raises(ProtocolError, match=re.escape(f"`{field}`")):
        convert.read_feedback(reply, ("a", "b"))


def test_converting_needs_no_grpc() -> None:
    code = "import sys, flowslot_proto.convert; sys.exit('grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_hundred_demands_are_a_small_message() -> None:
    demands = [
        Demand(10_000 + i, 7, f"job{i % 4}", (i % 5, 5), 5_000_000, math.inf, 10**8, 2 * 10**8)
        for i in range(100)
    ]
    message = convert.write_daemon(FromDaemon(1, demands=demands), {i: i for i in range(LINKS)})
    assert message.ByteSize() < 3500
    assert len(message.demands.path_hops) == 5
    assert len(message.demands.jobs) == 4
