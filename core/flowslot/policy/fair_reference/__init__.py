# SPDX-License-Identifier: Apache-2.0
"""What would be if nobody scheduled anything: a fair run of the same jobs, beside the real one.

Each job computes for as long as it was observed to, then sends as many bytes as it was observed to,
and starts anew: closed-loop, whatever its real iterations do. Who is behind its virtual self would
have been better off without us, and is late. All of it is worked out from what an arbiter is told
anyway.

Flows share the links max-min in two runs. In one, those of a job share as one: with the same rate
on its busiest link as any other job has there, however many they are. In the other each has a rate
of its own, as under TCP. What a job has of the latter by opening more flows is not worth as much
protection: this run is SLACK times slower.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from flowslot.model.units import Nanos
from flowslot.policy.base import AllocationState, Bools, Floats, Rows
from flowslot.policy.fair_reference import fluid
from flowslot.policy.fair_reference.fluid import GROUP, JOB
from flowslot.policy.fair_reference.groups import Groups

SLACK = 1.06
"""Nobody is much slower than so many times what flows of equal rights would make of it."""

_UNKNOWN = np.zeros((), JOB)
_UNKNOWN["ended_at"] = math.nan


class VirtualFair:
    """Both runs, see the module. `look` at every allocation."""

    def __init__(self) -> None:
        self._groups = Groups()
        self._between_jobs, self._between_flows = _Run(1.0), _Run(SLACK)

    def look(self, state: AllocationState, now: Nanos) -> Bools:
        """Go on to `now`; which jobs are late, bool[J]: their virtual selves have ended the
        iteration that they are in, or are about to begin."""
        groups, runs = self._groups, (self._between_jobs, self._between_flows)
        before = groups.follow(state)
        for run in runs:
            run.follow(state.job_names, groups, before)
        volume, flows = groups.sizes(state)
        need = np.zeros((self._between_jobs.jobs, len(state.goodput)))
        self._between_flows.weigh(volume, flows)
        fluid.add_up(self._between_flows.groups, groups.paths, need)
        most = need[groups.job, :-1].max(axis=1, initial=0.0) if len(volume) else volume
        self._between_jobs.weigh(volume, volume / np.where(most > 0, most, 1.0))
        late = [run.look(state, now, need, groups) for run in runs]
        return np.logical_or(*late)[: len(state.job_names)]


class _Run:
    """One virtual run. `slack`: its time passes so many times slower."""

    def __init__(self, slack: float) -> None:
        self._slack = slack
        self._names: list[str] = []
        self._jobs = np.zeros(0, JOB)
        self._rows = np.zeros(0, GROUP)
        self._now = 0.0

    @property
    def jobs(self) -> int:
        """How many are known."""
        return len(self._names)

    @property
    def groups(self) -> Any:
        """For fluid."""
        return fluid.table(self._rows)

    def weigh(self, volume: Floats, weight: Floats) -> None:
        """Bytes per iteration and weight of each group, float64[G]."""
        self._rows["bytes"], self._rows["weight"] = volume, weight

    def look(self, state: AllocationState, now: Nanos, need: Floats, groups: Groups) -> Bools:
        """See VirtualFair; `need` as in fluid."""
        then, jobs, rows = now / self._slack, fluid.table(self._jobs), self.groups
        fluid.run(self._now, then, jobs, rows, groups.paths, state.goodput)
        self._now = then
        fluid.see(now, jobs, rows, need, state.job, state.remaining, state.wait_ns, state.idle_ns)
        late: Bools = self._jobs["lead"] > 0
        return late

    def follow(self, names: Sequence[str], groups: Groups, before: Rows | None) -> None:
        """Jobs and groups come and go: an index may have got another one. `before`, intp[G]: where
        each group was, -1 for new ones; None: where they are."""
        if before is not None:
            rows = np.zeros(len(before), GROUP)
            rows["left"] = 1.0
            rows[before >= 0] = self._rows[before[before >= 0]]
            rows["job"] = groups.job
            self._rows = rows
        if self._names == names:
            return
        more = len(names) - len(self._names)
        if more > 0:
            self._names += [""] * more
            self._jobs = np.concatenate((self._jobs, np.full(more, _UNKNOWN)))
        for j, name in enumerate(names):
            if self._names[j] != name:
                self._names[j], self._jobs[j] = name, _UNKNOWN
