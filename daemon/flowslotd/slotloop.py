# SPDX-License-Identifier: Apache-2.0
"""The daemon's heart: from progress records to paced flows, once per slot and at events between.

Holds no clock and no timer: `now` is passed in.
"""

from collections.abc import Callable, Collection, Iterable, Sequence

from flowslot.messages import Done
from flowslot.policy.base import HostPolicy
from flowslot.slot import SlotGrid
from flowslot.units import Nanos

from flowslotd.domain_base import Domain
from flowslotd.enforcer import Enforcer
from flowslotd.flowinfo import Source
from flowslotd.flowtable import FlowTable
from flowslotd.pacing.base import Pacer

LEASE_SLOTS = 2
"""Entries in the kernel outlive the last sign of life of this daemon by this many slots."""


class SlotLoop:
    """One pass of the datum's way, in `_run`; everything else decides when and how much of it."""

    def __init__(
        self,
        grid: SlotGrid,
        table: FlowTable,
        *,
        records: Callable[[], Collection[Source]],
        policy: HostPolicy,
        domain: Domain | None,
        pacer: Pacer | None,
        enforcer: Enforcer | None,
    ) -> None:
        """`domain` None: nobody is asked. `pacer`, `enforcer` None: nothing is changed."""
        self._grid = grid
        self._table = table
        self._records = records
        self._domain = domain
        self._policy = policy
        self._pacer = pacer
        self._enforcer = enforcer
        self._slot = 0
        self._stale = True
        self._running = False
        self._version = -1

    def on_slot(self, now: Nanos, slot: int) -> None:
        """A slot begins: look at everything."""
        self._slot = slot
        self._stale = True
        self._run(now, self._records())
        self.refresh(now)

    def on_events(self, now: Nanos, sources: Collection[Source]) -> None:
        """Something happened to flows of these jobs since the slot began."""
        self._run(now, sources)

    def on_grants(self, now: Nanos, grants: Iterable[tuple[int, float, float]]) -> None:
        """The arbiter gives (flow, rate, ceiling); in force when this returns."""
        for flow, rate, ceiling in grants:
            self._table.grant(flow, rate, ceiling)
        self._stale = True
        if not self._running:  # else the pass that asked goes on to decide
            self._decide(now)

    def on_new(self, flow: int) -> None:
        """The kernel has met this flow: its entry has to be written (again)."""
        self._stale = True
        if self._enforcer is not None:
            self._enforcer.forget(flow)

    def refresh(self, now: Nanos) -> None:
        """This daemon is alive: entries stay in force for another lease."""
        if self._enforcer is not None:
            self._enforcer.refresh(self._deadline(now))

    def release(self) -> None:
        """Let all flows go at once."""
        self._stale = True
        if self._enforcer is not None:
            self._enforcer.release_all()

    def _run(self, now: Nanos, sources: Collection[Source]) -> None:
        self._running = True
        try:
            counters = self._pacer.counters() if self._pacer is not None else None
            self._table.observe(now, sources, counters)
            self._attach()
            self._negotiate(now)
        finally:
            self._running = False
        if self._stale or self._version != self._table.version:
            self._decide(now)
        if self._pacer is not None:
            for cookie, acked in self._table.take_watches():
                self._pacer.watch(cookie, acked)

    def _attach(self) -> None:
        for info in self._table.take_new():
            if self._pacer is not None and info.path:
                self._pacer.attach(info.cookie, info.pid, info.fd)

    def _negotiate(self, now: Nanos) -> None:
        gone = self._table.take_gone()
        demands = self._table.demands(now)
        if self._domain is None:
            return
        if gone:
            self._domain.done(now, [Done(flow, inc) for flow, inc in gone])
        if demands:
            self._domain.demand(now, demands)

    def _decide(self, now: Nanos) -> None:
        self._stale = False
        self._version = self._table.version
        if self._enforcer is None:
            return
        view = self._table.view(self._slot, self._grid.horizon, self._guaranteed())
        rows = self._table.rows
        decisions = self._policy.decide(now, view, rows["rate"], rows["ceiling"])
        self._enforcer.apply(now, self._slot, decisions, self._table, self._deadline(now))

    def _guaranteed(self) -> Sequence[bool]:
        """By path: whether a live arbiter holds all of its links."""
        domain = self._domain
        if domain is None:
            return [False] * len(self._table.links)
        return [bool(path) and domain.covers(path) for path in self._table.links]

    def _deadline(self, now: Nanos) -> Nanos:
        """Until when entries may stay in force unheard: not beyond the arbiter's lease either."""
        own = Nanos(now + LEASE_SLOTS * self._grid.slot_ns)
        lease = self._domain.lease_end if self._domain is not None else None
        return own if lease is None else min(own, lease)
