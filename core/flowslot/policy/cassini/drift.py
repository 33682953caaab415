# SPDX-License-Identifier: Apache-2.0
"""Running jobs are put in their places, and kept out of each other's way from then on.

Source: the thesis (section 4.4.2, step 3): a time shift delays the next iteration once; drift by
noise and stragglers is measured and corrected. How, it does not say. Realigning every iteration to
the planned grid makes all jobs wait for the slowest, again and again. So here nobody is led back to
the grid: a job that is about to meet others waits as long as that costs less than to meet them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from flowslot.policy.base import Floats
from flowslot.policy.cassini.profile import Profile
from flowslot.policy.cassini.shifts import Plan

MOST_HELD = 0.25
"""Part of an iteration for which drift alone holds a job back, at most."""
LOST_BY = 2
"""So many jobs lose the time during which a link is asked for twice."""
IN_PLACE = 0.01
"""A job that loses no more than this part of an iteration beyond what is planned stays put."""
LOOKED_AHEAD = 64
"""Iterations of another job, at most."""

Ups = tuple[list[float], list[float], list[float]]
"""Begins, ends and demands of up phases."""


@dataclass(slots=True)
class Place:
    """Where a running job is. `start` of its first up phase, `end` of its last one, of the latest
    iteration, ns; `until`: its next one does not start before. `sends`: between the two. `placed`:
    its shift has been applied. `drifts`: it is held back for no more than its drift."""

    profile: Profile
    shift_ns: int
    start: int = 0
    end: int = 0
    until: int = 0
    seen: bool = False
    sends: bool = False
    placed: bool = False
    drifts: bool = False

    @property
    def first(self) -> int:
        """From an iteration's begin to its first up phase, ns."""
        return self.profile.phases[0].start_ns

    @property
    def idle(self) -> int:
        """From the end of an iteration's last up phase to the next one's first, ns."""
        last = self.profile.phases[-1]
        return self.profile.period_ns - last.start_ns - last.length_ns + self.first

    def next(self, now: int) -> int:
        """When the first up phase starts next, ns."""
        if self.sends:
            return max(self.start + self.profile.period_ns, now + self.idle)
        return max(self.end + self.idle, self.until, now)


