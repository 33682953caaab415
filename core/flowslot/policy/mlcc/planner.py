# SPDX-License-Identifier: Apache-2.0
"""Runs a planning policy (MLCC) that needs the switches' load tables, for callers that never wait.

The planner is asked once per slot and, if it replans, as flows begin and end; but only when the
load tables have come, which takes a round trip. Until then, what was decided before goes on. Pure:
somebody else fetches and sends, and says when.

One round: `links` are fetched, `plan` says what to send to the switches, `settle` which of it they
refused. Until a round is settled, flows have the least of what they had and of what is planned: a
switch may give to others what was taken back as soon as it is told.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from flowslot.model.schedule import Schedule
from flowslot.model.units import SECOND, Nanos
from flowslot.policy.base import Bools, Floats, HostPolicy, Pace, View
from flowslot.policy.mlcc import Dependency, LivelockDetector, Observed, Stall, Update

PATIENCE_SLOTS = 2
"""A switch process that has not answered for longer has no say: its flows are let go."""
_NEVER = -(1 << 62)


class Planner(HostPolicy, Protocol):
    """A HostPolicy that plans ahead against load tables; see MlccPolicy."""

    updates: tuple[Update, ...]
    dependencies: Mapping[int, Dependency]
    """Of the flows that have any; read by `decide`."""

    @property
    def replans(self) -> bool:
        """Wants to decide as flows begin and end, not only when a slot begins."""
        ...

    def observe(self, observed: Observed) -> None:
        """What the last slot was like."""
        ...

    def decide(self, now: Nanos, view: View) -> Pace:
        """See HostPolicy."""
        ...

    def refused(self, updates: Sequence[Update]) -> Pace:
        """Rates without these updates."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Feedback:
    """What a switch process said of N links. `load`: float64[N, K], payload bytes/s in the slots
    from `slot` on; `reservable`: float64[N], what may be given out in each slot."""

    slot: int
    links: tuple[int, ...]
    load: Floats
    reservable: Floats


