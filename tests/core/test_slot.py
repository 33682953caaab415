# SPDX-License-Identifier: Apache-2.0
import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from flowslot.model.schedule import Schedule, constant
from flowslot.model.slot import SlotClock, SlotGrid
from flowslot.model.units import MILLISECOND, SECOND, Nanos

GRID = SlotGrid(Nanos(60 * MILLISECOND), 10)
MS = int(MILLISECOND)


def test_grid_and_clock_follow_the_wall() -> None:
    clock = SlotClock(GRID)
    tick = clock.observe(5 * MS, 600 * MS + 10 * MS)
    assert tick.slot == 10
    assert tick.boundary_ns == 5 * MS + 50 * MS
    assert clock.observe(55 * MS, 660 * MS).slot == 11


def test_small_step_back_holds_large_one_goes_on_counting() -> None:
    clock = SlotClock(GRID)
    assert clock.observe(0, 6000 * MS).slot == 100
    held = clock.observe(1, 6000 * MS - 130 * MS)
    assert held.slot == 100 and 0 < held.boundary_ns <= 61 * MS
    assert clock.observe(2, 5 * SECOND).slot == 100
    assert clock.observe(3, 5 * SECOND + 60 * MS).slot == 101
    assert clock.observe(4, 9 * SECOND).slot == 150  # forward: numbers agree with the wall again


@given(
    st.lists(
        st.tuples(st.integers(1, 300 * MS), st.integers(-20 * SECOND, 20 * SECOND)),
        min_size=1,
        max_size=60,
    )
)
@example([(1, 4_999_999_999), (1, -300_000_002)])
def test_never_runs_backwards_nor_stops(steps: list[tuple[int, int]]) -> None:
    """Whatever the wall clock does between readings."""
    clock = SlotClock(GRID)
    monotonic, wall, last = 0, 10**18, -1
    for elapsed, jump in steps:
        monotonic, wall = monotonic + elapsed, wall + elapsed + jump
        tick = clock.observe(monotonic, wall)
        assert tick.slot >= last
        assert monotonic < tick.boundary_ns <= monotonic + GRID.slot_ns
        last = tick.slot
    # Without further jumps it counts on, at the latest after holding for 4 slots.
    later = clock.observe(monotonic + 6 * GRID.slot_ns, wall + 6 * GRID.slot_ns)
    assert later.slot > last


def test_schedule() -> None:
    plan = Schedule(10, np.array([[1.0, 2.0, 3.0], [4.0, 0.0, 0.0]]))
    assert constant(3, np.array([5.0, 6.0])).at(99).tolist() == [5.0, 6.0]
    firsts = [float(plan.at(slot)[0]) for slot in (9, 10, 11, 12, 13, 99)]
    assert firsts == [1.0, 1.0, 2.0, 3.0, 3.0, 3.0]
    assert plan.at(10).tolist() == [1.0, 4.0]
