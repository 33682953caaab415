# SPDX-License-Identifier: Apache-2.0
"""Slots: a grid on the wall clock, and a clock that walks it without ever going back."""

from dataclasses import dataclass

from flowslot.model.units import MILLISECOND, Nanos

DEFAULT_SLOT = Nanos(60 * MILLISECOND)
MAX_HOLD = 4
"""Slots by which the wall clock may be set back without a shift of the numbering."""


@dataclass(frozen=True, slots=True)
class SlotGrid:
    """Wall-clock time cut into slots of `slot_ns`; schedules look `horizon` slots ahead."""

    slot_ns: Nanos = DEFAULT_SLOT
    horizon: int = 10

    def __post_init__(self) -> None:
        if self.slot_ns <= 0 or self.horizon <= 0:
            raise ValueError("slot_ns and horizon must be greater than 0")


@dataclass(frozen=True, slots=True)
class Tick:
    """The slot it is now, and the monotonic time at which to look again."""

    slot: int
    boundary_ns: Nanos


class SlotClock:
    """Slot numbers that follow the wall clock and never decrease.

    A wall clock set back by up to MAX_HOLD slots holds the number until the wall catches up;
    one set back further shifts the numbering, so that it goes on from where it was. A wall clock
    set forward skips slots. The boundary is always the next one of the wall clock's grid, at most
    one slot away, so that a loop sleeping until then never misses its leases.
    """

    def __init__(self, grid: SlotGrid) -> None:
        self.grid = grid
        self._shift = 0
        self._slot: int | None = None

    def observe(self, monotonic_ns: int, wall_ns: int) -> Tick:
        """Take one reading of both clocks (ns, read together)."""
        wall_slot, passed = divmod(wall_ns, self.grid.slot_ns)
        self._slot = self._follow(wall_slot)
        return Tick(self._slot, Nanos(monotonic_ns + self.grid.slot_ns - passed))

    def _follow(self, wall_slot: int) -> int:
        if self._slot is None or wall_slot > self._slot:
            self._shift = 0
            return wall_slot
        slot = wall_slot + self._shift
        if self._slot - slot > MAX_HOLD:
            self._shift += self._slot - slot
            slot = self._slot
        return max(self._slot, slot)
