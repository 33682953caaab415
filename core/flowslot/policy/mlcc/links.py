# SPDX-License-Identifier: Apache-2.0
"""Links as one flow after the other sees them while a host plans: what is free, what it costs."""

import numpy as np

from flowslot.policy.base import Floats, Rows

COST_DIGITS = 9
"""Loads are compared to so many digits of the path's capacity: adding a schedule to a load table
and taking it off again leaves dust, and must not turn two equal slots into a cheap and a dear one.
"""
DUST = 10.0**-COST_DIGITS
"""Of the path's capacity: a slot with less room is full."""


class Links:
    """L links over K slots; rates in payload bytes/s."""

    def __init__(self, capacity: Floats, limit: Floats, load: Floats) -> None:
        """`capacity`: float64[L]. `limit`: u_l, float64[L], at most that. `load`: b_l(t), of all
        but the flows that are to be planned, float64[L, K]; taken over."""
        self._capacity = capacity
        self._limit = limit[:, np.newaxis]
        self._load = load

    def free(self, path: Rows) -> Floats:
        """min over the path of u_l - b_l(t), at least 0, float64[K] (line 6 of Algorithm 1)."""
        free: Floats = (self._limit[path] - self._load[path]).min(axis=0)
        return np.where(free > DUST * self.capacity(path), free, 0.0)

    def cost(self, path: Rows) -> Floats:
        """Unit cost of each slot, slots per (payload byte/s), float64[K].

        The paper takes the sum of the links' loads for sum of lambda_l(t), and leaves the unit
        open; (11) adds it, times a rate, to a number of slots. With load and rate in units of the
        path's capacity C, sending at C for a slot in which the path's load is C costs one slot.
        """
        capacity = self.capacity(path)
        if capacity <= 0.0:
            return np.zeros(self._load.shape[1])
        load = self._load[path].sum(axis=0) / capacity
        cost: Floats = np.round(load, COST_DIGITS) / capacity
        return cost

    def capacity(self, path: Rows) -> float:
        """C: of the path's narrowest link."""
        return float(self._capacity[path].min())

    def add(self, path: Rows, rates: Floats) -> None:
        """A flow has been planned: `rates`, float64[K]; those that follow see it."""
        self._load[path] += rates