class Drift:
    """Of jobs with a plan. `capacity`: payload bytes/s of each link. Times in ns of any one clock.
    What is said of jobs that are not in the plan is ignored."""

    def __init__(
        self, profiles: Sequence[Profile], capacity: Mapping[int, float], plan: Plan
    ) -> None:
        self._capacity = capacity
        self._places = {
            one.job: Place(one, plan.shifts[one.job].shift_ns) for one in profiles if one.phases
        }
        self._near: dict[str, dict[int, list[str]]] = {}  # on which links they meet whom
        for link, found in plan.links.items():
            for job in found.weights:
                others = [other for other in found.weights if other != job]
                self._near.setdefault(job, {})[link] = others

    def started(self, job: str, now: int) -> None:
        """The first up phase of an iteration has begun."""
        place = self._places.get(job)
        if place is not None:
            place.start, place.sends, place.seen, place.until = now, True, True, 0

    def ended(self, job: str, now: int) -> dict[str, int]:
        """The last up phase of the iteration that was started last has ended. Returns whose holds
        are new: how long after its last start the job's next one is to start, at the earliest, ns;
        0: whenever it likes. Others that are held back are looked at again: what was expected of
        this job is known now."""
        place = self._places.get(job)
        if place is None or not place.sends:
            return {}
        place.end, place.sends = now, False
        news: dict[str, int] = {}
        for other in sorted({other for them in self._near.get(job, {}).values() for other in them}):
            beside = self._places[other]
            if beside.drifts and beside.until > now:
                news |= self._hold(other, self._avoid(other, now), now)
        place.drifts = place.placed
        wait = self._avoid(job, now) if place.placed else self._shift(job, now)
        place.placed = True
        return news | self._hold(job, wait, now)

    def _hold(self, job: str, wait: int, now: int) -> dict[str, int]:
        """Let a job wait for so long after it is ready."""
        place = self._places[job]
        was_held, place.until = place.until > 0, 0
        if wait > 0:
            place.until = max(place.end + place.idle, now) + wait
        elif not was_held:
            return {}
        return {job: max(place.until - place.start, 0)}

    def resume(self, job: str, start: int, end: int | None, until: int, placed: bool) -> None:
        """A job of an earlier plan: its last iteration started, and ended unless `end` is None; it
        was told not to start again before `until`. `placed`: it keeps its place."""
        self.started(job, start)
        place = self._places.get(job)
        if place is None:
            return
        place.placed = placed
        if end is not None:
            place.end, place.until, place.sends = end, until, False

    def _shift(self, job: str, now: int) -> int:
        """By how much the next start is delayed, so that it is as planned beside a job that has its
        place already; nothing if it is as good where it is."""
        place = self._places[job]
        settled = [
            self._places[other]
            for others in self._near.get(job, {}).values()
            for other in others
            if self._places[other].placed and self._places[other].seen
        ]
        if not settled:
            return 0
        other = max(settled, key=lambda each: (each.start, each.profile.job))
        at = other.start if other.sends else other.next(now)
        target = at - other.first - other.shift_ns + place.first + place.shift_ns
        wait = (target - place.next(now)) % place.profile.period_ns
        here, there = self._lost(job, now, np.array([0.0, float(wait)])).tolist()
        return 0 if here <= there + IN_PLACE * place.profile.period_ns else wait

    def _avoid(self, job: str, now: int) -> int:
        """By how much it is best to wait, out of everybody's way."""
        place = self._places[job]
        begins, ends, _ = self._own(place, now)
        most = MOST_HELD * place.profile.period_ns
        edges = [
            edge
            for others in self._near.get(job, {}).values()
            for other in others
            for ups in self._ups(self._places[other], now, ends[-1] + most)[:2]
            for edge in ups
        ]
        waits = np.unique([0.0, *(e - mine for e in edges for mine in (*begins, *ends))])
        waits = np.append(waits[(waits >= 0) & (waits < most)], most)
        costs = waits + LOST_BY * self._lost(job, now, waits)
        return round(float(waits[int(np.argmin(costs))]))

    def _own(self, place: Place, now: int) -> Ups:
        """Its next iteration's up phases, if it does not wait."""
        at = max(place.end + place.idle, now) - place.first
        phases = place.profile.phases
        begins = [float(at + phase.start_ns) for phase in phases]
        ends = [b + phase.length_ns for b, phase in zip(begins, phases, strict=True)]
        return begins, ends, [phase.demand for phase in phases]

    def _ups(self, place: Place, now: int, until: float) -> Ups:
        """The up phases of another job up to a time: of the iteration it is in, and as expected."""
        begins: list[float] = []
        ends: list[float] = []
        demands: list[float] = []
        if not place.seen or (not place.sends and now > place.end + 2 * place.profile.period_ns):
            return begins, ends, demands  # nothing is known, or it has not come back
        starts = [place.start] if place.sends else []
        at = place.next(now)
        while at < until and len(starts) < LOOKED_AHEAD:
            starts.append(at)
            at += place.profile.period_ns
        for start in starts:
            for phase in place.profile.phases:
                begins.append(float(start - place.first + phase.start_ns))
                ends.append(begins[-1] + phase.length_ns)
                demands.append(phase.demand)
        return begins, ends, demands

    def _lost(self, job: str, now: int, waits: Floats) -> Floats:
        """For how long the worst of its links is asked for more than it carries, because of this
        job's next iteration, if it waits so long; ns, float64[len(waits)]."""
        place = self._places[job]
        mine = self._own(place, now)
        until = mine[1][-1] + float(waits.max())
        lost: Floats = np.zeros(len(waits))
        for link, others in self._near.get(job, {}).items():
            capacity = self._capacity[link]
            steps: list[tuple[float, float]] = []
            for other in others:
                factor = self._places[other].profile.links[link] / capacity
                for b, e, d in zip(*self._ups(self._places[other], now, until), strict=True):
                    steps += [(b, d * factor), (e, -d * factor)]
            if steps:
                own = place.profile.links[link] / capacity
                lost = np.maximum(lost, _beyond(steps, mine, own, waits))
        return lost


def _beyond(
    steps: Sequence[tuple[float, float]], mine: Ups, factor: float, waits: Floats
) -> Floats:
    """Time by which my up phases, after each of `waits`, are in the way on a link whose use by
    others changes by `steps` (when, by which part of its capacity); float64[len(waits)]."""
    ordered = np.array(sorted(steps))
    at = ordered[:, 0]
    used = np.cumsum(ordered[:, 1])
    lost: Floats = np.zeros(len(waits))
    for begin, end, demand in zip(*mine, strict=True):
        more = np.maximum(used + demand * factor - 1, 0) - np.maximum(used - 1, 0)
        alone = max(demand * factor - 1, 0.0)
        sums = np.concatenate(([0.0], np.cumsum((more[:-1] - alone) * np.diff(at))))
        lost += np.interp(end + waits, at, sums) - np.interp(begin + waits, at, sums)
    return np.maximum(lost, 0.0)
