# SPDX-License-Identifier: Apache-2.0
"""The host's part of MLCC: plans its flows one after the other, and says what to reserve.

One slot, as the caller goes through it: `observe` what the last slot was like, set `dependencies`,
fetch the load table into the view, `decide`, send `updates` to the switches in their order, tell
`refused` which of them were not accepted, and if any were, fetch again and `decide` again.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from flowslot.model.schedule import Schedule
from flowslot.model.units import SECOND, Nanos
from flowslot.policy.base import Floats, Pace, Rows, View
from flowslot.policy.mlcc import depend
from flowslot.policy.mlcc.bandwidth import History, Observed
from flowslot.policy.mlcc.depend import Dependency
from flowslot.policy.mlcc.links import Links
from flowslot.policy.mlcc.options import MlccOptions
from flowslot.policy.mlcc.plan import plan
from flowslot.policy.mlcc.release import Pauses

INSTANT_S = 1e-9
"""A flow that needs less than this needs so much, where something is divided by it."""
LEAST_PART = 1 / 16
"""Of a slot. A plan made in its last moments counts on so much of it, so that a clock that is a
little late cannot make a rate infinite, or a flow stop."""


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """To be sent as UpdateSchedule: replaces the flow's schedule on all `links`.

    `rates`: float64[K], payload bytes/s in the slots from `slot` on; all 0: remove the flow.
    `before`: what of it the switches have if they refuse, float64[K]; None: the update only takes
    something back. `key`: seconds that the flow would need alone, shortened as it waits: a caller
    that can choose sends those with the smallest first. What takes something back has 0.
    """

    flow: int
    links: tuple[int, ...]
    slot: int
    rates: Floats
    before: Floats | None = None
    key: float = 0.0


class _Held(NamedTuple):
    """What the switches hold of a flow, as far as we know."""

    path: Rows
    slot: int  # of rates[0]
    rates: Floats  # [K]

    def at(self, slot: int, horizon: int) -> Floats:
        """From `slot` on, float64[horizon]; nothing after its end."""
        rates = np.zeros(horizon)
        rest = self.rates[max(slot - self.slot, 0) :][:horizon]
        rates[: len(rest)] = rest
        return rates


class _Active(NamedTuple):
    """A flow with bytes to send: where it is in the view, and since when it has had them."""

    flow: int
    path: Rows
    remaining: float
    since: int  # slot


class MlccPolicy:
    """A HostPolicy. Flows that are not on a path are left alone, idle ones get rate 0.

    `slot_ns`: length of a slot. `updates`: what the last `decide` wants sent. `dependencies`: of
    the flows that have any, by identifier; set it before `decide`.
    """

    def __init__(self, options: MlccOptions, slot_ns: Nanos) -> None:
        self.options = options
        self.updates: tuple[Update, ...] = ()
        self.dependencies: Mapping[int, Dependency] = {}
        self._slot_s = slot_ns / SECOND
        self._history = History()
        self._pauses = Pauses()
        self._held: dict[int, _Held] = {}
        self._seen: dict[int, tuple[int, float]] = {}  # active since which slot, bytes left
        self._paced: dict[int, float] = {}  # least that each flow had, all through the slot
        self._slot: int | None = None
        self._again = False
        self._fresh = False  # what is decided holds from the slot's beginning
        self._links: Links | None = None
        self._view: View | None = None

    @property
    def replans(self) -> bool:
        """Wants to decide as flows begin and end, not only when a slot begins."""
        return self.options.replan_on_events

    def observe(self, observed: Observed) -> None:
        """What the last slot was like; before the first `decide` of the next one."""
        self._history.observe(observed)
        if self.options.release and observed.slot == self._slot:
            for flow, sent in observed.sent.items():
                self._pauses.observe(flow, self._paced.get(flow, 0.0), sent, observed.slot)

    def decide(self, now: Nanos, view: View) -> Pace:
        """See HostPolicy. `view.load`: as fetched just now, own schedules included, its first
        column for `view.slot`. Links keep their indices as long as the policy lives.
        """
        begins = view.slot != self._slot
        if begins:
            self._slot, self._paced = view.slot, {}
        self._view, self.updates = view, ()
        self._fresh = begins or self._again
        active = self._active(view)
        if begins or self._again or self.options.replan_on_events or self._links is None:
            self._again = False
            self._plan(active, view, min(max(1.0 - view.passed, LEAST_PART), 1.0))
        return self._pace()

    def refused(self, updates: Iterable[Update]) -> Pace:
        """Switches refused these of `updates`: those flows have what they had reserved before.

        Returns rates that keep to it, in place of those of `decide`; the next `decide` plans
        again, within the same slot too.
        """
        assert self._view is not None and self._links is not None, "nothing was decided yet"
        for update in updates:
            if update.before is None:
                continue
            held = self._held.pop(update.flow)
            self._links.add(held.path, update.before - held.rates)
            if update.before.any():
                self._held[update.flow] = held._replace(rates=update.before)
            self._again = True
        self._fresh = False
        return self._pace()

    def give_back(self) -> tuple[Update, ...]:
        """What takes back all that is held."""
        held = ((flow, held._replace(rates=0.0 * held.rates)) for flow, held in self._held.items())
        return tuple(_update(flow, nothing) for flow, nothing in held)

    # --- what there is to plan

    def _active(self, view: View) -> list[_Active]:
        """Flows with bytes to send on a known path, those that came first in front."""
        n_links = len(view.capacity)
        active, seen = [], {}
        for row in np.flatnonzero((view.remaining > 0) & (view.paths < n_links).any(axis=1)):
            flow, remaining = int(view.flow[row]), float(view.remaining[row])
            since, left = self._seen.get(flow, (view.slot, remaining))
            if remaining > left:  # a new iteration: it came last
                since = view.slot
            path = view.paths[row]
            path = np.unique(path[path < n_links]).astype(np.intp)
            seen[flow] = since, remaining
            active.append(_Active(flow, path, remaining, since))
        self._seen = seen
        self._pauses.keep(seen)
        return sorted(active, key=lambda a: a.since)

    def _key(self, active: _Active, capacity: Floats, slot: int) -> float:
        """Seconds that the flow needs alone, divided by 1 + how often it has waited so long."""
        width = float(capacity[active.path].min())
        alone = active.remaining / width if width > 0.0 else np.inf
        waited = (slot - active.since) * self._slot_s
        return alone / (1.0 + waited / max(alone, INSTANT_S)) if np.isfinite(alone) else alone

    # --- Algorithm 2 for all flows

    def _plan(self, active: list[_Active], view: View, part: float) -> None:
        """Plan every active flow; `part` of the current slot is left."""
        assert view.load is not None, "plans are made against load tables"
        own = {flow: held.at(view.slot, view.horizon) for flow, held in self._held.items()}
        capacity, history = view.capacity, self._history
        paper = self.options.bound == "paper"
        limits = history.limits(capacity) if paper else history.recovering_limits(capacity)
        others = view.load.copy()
        for flow, held in self._held.items():
            others[held.path] -= own[flow]
        links = self._links = Links(capacity, limits, np.maximum(others, 0.0))
        keys = {a.flow: self._key(a, capacity, view.slot) for a in active}
        if self.options.order == "shortest":
            active = sorted(active, key=lambda a: keys[a.flow])
        paused = {a.flow for a in active if self._is_paused(a.flow, view.slot)}
        planned: dict[int, _Held] = {}
        for a in sorted(active, key=lambda a: a.flow in paused):  # what they get is left over
            if a.flow in paused:
                rates = np.zeros(view.horizon)
                rates[0] = min(float(links.free(a.path)[0]), a.remaining / (part * self._slot_s))
            else:
                rates = self._rates(a, links, part)
            links.add(a.path, rates)
            planned[a.flow] = _Held(a.path, view.slot, rates)
        self._reserve(view.slot, planned, own, keys)

    def _is_paused(self, flow: int, slot: int) -> bool:
        dependency = self.dependencies.get(flow)
        may = dependency is not None and depend.may_send(dependency)
        return not may and self._pauses.paused(flow, slot)

    def _rates(self, active: _Active, links: Links, part: float) -> Floats:
        """Algorithm 2 for one flow: its rate in each slot, float64[K]."""
        free = links.free(active.path)
        cost = links.cost(active.path)
        rates = self._initial(active.remaining, free, cost, part)
        dependency = self.dependencies.get(active.flow)
        if dependency is None:
            return rates
        seconds = part * self._slot_s
        first = float(rates[0])
        rate = depend.adjusted(
            dependency, first, self._bound(active, links, first, float(free[0])), seconds
        )
        if rate != first:
            # Lines 9 and 12: the later slots carry the rest, planned as before.
            free[0] = 0.0
            rates = self._initial(active.remaining - rate * seconds, free, cost, part)
            rates[0] = rate
        return rates

    def _initial(self, remaining: float, free: Floats, cost: Floats, part: float) -> Floats:
        """Algorithm 1. A slot of which a part is left is a whole one with as much less room."""
        room = free.copy()
        room[0] *= part
        rates = plan(remaining, room, cost, self._slot_s, self.options.cost)
        rates[0] = min(rates[0] / part, free[0])
        return rates

    def _bound(self, active: _Active, links: Links, rate: float, free: float) -> float:
        """B_i, payload bytes/s; one that recovers: what the flow has already, and what is free."""
        if self.options.bound == "residual":
            return rate + max(free - rate, 0.0)
        return self._history.bound(active.flow, self._slot_s, links.capacity(active.path))

    # --- what comes of it

    def _reserve(
        self,
        slot: int,
        planned: dict[int, _Held],
        own: dict[int, Floats],
        keys: dict[int, float],
    ) -> None:
        """The updates that lead from what is held to what is planned.

        A switch that refuses what does not fit must never be asked to give one flow what another
        of ours still has: all that is given back goes first, in updates that cannot be refused.
        """
        back, more = [], []
        for flow in [*planned, *(f for f in self._held if f not in planned)]:
            old, new = self._held.pop(flow, None), planned.get(flow)
            had = own[flow] if old is not None else np.zeros_like(planned[flow].rates)
            if old is not None and (new is None or not np.array_equal(old.path, new.path)):
                nothing = np.zeros_like(had)
                if had.any():
                    back.append(_update(flow, _Held(old.path, slot, nothing)))
                had = nothing
            if new is None:
                continue
            kept = np.minimum(had, new.rates)
            grows = bool(np.any(new.rates > kept))
            if np.any(kept < had) and (self.options.atomic or not grows):
                back.append(_update(flow, new._replace(rates=kept)))
            if grows:
                more.append(_update(flow, new, kept if self.options.atomic else had, keys[flow]))
            if new.rates.any():
                self._held[flow] = new
        self.updates = (*back, *more)

    def _pace(self) -> Pace:
        """Every flow on a known path at what is held for it; idle and new ones at 0."""
        view, links = self._view, self._links
        assert view is not None and links is not None
        n_links = len(view.capacity)
        rows = np.flatnonzero((view.paths < n_links).any(axis=1))
        rates = np.zeros((len(rows), view.horizon))
        for i, row in enumerate(rows):
            held = self._held.get(int(view.flow[row]))
            if held is not None:
                rates[i] = held.at(view.slot, view.horizon)
        current = rates[:, 0]
        tops = current.copy()
        for i, row in enumerate(rows):
            flow = int(view.flow[row])
            before = np.inf if self._fresh else self._paced.get(flow, 0.0)
            self._paced[flow] = min(before, float(current[i]))
            if self.options.top_up:
                path = view.paths[row]
                left = float(links.free(path[path < n_links].astype(np.intp))[0])
                tops[i] = current[i] + max(left, 0.0)
        no = np.zeros(len(rows), np.bool_)
        return Pace(view.flow[rows], Schedule(view.slot, rates), ceilings=tops, guaranteed=no)


def _update(flow: int, held: _Held, before: Floats | None = None, key: float = 0.0) -> Update:
    return Update(flow, tuple(held.path.tolist()), held.slot, held.rates, before, key)
