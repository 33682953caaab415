# SPDX-License-Identifier: Apache-2.0
"""Gates at an arbiter: who sends, who is held, and for how long at most."""

import numpy as np
import pytest
from arbiters import Bench, at
from states import MS, NOW, state

from flowslot.policy.adadual import AdaDual
from flowslot.policy.fair import FairAllocator
from flowslot.policy.gated import HOLD_SLACK_NS, GatedAllocator
from flowslot.policy.job_classes import ClassedAllocator, JobClass
from flowslot.policy.srsf import Srsf
from flowslot.policy.srsf_chunked import ChunkedSrsf
from flowslot.policy.transfers import MOST_WAIT_NS


def shared(allocator, *flows, capacity=(100.0,), now=NOW):
    return allocator.allocate(state(*flows, capacity=capacity), now).tolist()


class Going:
    """What a gate gives to jobs of one flow each that have what it gave them last."""

    def __init__(self, gate):
        self.gate, self.goals = gate, {}

    def __call__(self, *flows):
        given = shared(self.gate, *({"goal": self.goals.get(f["job"], 0.0)} | f for f in flows))
        self.goals = {f["job"]: rate for f, rate in zip(flows, given, strict=True)}
        return given


def test_one_sends_and_the_others_are_held_for_an_iteration_at_most():
    gate = GatedAllocator(Srsf(1))
    first = {"job": "a", "left": 50.0, "wait": 3.0}
    second = {"job": "b", "left": 80.0, "wait": 10.0, "period": 400.0}
    seen = state(first, second)
    assert gate.allocate(seen, NOW).tolist() == [100.0, 0.0]
    hold = gate.terms().hold
    until = NOW + 390 * MS + HOLD_SLACK_NS
    assert hold is not None and hold.tolist() == [0, until]
    assert gate.next_change(seen).tolist() == [np.inf, 390 * MS]
    # Later the hold ends at the same moment: no message says so again.
    first["goal"] = 100.0
    later = state(first | {"wait": 23.0}, second | {"wait": 30.0})
    gate.allocate(later, NOW + 20 * MS)
    assert gate.terms().hold.tolist() == [0, until]
    # A shorter one that comes does not stop the one that sends; after that it is first.
    third = {"job": "c", "left": 10.0}
    assert shared(gate, first, second, third) == [100.0, 0.0, 0.0]
    assert shared(gate, first | {"left": 0.0}, second, third) == [0.0, 0.0, 100.0]
    assert shared(gate, first | {"left": 0.0}, second, third | {"left": 0.0}) == [0.0, 100.0, 0.0]
    assert gate.terms().hold is None


def test_nobody_waits_longer_than_an_iteration():
    gate = Going(GatedAllocator(Srsf(1)))
    small = {"job": "a", "left": 50.0, "period": 100.0}
    large = {"job": "b", "left": 1000.0, "period": 300.0}
    assert gate(small, large | {"wait": 299.0}) == [100.0, 0.0]
    assert gate(small, large | {"wait": 300.0}) == [50.0, 50.0]
    assert gate(small, large | {"wait": 320.0}) == [50.0, 50.0]  # and it goes on
    # The longest wait of all, and of whom nothing is known yet: four transfers, of 0.1 s each.
    forever, new = {"period": 1e6, "left": 1000.0}, {"period": 0.0, "left": 10.0}
    for such, limit in ((forever, MOST_WAIT_NS / MS), (new, 400.0)):
        gate = Going(GatedAllocator(Srsf(1)))
        gate(small)
        other = {"job": "c"} | such
        assert gate(small, other | {"wait": limit - 1}) == [100.0, 0.0]
        assert gate(small, other | {"wait": limit + 1}) == [50.0, 50.0]


def test_links_that_nobody_shares_and_jobs_that_cannot_send_are_in_nobodys_way():
    gate = GatedAllocator(Srsf(1))
    here, there = {"job": "a", "links": (0,)}, {"job": "b", "links": (1,)}
    both = {"job": "c", "links": (0, 1), "left": 500.0}
    assert shared(gate, here, there, both, capacity=(100.0, 60.0)) == [100.0, 60.0, 0.0]
    stalled = here | {"cap": 0.0}
    alone = {"job": "d", "left": 900.0}
    assert shared(GatedAllocator(Srsf(1)), stalled, alone) == [0.0, 100.0]


