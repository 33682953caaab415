# SPDX-License-Identifier: Apache-2.0
"""Algorithm 2 of MLCC, and what it and Algorithm 1 take from the last slots."""

import math

import numpy as np
import pytest

from flowslot.policy.mlcc import depend
from flowslot.policy.mlcc.bandwidth import WINDOW, History, Observed
from flowslot.policy.mlcc.depend import Dependency

SLOT_S = 0.5
CAPACITY = np.array([100.0])
AHEAD, BEHIND = 60.0, 45.0
"""Bytes; F_i = 40 + 20 * 0.5 = 50."""


@pytest.mark.parametrize(
    ("other", "lead", "bound", "rate"),
    [
        (AHEAD, math.inf, 90.0, 40.0),
        (AHEAD, 0.0, 90.0, 40.0),
        (AHEAD, 0.0, 30.0, 30.0),
        (AHEAD, 0.0, 5.0, 5.0),  # even below what it was
        (BEHIND, math.inf, 5.0, 20.0),  # waits for nobody; line 6: no look at B
        (BEHIND, 0.0, 5.0, 10.0),
        (BEHIND, 2.0, 5.0, 14.0),
        (BEHIND, 7.0, 5.0, 20.0),
        (10.0, 0.0, 90.0, 0.0),  # never below 0
    ],
)
def test_the_rate_after_another_flow(other: float, lead: float, bound: float, rate: float) -> None:
    assert depend.adjusted(Dependency(40.0, other, lead), 20.0, bound, SLOT_S) == rate


def test_who_waits_may_not_send() -> None:
    assert not depend.may_send(Dependency(10.0, 10.0))
    assert depend.may_send(Dependency(10.0, 10.0, lead=5.0))
    assert depend.may_send(Dependency(10.0, 0.0, lead=math.inf))


def history(*loads: tuple[float, float]) -> History:
    """One slot after the other; `loads`: of controlled flows, and of other traffic."""
    seen = History()
    for slot, (controlled, other) in enumerate(loads):
        pair = np.array([controlled]), np.array([controlled + other])
        seen.observe(Observed(slot, {}, pair))
    return seen


def available(seen: History) -> tuple[float, float]:
    """As in the paper, and so that it recovers."""
    return float(seen.limits(CAPACITY)[0]), float(seen.recovering_limits(CAPACITY)[0])


@pytest.mark.parametrize(
    ("loads", "paper", "ours"),
    [
        ([(70.0, 30.0)] * 10, 70.0, 70.0),
        ([(10.0, 30.0)], 10.0, 70.0),  # what was left unused stays available
        ([(120.0, -5.0)], 100.0, 100.0),  # counters that were read a little late
        ([(0.0, 130.0)], 0.0, 0.0),
        ([], 100.0, 100.0),
    ],
)
def test_bandwidth_next_to_other_traffic(
    loads: list[tuple[float, float]], paper: float, ours: float
) -> None:
    seen = history(*loads)
    assert available(seen) == (paper, ours)
    seen.observe(Observed(10, {}))  # links are not counted: nothing is learnt
    assert available(seen) == (paper, ours)


def test_bandwidth_recovers_only_if_what_others_left_counts() -> None:
    loads: list[tuple[float, float]] = []
    estimates = []
    for slot in range(16):
        other = 100.0 if slot < 6 else 0.0
        estimates.append(available(history(*loads)))
        # The flow sends what it is told to, as far as other traffic leaves room.
        loads.append((min(estimates[-1][0], 100.0 - other), other))
    paper, ours = zip(*estimates, strict=True)
    assert paper == (100.0,) + (0.0,) * 15
    assert ours == (100.0,) + (0.0,) * 9 + (100.0,) * 6


def test_history_looks_back_so_far_and_not_into_the_past() -> None:
    seen = History()
    for slot in range(WINDOW + 2):
        seen.observe(Observed(slot, {7: 100.0 - slot} if slot else {}))
    assert seen.bound(7, SLOT_S, 33.0) == 2 * (100.0 - 2)
    assert seen.bound(8, SLOT_S, 33.0) == 33.0
    with pytest.raises(ValueError, match="after"):
        seen.observe(Observed(WINDOW + 1, {}))