class Reserving:
    """A HostPolicy around a planner. `now` is monotonic nanoseconds."""

    def __init__(
        self, planner: Planner, held: Sequence[bool], slot_ns: Nanos, target: float = 1.0
    ) -> None:
        """`held`: by link, whether a switch process holds it. Of the others, the planner may give
        `target` of their goodput to this host's flows, whatever other hosts do."""
        self.stalls: list[Stall] = []
        """What the detector has found since somebody emptied this."""
        self.wanted = False
        """A round is due."""
        self._planner = planner
        self._held: Bools = np.array(held, dtype=np.bool_)
        self._slot_ns = slot_ns
        self._target = target
        self._detector = LivelockDetector()
        self._heard = np.full(len(held), _NEVER, dtype=np.int64)
        """When each link's switch process last answered for all of a round."""
        self._known: Bools = np.zeros(len(held), np.bool_)
        """Links of which the last round brought usable feedback; and those that nobody holds."""
        self._began = Nanos(0)
        """When the slot of the view did; what has passed of it when the tables come, has passed."""
        self._view: View | None = None
        self._flows: Mapping[int, float] = {}
        self._acked: tuple[int, Mapping[int, float]] = (-1, {})
        self._observed: list[Observed] = []
        self._pace: Pace | None = None
        self._planned: Pace | None = None

    def rates(self, now: Nanos, view: View) -> Pace | None:
        """What is in force at present; None: no flow is paced. A round may be `wanted` by then."""
        begins = self._view is None or view.slot != self._view.slot
        self._view = view
        if begins:
            self._began = now
            self._begin(view)
        flows = dict(zip(view.flow.tolist(), view.remaining.tolist(), strict=True))
        if begins or (self._planner.replans and _differ(self._flows, flows)):
            self.wanted = True
        self._flows = flows
        return self._in_force(now, view)

    def ask(self) -> None:
        """What this host's flows depend on has changed: a round is due if the planner minds."""
        self.wanted |= self._planner.replans and self._view is not None

    def in_force(self, now: Nanos) -> tuple[Mapping[int, float], float]:
        """Rate of each flow, payload bytes/s, and for how many seconds more: till the slot ends."""
        if self._view is None:
            return {}, 0.0
        left_s = max(self._began + self._slot_ns - now, 0) / SECOND
        pace = self._in_force(now, self._view)
        if pace is None:
            return {}, left_s
        at = pace.schedule.at(self._view.slot).tolist()
        return dict(zip(pace.flows.tolist(), at, strict=True)), left_s

    def links(self) -> tuple[int, ...]:
        """What the next round needs to know: links on the paths of this host's flows that a switch
        process holds. The round counts as begun."""
        self.wanted = False
        if self._view is None:
            return ()
        paths = np.unique(self._view.paths)
        paths = paths[paths < len(self._held)]
        links: list[int] = paths[self._held[paths]].tolist()
        return tuple(links)

    def answered(self, now: Nanos, links: Sequence[int]) -> None:
        """The switch process of these links has answered all that it was asked in this round,
        which has been planned (or left): counts where its answer was of use."""
        self._heard[[link for link in links if self._known[link]]] = now

    def plan(
        self,
        now: Nanos,
        feedback: Sequence[Feedback],
        dependencies: Callable[[Nanos], Mapping[int, Dependency]] = lambda now: {},
    ) -> tuple[Update, ...] | None:
        """Updates to be sent, in this order; `settle` has to follow. None: nothing is decided.

        `dependencies`, of this host's flows, are asked for when there is something to plan.

        Flows of links without feedback are left out, and so let go, once their switch process has
        been silent for PATIENCE_SLOTS. Before that, what was decided last goes on for all.
        """
        view = self._view
        assert view is not None, "nobody has asked for a decision yet"
        feedback = [f for f in feedback if _columns(f, view.slot) > 0]
        known = ~self._held
        for one in feedback:
            known[list(one.links)] = True
        self._known = known
        unknown = np.unique(view.paths[~np.append(known, True)[view.paths]])
        if np.any(self._is_fresh(now)[unknown]):
            return None
        passed = (now - self._began) / self._slot_ns
        view = replace(self._with_load(view, feedback, _on(view, known)), passed=passed)
        for observed in self._observed:
            self._planner.observe(observed)
        self._observed = []
        self._planner.dependencies = dependencies(now)
        self._planned = self._planner.decide(now, view)
        self._pace = _lower(self._pace, self._planned, view.slot)
        return self._planner.updates

    def settle(self, refused: Sequence[Update]) -> bool:
        """These of the updates were refused, the others are in force. True: a round is due again,
        with fresh feedback, in the same slot."""
        assert self._planned is not None, "nothing was planned"
        self._pace = self._planner.refused(refused) if refused else self._planned
        self._planned = None
        return bool(refused)

    def _begin(self, view: View) -> None:
        """A slot begins: what the last one was like."""
        ready = view.remaining > 0
        self.stalls += self._detector.feed(view.slot - 1, view.flow.tolist(), view.remaining, ready)
        acked: dict[int, float] = {}
        if view.acked is not None:
            counted = ~np.isnan(view.acked)
            flows, values = view.flow[counted].tolist(), view.acked[counted].tolist()
            acked = dict(zip(flows, values, strict=True))
        slot, before = self._acked
        self._acked = view.slot, acked
        if slot == view.slot - 1:
            sent = {f: max(acked[f] - before[f], 0.0) for f in acked if f in before}
            # Planned against only when load tables come again; who waits long needs the last few.
            self._observed = [*self._observed[-3:], Observed(slot, sent)]

    def _in_force(self, now: Nanos, view: View) -> Pace | None:
        pace = self._pace
        if pace is None:
            return None
        heard = view.flow[_on(view, ~self._held | self._is_fresh(now))]
        keep = np.isin(pace.flows, heard)
        rates = pace.schedule.rates[keep]
        schedule = Schedule(pace.schedule.base_slot, rates)
        # Who may top up how far was worked out for the first slot only.
        ahead = view.slot > schedule.base_slot
        tops = schedule.at(view.slot) if ahead else pace.ceilings[keep]
        return Pace(pace.flows[keep], schedule, tops, pace.guaranteed[keep])

    def _is_fresh(self, now: Nanos) -> Bools:
        """By link, of those that are held."""
        fresh: Bools = now - self._heard <= PATIENCE_SLOTS * self._slot_ns
        return fresh

    def _with_load(self, view: View, feedback: Sequence[Feedback], rows: Bools) -> View:
        """Of these rows, with the load tables; links of which nothing is known are never full."""
        horizon = min([view.horizon, *(_columns(f, view.slot) for f in feedback)])
        capacity = self._target * view.capacity
        load = np.zeros((len(capacity), horizon))
        for one in feedback:
            links, skip = list(one.links), view.slot - one.slot
            capacity[links] = one.reservable
            # A switch process whose clock is ahead: the slots before are as its first one.
            columns = np.maximum(np.arange(horizon) + skip, 0)
            load[links] = one.load[:, columns]
        return replace(
            view,
            horizon=horizon,
            capacity=capacity,
            flow=view.flow[rows],
            paths=view.paths[rows],
            job=view.job[rows],
            remaining=view.remaining[rows],
            guaranteed=view.guaranteed[rows],
            load=load,
            acked=None,
        )


def _on(view: View, links: Bools) -> Bools:
    """By flow, whether all links of its path are among these."""
    rows: Bools = np.all(np.append(links, True)[view.paths], axis=1)
    return rows


def _columns(feedback: Feedback, slot: int) -> int:
    """How many slots it covers from `slot` on; 0 when the clocks are more than a slot apart."""
    behind = slot - feedback.slot
    return feedback.load.shape[1] - max(behind, 0) if abs(behind) <= 1 else 0


def _differ(old: Mapping[int, float], new: Mapping[int, float]) -> bool:
    """Whether flows have come, gone, begun or ended."""
    return old.keys() != new.keys() or any(
        left > old[flow] or (left > 0) != (old[flow] > 0) for flow, left in new.items()
    )


def _lower(old: Pace | None, new: Pace, slot: int) -> Pace:
    """`new`, but in `slot` nobody above what `old` had: nothing is reserved yet."""
    rates = new.schedule.rates.copy()
    if old is not None:
        had = dict(zip(old.flows.tolist(), old.schedule.at(slot).tolist(), strict=True))
        most = np.array([had.get(flow, np.inf) for flow in new.flows.tolist()])
        rates[:, 0] = np.minimum(rates[:, 0], most)
    return Pace(new.flows, Schedule(slot, rates), rates[:, 0], new.guaranteed)
