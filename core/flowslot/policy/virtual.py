# SPDX-License-Identifier: Apache-2.0
"""What would be if nobody scheduled anything: a fair run of the same jobs, beside the real one.

Each job computes for as long as it was observed to, then sends as many bytes as it was observed to,
at max-min fair rates among the other jobs that do so in this run, and starts anew: closed-loop,
whatever its real iterations do. Whoever is behind its virtual self would have been better off
without us, and is `late`. All of it is worked out from what an arbiter is told anyway.
"""

import math
from dataclasses import dataclass

import numpy as np

from flowslot.policy.base import AllocationState, Bools, Floats
from flowslot.policy.fill import max_min
from flowslot.units import SECOND, Nanos

SMOOTHING = 0.25
"""Weight of the latest observation in a job's computation time."""
MOST_STEPS = 10_000
"""Virtual events from one look to the next; after more, all jobs begin anew."""
ROUNDS = 3
"""Flows of a job go on together: what one cannot use is shared out again, so many times."""


@dataclass(slots=True)
class _Job:
    """Real and virtual state of one job; times ns."""

    name: str
    active: bool = False
    ended_at: int | None = None
    compute: float = math.nan
    """ns from the end of its communication to the beginning of the next one; NaN: unknown."""
    lead: int = 0
    """Iterations that its virtual self has ended more than it has."""
    left: float = 0.0
    """Part of the virtual communication that is left; 0: it computes."""
    until: float = math.inf
    """When the virtual computation ends."""


class VirtualFair:
    """See the module. `look` at every allocation, then ask who is `late`."""

    def __init__(self) -> None:
        self._jobs: list[_Job] = []
        self._now = 0.0

    def look(self, state: AllocationState, now: Nanos) -> Bools:
        """Go on to `now`; which jobs are late, bool[J]: their virtual selves have ended the
        iteration that they are in, or are about to begin."""
        self._follow(state.job_names)
        self._run(state, float(now))
        self._see(state, now)
        return np.array([job.lead > 0 for job in self._jobs], np.bool_)

    def _follow(self, names: object) -> None:
        """Jobs come and go: an index may have got another job."""
        for j, name in enumerate(names):  # type: ignore[arg-type, var-annotated]
            if j == len(self._jobs):
                self._jobs.append(_Job(name))
            elif self._jobs[j].name != name:
                self._jobs[j] = _Job(name)

    # --- the real run

    def _see(self, state: AllocationState, now: Nanos) -> None:
        n = len(self._jobs)
        at_work = state.remaining > 0
        active = np.bincount(state.job[at_work], minlength=n) > 0
        wait, idle = np.zeros(n), np.full(n, np.inf)
        np.maximum.at(wait, state.job, np.where(at_work, state.wait_ns, 0.0))
        np.minimum.at(idle, state.job, state.idle_ns)
        for j, job in enumerate(self._jobs):
            if active[j] and not job.active:
                self._begin(job, now - wait[j])
            elif not active[j] and job.active:
                job.ended_at = int(now - idle[j]) if math.isfinite(idle[j]) else now
                job.lead -= 1
            job.active = bool(active[j])

    def _begin(self, job: _Job, at: float) -> None:
        if job.ended_at is None:
            return
        took = max(at - job.ended_at, 0.0)
        if math.isnan(job.compute):
            # Known from now on: its virtual self begins together with it.
            job.compute, job.lead, job.left = took, 0, 1.0
        else:
            job.compute += (took - job.compute) * SMOOTHING

    # --- the virtual run

    def _run(self, state: AllocationState, now: float) -> None:
        """From event to event: somebody has sent everything, or has computed."""
        volume = np.where(state.next_bytes > 0, state.next_bytes, state.remaining)
        for _ in range(MOST_STEPS):
            if self._now >= now:
                return
            speed = self._speeds(state, volume)
            step = now - self._now
            for j, job in enumerate(self._jobs):
                if job.left > 0 and speed[j] > 0:
                    step = min(step, job.left / speed[j])
                elif job.left <= 0:
                    step = min(step, job.until - self._now)
            self._now += max(step, 0.0)
            for j, job in enumerate(self._jobs):
                self._advance(job, step, speed[j])
        self._now = now
        for job in self._jobs:
            job.compute, job.left, job.until = math.nan, 0.0, math.inf

    def _advance(self, job: _Job, step: float, speed: float) -> None:
        if job.left > 0:
            job.left -= step * speed
            if job.left <= 1e-9:
                job.left, job.until = 0.0, self._now + job.compute
                job.lead += 1
        elif self._now >= job.until:
            job.left, job.until = 1.0, math.inf

    def _speeds(self, state: AllocationState, volume: Floats) -> list[float]:
        """Part of its communication that each job does per ns."""
        busy = np.array([job.left > 0 for job in self._jobs], np.bool_)
        if not busy.any():
            return [0.0] * len(self._jobs)
        takes_part = busy[state.job] & (volume > 0)
        limit = np.where(takes_part, np.inf, 0.0)
        speed = np.zeros(len(self._jobs))
        for _ in range(ROUNDS):
            rate = max_min(state.paths, state.goodput, limit)
            part = np.where(takes_part, rate / np.maximum(volume, 1.0), np.inf)
            speed = np.full(len(self._jobs), np.inf)
            np.minimum.at(speed, state.job, part)
            gang = np.where(takes_part, np.where(takes_part, speed[state.job], 0.0) * volume, 0.0)
            if np.all(rate <= gang * (1 + 1e-6)):
                break
            limit = np.where(rate > gang * (1 + 1e-6), gang, limit)
        # A job all of whose flows have gone sends nothing, and so is done at once.
        result: list[float] = np.where(np.isinf(speed), 1.0, speed / SECOND).tolist()
        return result
