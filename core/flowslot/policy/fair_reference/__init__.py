# SPDX-License-Identifier: Apache-2.0
"""What would be without any scheduling: a fair run of the same jobs, beside the real one.

Each job computes for as long as it was observed to, then sends as many bytes as it was observed to,
and starts anew: closed-loop, whatever its real iterations do. A job that lags behind this reference
would have been better off without us. (The service of a fluid fair system as a yardstick is that of
GPS; lag is as in EEVDF.) All of it is worked out from what daemons report anyway.

Flows share the links max-min in two runs. In the first, the flows of a job share as one: however
many they are, they have the same rate on its busiest link as any other job has there. In the
second, each socket has a rate of its own, as under TCP. What a job gains there by opening more
sockets deserves less protection: the second run is SLACK times slower.
"""

import numpy as np

from flowslot.model.units import Nanos
from flowslot.policy.base import AllocationState, Bools
from flowslot.policy.fair_reference import fluid

SLACK = 1.06
"""No job is much slower than so many times what sockets of equal rights would make of it."""


class FairReference:
    """Both runs, see the module. `look` at every allocation."""

    def __init__(self) -> None:
        self._between_jobs, self._between_sockets = fluid.Run(1.0), fluid.Run(SLACK)
        self._names: list[str] = []  # by number, as of the job's last look
        self._turns = np.full((2, 0), -1)  # of jobs and of aggregates, by number, likewise

    def look(self, state: AllocationState, now: Nanos) -> Bools:
        """Go on to `now`; returns which jobs lag, bool[J]: the reference has ended the iteration
        that the job is in, or is about to begin."""
        jobs, aggregates, of = state.jobs, state.aggregates, state.aggregate
        need = np.zeros((len(state.job_names), len(state.goodput)))
        sums = np.zeros((3, len(aggregates.numbers)))
        member = np.zeros(len(aggregates.numbers), np.intp)
        size = np.where(state.next_bytes > 0, state.next_bytes, state.remaining)
        fluid.sum_up(state.paths, of, state.job, size, state.sockets, sums, member, need)
        volume, sockets, part = sums
        job, paths = state.job[member], state.paths[member]
        gone, others, new = self._new(state)
        lags = np.zeros(len(state.job_names), np.bool_)
        for run, weight in (self._between_jobs, part), (self._between_sockets, sockets):
            run.begin(now, jobs, gone, others, aggregates, new)
            run.advance(now, job, paths, state.goodput, volume, weight)
            run.see(now, need, state.job, state.remaining, state.wait_ns, state.idle_ns)
            lags |= run.end()
        return lags

    def _new(self, state: AllocationState) -> tuple[Bools, Bools, Bools]:
        """Which jobs were gone, which of these are others now, and which aggregates are new."""
        jobs, aggregates = state.jobs, state.aggregates
        most = max(keys.numbers.max(initial=-1) + 1 for keys in (jobs, aggregates))
        if most > self._turns.shape[1]:
            self._turns = np.append(self._turns, np.full((2, most), -1), axis=1)
            self._names += [""] * most
        gone = self._turns[0, jobs.numbers] != jobs.turns
        new = self._turns[1, aggregates.numbers] != aggregates.turns
        others = np.zeros(len(gone), np.bool_)
        for k in np.flatnonzero(gone).tolist():
            number, name = jobs.numbers[k], state.job_names[k]
            first = self._turns[0, number] < 0
            others[k], self._names[number] = first or self._names[number] != name, name
        self._turns[0, jobs.numbers] = jobs.turns
        self._turns[1, aggregates.numbers] = aggregates.turns
        return gone, others, new
