# SPDX-License-Identifier: Apache-2.0
"""Policies on states made by hand. One link carries 100 bytes/s unless said."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlcc_hosts import view_of
from states import NOW, state

from flowslot.model.errors import FlowslotError
from flowslot.model.units import MILLISECOND, SECOND
from flowslot.policy import registry
from flowslot.policy.base import View
from flowslot.policy.fill import link_sum
from flowslot.policy.stagger import StaggerAllocator, StaggerPolicy
from flowslot.policy.static import StaticPolicy


def stagger(*flows: dict[str, Any], capacity: tuple[float, ...] = (100.0,)) -> list[float]:
    rates = StaggerAllocator(1 / 8).allocate(state(*flows, capacity=capacity), NOW)
    return [round(rate, 6) for rate in rates.tolist()]


def fair(*flows: dict[str, Any]) -> list[float]:
    allocator = registry.get("fair").allocator
    assert allocator is not None
    return [round(r, 6) for r in allocator(registry.PolicyOptions()).allocate(state(*flows), NOW)]


def test_shorter_job_first_and_a_floor_for_the_other() -> None:
    # Fair rates are 50 each, floors an eighth of that.
    assert stagger({"job": "a", "left": 300}, {"job": "b", "left": 100}) == [6.25, 93.75]


def test_ties_go_by_name_and_a_job_of_which_nothing_is_known_does_not_wait_for_ever() -> None:
    assert stagger({"job": "b"}, {"job": "a"}) == [6.25, 93.75]
    # It needs 1.9 s: 4 times that do not count; then 1.9 / (1.25 + wait / 7.6 - 1)^2 < 1 / 1.25^2.
    assert stagger({"job": "b", "left": 190, "wait": 7600}, {"job": "a"}) == [6.25, 93.75]
    assert stagger({"job": "b", "left": 190, "wait": 11_300}, {"job": "a"}) == [93.75, 6.25]


def test_a_job_that_leaves_half_of_a_link_may_come_before_a_shorter_one() -> None:
    # Two workers of a push to one server, over 1.5 s; b, on the first one's link, over 1 s. With b
    # first, a waits: 1 phase per second. With a first: 1 / 1.5 + 1 / 2.
    push = [{"job": "a", "left": 75, "links": (up, 2)} for up in (0, 1)]
    b = {"job": "b", "left": 100, "links": (0,)}
    assert stagger(*push, b, capacity=(100.0,) * 3) == [50, 50, 50]
    # The same with as much again for each worker: 1 / 3 + 1 / 2 is less than 1.
    longer = [{**flow, "left": 150} for flow in push]
    assert stagger(*longer, b, capacity=(100.0,) * 3)[2] > 90
    # Nor if the two meet on the server's link only.
    assert stagger(*push, {**b, "links": (2,)}, capacity=(100.0,) * 3)[2] > 90


def both_orders(a: dict[str, float], b: dict[str, float], *, partial: bool) -> list[str]:
    """Who goes first where `a` and `b` are like this, and where they are the other way round."""
    allocator = StaggerAllocator(partial=partial)
    first = []
    for one, other in ((a, b), (b, a)):
        rates = allocator.allocate(state({"job": "a", **one}, {"job": "b", **other}), NOW)
        first.append("a" if rates[0] > rates[1] else "b")
    return first


def test_arbiters_of_a_part_put_the_same_job_first_or_who_ends_soon_is_small_or_starves() -> None:
    # Each of two hosts began with another of two equal jobs, and has sent half of it. In a ring
    # the other half waits for the other host: with opposite orders both jobs crawl.
    begun, new = {"left": 50, "next": 100, "wait": 50}, {"left": 100, "next": 100, "wait": 5}
    assert both_orders(begun, new, partial=False) == ["a", "b"]
    assert both_orders(begun, new, partial=True) == ["a", "a"]
    new["wait"] = 0
    for first in ({"left": 20, "next": 100}, {"left": 10, "next": 10}, {**new, "wait": 2500}):
        assert both_orders(first, new, partial=True) == ["a", "b"], first


def test_to_arbiters_of_a_part_a_job_stays_as_large_when_some_of_its_flows_end() -> None:
    one, other = {"left": 26, "next": 100}, {"left": 0, "next": 100}
    allocator = StaggerAllocator(partial=True)
    rates = allocator.allocate(
        state({"job": "b", **one}, *[{"job": "b", **other}] * 3, {"job": "a", "left": 100}), NOW
    )
    # 26 of 400 are left, not 26 of 100: it may finish.
    assert rates[0] > rates[4]
    rates = allocator.allocate(
        state(
            {"job": "b", "left": 100, "next": 100},
            *[{"job": "b", **other}] * 2,
            {"job": "a", "left": 300},
        ),
        NOW,
    )
    # 100 of 300: as large as the other one, which comes first by name.
    assert rates[3] > rates[0]


def test_a_gang_ends_together_and_other_links_are_topped_up() -> None:
    rates = stagger(
        {"job": "a", "left": 300, "links": (0, 1)},
        {"job": "a", "left": 100, "links": (0,)},
        {"job": "b", "left": 900, "links": (1,)},
        capacity=(100.0, 200.0),
    )
    assert rates == [75.0, 25.0, 125.0]


def test_a_stalled_flow_neither_holds_up_its_gang_nor_starves_others() -> None:
    rates = stagger(
        {"job": "a", "left": 10, "cap": 0, "links": (0,), "goal": 100.0},
        {"job": "a", "left": 50, "links": (1,)},
        {"job": "b", "left": 900, "links": (0,)},
        capacity=(100.0, 100.0),
    )
    assert rates == [0.0, 100.0, 100.0]
    # No other job is there: the link stays ready for it.
    assert stagger({"job": "a", "cap": 0}) == [100.0]


def test_what_a_flow_cannot_use_is_for_others() -> None:
    slow, other = {"job": "a", "left": 100, "cap": 20}, {"job": "b", "left": 900}
    assert stagger(slow, other) == [20.0, 80.0]
    assert stagger({**slow, "goal": 60}, other) == [20.0, 80.0]
    assert fair(slow, other) == [20.0, 80.0]
    # Its gang need not be faster; no other job is there: the link stays ready for it.
    gang = stagger(slow, {"job": "a", "left": 200, "links": (1,)}, {**other, "links": (1,)},
                   other, capacity=(100.0, 100.0))  # fmt: skip
    assert gang[:2] == [20.0, 40.0]
    assert stagger(slow) == [100.0]


def test_shares_are_counted_by_sockets() -> None:
    """A part of them is a flow's own, while another job is served."""
    short, long = {"job": "a", "left": 10}, {"job": "b", "left": 900, "sockets": 4}
    assert fair(short, long) == [20.0, 80.0]
    assert stagger(short, long) == [90.0, 10.0]
    assert stagger({**short, "left": 900}, {**long, "left": 10}) == [2.5, 97.5]


