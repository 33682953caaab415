# SPDX-License-Identifier: Apache-2.0
"""The daemon's heart: from progress records to paced flows, once per slot and at events between.

Holds no clock and no timer: `now` is passed in.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

import numpy as np

from flowslot.decision import Pace
from flowslot.model.slot import SlotGrid
from flowslot.model.units import Nanos
from flowslot.policy.base import HostPolicy
from flowslot.protocol.grantbook import Granted
from flowslotd.flows.flow_info import Source
from flowslotd.negotiate.aggregates import Aggregates
from flowslotd.negotiate.domain_base import Domain
from flowslotd.observe.observer import Observer
from flowslotd.pace import handover
from flowslotd.pace.enforcer import Enforcer
from flowslotd.pace.pacer import Pacer

ENTRY_SLOTS = 2
"""Entries in the kernel outlive the last sign of life of this daemon by this many slots."""


class SlotLoop:
    """One pass of the datum's way, in `_run`; everything else decides when and how much of it."""

    def __init__(
        self,
        grid: SlotGrid,
        observer: Observer,
        *,
        records: Callable[[], Collection[Source]],
        policy: HostPolicy,
        domain: Domain | None,
        pacer: Pacer | None,
        enforcer: Enforcer | None,
        by_grant: bool,
        follows: bool = False,
    ) -> None:
        """`domain` None: nobody is asked. `pacer`, `enforcer` None: nothing is changed.

        `by_grant`: the policy decides on each flow by its grant alone, for all slots alike, so
        that nothing else calls for a new decision, and `on_slot` may come at any moment of a slot.
        `follows`: it wants to know at once what flows do, although no domain is told.
        """
        self.by_grant = by_grant
        self._follows = follows
        self._grid = grid
        self._observer, self._table = observer, observer.table
        self._records = records
        self._domain = domain
        self._policy = policy
        self._pacer = pacer
        self._enforcer = enforcer
        top_up = enforcer is not None and not enforcer.hard
        self._lends = by_grant and top_up and pacer is not None and pacer.lends
        self._aggregates = (
            Aggregates(observer.table, tops_up=self._lends) if domain is not None else None
        )
        self._slot = 0
        self._running = False
        self._drained = False
        self._untold = True
        """Flows have done more than send, or have other rates, since the kernel was last told what
        to report and whose rate goes to whom."""
        self._all_due = True
        self._due: set[int] = set()
        """Flows to decide on, in this pass or the next."""
        observer.negotiated = follows or domain is not None

    def on_slot(self, now: Nanos, slot: int, touched: Collection[Source] = ()) -> None:
        """Once per slot: look at everything that matters, and at what was `touched`. This daemon is
        alive. In some slots the arbiter is told small news, too (Domain.beat)."""
        self._slot = slot
        self._all_due |= not self.by_grant
        due = self._observer.due(slot, self._records())
        if not touched and all(self._observer.is_fresh(now, source) for source in due):
            due = []
        small = self._domain is None or self._domain.beat(now)
        self._run(now, [*due, *(source for source in touched if source not in due)], small=small)
        self.refresh(now)

    def on_events(self, now: Nanos, sources: Collection[Source]) -> None:
        """Something happened to flows of these jobs since the slot began."""
        # Who plans for all flows together needs to know of all how far they are.
        self._run(now, self._records() if self._follows and sources else sources)

    def on_grants(self, now: Nanos, grants: Iterable[Granted]) -> None:
        """The arbiter gives; in force when this returns."""
        if self._aggregates is None:
            return
        self._aggregates.grant(grants)
        if not self._running:  # else the pass that asked goes on to decide
            self._due |= self._aggregates.share_out(now)
            self._decide(now)
            if self._aggregates.waiting():
                self._run(now, self._records())

    def on_planned(self, now: Nanos) -> None:
        """The policy has changed its mind about flows that it decides on together."""
        self._all_due = True
        self._decide(now)

    def on_new(self, flow: int) -> None:
        """The kernel has met this flow: its entry has to be written (again)."""
        if self._enforcer is not None and flow in self._table:
            self._enforcer.forget(flow)
            self._due.add(flow)
            self._all_due |= not self.by_grant

    def on_drained(self) -> None:
        """Flows have ended whose siblings go on: the next pass shares their rates out again."""
        self._drained = True

    def refresh(self, now: Nanos) -> None:
        """Entries stay in force for another ENTRY_SLOTS."""
        if self._enforcer is not None:
            self._enforcer.refresh(self._deadline(now))

    def release(self) -> None:
        """Let all flows go at once, and look at everything in the next slot."""
        self._all_due = True
        self._observer.stir()
        if self._enforcer is not None:
            self._enforcer.release_all()

    def _run(self, now: Nanos, sources: Collection[Source], *, small: bool = False) -> None:
        waits = self._aggregates is not None and self._aggregates.waiting()
        news = self._due or self._all_due or self._drained or self._table.has_news()
        if not (sources or news or waits or (small and self._aggregates is not None)):
            return  # what nobody has looked at is as it was
        self._drained, self._running = False, True
        try:
            moved = self._look(now, sources)
            self._untold |= moved
            self._all_due |= moved and not self.by_grant
            self._negotiate(now, small)
            if self._aggregates is not None and self._aggregates.waiting():
                # An answer asks for flows that nobody has looked at for a while.
                sources = self._records()
                self._untold |= self._look(now, sources)
                self._negotiate(now)
        finally:
            self._running = False
        self._decide(now)
        if sources:
            self._tell(sources)

    def _tell(self, sources: Collection[Source]) -> None:
        """Tell the kernel what to report and whose rate goes to whom; and jobs, when to ring."""
        pacer, observer = self._pacer, self._observer
        if pacer is not None and self._untold:
            self._untold = False
            for cookie, acked in observer.take_watches():
                pacer.watch(cookie, acked)
            if self._lends:
                pacer.lend(handover.update(self._table.rows, not observer.negotiated))
        observer.suppress(sources, pacer is not None and pacer.event_fd() is not None)

    def _look(self, now: Nanos, sources: Collection[Source]) -> bool:
        if not sources:
            return False
        counters = self._pacer.counters() if self._pacer is not None else None
        return self._observer.observe(now, sources, counters)

    def _negotiate(self, now: Nanos, small: bool = False) -> None:
        new, gone = self._table.take_new(), self._table.take_gone()
        # A job's flows share their top-up: one more or less concerns them all.
        self._all_due |= bool(new or gone)
        if self._pacer is not None:
            for info in new:
                if info.path:
                    self._pacer.attach(info.cookie, info.pid, info.fd)
        if self._enforcer is not None:
            self._enforcer.release(info.cookie for info in gone)
        if self._domain is not None and self._aggregates is not None:
            self._aggregates.follow(now, new, gone)
            self._ask(now, self._domain, self._aggregates, small)
            self._due |= self._aggregates.share_out(now)

    def _ask(self, now: Nanos, domain: Domain, aggregates: Aggregates, small: bool) -> None:
        aggregates.look(now)
        # Who waits gets it a round trip earlier than if the arbiter had to take it back. But
        # what a borrower uses is not free.
        ended = aggregates.ended(partial(handover.in_use, now, self._table.rows))
        if ended:
            aggregates.grant(domain.give_back(ended))
        gone, demands = aggregates.take_gone(), aggregates.demands(now, small)
        self._all_due |= bool(demands) and not self.by_grant
        if gone:
            domain.done(now, gone)
        if demands:
            domain.demand(now, demands)

    def _decide(self, now: Nanos) -> None:
        table = self._table
        due = [row for flow in self._due if (row := table.find(flow)) is not None]
        at = table.used() if self._all_due else np.array(due, dtype=np.intp)
        self._due, self._all_due = set(), False
        self._untold |= bool(at.size)
        if self._enforcer is None or not at.size:
            return
        view = table.view(self._slot, self._grid.horizon, self._guaranteed(), at)
        rows = table.rows[at]
        decisions = self._policy.decide(now, view, rows["rate"], rows["ceiling"])
        self._enforcer.apply(
            self._slot,
            next((d for d in decisions if isinstance(d, Pace)), None),
            table=table,
            deadline=self._deadline(now),
            rows=at,
        )

    def _guaranteed(self) -> Sequence[bool]:
        """By path: whether a live arbiter holds all of its links."""
        domain = self._domain
        if domain is None:
            return [False] * len(self._table.links)
        return [bool(path) and domain.covers(path) for path in self._table.links]

    def _deadline(self, now: Nanos) -> Nanos:
        """Until when entries may stay in force unheard: not beyond the arbiter's lease either."""
        own = Nanos(now + ENTRY_SLOTS * self._grid.slot_ns)
        lease = self._domain.lease_end if self._domain is not None else None
        return own if lease is None else min(own, lease)
