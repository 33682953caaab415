# SPDX-License-Identifier: Apache-2.0
"""What would be if nobody scheduled anything: a fair run of the same jobs, beside the real one.

Each job computes for as long as it was observed to, then sends as many bytes as it was observed to,
and starts anew: closed-loop, whatever its real iterations do. Who is behind its virtual self would
have been better off without us, and is late. All of it is worked out from what an arbiter is told
anyway.

Jobs that send share the links max-min, each as one: in one run with the same rate on its busiest
link, however many flows it has there, and in another with a rate for each of its flows, as TCP
would share. What a job has of the latter by opening more flows is not worth as much protection:
this run is SLACK times slower.
"""

import math
from collections.abc import Sequence

import numpy as np

from flowslot.policy.base import AllocationState, Bools, Floats
from flowslot.policy.virtual import loops
from flowslot.policy.virtual.loops import JOB
from flowslot.units import Nanos

SLACK = 1.06
"""Nobody is much slower than so many times what flows of equal rights would make of it."""
PAUSE, PAUSE_NS = 3.0, 100e6
"""A job that computes for so many times longer than usual, and by so much, has paused: that is none
of our doing, and its virtual self begins anew together with it."""
LEAST_NS = 100e3
"""No virtual computation is shorter: thousands of virtual iterations between two looks say
nothing."""
SMOOTHING = 0.25
"""Weight of the latest observation in a job's computation time."""


class VirtualFair:
    """Both runs, see the module. `look` at every allocation."""

    def __init__(self) -> None:
        self._between_jobs, self._between_flows = _Run(1.0), _Run(SLACK)

    def look(self, state: AllocationState, now: Nanos) -> Bools:
        """Go on to `now`; which jobs are late, bool[J]: their virtual selves have ended the
        iteration that they are in, or are about to begin."""
        runs = self._between_jobs, self._between_flows
        jobs = max([run.follow(state.job_names) for run in runs])
        shape = jobs, len(state.goodput)
        need, flows = np.zeros(shape), np.zeros(shape)
        volume = np.where(state.next_bytes > 0, state.next_bytes, state.remaining)
        loops.add_up(state.paths, state.job, volume, need, flows)
        late = self._between_jobs.look(state, now, need, np.ones(shape))
        late |= self._between_flows.look(state, now, need, flows)
        return late[: len(state.job_names)]


class _Run:
    """One virtual run. `slack`: its time passes so many times slower."""

    def __init__(self, slack: float) -> None:
        self._slack = slack
        self._names: list[str] = []
        self._jobs = np.zeros(0, JOB)
        self._ended_at: list[float] = []
        """When each job's real communication has ended last; NaN: never."""
        self._active: list[bool] = []
        self._now = 0.0

    def look(self, state: AllocationState, now: Nanos, need: Floats, flows: Floats) -> Bools:
        """See VirtualFair; `need` and `flows` as in loops.run."""
        then = now / self._slack
        loops.run(self._now, then, loops.table(self._jobs), need, flows, state.goodput)
        self._now = then
        self._see(state, now, need[:, :-1] > 0)
        late: Bools = self._jobs["lead"] > 0
        return late

    def follow(self, names: Sequence[str]) -> int:
        """Jobs come and go: an index may have got another job. Returns how many are known."""
        if self._names == names:
            return len(self._names)
        more = len(names) - len(self._names)
        if more > 0:
            self._names += [""] * more
            self._ended_at += [math.nan] * more
            self._active += [False] * more
            self._jobs = np.concatenate((self._jobs, np.zeros(more, JOB)))
        for j, name in enumerate(names):
            if self._names[j] != name:
                self._names[j], self._ended_at[j], self._active[j] = name, math.nan, False
                self._jobs[j] = np.zeros((), JOB)
        return len(self._names)

    def _see(self, state: AllocationState, now: Nanos, crosses: Bools) -> None:
        """Whose real communication has begun or ended since the last look. `crosses`, bool[J, L]:
        who uses which links."""
        n = len(self._names)
        at_work = state.remaining > 0
        active = np.bincount(state.job[at_work], minlength=n) > 0
        for j in np.flatnonzero(active != self._active).tolist():
            mine = state.job == j
            self._active[j] = bool(active[j])
            if active[j]:
                self._begin(j, now - float(state.wait_ns[mine & at_work].max()))
                self._forgive(j, crosses)
            else:
                idle = float(state.idle_ns[mine].min(initial=math.inf))
                self._ended_at[j] = now - idle if math.isfinite(idle) else float(now)
                self._jobs["lead"][j] -= 1

    def _forgive(self, j: int, crosses: Bools) -> None:
        """Where everybody is late, nobody can be helped: all would have their fair shares for ever,
        and never take turns again. Such a job begins anew together with its virtual self."""
        jobs = self._jobs
        if jobs["lead"][j] <= 0:
            return
        others = crosses[:, crosses[j]].any(axis=1) & jobs["runs"]
        if others.sum() > 1 and (jobs["lead"][others] > 0).all():
            jobs["lead"][j], jobs["left"][j] = 0, 1.0

    def _begin(self, j: int, at: float) -> None:
        if math.isnan(self._ended_at[j]):
            return
        job = self._jobs[j]
        took = max(at - self._ended_at[j], LEAST_NS)
        if job["runs"] and took > PAUSE * job["compute"] + PAUSE_NS:
            job["lead"], job["left"] = 0, 1.0
        elif job["runs"]:
            job["compute"] += (took - job["compute"]) * SMOOTHING
        else:
            # Known from now on: its virtual self begins together with it.
            job["runs"], job["compute"], job["lead"], job["left"] = True, took, 0, 1.0
