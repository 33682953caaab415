# SPDX-License-Identifier: Apache-2.0
"""CASSINI: circles, rotations, the affinity graph, shifts, candidates, bad profiles."""

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from interpreted import plain

import flowslot.policy.cassini.rotate
from flowslot.model.errors import FlowslotError
from flowslot.model.units import MILLISECOND as MS
from flowslot.policy.cassini import Phase, Profile, alone, best, plan, shifts
from flowslot.policy.cassini.affinity import loop_free, traverse
from flowslot.policy.cassini.circle import MOST_TURNS, demand, unified
from flowslot.policy.cassini.rotate import Search

C = 6.25e9
INTERPRETED = plain(flowslot.policy.cassini.rotate)


def job(name, period_ms, *ups, links=(0,), rate=C):
    """`ups`: (start, length) in ms."""
    phases = tuple(Phase(start * MS, length * MS, rate) for start, length in ups)
    return Profile(name, period_ms * MS, phases, dict.fromkeys(links, 1.0))


def excess(demands, rotations, capacity):
    total = sum(np.roll(row, k) for row, k in zip(demands, rotations, strict=True))
    return float(np.maximum(total - capacity, 0).sum())


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_rotations_are_as_good_as_any(data) -> None:
    """Against all combinations, of the first job's, too; compiled and interpreted alike."""
    turns = data.draw(st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=4))
    angles = 6 if len(turns) > 3 else 12
    rows = []
    for r in turns:
        level = st.lists(
            st.sampled_from([0.0, 1.0, 2.5, 4.0]), min_size=angles // r, max_size=angles // r
        )
        rows.append(np.tile(data.draw(level), r))
    demands, most = np.array(rows), np.array([angles // r for r in turns], np.intp)
    capacity = data.draw(st.sampled_from([1.0, 3.0, 4.0]))
    brute = min(excess(demands, ks, capacity) for ks in product(*(range(m) for m in most)))
    found = []
    for module in (flowslot.policy.cassini.rotate, INTERPRETED):
        search = module.Search(demands, most, capacity)
        search.go()
        found.append(np.asarray(search.best).tolist())
        assert search.exact and search.least == pytest.approx(brute, abs=1e-6)
        assert excess(demands, found[-1], capacity) == pytest.approx(brute, abs=1e-6)
    assert found[0] == found[1] and found[0][0] == 0


def test_a_search_that_is_cut_off_says_so() -> None:
    rows = np.random.default_rng(1).random((5, 72))
    search = Search(rows, np.full(5, 72, np.intp), 2.0, 10_000)
    search.go()
    assert not search.exact
    assert excess(rows, np.asarray(search.best).tolist(), 2.0) == pytest.approx(search.least)
    assert search.least <= excess(rows, [0] * 5, 2.0)


def test_figure_4_5() -> None:
    """40 and 60 ms meet on a circle of 120 ms, of which 30 degrees are 10 ms."""
    circle = unified([40 * MS, 60 * MS], tolerance=0.0)
    assert circle.perimeter_ns == 120 * MS and circle.turns == (3, 2) and circle.angles == 72
    assert circle.ns(circle.angles * 30 // 360) == 10 * MS
    assert [circle.rotations(j) for j in (0, 1)] == [24, 36]  # 2 pi / r
    found = shifts([job("j1", 40, (0, 10)), job("j2", 60, (0, 10))], {0: C})
    assert found["j1"].score == found["j2"].score == 1.0
    apart = found["j2"].shift_ns - found["j1"].shift_ns
    assert apart % math.gcd(40 * MS, 60 * MS) == 10 * MS  # the only way


@given(st.integers(1, 60), st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_exact_periods_have_their_least_common_multiple(unit, factors) -> None:
    periods = [unit * factor for factor in factors]
    whole = math.lcm(*periods)
    assume(whole // min(periods) <= MOST_TURNS)
    circle = unified(periods, tolerance=0.0)
    assert circle.perimeter_ns == whole and circle.rounded == 0
    assert [r * each for r, each in zip(circle.turns, periods, strict=True)] == [whole] * len(
        periods
    )


@given(st.lists(st.integers(10, 2000), min_size=1, max_size=5), st.sampled_from([0.0, 0.01, 0.05]))
def test_circles_stay_small(periods, tolerance) -> None:
    """However large the multiple is; times are rounded up only."""
    circle = unified(periods, tolerance=tolerance)
    limit = max(MOST_TURNS, max(periods) / min(periods) + 1)
    assert max(circle.turns) <= limit
    for r, each in zip(circle.turns, periods, strict=True):
        assert each <= circle.perimeter_ns / r <= each * (1 + circle.rounded) * (1 + 1e-12)
    near = unified([273 * MS, 274 * MS])
    assert near.perimeter_ns == 274 * MS and near.rounded == pytest.approx(1 / 273)


def test_demand_keeps_bytes_whatever_the_angles() -> None:
    one = Profile("a", 100, (Phase(3, 10, 5.0), Phase(50, 49, 2.0)), {7: 1.5})
    circle = unified([100, 150], tolerance=0.0)
    row = demand(one, 7, circle.turns[0], circle)
    assert row.mean() * circle.perimeter_ns == pytest.approx(3 * (10 * 5 + 49 * 2) * 1.5)


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_theorem_1_up_to_whole_iterations(data) -> None:
    """A random forest: on every link, the difference of two shifts is the link's own, up to whole
    iterations of either. As printed, modulo the link's perimeter, it fails."""
    period = {"j0": data.draw(st.integers(20, 90))}
    weights: dict[int, dict[str, int]] = {}
    for link in range(data.draw(st.integers(1, 5))):
        old = data.draw(st.sampled_from(sorted(period)))
        members = [old]
        for _ in range(data.draw(st.integers(1, 3))):
            members.append(f"j{len(period)}")
            period[members[-1]] = data.draw(st.integers(20, 90))
        weights[link] = {j: data.draw(st.integers(0, period[j] - 1)) for j in members}
    order = data.draw(st.permutations(sorted(weights)))
    assert loop_free({link: weights[link] for link in order}) == order
    found = traverse({link: weights[link] for link in order}, period)
    assert found.keys() == period.keys()
    for jobs in weights.values():
        for j, k in product(jobs, jobs):
            off = (found[j] - found[k]) - (jobs[j] - jobs[k])
            assert off % math.gcd(period[j], period[k]) == 0
            assert 0 <= found[j] < period[j]


def test_theorem_1_as_printed_fails() -> None:
    found = traverse({0: {"a": 30, "b": 10}}, {"a": 40, "b": 60})
    assert found == {"a": 0, "b": 40}
    assert (found["a"] - found["b"]) % 120 != (30 - 10) % 120
    assert (found["a"] - found["b"] - 20) % math.gcd(40, 60) == 0


def test_shifts_hold_on_every_link_of_a_tree() -> None:
    """b meets a on one link and c on another; each link is as good as it would be alone."""
    jobs = [
        job("a", 40, (0, 19), links=[0]),
        job("b", 40, (0, 19), links=[0, 1]),
        job("c", 80, (0, 15), (40, 15), links=[1, 2]),
        job("d", 80, (0, 39), links=[2]),
    ]
    made = plan(jobs, dict.fromkeys(range(3), C))
    assert not made.left_out and set(made.links) == {0, 1, 2}
    alone_on = plan([jobs[2], jobs[3]], dict.fromkeys(range(3), C))
    assert made.scores == pytest.approx({0: 1.0, 1: 1.0, 2: alone_on.score})
    assert made.shifts["a"].shift_ns == 0 and made.shifts["a"].score == 1.0
    apart = (made.shifts["b"].shift_ns - made.shifts["a"].shift_ns) / MS % 40
    assert 19 <= apart <= 21
    apart = (made.shifts["c"].shift_ns - made.shifts["b"].shift_ns) / MS % 40
    assert 19 - 1.2 <= apart <= 25 + 1.2  # to an angle of 80 ms / 72


def test_loops() -> None:
    """Jobs that share both directions are none; a triangle is, and placements with one do not
    count."""
    capacity = dict.fromkeys(range(3), C)
    both = [job("a", 100, (0, 45), links=[0, 1]), job("b", 100, (0, 45), links=[0, 1])]
    assert not plan(both, capacity).left_out
    triangle = [
        job("a", 100, (0, 30), links=[0, 2]),
        job("b", 100, (0, 30), links=[0, 1]),
        job("c", 100, (0, 30), links=[1, 2]),
    ]
    assert len(plan(triangle, capacity).left_out) == 1
    apart = [job(n, 100, (0, 60), links=[k]) for n, k in (("a", 0), ("b", 0), ("c", 1))]
    chosen, made = best([triangle, apart], capacity)
    assert chosen == 1 and made.score == pytest.approx(0.8, abs=0.02)
    assert best([triangle, triangle], capacity)[0] == 0  # nothing else is there
    easier = [job(n, 100, (0, 55), links=[k]) for n, k in (("a", 0), ("b", 0), ("c", 1))]
    assert best([apart, easier, easier], capacity)[0] == 1
    with pytest.raises(FlowslotError, match="from 1 to 10 placements, got 11"):
        best([apart] * 11, capacity)


def test_jobs_that_never_meet_are_free() -> None:
    calm = [job(name, 100, (0, 50), rate=C / 3) for name in "abc"]
    made = plan(calm, {0: C})
    assert made.links == {} and made.score == 1.0 and made.scores == {0: 1.0}
    crowd = plan([job(name, 100, (0, 100)) for name in "abcd"], {0: C})
    assert crowd.shifts["a"].score == pytest.approx(-2.0)  # may be negative


GOOD = {
    "job": "x",
    "period_ns": 100,
    "phases": (Phase(10, 20, 1.0), Phase(40, 60, 2.0)),
    "links": {3: 1.0},
}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"period_ns": 0}, 'job "x": period_ns must be a whole number from 1'),
        ({"period_ns": 1.5}, "period_ns must be a whole number"),
        ({"period_ns": True}, "period_ns must be a whole number"),
        ({"phases": (Phase(-1, 5, 1.0),)}, r"phases\[0\].start_ns must be a whole number from 0"),
        ({"phases": (Phase(0, 50, 1.0), Phase(40, 5, 1.0))}, r"phases\[1\].start_ns .* from 50"),
        ({"phases": (Phase(90, 11, 1.0),)}, r"phases\[0\].length_ns .* from 1 to 10"),
        ({"phases": (Phase(0, 5, math.nan),)}, r"phases\[0\].demand must be finite and above 0"),
        ({"phases": (Phase(0, 5, math.inf),)}, r"demand must be finite"),
        ({"links": {3: -1.0}}, r"links\[3\] must be finite and above 0"),
    ],
)
def test_bad_profiles(change, said) -> None:
    Profile(**GOOD)
    with pytest.raises(FlowslotError, match=said):
        Profile(**{**GOOD, **change})


def test_bad_networks() -> None:
    with pytest.raises(FlowslotError, match='job "x": is there twice'):
        shifts([Profile(**GOOD)] * 2, {3: 1.0})
    with pytest.raises(FlowslotError, match=r"links\[3\] needs a capacity"):
        shifts([Profile(**GOOD)], {})


def test_a_profile_from_what_is_measured_in_a_crowd() -> None:
    one = alone("a", 60 * MS, {0: 5e7, 1: 1e8, 9: 3.0}, {0: 1e9, 1: 4e9})
    assert one is not None and one.period_ns == 110 * MS
    assert one.phases == (Phase(0, 50 * MS, pytest.approx(2e9)),)
    assert one.links == {0: 0.5, 1: 1.0}
    assert alone("a", 60 * MS, {9: 1.0}, {0: 1e9}) is None
