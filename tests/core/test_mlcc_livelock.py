# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable

import numpy as np
import pytest

from flowslot.policy.mlcc.livelock import LIVELOCK_SLOTS, STARVED_SLOTS, LivelockDetector, Stall


def run(
    left: Callable[[int], dict[int, float]],
    slots: int = 200,
    ready: Callable[[int, int], bool] = lambda slot, flow: True,
) -> list[Stall]:
    """All that is reported when the flows have `left(slot)` bytes at the end of each slot."""
    detector = LivelockDetector()
    found: list[Stall] = []
    for slot in range(slots):
        flows = left(slot)
        is_ready = np.array([ready(slot, flow) for flow in flows], np.bool_)
        found += detector.feed(slot, list(flows), np.array([*flows.values()]), is_ready)
    return found


def test_nobody_moves() -> None:
    found = run(lambda slot: {1: max(90.0 - slot, 70.0), 2: 50.0})
    assert found == [Stall("livelock", (1, 2), 21, 20 + LIVELOCK_SLOTS)]  # once


def test_a_plan_may_wait_for_the_end_of_the_horizon() -> None:
    assert not run(lambda slot: {1: 100.0 - slot // LIVELOCK_SLOTS})


def test_a_second_livelock_is_reported_again() -> None:
    found = run(lambda slot: {1: 100.0 if slot < 40 else 50.0}, slots=80)
    assert [(stall.since, stall.kind) for stall in found] == [(1, "livelock"), (41, "livelock")]


def test_one_flow_starves_while_another_moves() -> None:
    found = run(lambda slot: {1: 1e6 - 5.0 * slot, 2: 50.0})
    assert found == [Stall("starvation", (2,), 1, STARVED_SLOTS)]


def test_livelock_of_the_rest_is_no_starvation_of_each() -> None:
    # Flow 1 ends at slot 5, then nothing moves for longer than starving takes.
    found = run(lambda slot: {1: max(5.0 - slot, 0.0), 2: 50.0, 3: 50.0})
    assert found == [Stall("livelock", (2, 3), 6, 5 + LIVELOCK_SLOTS)]


def test_new_iterations_ends_and_computation_are_no_stall() -> None:
    # Each time it is looked at, the flow has just begun; it is done; it computes.
    assert not run(lambda slot: {1: 100.0 + slot})
    assert not run(lambda slot: {1: 0.0})
    assert not run(lambda slot: {1: 50.0}, ready=lambda slot, flow: False)
    assert not run(lambda slot: {slot // 5: 50.0})
    assert not run(lambda slot: {})


def test_rounding_is_not_progress_but_a_trickle_is() -> None:
    assert run(lambda slot: {1: 100.0 - slot * 1e-6})[0].kind == "livelock"
    assert not run(lambda slot: {1: 100.0 - slot * 0.3})


def test_arrivals_do_not_hide_a_livelock() -> None:
    found = run(lambda slot: {flow: 50.0 for flow in range(slot // 3 + 1)}, slots=15)
    assert [(stall.kind, stall.since, stall.slot) for stall in found] == [("livelock", 1, 10)]


def test_nonsense_is_refused() -> None:
    detector = LivelockDetector()
    detector.feed(3, [], np.array([]), np.array([], np.bool_))
    with pytest.raises(ValueError, match="after"):
        detector.feed(3, [], np.array([]), np.array([], np.bool_))
    with pytest.raises(ValueError, match="greater"):
        LivelockDetector(livelock_slots=0)
