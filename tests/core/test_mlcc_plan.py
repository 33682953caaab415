# SPDX-License-Identifier: Apache-2.0
"""Algorithm 1 of MLCC against a transcription of the paper's lines."""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowslot.policy.mlcc.plan import Reading, plan

SLOT_S = 0.5
Real = Any


def as_written(
    volume: Real, free: Sequence[Real], cost: Sequence[Real], scale: Real, reading: Reading
) -> list[float]:
    """Lines 1 to 13, exact if numbers are. One unit of cost is `scale` slots per (byte/s)."""
    slot_s, best, best_value = Fraction(1, 2), None, math.inf
    for completion in range(1, len(free) + 1):
        left, spent, rates = volume, 0, [0] * len(free)
        candidates = sorted(range(completion), key=lambda k: cost[k])
        while left > 0 and candidates:
            k = candidates.pop(0)
            rates[k] = min(max(free[k], 0), left / slot_s)
            left -= rates[k] * slot_s
            spent += rates[k] * cost[k] * scale
        if left == 0:
            value = spent if reading == "literal" else completion + spent
            if value < best_value:
                best, best_value = rates, value
    if best is None:  # too little room: all of it
        best = [max(f, 0) for f in free]
    return [float(rate) for rate in best]


SLOTS = st.lists(st.tuples(st.integers(-1, 6), st.integers(0, 5)), min_size=1, max_size=10)


@pytest.mark.parametrize("reading", ["literal", "rhs"])
@settings(max_examples=1500, deadline=None)
@given(slots=SLOTS, halves=st.integers(0, 60), shift=st.integers(0, 6))
def test_plan_is_what_the_paper_writes(
    reading: Reading, slots: list[tuple[int, int]], halves: int, shift: int
) -> None:
    # Small whole numbers make ties, empty slots and too little room common, and floats exact.
    free, cost = [f for f, _ in slots], [c for _, c in slots]
    scale = Fraction(1, 2**shift)
    rates = plan(halves / 4, np.array(free, float), np.array(cost) * float(scale), SLOT_S, reading)
    assert rates.tolist() == as_written(Fraction(halves, 4), free, cost, scale, reading)


@pytest.mark.parametrize("reading", ["literal", "rhs"])
def test_plan_is_what_the_paper_writes_on_loaded_paths(reading: Reading) -> None:
    # As loads and capacities are: any numbers, up to rounding.
    rng = np.random.default_rng(7)
    for _ in range(2000):
        slots = int(rng.integers(1, 41))
        free = rng.uniform(0, 100, slots) * (rng.random(slots) < 0.7)
        cost = (rng.uniform(0, 2, slots) * rng.integers(0, 2, slots)) / 100
        volume = float(rng.uniform(0, 60 * slots)) * SLOT_S
        rates = plan(volume, free, cost, SLOT_S, reading)
        best = np.array(as_written(volume, free.tolist(), cost.tolist(), 1, reading))
        assert np.all((rates >= 0) & (rates <= free))
        assert rates.sum() == pytest.approx(best.sum())
        values = [
            float(plan @ cost) + (reading == "rhs") * max(np.flatnonzero(plan), default=0)
            for plan in (rates, best)
        ]
        assert values[0] == pytest.approx(values[1], rel=1e-9, abs=1e-9)


def test_the_readings_differ_in_whether_to_wait() -> None:
    free, cost = np.full(4, 10.0), np.array([0.05, 0.05, 0.05, 0.0])
    assert plan(5.0, free, cost, SLOT_S, "literal").tolist() == [0, 0, 0, 10]
    assert plan(5.0, free, cost, SLOT_S, "rhs").tolist() == [10, 0, 0, 0]
    # Where the load costs more than the slots of waiting, both wait.
    assert plan(5.0, free, cost * 8, SLOT_S, "rhs").tolist() == [0, 0, 0, 10]


def test_plan_takes_all_room_when_there_is_too_little() -> None:
    free = np.array([3.0, -2.0, 0.0, 4.0])
    for remaining in (1e9, math.inf):
        assert plan(remaining, free, np.zeros(4), SLOT_S, "rhs").tolist() == [3, 0, 0, 4]
    assert plan(-1.0, free, np.zeros(4), SLOT_S).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("remaining", "free", "cost", "slot_s"),
    [
        (1.0, [1.0, 1.0], [1.0], 1.0),
        (math.nan, [1.0], [1.0], 1.0),
        (1.0, [math.nan], [1.0], 1.0),
        (1.0, [1.0], [math.inf], 1.0),
        (1.0, [1.0], [-1.0], 1.0),
        (1.0, [1.0], [1.0], 0.0),
    ],
)
def test_nonsense_is_refused(
    remaining: float, free: list[float], cost: list[float], slot_s: float
) -> None:
    with pytest.raises(ValueError, match="must"):
        plan(remaining, np.array(free), np.array(cost), slot_s)
