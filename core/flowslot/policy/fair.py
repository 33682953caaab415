# SPDX-License-Identifier: Apache-2.0
"""Max-min fair sharing: what the network does by itself in the ideal. The baseline."""

import numpy as np

from flowslot.model.units import Nanos
from flowslot.policy.base import AllocationState, Allocator, Floats
from flowslot.policy.fill import max_min


class FairAllocator(Allocator):
    """Max-min fair rates of the active flows; idle and stalled flows get nothing. Only reports
    change them, and none stands: they depend on which flows are active."""

    def allocate(self, state: AllocationState, now: Nanos) -> Floats:
        """See Allocator."""
        most = np.where((state.remaining > 0) & ~state.stalled, np.inf, 0.0)
        rates = np.zeros(len(most))
        max_min(state.paths, state.capacity, most, rates)
        return rates