def test_adadual_lets_the_short_join_the_long():
    b, eta = 0.856e-9, 0.235e-9
    limit = b / (2 * (b + eta))
    long = {"job": "a", "left": 1000.0}
    for part, rates in ((limit * 0.9, [50.0, 50.0]), (limit * 1.1, [100.0, 0.0])):
        gate = Going(GatedAllocator(AdaDual(b, eta)))
        gate(long)
        assert gate(long, {"job": "b", "left": 1000.0 * part}) == rates


def test_chunked_interrupts_what_has_more_left():
    gate = Going(GatedAllocator(ChunkedSrsf()))
    long, short = {"job": "a", "left": 1000.0}, {"job": "b", "left": 10.0}
    assert gate(long) == [100.0]
    assert gate(long, short) == [0.0, 100.0]
    assert gate.gate.terms().hold[0] > 0
    assert gate(long, short | {"left": 0.0}) == [100.0, 0.0]
    # What has been in the way for a whole iteration is not interrupted any more.
    assert gate(long | {"wait": 1000.0}, short)[0] > 0


def test_beside_other_arbiters_nobody_waits():
    gate = GatedAllocator(Srsf(1), partial=True)
    assert shared(gate, {"job": "a"}, {"job": "b"}) == [50.0, 50.0]
    assert gate.terms().hold is None


def test_a_gate_that_is_set_under_load_stops_nobody():
    bench = Bench(allocator=FairAllocator())
    bench.demand(1, job="a", remaining=5000)
    assert bench.step()[1, 1].rate == pytest.approx(100)
    bench.arbiter.use(GatedAllocator(Srsf(1)))
    bench.demand(2, job="b", session=2, remaining=5)
    sent = bench.step()
    assert (1, 1) not in sent, "it goes on as it did"
    assert sent[2, 2].rate == 0 and sent[2, 2].hold_ns > 0


def test_a_floor_is_no_turn():
    """A floor that has changed by less than what is worth a message is no goal above it either."""
    gate = ClassedAllocator(GatedAllocator(Srsf(1)), (JobClass(jobs="slow", floor=0.3),))
    slow, fast = {"job": "slow", "left": 900.0}, {"job": "fast", "left": 10.0}
    for goal in (30.0, 30.4):
        assert shared(gate, slow | {"goal": goal}, fast) == pytest.approx([30.0, 70.0])


@pytest.mark.parametrize("coalesce", [0, 4])
def test_arbiter_says_at_once_who_is_held_and_who_is_not_any_more(coalesce):
    bench = Bench(allocator=GatedAllocator(Srsf(1)), coalesce_ns=at(coalesce))
    bench.demand(1, job="a", remaining=10, period_ns=at(400))
    bench.demand(2, job="b", remaining=50, period_ns=at(400), session=2)
    sent = bench.step()
    assert sent[1, 1].rate == pytest.approx(100) and sent[1, 1].hold_ns == 0
    held = sent[2, 2]
    assert (held.rate, held.must_ack) == (0.0, False)
    assert held.hold_ns == at(399) + HOLD_SLACK_NS
    assert bench.step() == {}
    bench.demand(1, job="a", remaining=0, period_ns=at(400))
    sent = bench.step()
    for _ in range(6):  # what is lowered may wait
        if (1, 1) in sent:
            break
        sent |= bench.step()
    bench.ack(sent[1, 1])
    sent |= bench.step()
    assert sent[2, 2].rate == pytest.approx(100) and sent[2, 2].hold_ns == 0


def test_another_policy_takes_over_what_is_held():
    bench = Bench(allocator=GatedAllocator(Srsf(1)))
    bench.demand(1, job="a", remaining=5000)
    bench.step()
    bench.demand(2, job="b", session=2)
    assert bench.step()[2, 2].hold_ns > 0
    bench.arbiter.use(GatedAllocator(Srsf(2)))
    sent = bench.step()
    assert sent[1, 1].rate == pytest.approx(50) and sent[1, 1].must_ack
    assert (2, 2) not in sent or sent[2, 2].rate == 0  # lower first
    bench.ack(sent[1, 1])
    sent |= bench.step()
    assert sent[2, 2].rate == pytest.approx(50) and sent[2, 2].hold_ns == 0
    assert bench.committed()[0] == pytest.approx(100)
