# SPDX-License-Identifier: Apache-2.0
"""The rates of flows in each of the next K slots."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True, eq=False)
class Schedule:
    """`rates[i, k]` (payload bytes/s, float64[N, K]) is the rate of flow i in slot
    `base_slot + k`; never modified.

    Past its end the last rate goes on: a schedule that is not renewed in time must not stop a
    flow (the lease, not the horizon, ends it). Before its start the first rate holds.
    """

    base_slot: int
    rates: NDArray[np.float64]

    def at(self, slot: int) -> NDArray[np.float64]:
        """Payload bytes/s of each flow in `slot`, float64[N]."""
        k = min(max(slot - self.base_slot, 0), self.rates.shape[1] - 1)
        rates: NDArray[np.float64] = self.rates[:, k]
        return rates


def constant(base_slot: int, rates: NDArray[np.float64]) -> Schedule:
    """The same rates (payload bytes/s, float64[N]) in every slot."""
    return Schedule(base_slot, rates[:, np.newaxis])