def test_standing_grants_go_to_the_job_that_is_due_first() -> None:
    a = {"job": "a", "left": 0, "next": 500, "due": 300}
    b = {"job": "b", "left": 0, "next": 500, "due": 80}
    assert stagger(a, b) == [0.0, 100.0]
    assert stagger(a, {**b, "due": 295}) == [0.0, 100.0]
    assert stagger({**a, "goal": 100}, {**b, "due": 295}) == [100.0, 0.0]
    assert stagger(a, {**b, "due": -600}) == [100.0, 0.0], "seems to be gone"
    assert stagger(a, {**b, "next": 0}) == [100.0, 0.0], "nothing is known of it"
    assert stagger(a, b, {"job": "c"}) == [0.0, 0.0, 100.0]


def test_a_jobs_own_idle_flows_come_before_other_jobs() -> None:
    rates = stagger(
        {"job": "a", "links": (0,)},
        {"job": "a", "links": (1,), "left": 0, "next": 100, "due": 200},
        {"job": "b", "links": (1,), "left": 0, "next": 100, "due": 1},
        capacity=(100.0, 100.0),
    )
    assert rates == [100.0, 100.0, 0.0]


def test_a_flow_that_has_just_ended_comes_after_those_that_are_due() -> None:
    """Its job is still active elsewhere, but this one is due in a period only."""
    rates = stagger(
        {"job": "a", "links": (1,), "wait": 100.0},
        {"job": "a", "left": 0.0, "next": 100.0, "idle": 20.0, "due": 150.0},
        {"job": "b", "left": 0.0, "next": 100.0, "due": 5.0},
        capacity=(100.0, 100.0),
    )
    assert rates == pytest.approx([100.0, 0.0, 100.0])


@pytest.mark.parametrize("moved", [0.0, 2.0, 50.0, 90.0])
def test_a_job_alone_keeps_its_rates(moved: float) -> None:
    """Noise of progress, siblings that end or start a little apart, computing: no change."""
    goals = [24.0, 24.0, 24.0, 24.0]
    noise = [0.0, 1.0, -1.0, 0.5]
    full = [
        {"job": "a", "left": 100 - moved + x, "goal": g} for x, g in zip(noise, goals, strict=True)
    ]
    ended = {"left": 0, "next": 100, "due": 50, "idle": 3}
    starting = {"left": 0, "next": 100, "due": 4, "idle": 200}
    assert stagger(*full, capacity=(96.0,)) == goals
    assert stagger({**full[0], **ended}, *full[1:], capacity=(96.0,)) == goals
    assert stagger({**full[0], **starting}, *full[1:], capacity=(96.0,)) == goals
    assert stagger(*({**f, **ended} for f in full), capacity=(96.0,)) == goals
    gone = {"left": 0, "next": 100, "due": 200, "idle": 100}
    alone = stagger({**full[0], **gone}, *full[1:], capacity=(96.0,))
    assert alone[0] == 0.0 and sum(alone) == pytest.approx(96.0, rel=1e-6)


