# SPDX-License-Identifier: Apache-2.0
"""The default policy: jobs take turns on shared links, shortest bottleneck first, with ageing.

Per allocation: floors, so that everybody makes progress; then gangs, job by job in order of
`G / (1 + 4 wait / period)`, where G is the time the job's bottleneck needs for what is left; then
max-min top-up. What is still unused stands ready for flows that are computing now, so that they
start at full rate without a negotiation. A job whose present rates are good enough keeps them:
progress reports are noisy, and every change costs messages and a round trip. For the same reason
a job that shares no link with another one has the same rates in all its phases: each flow gets
what its bytes per iteration are of the bottleneck's.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flowslot.decision import Decision, Pace
from flowslot.policy.base import AllocationState, Bools, Floats, Rows, View
from flowslot.policy.fill import link_sum, max_min
from flowslot.schedule import constant
from flowslot.units import MILLISECOND, SECOND, Nanos, Rate

AGEING = 4.0
"""Weight of waiting time: after one period of waiting a job counts as five times shorter."""
KEEP_RATIO = 1.1
KEEP_SLACK_S = 0.004
"""Rates are kept while the job ends at most 10 % + 4 ms (a renegotiation) later than it could."""
SOON_NS = 10.0 * MILLISECOND
"""An idle flow this close before its start, or after its end, keeps its rate from its siblings."""
LATE_NS = 20.0 * MILLISECOND
"""... unless it is overdue by more than this."""
OVERDUE_NS = 250.0 * MILLISECOND
"""An idle job overdue by more (and by more than half a period) stands last in the queue."""
NEARLY_DONE = 0.25
"""A job with at most this part of its iteration left is let finish by a partial arbiter."""
SIZE_CLASS = 4.0
"""Jobs within this factor are of one size to a partial arbiter."""
WORTHWHILE = 20.0
"""A standing grant below this fraction (1/20) of what the job could use alone is not made."""
FULL = 1e-3
"""A link with less than this share of its capacity left has nothing to top up with."""
ROUNDING = 1e-9
"""Relative; present goals that fill a link must not seem too much for it."""


class StaggerAllocator:
    """See the module. `floor_share`: part of a flow's max-min fair rate that is always its own.

    `partial`: other arbiters, unheard, decide about other links of the same jobs. Two that put
    the same two jobs in different order make each wait for the other, all the time; so the order
    hangs on what they all see alike: size classes of whole iterations, then names.
    """

    def __init__(self, floor_share: float = 1 / 8, *, partial: bool = False) -> None:
        if not 0.0 < floor_share <= 1.0:
            raise ValueError("floor_share must be greater than 0 and at most 1")
        self._floor_share = floor_share
        self._partial = partial
        self._settled = False  # no job shares a link: who is active or due changes nothing
        self._standing: Bools | None = None

    def allocate(self, state: AllocationState, now: Nanos) -> Floats:
        """See Allocator."""
        allocation = _Allocation(state, self._floor_share, self._partial)
        self._settled = allocation.settled
        self._standing = allocation.solo > 0
        return allocation.solo if self._settled else allocation.run()

    def next_change(self, state: AllocationState, now: Nanos) -> Nanos | None:
        """The next time at which an idle flow begins or ceases to count as about to start."""
        if self._settled:
            return None
        known = (state.remaining <= 0) & (state.next_bytes > 0)
        due, idle = state.due_ns[known], state.idle_ns[known]
        edges = np.concatenate((due - SOON_NS, due + LATE_NS, due + OVERDUE_NS, SOON_NS - idle))
        edges = edges[edges > 0]
        return Nanos(now + int(edges.min()) + 1) if edges.size else None

    def standing(self) -> Bools | None:
        """See Allocator: the flows of jobs that share no link with another one."""
        return self._standing


@dataclass(slots=True)
class _Gang:
    """Per-job sums over one kind of flows. `need`: bytes[J, L+1]; `hold`: present goals there."""

    rows: Bools
    need: Floats
    hold: Floats
    lasts: Floats  # [J] seconds until the last flow ends at the present goals


class _Allocation:
    """One run of the allocator over one state."""

    def __init__(self, state: AllocationState, floor_share: float, partial: bool) -> None:
        self.state = state
        self.partial = partial
        self.n_links = len(state.capacity) - 1
        self.n_jobs = len(state.job_names)
        self.cell = state.job[:, None] * (self.n_links + 1) + state.paths
        self.floor_share = floor_share
        self.left = np.maximum(state.capacity, 0.0)
        closed: Bools = np.asarray((state.capacity <= 0)[state.paths].any(axis=1))
        self.solo = self._solo_rates(closed)
        closed |= self.solo > 0  # out of the turns
        self.settled = bool(closed.all())
        self.closed = closed
        self.rate = np.zeros(len(state.remaining))
        self.short = np.zeros(len(state.remaining))

    def run(self) -> Floats:
        s = self.state
        self._classify()
        idle = ~self.active & (self.later > 0)
        gang = self._gang(self.active, s.remaining, self.need)
        busy: Bools = np.asarray(gang.need.any(axis=1))
        # Siblings about to start keep their rates, but not from a flow that has none yet.
        starting = np.bincount(s.job[self.active & (s.goal <= 0)], minlength=self.n_jobs) > 0
        kept = idle & (s.goal > 0) & (busy & ~starting)[s.job] & self.alone & self._near()
        order = self._turns(gang, kept)
        self._floors_and_gangs(gang, order, kept)
        self._top_up()
        self._restore(order)
        self._stand(idle & ~kept, order, busy)
        return self.rate + self.solo

    def _classify(self) -> None:
        """Who takes part in the turns: active flows, and idle ones with what they will send."""
        state, closed = self.state, self.closed
        active: Bools = (state.remaining > 0) & ~closed
        need = self._by_job(np.where(active, state.remaining, 0.0))
        # What a dependency leaves unused matters only where another job could use it.
        self.alone: Bools = ~((need > 0).sum(axis=0) > 1)[state.paths].any(axis=1)
        self.cap: Floats = np.where(self.alone, np.inf, state.cap)
        # A flow that cannot send now is as good as idle: it must not hold up its gang.
        self.active = active & (self.cap > 0)
        self.wait = np.zeros(self.n_jobs)
        np.maximum.at(self.wait, state.job[self.active], state.wait_ns[self.active])
        blocked = (state.remaining > 0) & ~self.active & (self.solo <= 0)
        self.need = self._by_job(np.where(self.active, state.remaining, 0.0))
        later = np.where(blocked, state.remaining, state.next_bytes)
        self.later: Floats = np.where(self.solo > 0, 0.0, later)

    def _solo_rates(self, closed: Bools) -> Floats:
        """Rates of the jobs that share no link with another one; 0 for the others' flows.

        They depend on the bytes per iteration only, not on who is active or how far: what an idle
        sibling leaves unused for the moment is for the top-up in the kernel.
        """
        s = self.state
        size = np.where(closed, 0.0, np.where(s.next_bytes > 0, s.next_bytes, s.remaining))
        need = self._by_job(size)
        shared = (need > 0).sum(axis=0) > 1
        unknown = (size > 0) & (s.next_bytes <= 0)
        meets = np.bincount(s.job, shared[s.paths].any(axis=1) | unknown, self.n_jobs) > 0
        rows = np.flatnonzero((size > 0) & ~meets[s.job])
        rates = np.zeros(len(size))
        if rows.size:
            with np.errstate(divide="ignore", invalid="ignore"):
                seconds = np.where(need > 0, need / self.left, 0.0).max(axis=1)
            rates[rows] = size[rows] / seconds[s.job[rows]]
            self._take_away(rows, rates[rows])
            self._raise_to_fill(rates, rows, np.full(rows.size, np.inf))
        return rates

    def _gang(self, rows: Bools, size: Floats, need: Floats) -> _Gang:
        s = self.state
        lasts = np.zeros(self.n_jobs)
        late = rows & (s.goal < self.cap)  # more is of no use to the others
        with np.errstate(divide="ignore", over="ignore"):
            np.maximum.at(lasts, s.job[late], size[late] / s.goal[late])
        return _Gang(rows, need, self._by_job(np.where(rows, s.goal, 0.0)), lasts)

    def _by_job(self, values: Floats) -> Floats:
        """Sums of float64[F] over job and link, float64[J, L + 1]; padding zero."""
        width = self.state.paths.shape[1]
        shape = self.n_jobs, self.n_links + 1
        flat = np.bincount(self.cell.ravel(), np.repeat(values, width), shape[0] * shape[1])
        sums: Floats = flat.astype(np.float64, copy=False).reshape(shape)
        sums[:, -1] = 0.0
        return sums

    def _near(self) -> Bools:
        """Idle flows that are about to start, or have just ended."""
        s = self.state
        due_soon = (s.due_ns <= SOON_NS) & (s.due_ns >= -LATE_NS)
        near: Bools = (due_soon | (s.idle_ns < SOON_NS)) & (s.remaining <= 0)
        return near

    def _turns(self, gang: _Gang, kept: Bools) -> list[int]:
        """Active jobs, the most urgent first; ties by name."""
        s = self.state
        capacity = np.maximum(s.capacity, 1.0)
        soon = np.where(kept & (s.due_ns <= SOON_NS), self.later, 0.0)
        bottleneck = ((gang.need + self._by_job(soon)) / capacity).max(axis=1) * SECOND
        period = np.zeros(self.n_jobs)
        np.maximum.at(period, s.job[gang.rows], s.period_ns[gang.rows])
        period = np.where(period > 0, period, 4.0 * bottleneck + 1.0)
        waits = self.wait / period
        if self.partial:
            # Of all its flows: others of its arbiters may not have heard yet which ones have ended.
            size = np.where(self.closed, 0.0, np.maximum(s.next_bytes, s.remaining))
            whole = (self._by_job(size) / capacity).max(axis=1) * SECOND
            seen = np.where(bottleneck > NEARLY_DONE * whole, whole, bottleneck)
            aged = np.maximum(seen / (1.0 + AGEING * np.floor(waits)), 1.0)
            key = np.floor(np.log(aged) / np.log(SIZE_CLASS))
        else:
            key = bottleneck / (1.0 + AGEING * waits)
        jobs = np.flatnonzero(gang.need[:, :-1].any(axis=1)).tolist()
        return sorted(jobs, key=lambda j: (key[j], s.job_names[j]))

    def _floors_and_gangs(self, gang: _Gang, order: list[int], kept: Bools) -> None:
        s = self.state
        fair = max_min(s.paths, self.left, np.where(self.active, self.cap, 0.0))
        floors = self._by_job(self.floor_share * fair)
        self.left -= floors.sum(axis=0)
        siblings = np.where(kept, s.goal, 0.0)
        sibling_use = self._by_job(siblings)
        for job in order:
            self.left += floors[job]
            rows = np.flatnonzero(s.job == job)
            if (sibling_use[job] <= self.left * (1 + ROUNDING)).all():
                self.left = np.maximum(self.left - sibling_use[job], 0.0)
                self.rate[rows] = siblings[rows]
            else:
                kept[rows] = False
            rows = rows[self.active[rows]]
            rates = self._take(gang, job, rows, s.remaining)
            taken = np.minimum(rates, self.cap[rows])
            self.rate[rows] = taken
            self.short[rows] = rates - taken
            self._take_away(rows, taken)

    def _take(self, gang: _Gang, job: int, rows: Rows, size: Floats) -> Floats:
        """Rates of one job's flows, as a gang: all end at the same time, as early as they can."""
        seconds = self._seconds(gang, job)
        fits = (gang.hold[job] <= self.left * (1 + ROUNDING)).all()
        if fits and gang.lasts[job] <= KEEP_RATIO * seconds + KEEP_SLACK_S:
            goals: Floats = self.state.goal[rows]
            return goals
        rates: Floats = size[rows] / seconds
        return rates

    def _seconds(self, gang: _Gang, job: int) -> float:
        """Time that the job's flows take when they share what is left."""
        need = gang.need[job]
        used = need > 0
        with np.errstate(divide="ignore", over="ignore"):
            return float((need[used] / self.left[used]).max())

    def _top_up(self) -> None:
        """Max-min over the active flows, of what is left."""
        rows = np.flatnonzero(self.active)
        self._raise_to_fill(self.rate, rows, self.cap[rows] - self.rate[rows])

    def _raise_to_fill(self, rate: Floats, rows: Rows, most: Floats) -> None:
        """Add what is left on the paths of `rows` to their rates, max-min, each at most `most`."""
        paths = self.state.paths[rows]
        spare = (self.left >= FULL * self.state.capacity)[paths].all(axis=1)
        rows, most = rows[spare], most[spare]
        if rows.size:
            extra = max_min(paths[spare], self.left, most)
            rate[rows] += extra
            self._take_away(rows, extra)

    def _take_away(self, rows: Rows, rates: Floats) -> None:
        self.left -= link_sum(self.state.paths[rows], rates, self.n_links)
        np.maximum(self.left, 0.0, out=self.left)

    def _restore(self, order: list[int]) -> None:
        """What capped flows could not use, and nobody else either, stays theirs after all."""
        for job in order if self.short.any() else ():
            rows = np.flatnonzero((self.state.job == job) & (self.short > 0))
            if rows.size:
                short = self.short[rows]
                use = link_sum(self.state.paths[rows], short, self.n_links)
                used = use > 0
                used[-1] = False
                share = min(1.0, float((self.left[used] / use[used]).min()))
                self._give(rows, short * share)

    def _stand(self, idle: Bools, order: list[int], busy: Bools) -> None:
        """Standing grants: flows of active jobs that are still to come, then who is due first.

        Flows of an active job that have ended in this phase are due in a period, as all others.
        """
        if not idle.any():
            return
        coming = idle & busy[self.state.job] & (self.state.idle_ns >= self.wait[self.state.job])
        gang = self._idle_gang(coming)
        for job in order:
            self._stand_for(job, gang)
        gang = self._idle_gang(idle & ~coming)
        for job in self._queue(gang):
            self._stand_for(job, gang)

    def _idle_gang(self, rows: Bools) -> _Gang:
        return self._gang(rows, self.later, self._by_job(np.where(rows, self.later, 0.0)))

    def _stand_for(self, job: int, gang: _Gang) -> None:
        need = gang.need[job]
        if not need.any():
            return
        alone = float((need / np.maximum(self.state.capacity, 1.0)).max())
        if self._seconds(gang, job) <= WORTHWHILE * alone:
            rows = np.flatnonzero(gang.rows & (self.state.job == job))
            self._give(rows, self._take(gang, job, rows, self.later))

    def _queue(self, gang: _Gang) -> list[int]:
        """Jobs with idle flows, in the order in which these are expected back."""
        s = self.state
        due = np.full(self.n_jobs, np.inf)
        np.minimum.at(due, s.job[gang.rows], s.due_ns[gang.rows])
        period = np.zeros(self.n_jobs)
        np.maximum.at(period, s.job[gang.rows], s.period_ns[gang.rows])
        lost = due < -np.maximum(OVERDUE_NS, period / 2)
        # Two jobs due at about the same time must not pass the capacity to and fro.
        due -= np.where(gang.hold.any(axis=1), SOON_NS, 0.0)
        jobs = np.flatnonzero(gang.need.any(axis=1)).tolist()
        return sorted(jobs, key=lambda j: (lost[j], due[j], s.job_names[j]))

    def _give(self, rows: Rows, extra: Floats) -> None:
        self.rate[rows] += extra
        self._take_away(rows, extra)


class StaggerPolicy:
    """The daemon's part: paces every flow at its grant."""

    def decide(
        self, now: Nanos, view: View, grants: Floats, ceilings: Floats
    ) -> Sequence[Decision]:
        """See HostPolicy."""
        schedules = {
            rate: constant(view.slot, rate) for rate in grants.tolist() if not math.isnan(rate)
        }
        return [
            Pace(flow, schedules[rate], Rate(ceiling), guaranteed)
            for flow, rate, ceiling, guaranteed in zip(
                view.flow.tolist(),
                grants.tolist(),
                ceilings.tolist(),
                view.guaranteed.tolist(),
                strict=True,
            )
            if not math.isnan(rate)
        ]
