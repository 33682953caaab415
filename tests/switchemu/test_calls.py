# SPDX-License-Identifier: Apache-2.0
"""The paper's two calls, by a plain client."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
from switchproc import GBPS, LINKS, EmulatedSwitchStub, Switch

from flowslot.arbiter import TARGET
from flowslot.model.units import goodput
from flowslot_proto import flowslot_pb2 as pb
from flowslot_proto.grpcio import grpc

OK = pb.UpdateScheduleReply.STATUS_OK
REFUSED = pb.UpdateScheduleReply.STATUS_REFUSED
GOODPUT = goodput(GBPS * 1e9)
RESERVABLE = TARGET * GOODPUT
PATH = ("h1->s1", "s1->h2")
K = 10


@pytest.fixture
def stub(shared_switch: Switch) -> Iterator[EmulatedSwitchStub]:
    with shared_switch.channel() as channel:
        grpc.channel_ready_future(channel).result(timeout=60)  # a machine may stand still
        stub = EmulatedSwitchStub(channel)
        yield stub
        for flow in range(8):
            update(stub, flow, rates=())


def update(
    stub: EmulatedSwitchStub,
    flow: int,
    links: tuple[str, ...] = PATH,
    rates: tuple[float, ...] = (),
    **more: object,
) -> pb.UpdateScheduleReply:
    return stub.UpdateSchedule(
        pb.UpdateScheduleRequest(scheduler="me", flow=flow, links=links, rates=rates, **more)
    )


def fetch(
    stub: EmulatedSwitchStub, links: tuple[str, ...] = PATH, slots: int = 0
) -> pb.FetchFeedbackReply:
    return stub.FetchFeedback(pb.FetchFeedbackRequest(links=links, slots=slots))


def by_slot(reply: pb.FetchFeedbackReply, link: int = 0) -> dict[int, float]:
    return {reply.slot + k: load for k, load in enumerate(reply.links[link].load)}


def test_feedback_has_k_rates_link_by_link_and_their_sum(stub: EmulatedSwitchStub) -> None:
    base = fetch(stub).slot + 1
    assert update(stub, 1, rates=(1e6, 2e6, 3e6), slot=base).status == OK
    assert update(stub, 2, links=("s1->h2",), rates=(5e5,) * 5, slot=base).status == OK
    reply = fetch(stub)
    assert [row.link for row in reply.links] == list(PATH)
    assert reply.links[0].goodput == pytest.approx(GOODPUT)
    assert reply.links[0].reservable == pytest.approx(RESERVABLE)
    assert [len(row.load) for row in reply.links] == [K, K]
    assert len(reply.path) == K
    first, second = by_slot(reply, 0), by_slot(reply, 1)
    for slot, want in ((base, 1e6), (base + 1, 2e6), (base + 2, 3e6), (base + 3, 0.0)):
        if slot >= reply.slot:  # slots pass while we look
            assert first[slot] == pytest.approx(want)
            assert second[slot] == pytest.approx(want + 5e5)
            assert reply.path[slot - reply.slot] == pytest.approx(2 * want + 5e5)
    short = fetch(stub, slots=3)
    assert [len(row.load) for row in short.links] == [3, 3]
    assert len(short.path) == 3


def test_a_refusal_says_why_and_changes_nothing(
    stub: EmulatedSwitchStub, shared_switch: Switch
) -> None:
    before = shared_switch.describe().counters
    assert update(stub, 1, links=("s1->h2",), rates=(0.7 * GOODPUT,) * K).status == OK
    assert update(stub, 1, links=("s1->h2",), rates=(0.5 * GOODPUT,) * K).status == OK  # instead
    reply = update(stub, 2, rates=(0.5 * GOODPUT,) * K)
    assert (reply.status, reply.link) == (REFUSED, "s1->h2")
    assert "capacity" in reply.reason
    up, down = (row.load[0] for row in fetch(stub).links)
    assert (up, down) == (0.0, pytest.approx(0.5 * GOODPUT))
    after = shared_switch.describe().counters
    assert (after.scheduled - before.scheduled, after.refused - before.refused) == (2, 1)


def test_rates_of_slots_that_have_passed_are_skipped(stub: EmulatedSwitchStub) -> None:
    base = fetch(stub).slot - 2
    assert update(stub, 1, rates=(9e6, 9e6, 1e6, 2e6, 3e6, 4e6), slot=base).status == OK
    assert max(fetch(stub).links[0].load) <= 4e6
    late = update(stub, 2, rates=(1e6,), slot=base + 100)
    assert late.status == REFUSED
    assert "10 slots" in late.reason


@pytest.mark.parametrize(
    ("call", "asked", "field"),
    [
        (update, {"links": ("h1->s1", "nowhere")}, "`links[1]`"),
        (update, {"links": ("h1->s1", "h1->s1")}, "`links[1]`"),
        (update, {"links": ()}, "`links`"),
        (update, {"rates": (1.0, math.nan)}, "`rates`"),
        (update, {"rates": (-1.0,)}, "`rates`"),
        (update, {"rates": (1.0,) * (K + 1)}, "`rates`"),
        (fetch, {"links": ("nowhere",)}, "`links[0]`"),
        (fetch, {"slots": K + 1}, "`slots`"),
    ],
)
def test_nonsense_is_invalid_and_names_the_field(
    stub: EmulatedSwitchStub, shared_switch: Switch, call: Any, asked: dict[str, Any], field: str
) -> None:
    before = shared_switch.describe().counters.rejected
    with pytest.raises(grpc.RpcError) as error:
        call(stub, **({"flow": 1} if call is update else {}), **asked)
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert field in error.value.details()
    assert shared_switch.describe().counters.rejected == before + 1


def test_describe_says_who_it_is_and_what_it_holds(shared_switch: Switch) -> None:
    reply = shared_switch.describe()
    assert (reply.name, reply.pid) == ("s1", shared_switch.pid)
    assert [row.link for row in reply.links] == list(LINKS)
    assert all(len(row.load) == K for row in reply.links)
    assert reply.uptime_ns > 0
    assert reply.lease_ns == 5 * reply.slot_ns == 300_000_000
    assert reply.counters.steps > 0
