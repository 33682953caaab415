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

Turns favour short jobs. Under TCP, with its queues, these are slower than a fluid makes them. So a
job needs no protection as long as others of its length, or longer ones, pay more than it does.
"""

import numpy as np

from flowslot.model.units import Nanos
from flowslot.policy.base import AllocationState, Bools, Floats
from flowslot.policy.fair_reference import fluid, slowdown
from flowslot.policy.job_links import JobLinks

SLACK = 1.06
"""No job is much slower than so many times what sockets of equal rights would make of it."""
MOST_SLOWDOWN = 10.0
"""A larger slowdown counts as this: hangs and lies have no more weight."""


class FairReference:
    """Both runs, see the module. `look` at every allocation."""

    def __init__(self) -> None:
        self._between_jobs, self._between_sockets = fluid.Run(1.0), fluid.Run(SLACK)
        self._names: list[str | None] = []  # by number, as of the job's last look
        self._turns = np.full((2, 0), -1)  # of jobs and of aggregates, by number, likewise
        self.seen: Floats = np.zeros((3, 0))
        """Of jobs, as of the last look: see `slowdown.measure`; slowdowns are at most
        MOST_SLOWDOWN."""

    def look(self, state: AllocationState, now: Nanos, cells: JobLinks) -> Bools:
        """Go on to `now`, and find what is `seen`; returns which jobs lag, bool[J]: the reference
        has ended the iteration that the job is in, or is about to begin, and the job pays for
        others (`slowdown.spare`). `cells`: of the state's paths."""
        jobs, aggregates, of = state.jobs, state.aggregates, state.aggregate
        need = np.zeros(cells.count)
        sums = np.zeros((3, len(aggregates.numbers)))
        member = np.zeros(len(aggregates.numbers), np.intp)
        size = state.remaining, state.next_bytes
        fluid.sum_up(cells, of, state.job, *size, state.sockets, sums, member, need)
        volume, sockets, part = sums
        job, paths = state.job[member], state.paths[member]
        gone, others, new = self._new(state)
        lags = np.zeros(len(state.job_names), np.bool_)
        for run, weight in (self._between_jobs, part), (self._between_sockets, sockets):
            run.begin(now, jobs, gone, others, aggregates, new)
            run.advance(now, job, paths, state.goodput, volume, weight)
            run.see(now, cells, need, of, state.remaining, state.wait_ns, state.idle_ns)
            run.end(lags)
        self._measure(state, cells, need)
        if lags.any():
            slowdown.spare(cells, need, self.seen, lags)
        return lags

    def _measure(self, state: AllocationState, cells: JobLinks, need: Floats) -> None:
        """Find what is `seen`."""
        compute, takes = np.zeros((2, len(state.job_names)))
        self._between_jobs.tell(compute, takes)
        slowdown.shorten(state.job, state.period_ns, takes)
        self.seen = np.zeros((3, len(compute)))
        slowdown.measure(cells, need, state.goodput, compute, takes, self.seen)
        np.minimum(self.seen[0], MOST_SLOWDOWN, out=self.seen[0])

    def _new(self, state: AllocationState) -> tuple[Bools, Bools, Bools]:
        """Which jobs were gone, which of these are others now, and which aggregates are new."""
        jobs, aggregates = state.jobs, state.aggregates
        most = max(fluid.end_of(jobs.numbers), fluid.end_of(aggregates.numbers))
        if most > self._turns.shape[1]:
            self._turns = np.append(self._turns, np.full((2, most), -1), axis=1)
            self._names += [None] * most
        gone, others = np.zeros((2, len(jobs.numbers)), np.bool_)
        new = np.zeros(len(aggregates.numbers), np.bool_)
        if fluid.find_new(jobs, self._turns[0], gone):
            for k in np.flatnonzero(gone).tolist():
                number, name = jobs.numbers[k], state.job_names[k]
                others[k], self._names[number] = self._names[number] != name, name
        fluid.find_new(aggregates, self._turns[1], new)
        return gone, others, new
