# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable

import numpy as np
import pytest

from flowslot.policy.mlcc.livelock import LIVELOCK_SLOTS, STARVED_SLOTS, LivelockDetector, Stall

Left = Callable[[int], dict[int, float]]
"""Bytes that each flow has left at the end of a slot."""


def run(left: Left, slots: int = 200, ready: bool = True) -> list[Stall]:
    """All that is reported."""
    detector = LivelockDetector()
    found: list[Stall] = []
    for slot in range(slots):
        flows = left(slot)
        is_ready = np.full(len(flows), ready)
        found += detector.feed(slot, list(flows), np.array([*flows.values()]), is_ready)
    return found


@pytest.mark.parametrize(
    ("left", "slots", "stalls"),
    [
        # Reported once; and again if flows have moved since.
        (
            lambda slot: {1: max(90.0 - slot, 70.0), 2: 50.0},
            200,
            [Stall("livelock", (1, 2), 21, 20 + LIVELOCK_SLOTS)],
        ),
        (
            lambda slot: {1: 100.0 if slot < 40 else 50.0},
            80,
            [Stall("livelock", (1,), since, since - 1 + LIVELOCK_SLOTS) for since in (1, 41)],
        ),
        # Rounding is no progress, and arrivals do not hide that there is none.
        (lambda slot: {1: 100.0 - slot * 1e-6}, 200, [Stall("livelock", (1,), 1, LIVELOCK_SLOTS)]),
        (
            lambda slot: {flow: 50.0 for flow in range(slot // 3 + 1)},
            15,
            [Stall("livelock", (0, 1, 2, 3), 1, LIVELOCK_SLOTS)],
        ),
        (
            lambda slot: {1: 1e6 - 5.0 * slot, 2: 50.0},
            200,
            [Stall("starvation", (2,), 1, STARVED_SLOTS)],
        ),
        # Flow 1 ends at slot 5, then nothing moves for longer than starving takes: a livelock of
        # the rest is no starvation of each.
        (
            lambda slot: {1: max(5.0 - slot, 0.0), 2: 50.0, 3: 50.0},
            200,
            [Stall("livelock", (2, 3), 6, 5 + LIVELOCK_SLOTS)],
        ),
        # A plan may wait for the end of the horizon, and a trickle is progress.
        (lambda slot: {1: 100.0 - slot // LIVELOCK_SLOTS}, 200, []),
        (lambda slot: {1: 100.0 - slot * 0.3}, 200, []),
        # Each time it is looked at, the flow has just begun; it is done; it is another one.
        (lambda slot: {1: 100.0 + slot}, 200, []),
        (lambda slot: {1: 0.0}, 200, []),
        (lambda slot: {slot // 5: 50.0}, 200, []),
        (lambda slot: {}, 200, []),
    ],
)
def test_flows_that_do_not_move_are_reported(left: Left, slots: int, stalls: list[Stall]) -> None:
    assert run(left, slots) == stalls


def test_computing_is_no_stall() -> None:
    assert not run(lambda slot: {1: 50.0}, ready=False)


def test_a_slot_that_was_fed_is_over() -> None:
    detector = LivelockDetector()
    detector.feed(3, [], np.array([]), np.array([], np.bool_))
    with pytest.raises(ValueError, match="after"):
        detector.feed(3, [], np.array([]), np.array([], np.bool_))
