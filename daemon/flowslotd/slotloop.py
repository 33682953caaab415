# SPDX-License-Identifier: Apache-2.0
"""The daemon's heart: from progress records to paced flows.

Holds no clock and no timer: `now` is passed in. When to look, and at what, is decided in passes.py.
"""

from collections.abc import Collection, Sequence

import numpy as np

from flowslot.model.slot import SlotGrid
from flowslot.model.units import Nanos
from flowslot.protocol.host import ENTRY_SLOTS
from flowslotd.flows.flow_info import Source
from flowslotd.flows.rows import Typed
from flowslotd.negotiate.source import RateSource
from flowslotd.observe.observer import Observer
from flowslotd.pace import handover
from flowslotd.pace.enforcer import Enforcer
from flowslotd.pace.pacer import Pacer


class SlotLoop:
    """One pass of the datum's way is `on_slot`: observe, negotiate, decide, pace."""

    def __init__(
        self,
        grid: SlotGrid,
        observer: Observer,
        source: RateSource,
        *,
        pacer: Pacer,
        enforcer: Enforcer,
        lends: bool = False,
    ) -> None:
        """`enforcer`: of this pacer. `lends`: a flow that has sent everything may leave its rate to
        another one of this host."""
        self._grid = grid
        self._observer, self._table = observer, observer.table
        self._source = source
        self._pacer = pacer
        self._enforcer = enforcer
        self._lends, self._view = lends, Typed(handover.typed)
        self._slot = 0
        self._until = Nanos(0)
        """When entries lapse."""
        self._all_due = True
        self._due: set[int] = set()
        """Flows to decide on, whatever the source says of them."""
        self._unreported = True
        """Flows have done more than send, or have other rates, since the kernel last heard what to
        report and whose rate goes to whom."""

    def on_slot(
        self, now: Nanos, slot: int, sources: Collection[Source] = (), *, small: bool = False
    ) -> None:
        """One pass over the jobs of `sources`: at a slot, and at events in between."""
        self._slot = slot
        moved = self._observe(now, sources)
        self._source.negotiate(now, slot, moved=moved, small=small)
        self.pace(now)
        self._report(sources)

    def _observe(self, now: Nanos, sources: Collection[Source]) -> bool:
        """What flows have done; True: more than send."""
        moved = False
        if sources:
            moved = self._observer.observe(now, sources, self._pacer.counters())
            self._unreported |= moved
        new, gone = self._table.take_new(), self._table.take_gone()
        self._source.follow(now, new, gone)
        # A job's flows share their top-up: one more or less concerns them all.
        self._all_due |= bool(new or gone)
        for info in new:
            if info.path:
                self._pacer.attach(info.cookie, info.pid, info.fd)
        self._enforcer.release(info.cookie for info in gone)
        return moved or bool(new or gone)

    def pace(self, now: Nanos) -> None:
        """Decide on flows whose rates may have changed; in force when this returns."""
        table, due = self._table, self._source.due(now)
        if self._all_due or due is None or (self._due and self._source.joint):
            at = table.used()
        else:
            rows = (table.find(flow) for flow in due | self._due)
            at = np.array([row for row in rows if row is not None], dtype=np.intp)
        self._due, self._all_due = set(), False
        self._unreported |= bool(at.size)
        if not at.size:
            return
        view = table.view(self._slot, self._grid.horizon, self._guaranteed(), at)
        pace = self._source.rates(now, view)
        deadline = self._deadline(now)
        self._enforcer.apply(self._slot, pace, table=table, deadline=deadline, rows=at)

    def _report(self, sources: Collection[Source]) -> None:
        """Tell the kernel what to report and whose rate goes to whom; and jobs, when to ring."""
        pacer, observer = self._pacer, self._observer
        if self._unreported:
            self._unreported = False
            for cookie, target in observer.take_watches():
                pacer.watch(cookie, target)
            if self._lends:
                rows = self._table.rows
                pacer.lend(handover.update(rows, self._view(rows), not observer.negotiated))
        if sources:
            observer.suppress(sources, pacer.event_fd() is not None)

    # --- what happens in between

    @property
    def has_news(self) -> bool:
        """There is something to decide, although no job was looked at."""
        return bool(self._due or self._all_due or self._table.has_news())

    def on_new(self, flow: int) -> None:
        """The kernel has met this flow: its entry has to be written (again)."""
        if flow in self._table:
            self._enforcer.forget(flow)
            self._due.add(flow)

    def refresh(self, now: Nanos) -> None:
        """Entries stay in force for another ENTRY_SLOTS: this daemon is alive."""
        self._until = self._deadline(now)
        self._enforcer.refresh(self._until)

    def keep(self, now: Nanos) -> None:
        """Rates have changed, and what is in force may have been to end with a lease that is
        another one now: `refresh`, if it cannot wait for the next slot, which may be late."""
        if not now + self._grid.slot_ns * 3 // 2 < self._until <= self._deadline(now):
            self.refresh(now)

    def release(self) -> None:
        """Let all flows go at once, and look at everything in the next slot."""
        self._all_due = True
        self._observer.stir()
        self._enforcer.release_all()

    def _guaranteed(self) -> Sequence[bool]:
        """By path: whether a live arbiter holds all of its links."""
        return [bool(path) and self._source.covers(path) for path in self._table.links]

    def _deadline(self, now: Nanos) -> Nanos:
        """Until when entries may stay in force unheard: not beyond the arbiter's lease either."""
        until = self._source.deadline(now)
        return Nanos(now + ENTRY_SLOTS * self._grid.slot_ns) if until is None else until
