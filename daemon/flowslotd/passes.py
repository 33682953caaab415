# SPDX-License-Identifier: Apache-2.0
"""When to look at which jobs: coalescing, back-off, and this host's own moment of a slot.

Pure: `now` (monotonic ns) is passed in, and `next_wakeup` says when the next pass is due.
"""

from flowslot.model.slot import Tick
from flowslot.model.units import MILLISECOND, Nanos
from flowslotd.flows.flow_info import Source

COALESCE_NS = MILLISECOND
"""Events this close together share a pass: a job's sockets start one right after the other. When
all have started, there is nothing to wait for."""
LAZY_NS = 10 * MILLISECOND
"""What a flow leaves free can wait so long while its job goes on: top-up uses it meanwhile."""
BUSY, LAZY_BUSY = 2, 10
"""After a pass at events there is a rest before the next one: so many times the processor time that
the pass took, and more before one that can wait. Many flows end one by one, and must not cost more
than a few ends do."""
GOLDEN = 0.6180339887498949


class Passes:
    """The jobs that something has happened to, and when they are to be looked at."""

    def __init__(self, slot_ns: Nanos, number: int) -> None:
        """`number`: of this host among all hosts."""
        self.next_wakeup: Nanos | None = None
        """When the next pass at events is due; None: nothing has happened."""
        self._slot_ns = slot_ns
        self._moment = own_moment(number, slot_ns)
        self._touched: dict[int, Source] = {}
        self._lazy = False
        self._ended, self._cpu_ns = Nanos(0), 0  # of the last pass at events

    def touch(self, now: Nanos, source: Source, *, lazy: bool = False) -> None:
        """Something happened to flows of this job. `lazy`: nobody waits for it to be seen."""
        self._touched[source.id] = source
        self.soon(now, lazy=lazy)

    def rang(self, now: Nanos, source: Source, *, lazy: bool) -> None:
        """A doorbell of this job. As its other flows just before: the pass that this calls for is
        already due."""
        if source.id not in self._touched or not (lazy or not self._lazy):
            self.touch(now, source, lazy=lazy)

    def complete(self, now: Nanos, source: Source) -> None:
        """All flows of this job have begun, or ended: nothing is to be waited for but the rest."""
        self._touched[source.id] = source
        self._due_at(self._rested(now, max(COALESCE_NS, BUSY * self._cpu_ns)))

    def forget(self, now: Nanos, source: int) -> None:
        """The job has left. What it held is free."""
        self._touched.pop(source, None)
        self.soon(now)

    def soon(self, now: Nanos, *, lazy: bool = False) -> None:
        """A pass is due for what was touched, together with what is touched until then."""
        within, busy = (LAZY_NS, LAZY_BUSY) if lazy else (COALESCE_NS, BUSY)
        self._due_at(self._rested(Nanos(now + within), busy * self._cpu_ns), lazy=lazy)

    def take(self) -> list[Source]:
        """The pass is now: those that something has happened to."""
        touched, self._touched = list(self._touched.values()), {}
        self.next_wakeup = None
        return touched

    def took(self, now: Nanos, cpu_ns: int) -> None:
        """A pass at events has ended: its processor time."""
        self._ended, self._cpu_ns = now, cpu_ns

    def next_slot(self, now: Nanos, tick: Tick, *, at_boundary: bool) -> Nanos:
        """When to look at everything next: this host's own moment, or at the end of the slot."""
        if at_boundary:
            return tick.boundary_ns
        moment = Nanos(tick.boundary_ns - self._slot_ns + self._moment)
        return moment if moment > now else Nanos(moment + self._slot_ns)

    def _rested(self, due: Nanos, rest_ns: int) -> Nanos:
        """Then, or when there has been this much rest since the last pass."""
        return Nanos(max(due, self._ended + rest_ns))

    def _due_at(self, due: Nanos, *, lazy: bool = False) -> None:
        """Unless a pass is due before."""
        if self.next_wakeup is None or due < self.next_wakeup:
            self.next_wakeup, self._lazy = due, lazy


def own_moment(number: int, slot_ns: Nanos) -> Nanos:
    """How far into a slot host `number` (0, 1, ...) looks and reports, so that not all do at once.

    Between a quarter and three quarters of it, so that all clocks agree on the slot. The golden
    ratio spreads any number of hosts evenly.
    """
    return Nanos(int(slot_ns * (0.25 + 0.5 * (number * GOLDEN % 1.0))))
