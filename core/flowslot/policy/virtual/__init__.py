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

_UNKNOWN = np.zeros((), JOB)
_UNKNOWN["ended_at"] = math.nan


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
        self._now = 0.0

    def look(self, state: AllocationState, now: Nanos, need: Floats, flows: Floats) -> Bools:
        """See VirtualFair; `need` and `flows` as in loops.run."""
        then, jobs = now / self._slack, loops.table(self._jobs)
        loops.run(self._now, then, jobs, need, flows, state.goodput)
        self._now = then
        loops.see(now, jobs, need, state.job, state.remaining, state.wait_ns, state.idle_ns)
        late: Bools = self._jobs["lead"] > 0
        return late

    def follow(self, names: Sequence[str]) -> int:
        """Jobs come and go: an index may have got another job. Returns how many are known."""
        if self._names == names:
            return len(self._names)
        more = len(names) - len(self._names)
        if more > 0:
            self._names += [""] * more
            self._jobs = np.concatenate((self._jobs, np.full(more, _UNKNOWN)))
        for j, name in enumerate(names):
            if self._names[j] != name:
                self._names[j], self._jobs[j] = name, _UNKNOWN
        return len(self._names)
