# SPDX-License-Identifier: Apache-2.0
"""Classes of jobs: who comes first, what is everybody's least and most, beside any policy."""

import numpy as np
import pytest
from arbiters import Bench, at
from hypothesis import given
from hypothesis import strategies as st
from states import MS, NOW, state

from flowslot.model.errors import ConfigError
from flowslot.model.settings import validate
from flowslot.model.top_up import HELD_PART, LEAST_RATE, NOTICED_RATE, least
from flowslot.policy import registry
from flowslot.policy.fair import FairAllocator
from flowslot.policy.job_classes import OTHERS, TRICKLE, ClassedAllocator, JobClass
from flowslot.policy.registry import PolicyOptions
from flowslot.policy.returns import DEVIATION_NS, NEGOTIATED_NS
from flowslot.policy.stagger import StaggerAllocator
from flowslot.protocol.messages import Held

FIRST = JobClass(jobs="vip*", protected=True)


def classed(*classes):
    return ClassedAllocator(FairAllocator(), classes)


def rates(allocator, *flows, capacity=(100.0,)):
    return allocator.allocate(state(*flows, capacity=capacity), NOW).tolist()


def test_a_protected_job_has_all_that_it_can_use_and_the_others_the_rest():
    allocator = classed(FIRST)
    others = [{"job": "a"}, {"job": "b"}]
    assert rates(allocator, {"job": "vip1"}) == [100.0]
    given = rates(allocator, {"job": "vip1"}, *others)
    assert given == pytest.approx([100 * (1 - OTHERS), 50 * OTHERS, 50 * OTHERS])
    most = allocator.terms().most.tolist()
    assert most == pytest.approx([np.inf, 50 * TRICKLE, 50 * TRICKLE]), "others do not top up"
    given = rates(allocator, {"job": "vip1", "cap": 30.0}, *others)
    assert given == pytest.approx([30, 35, 35])
    idle = {"job": "c", "left": 0.0, "sockets": 3.0}
    rates(allocator, {"job": "vip1"}, others[0] | {"sockets": 2.0}, idle)
    most = allocator.terms().most.tolist()
    assert most[1:] == pytest.approx([100 * TRICKLE, 60 * TRICKLE]), "who begins neither"
    assert rates(allocator, {"job": "vip1", "left": 0.0, "due": 500.0}, *others) == [0, 50, 50]
    assert allocator.terms().most is None


def test_a_protected_job_has_its_rates_from_shortly_before_it_is_expected():
    allocator, margin = classed(FIRST), (NEGOTIATED_NS + DEVIATION_NS) / MS
    vip = {"job": "vip", "left": 0.0, "next": 100.0}
    for due, early in ((margin + 1, False), (margin, True), (-margin, False)):
        seen = state(vip | {"due": due}, {"job": "a"})
        assert (allocator.allocate(seen, NOW)[0] > 0) == early
    seen = state(vip | {"due": 30.0}, {"job": "a"})
    allocator.allocate(seen, NOW)
    assert allocator.next_change(seen).tolist() == [(30 - margin) * MS, np.inf]
    assert rates(allocator, vip | {"due": 0.0, "period": 0.0}, {"job": "a"}) == [0.0, 100.0]


def test_others_hear_at_once_that_they_may_not_top_up_and_later_that_they_may():
    bench = Bench(allocator=classed(FIRST), coalesce_ns=at(4))
    bench.demand(1, job="a", cap=30.0)
    bench.demand(2, 1, job="b", session=2)
    first = bench.step()
    assert first[1, 1].ceiling == first[2, 2].ceiling == 100.0
    bench.demand(3, 0, 1, job="vip", cap=40.0)
    sent = bench.step()
    assert sent[1, 1].ceiling == sent[2, 2].ceiling == pytest.approx(100 * TRICKLE)
    assert sent[1, 1].rate == 30.0, "there is room for that"
    assert (1, 1) not in bench.step(), "it is said once"
    bench.demand(3, 0, 1, job="vip", remaining=0)
    sent = {}
    for _ in range(8):
        sent |= bench.step()
    assert sent[1, 1].ceiling == sent[2, 2].ceiling == 100.0


