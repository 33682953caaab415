# SPDX-License-Identifier: Apache-2.0
"""A flow's rate in each of the next K slots."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flowslot.units import Rate


@dataclass(slots=True, eq=False)
class Schedule:
    """`rates[k]` (payload bytes/s, float64[K]) holds in slot `base_slot + k`; never modified.

    Past its end the last rate goes on: a schedule that is not renewed in time must not stop a
    flow (the lease, not the horizon, ends it). Before its start the first rate holds.
    """

    base_slot: int
    rates: NDArray[np.float64]

    def rate_at(self, slot: int) -> Rate:
        """Payload bytes/s in `slot`."""
        k = min(max(slot - self.base_slot, 0), len(self.rates) - 1)
        return Rate(float(self.rates[k]))


def constant(base_slot: int, rate: float, horizon: int = 1) -> Schedule:
    """The same rate (payload bytes/s) in every slot."""
    return Schedule(base_slot, np.full(horizon, rate))
