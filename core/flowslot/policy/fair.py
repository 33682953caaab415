# SPDX-License-Identifier: Apache-2.0
"""Max-min fair sharing: what the network does by itself in the ideal. The baseline."""

import numpy as np

from flowslot.model.units import Nanos
from flowslot.policy.base import AllocationState, Allocator, Bools, Floats
from flowslot.policy.fill import weighted


class FairAllocator(Allocator):
    """Max-min fair rates of the active flows' sockets, as far as they can use them; idle flows get
    nothing. Only reports change them, and none stands: they depend on which flows are active."""

    def allocate(self, state: AllocationState, now: Nanos) -> Floats:
        """See Allocator."""
        return share_fairly(state, np.ones(len(state.job_names), np.bool_))


def share_fairly(state: AllocationState, sends: Bools) -> Floats:
    """Max-min fair rates of the active sockets of the jobs that send, bool[J]; others have none."""
    most = np.where((state.remaining > 0) & sends[state.job], state.cap, 0.0)
    rates = np.zeros(len(most))
    weighted(state.paths, state.capacity, most, state.sockets, rates)
    return rates