@pytest.mark.parametrize("left", [(300, 100), (1, 100), (0, 100), (0, 0)])
def test_a_job_that_meets_no_other_has_the_same_rates_in_all_phases(left: tuple[int, int]) -> None:
    """In proportion to bytes per iteration; what the bottleneck leaves elsewhere is given out."""
    job = [
        {"job": "a", "links": (0, 1), "left": left[0], "next": 300},
        {"job": "a", "links": (0,), "left": left[1], "next": 100},
        {"job": "a", "links": (1,), "left": 0, "next": 300},
    ]
    other = {"job": "b", "links": (2,)}
    assert stagger(*job, other, capacity=(100.0, 200.0, 50.0)) == [75.0, 25.0, 125.0, 50.0]


@pytest.mark.parametrize("strangers", [0, 6, 7])
@pytest.mark.parametrize("full", [28322286.0, 250297217.0, 909597559.0])
def test_a_link_that_others_fill_is_no_reason_to_drop_rates(strangers: int, full: float) -> None:
    """All of it is theirs, and by rounding a little more."""
    kept = {"links": (1,), "goal": 48.0}
    flows = [{"job": "a", "left": 100, **kept}, {"job": "b", "left": 200, **kept}]
    flows += [{"job": f"s{k}", "left": 1e9} for k in range(strangers)]
    seen = state(*flows, capacity=(full, 100.0))
    rates = StaggerAllocator(floor_share=1.0, top_up=False).allocate(seen, NOW)
    assert rates[:2].tolist() == [48.0, 48.0], "good enough"


@pytest.mark.parametrize("other", [0, 100])
def test_without_top_up_the_rest_is_for_a_flow_that_meets_no_other_job(other: float) -> None:
    """The rate that it has is good enough."""
    seen = state({"job": "a", "left": 1000, "goal": 95.0}, {"job": "b", "left": other, "next": 0})
    rates = StaggerAllocator(1 / 10, top_up=False).allocate(seen, NOW)
    assert rates[0] == pytest.approx(5.0 if other else 100.0)


def test_next_change_is_the_start_of_the_window() -> None:
    allocator = StaggerAllocator()
    idle = {"left": 0, "next": 100, "due": 50, "idle": 100}

    def changes(*flows: dict[str, Any]) -> list[float]:
        s = state(*flows, capacity=(100.0, 100.0))
        allocator.allocate(s, NOW)
        return allocator.next_change(s).tolist()

    assert changes({"job": "a"}, {"job": "b", **idle}) == [math.inf, 550 * MILLISECOND]
    busy = [{"job": "a", **idle}, {"job": "a"}]
    assert changes(*busy, {"job": "b"})[0] == 40 * MILLISECOND, "its siblings are active"
    apart = {"job": "b", "links": (1,), "next": 100}
    assert changes({"job": "a", **idle}, apart) == [math.inf] * 2, "it meets no other job"
    overdue = {"job": "b", **idle, "due": -30, "period": 1000}
    assert changes({"job": "a"}, overdue)[1] == 470 * MILLISECOND
    assert changes({"job": "a"}, {"job": "b"}) == [0.0, 0.0], "they age"
    assert changes({"job": "a"}, {"job": "a"}) == [math.inf] * 2


FLOW = st.fixed_dictionaries(
    {
        "job": st.sampled_from("abcd"),
        "links": st.sets(st.integers(0, 3), min_size=1, max_size=3).map(sorted),
        "left": st.one_of(st.just(0), st.floats(1e-3, 1e9)),
        "cap": st.sampled_from([0.0, 1e3, 1e7, math.inf, math.inf, math.inf]),
        "sockets": st.sampled_from([1, 1, 4, 64]),
        "wait": st.floats(0, 1e4),
        "period": st.sampled_from([0.0, 10.0, 1e4]),
        "due": st.floats(-1e3, 1e3),
        "next": st.one_of(st.just(0), st.floats(1, 1e9)),
        "idle": st.one_of(st.floats(0, 1e3), st.just(math.inf)),
        "goal": st.one_of(st.just(0.0), st.floats(0, 1e8)),
    }
)