@pytest.mark.parametrize("restarted", [False, True])
def test_a_daemon_that_comes_again_hears_that_it_may_top_up_again(restarted):
    bench = Bench(allocator=classed(FIRST))
    bench.demand(1, job="a", cap=30.0)
    bench.demand(2, 0, 1, job="vip", session=2, cap=40.0)
    assert bench.step()[1, 1].ceiling == pytest.approx(100 * TRICKLE)
    if restarted:
        bench = Bench(allocator=classed(FIRST), time=50)
    bench.hello(3, Held(1, 1, 30.0), daemon=1)
    bench.demand(2, 0, 1, job="vip", session=2, remaining=0)
    bench.demand(1, job="a", cap=30.0, session=3)
    bench.keep_alive(200, 3)
    sent = bench.step()[3, 1]
    assert (sent.rate, sent.ceiling) == (30.0, 100.0)


def test_floors_are_kept_beside_a_policy_that_would_not():
    gate = registry.allocator("srsf1", PolicyOptions(classes=(JobClass(jobs="slow", floor=0.3),)))
    first, waits = {"job": "fast", "left": 10.0}, {"job": "slow", "left": 900.0}
    assert rates(gate, first, waits) == pytest.approx([70.0, 30.0])
    hold = gate.terms().hold
    assert hold is None or not hold.any(), "what has a floor is not held"
    both = classed(JobClass(jobs="*", floor=0.8))
    assert rates(both, {"job": "a"}, {"job": "b"}) == pytest.approx([50.0, 50.0])
    assert rates(both, {"job": "a", "cap": 5.0}, {"job": "b"}) == pytest.approx([5.0, 95.0])


def test_a_ceiling_holds_for_a_jobs_flows_together_top_up_included():
    allocator = classed(JobClass(jobs="batch", ceiling=0.4))
    flows = [{"job": "batch"}, {"job": "batch"}]
    assert rates(allocator, *flows) == pytest.approx([20.0, 20.0])
    assert allocator.terms().most.tolist() == pytest.approx([20.0, 20.0])
    assert rates(allocator, *flows, {"job": "x"}) == pytest.approx([20.0, 20.0, 60.0])
    assert allocator.terms().most[2] == np.inf
    bench = Bench(allocator=allocator)
    bench.demand(1, job="batch", sockets=4)
    grant = bench.step()[1, 1]
    assert (grant.rate, grant.ceiling) == pytest.approx((40.0, 10.0)), "each socket a quarter"
    for sockets in (8, 2):  # the rate is the same
        bench.demand(1, job="batch", sockets=sockets)
        assert bench.step()[1, 1].ceiling == pytest.approx(40.0 / sockets)


def test_a_ceiling_is_for_those_that_are_active():
    allocator = classed(JobClass(jobs="batch", ceiling=0.4))
    one, idle = {"job": "batch"}, {"job": "batch", "left": 0.0}
    assert rates(allocator, one, idle, idle, idle) == pytest.approx([40.0, 0.0, 0.0, 0.0])
    assert allocator.terms().most.tolist() == pytest.approx([40.0, 10.0, 10.0, 10.0])
    assert rates(allocator, one | {"cap": 5.0}, one, idle) == pytest.approx([5.0, 35.0, 0.0])
    stalled = one | {"cap": 0.0}
    assert rates(allocator, one, stalled) == pytest.approx([40.0, 0.0])
    assert allocator.terms().most.tolist() == pytest.approx([40.0, 20.0])


def test_what_has_a_ceiling_has_nothing_standing():
    """Its part depends on who of its job is active, which has to be reported."""
    bench = Bench(
        allocator=ClassedAllocator(StaggerAllocator(), (JobClass(jobs="b", ceiling=0.4),))
    )
    bench.demand(1, job="a", period_ns=at(100), next_bytes=1000)
    bench.demand(2, 1, job="b", period_ns=at(100), next_bytes=1000)
    sent = bench.step()
    for _ in range(4):
        sent |= bench.step()
    assert sent[1, 1].standing and not sent[1, 2].standing


