# SPDX-License-Identifier: Apache-2.0
"""MCS: coflows of jobs with several stages, in a cluster that is taken for one big switch.

Source: B. Tian et al., Scheduling Coflows of Multi-stage Jobs to Minimize the Total Weighted Job
Completion Time (INFOCOM 2018), as MLCC's section VII describes and uses it. The rules here:

1. A job's flows of one iteration are a coflow. Only ports count: the links by which a flow leaves
   its sender and reaches its receiver. What lies between is not looked at.
2. Coflows are ordered by the time that their fullest port needs for what is left, ties by name.
   The paper gets an order from a linear program over whole jobs; here a job's next iteration is
   not known to the scheduler, so that its order is by this iteration.
3. In that order each gets rates with which all of its flows end together; what ports have left is
   shared max-min.
4. The network between the ports shares what flows want of a link equally, if that is too much.
5. "Start after": a flow begins when the one that it depends on has ended. Whoever asks says so by
   `cap` (0: it cannot send now).
"""

import numpy as np

from flowslot.model.units import Nanos
from flowslot.policy.base import AllocationState, Allocator, Floats, Paths
from flowslot.policy.fill import weighted
from flowslot.policy.gangs import in_turns, seconds_alone


def ports(paths: Paths, links: int) -> Paths:
    """First and last link of each path, int32[F, 2], padded with L; one link counts once."""
    length = (paths < links).sum(axis=1)
    rows = np.arange(len(paths))
    first, last = paths[:, 0], paths[rows, np.maximum(length - 1, 0)]
    return np.stack((first, np.where(length > 1, last, links)), axis=1).astype(np.int32)


class McsAllocator(Allocator):
    """See the module. Idle flows get nothing."""

    def allocate(self, state: AllocationState, now: Nanos) -> Floats:
        """See Allocator."""
        ends = ports(state.paths, len(state.capacity) - 1)
        wanted = in_turns(state, ends, seconds_alone(state, ends))
        rates = np.zeros(len(wanted))
        weighted(state.paths, state.capacity, wanted, np.ones(len(wanted)), rates)
        return rates