@pytest.mark.parametrize("name", ["stagger", "fair", "mltcp"])
@settings(deadline=None, max_examples=150)
@given(
    flows=st.lists(FLOW, min_size=1, max_size=12),
    capacity=st.lists(st.sampled_from([0.0, 1e3, 1e7, 1e9]), min_size=4, max_size=4),
)
def test_any_state(name: str, flows: list[dict[str, Any]], capacity: list[float]) -> None:
    """Never over capacity; every active flow that can gets something; nothing is left over."""
    make = registry.get(name).allocator
    assert make is not None
    s = state(*flows, capacity=tuple(capacity))
    rates = make(registry.PolicyOptions()).allocate(s, NOW)
    assert np.all(np.isfinite(rates)) and np.all(rates >= 0)
    sums = np.zeros(5)
    link_sum(s.paths, rates, sums)
    used = sums[:-1]
    assert np.all(used <= s.capacity[:-1] * (1 + 1e-9) + 1e-9)
    room = s.capacity.copy()
    room[:-1] -= used
    for f in range(len(flows)):
        path = s.paths[f]
        if s.remaining[f] > 0 and s.cap[f] == math.inf and s.capacity[path].min() > 0:
            assert rates[f] > 0
            links = path[path < 4]
            spare = (room[links] - 0.0011 * s.capacity[links]).min()
            assert spare <= 0


def view(**changes: Any) -> View:
    """Flow 10 on one link, 11 on two, 12 not mapped."""
    seen = view_of(7, {10: ((0,), 1.0), 11: ((0, 1), 1.0), 12: ((), 1.0)}, None, n_links=2)
    return replace(seen, capacity=np.array([100.0, 60.0]), **changes)


def test_stagger_paces_what_is_granted() -> None:
    grants = np.array([5.0, 0.0, math.nan])
    ceilings = np.array([90.0, 80.0, math.nan])
    guaranteed = np.array([True, False, True])
    seen = view(grants=grants, ceilings=ceilings, guaranteed=guaranteed)
    pace = StaggerPolicy().decide(NOW, seen)
    assert pace.flows.tolist() == [10, 11]
    assert pace.schedule.at(7).tolist() == [5.0, 0.0]
    assert pace.ceilings.tolist() == [90.0, 80.0]
    assert pace.guaranteed.tolist() == [True, False]


def test_mltcp_weighs_flows_by_what_they_have_sent() -> None:
    make = registry.get("mltcp").allocator
    assert make is not None
    allocator = make(registry.PolicyOptions())

    def mltcp(*flows: dict[str, Any]) -> list[float]:
        return [round(r, 6) for r in allocator.allocate(state(*flows), NOW).tolist()]

    begun, ending = {"job": "a", "left": 400, "next": 400}, {"job": "b", "left": 1e-9, "next": 400}
    assert mltcp(begun, ending) == [round(100 / 9, 6), round(800 / 9, 6)]  # 1/4 to 2
    assert mltcp(begun, {"job": "b"}) == [20.0, 80.0], "nothing is known of it: plain TCP"
    assert mltcp({**begun, "sockets": 4}, {"job": "b"}) == [50.0, 50.0]
    assert mltcp(begun, {**ending, "left": 0}) == [100.0, 0.0]
    # 100 bytes/s: a 32nd of 400 bytes in an eighth of a second.
    changes = allocator.next_change(state(begun, {**ending, "left": 0}))
    assert changes.tolist() == [SECOND / 8, math.inf]


def test_static_divides_by_the_number_of_flows() -> None:
    def rates(flows_on_link: Mapping[int, int] | None = None) -> dict[int, float]:
        pace = StaticPolicy(flows_on_link).decide(NOW, view())
        assert not pace.guaranteed.any()
        assert pace.ceilings.tolist() == pace.schedule.at(7).tolist()
        return dict(zip(pace.flows.tolist(), pace.ceilings.tolist(), strict=True))

    assert rates() == {10: 50.0, 11: 50.0}  # the third one is not mapped
    assert rates({0: 4, 1: 3}) == {10: 25.0, 11: 20.0}


def test_registry() -> None:
    gates = "adadual srsf1 srsf2 srsf3 srsf-chunked"
    planned = "mltcp mlcc mlcc-literal mlcc-prototype ccml mcs srpt"
    assert registry.names() == tuple(f"stagger {gates} cassini static fair {planned}".split())
    fair = registry.get("fair")
    assert fair.host_policy is None and not fair.needs_arbiter
    with pytest.raises(
        FlowslotError, match=r'no policy is called "staggr"; did you mean "stagger"'
    ):
        registry.get("staggr")
    with pytest.raises(ValueError, match="floor_share"):
        StaggerAllocator(0.0)