def test_the_first_class_that_matches_counts():
    allocator = classed(JobClass(jobs="a1", ceiling=0.1), JobClass(jobs="a*", ceiling=0.5))
    assert rates(allocator, {"job": "a1"}, {"job": "a2"}) == pytest.approx([10.0, 50.0])


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"jobs": ""}, "jobs"),
        ({"jobs": "a", "floor": 1.5}, "floor"),
        ({"jobs": "a", "floor": "0.5"}, "floor"),
        ({"jobs": "a", "ceiling": 0.0}, "ceiling"),
        ({"jobs": "a", "floor": 0.5, "ceiling": 0.4}, "at most ceiling"),
        ({"jobs": "a", "celing": 0.4}, "celing"),
    ],
)
def test_bad_classes_are_refused_by_name(given, field):
    with pytest.raises(ConfigError, match=field):
        validate(given, "s.toml", JobClass)


FLOW = st.fixed_dictionaries(
    {
        "job": st.sampled_from(["vip", "a", "b", "c"]),
        "links": st.sampled_from([(0,), (1,), (0, 1), (1, 2)]),
        "left": st.sampled_from([0.0, 10.0, 500.0]),
        "cap": st.sampled_from([np.inf, np.inf, 0.0, 7.0]),
        "sockets": st.sampled_from([1.0, 4.0]),
        "next": st.sampled_from([0.0, 300.0]),
        "due": st.sampled_from([-50.0, 2.0, 40.0]),
        "wait": st.sampled_from([0.0, 90.0, 2000.0]),
    }
)
PART = st.sampled_from([None, 0.1, 0.6])


@pytest.mark.parametrize("policy", ["stagger", "srsf1", "srsf-chunked", "adadual", "cassini"])
@given(st.lists(st.lists(FLOW, min_size=1, max_size=8), min_size=1, max_size=4), PART, PART)
def test_no_link_is_given_out_twice_under_any_policy(policy, looks, floor, ceiling):
    ceiling = None if floor and ceiling and floor > ceiling else ceiling
    classes = (FIRST, JobClass(jobs="[ab]", floor=floor, ceiling=ceiling))
    allocator = registry.allocator(policy, PolicyOptions(classes=classes))
    capacity = np.array([100.0, 60.0, 30.0])
    for k, flows in enumerate(looks):
        seen = state(*flows, capacity=capacity)
        given = allocator.allocate(seen, NOW + k * 40 * 10**6)
        sums = np.zeros(4)
        for path, rate in zip(seen.paths, given, strict=True):
            assert rate >= 0 and np.isfinite(rate)
            sums[path[path < 3]] += rate
        assert np.all(sums[:3] <= capacity * (1 + 1e-6))
        for j, name in enumerate(seen.job_names):
            if ceiling is not None and name in {"a", "b"}:
                for link in range(3):
                    on = (seen.job == j) & (seen.paths == link).any(axis=1)
                    assert given[on].sum() <= ceiling * capacity[link] * (1 + 1e-6)
        terms = allocator.terms()
        if terms.hold is not None:
            assert not (terms.hold[given > 0] > 0).any(), "who has a rate is not held"


def test_a_ceiling_holds_where_it_is_below_the_kernels_least_rate():
    assert least(1e7, 1e5) == 1e5
    assert least(1e7, 1e9) == LEAST_RATE
    assert least(8e5, 1e9) == HELD_PART * 8e5
    assert least(1e7, 1e-9) == NOTICED_RATE, "but none lets a flow wait for minutes"
    assert least(8e4, 1e-9) == HELD_PART * 8e4
    assert least(1e7, 0.0) == least(1e7, np.nan) == LEAST_RATE, "held, or nobody has a say"
