# SPDX-License-Identifier: Apache-2.0
"""Slots: a grid on the wall clock, and a clock that walks it without ever going back."""

from dataclasses import dataclass

from flowslot.model.units import MILLISECOND, Nanos

DEFAULT_SLOT = Nanos(60 * MILLISECOND)


@dataclass(frozen=True, slots=True)
class SlotGrid:
    """Wall-clock time cut into slots of `slot_ns`; schedules look `horizon` slots ahead."""

    slot_ns: Nanos = DEFAULT_SLOT
    horizon: int = 10

    def __post_init__(self) -> None:
        if self.slot_ns <= 0 or self.horizon <= 0:
            raise ValueError("slot_ns and horizon must be greater than 0")

    def slot_at(self, wall_ns: int) -> int:
        """Number of the slot that contains the wall-clock time `wall_ns`."""
        return wall_ns // self.slot_ns

    def start_of(self, slot: int) -> Nanos:
        """Wall-clock time at which `slot` begins."""
        return Nanos(slot * self.slot_ns)


@dataclass(frozen=True, slots=True)
class Tick:
    """The slot it is now, and the monotonic time at which to look again."""

    slot: int
    boundary_ns: Nanos


class SlotClock:
    """Slot numbers that follow the wall clock and never decrease.

    A wall clock set back by up to `max_hold` slots holds the number until the wall catches up;
    one set back further shifts the numbering, so that it goes on from where it was. A wall clock
    set forward skips slots. The boundary is always the next one of the wall clock's grid, at most
    one slot away, so that a loop sleeping until then never misses its leases.
    """

    def __init__(self, grid: SlotGrid, max_hold: int = 4) -> None:
        self.grid = grid
        self._max_hold = max_hold
        self._shift = 0
        self._slot: int | None = None

    def observe(self, monotonic_ns: int, wall_ns: int) -> Tick:
        """Take one reading of both clocks (ns, read together)."""
        wall_slot = self.grid.slot_at(wall_ns)
        boundary = monotonic_ns + self.grid.start_of(wall_slot + 1) - wall_ns
        self._slot = self._follow(wall_slot)
        return Tick(self._slot, Nanos(boundary))

    def _follow(self, wall_slot: int) -> int:
        if self._slot is None or wall_slot > self._slot:
            self._shift = 0
            return wall_slot
        slot = wall_slot + self._shift
        if self._slot - slot > self._max_hold:
            self._shift += self._slot - slot
            slot = self._slot
        return max(self._slot, slot)
