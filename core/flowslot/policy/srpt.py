# SPDX-License-Identifier: Apache-2.0
"""SRPT: the job with the least left on its slowest link goes first, and interrupts all others.

Shortest remaining processing time is best for the mean of jobs that come once. Jobs that come back
and back starve those that are longer: above full load nothing bounds a wait. A baseline, without
the ageing and the floors of `stagger`.
"""

from flowslot.model.units import Nanos
from flowslot.policy.base import AllocationState, Allocator, Floats
from flowslot.policy.gangs import in_turns, seconds_alone


class SrptAllocator(Allocator):
    """Gangs by remaining time; what they leave is shared max-min. Idle flows get nothing."""

    def allocate(self, state: AllocationState, now: Nanos) -> Floats:
        """See Allocator."""
        return in_turns(state, state.paths, seconds_alone(state, state.paths))
