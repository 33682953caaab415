# SPDX-License-Identifier: Apache-2.0
"""Max-min fair sharing: what the network does by itself in the ideal. The baseline."""

import numpy as np

from flowslot.model.units import Nanos
from flowslot.policy.base import AllocationState, Bools, Floats, Pace, View
from flowslot.policy.fill import max_min


class FairAllocator:
    """Max-min fair rates of the active flows; idle and stalled flows get nothing."""

    def allocate(self, state: AllocationState, now: Nanos) -> Floats:
        """See Allocator."""
        most = np.where((state.remaining > 0) & ~state.stalled, np.inf, 0.0)
        rates = np.zeros(len(most))
        max_min(state.paths, state.capacity, most, rates)
        return rates

    def next_change(self, state: AllocationState, now: Nanos) -> Nanos | None:
        """Never: only reports change it."""
        return None

    def standing(self) -> Bools | None:
        """No flow's: rates depend on which flows are active."""
        return None


class FairPolicy:
    """Paces no flow: each is left to its own congestion control."""

    def decide(self, now: Nanos, view: View) -> Pace | None:
        """See HostPolicy."""
        return None
