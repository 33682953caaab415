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

from collections.abc import Hashable, Sequence

import numpy as np

from flowslot.model.units import Nanos
from flowslot.policy.base import AllocationState, Bools, Floats
from flowslot.policy.fair_reference import fluid

SLACK = 1.06
"""No job is much slower than so many times what sockets of equal rights would make of it."""


class FairReference:
    """Both runs, see the module. `look` at every allocation."""

    def __init__(self) -> None:
        self._between_jobs, self._between_sockets = fluid.Run(1.0), fluid.Run(SLACK)
        self._jobs: list[Hashable] = []
        self._aggregates: list[Hashable] = []

    def look(self, state: AllocationState, now: Nanos) -> Bools:
        """Go on to `now`; returns which jobs lag, bool[J]: the reference has ended the iteration
        that the job is in, or is about to begin."""
        of, n = state.aggregate, len(state.aggregates)
        volume = np.where(state.next_bytes > 0, state.next_bytes, state.remaining)
        volume = np.where(state.paths[:, 0] < len(state.goodput) - 1, volume, 0.0)
        sockets: Floats = np.bincount(of, np.where(volume > 0, state.sockets, 0.0), n).astype(float)
        volume = np.bincount(of, volume, n).astype(np.float64)
        member = np.zeros(n, np.intp)
        member[of] = np.arange(len(of))
        job, paths = state.job[member], state.paths[member]
        shape = len(state.job_names), len(state.goodput)
        cells, each = job[:, None] * shape[1] + paths, np.repeat(volume, paths.shape[1])
        need = (
            np.bincount(cells.ravel(), each, shape[0] * shape[1]).astype(np.float64).reshape(shape)
        )
        most = need[:, :-1].max(axis=1)[job]
        new_jobs = _renamed(self._jobs, state.job_names)
        new = _renamed(self._aggregates, state.aggregates) | (np.bincount(of, minlength=n) == 0)
        runs = self._between_jobs, self._between_sockets
        weights = volume / np.where(most > 0, most, 1.0), sockets
        for run, weight in zip(runs, weights, strict=True):
            run.follow(new_jobs, new)
            run.advance(now, job, paths, state.goodput, volume, weight)
            run.see(now, need, state.job, state.remaining, state.wait_ns, state.idle_ns)
        lags: Bools = np.logical_or(*(run.job_rows["lead"] > 0 for run in runs))
        return lags


def _renamed(known: list[Hashable], names: Sequence[Hashable]) -> Bools:
    """Which numbers have got another name since; `known`, the names then, becomes `names`."""
    new = np.zeros(len(names), np.bool_)
    if known != names:
        known += [None] * (len(names) - len(known))
        for i, name in enumerate(names):
            if known[i] != name:
                known[i], new[i] = name, True
    return new
