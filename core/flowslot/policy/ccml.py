# SPDX-License-Identifier: Apache-2.0
"""CCML: of jobs on one NIC whose phases fit beside each other, one at a time gets the NIC.

Source: S. Rajasekaran et al., Congestion Control in Machine Learning Clusters (HotNets 2022), as
MLCC's section VII describes and uses it: on the hosts, with iteration times profiled in advance,
interleaving the phases of jobs on one host as far as possible. The rules here:

1. Two jobs are compatible on a NIC if their phases can be laid on a circle without overlap. Phases
   of c1 and c2 seconds every T1 and T2 can exactly if c1 + c2 is at most the largest common divisor
   of T1 and T2. Periods are measured, so that a divisor is common if it is the p-th part of one and
   the q-th of the other within CLOSE, with p and q of at most PARTS. A job of which bytes or period
   are not known is compatible with none.
2. Of jobs on a NIC that are active at the same time, one that began later gives way to those that
   it is compatible with. That shifts its phase by the overlap: from then on they take turns.
3. Jobs that are compatible with none share the NIC, and all share the network behind it, as TCP
   does. What those that go first leave, the others get.

A NIC is the first link of a path. Profiled is what reports say of a job: period, bytes.
"""

import numpy as np

from flowslot.model.units import SECOND, Nanos
from flowslot.policy.base import AllocationState, Allocator, Bools, Floats
from flowslot.policy.fill import weighted

CLOSE = 0.02
PARTS = 4


def common_divisor(a: Floats, b: Floats) -> Floats:
    """Of periods, element by element; 0: none, see the module."""
    found = np.zeros(np.broadcast(a, b).shape)
    for p in range(1, PARTS + 1):
        for q in range(1, PARTS + 1):
            x, y = a / p, b / q
            close = np.abs(x - y) <= CLOSE * np.maximum(x, y)
            found = np.where(close, np.maximum(found, np.minimum(x, y)), found)
    return found  # 0 of an unknown period


class CcmlAllocator(Allocator):
    """See the module. Idle flows get nothing."""

    def allocate(self, state: AllocationState, now: Nanos) -> Floats:
        """See Allocator."""
        most = np.where(state.remaining > 0, state.cap, 0.0)
        gives_way = self._gives_way(state)
        rates, more = np.zeros(len(most)), np.zeros(len(most))
        first = np.where(gives_way, 0.0, most)
        weighted(state.paths, state.capacity, first, state.sockets, rates)
        left = state.capacity.copy()
        np.subtract.at(left, state.paths, rates[:, None])
        weighted(state.paths, np.maximum(left, 0.0), most - rates, state.sockets, more)
        return rates + more

    def _gives_way(self, state: AllocationState) -> Bools:
        """Flows of jobs that began after one that they are compatible with, on some NIC."""
        last, jobs = len(state.capacity) - 1, len(state.job_names)
        active = np.flatnonzero(
            (state.remaining > 0) & (state.cap > 0) & (state.paths[:, 0] < last)
        )
        at, job = state.paths[active, 0].astype(np.int64), state.job[active]
        # Each job on each NIC once: what it sends there in an iteration, and how long it is active.
        both, inverse = np.unique(at * jobs + job, return_inverse=True)
        bytes_there = np.bincount(inverse, state.next_bytes[active], len(both))
        wait, period = np.zeros(len(both)), np.zeros(len(both))
        np.maximum.at(wait, inverse, state.wait_ns[active])
        np.maximum.at(period, inverse, state.period_ns[active])
        nic, its = both // jobs, both % jobs
        lasts = bytes_there / np.maximum(state.capacity[nic], 1.0)
        # NIC by NIC, who began first in front.
        names = np.argsort(np.argsort(np.array(state.job_names, dtype=np.str_), kind="stable"))
        order = np.lexsort((names[its], -wait, nic))
        nic, its, lasts, period = nic[order], its[order], lasts[order], period[order] / SECOND
        known = (lasts > 0) & (period > 0)
        late = np.zeros(jobs, np.bool_)
        apart, more = 1, True
        while more:
            first, second = slice(0, max(len(nic) - apart, 0)), slice(apart, None)
            together = nic[first] == nic[second]
            fits = lasts[first] + lasts[second] <= common_divisor(period[first], period[second])
            late[its[second][together & known[first] & known[second] & fits]] = True
            apart, more = apart + 1, bool(together.any())
        gives: Bools = late[state.job]
        return gives
