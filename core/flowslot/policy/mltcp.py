# SPDX-License-Identifier: Apache-2.0
"""MLTCP: sharing as TCP does whose window grows F(bytes_ratio) times as fast (ADR 15).

Live it is a congestion control in the kernel (bpf/mltcp.bpf.c), which needs neither daemon nor
arbiter. This is the fluid model of it: a flow counts as F sockets on the links that it shares.
"""

from typing import NamedTuple

import numpy as np

from flowslot.model.units import SECOND, Nanos
from flowslot.policy.base import AllocationState, Allocator, Floats
from flowslot.policy.fill import weighted

STEPS = 32
"""Weights are looked at so often while a flow sends an iteration's bytes."""


class Aggressiveness(NamedTuple):
    """F of the thesis' equation 1.2, linear and increasing. As in bpf/mltcp.h."""

    slope: float = 1.75
    intercept: float = 0.25

    def __call__(self, ratio: Floats) -> Floats:
        """By how much a window grows faster, of the part of an iteration's bytes that is sent."""
        return self.slope * np.clip(ratio, 0.0, 1.0) + self.intercept


class MltcpAllocator(Allocator):
    """Max-min rates of the active flows, each weighted by F and its sockets; one whose bytes per
    iteration are not known counts as plain TCP. Idle flows get nothing."""

    def __init__(self, aggressiveness: Aggressiveness | None = None) -> None:
        self._f = aggressiveness or Aggressiveness()
        self._rates: Floats = np.zeros(0)

    def allocate(self, state: AllocationState, now: Nanos) -> Floats:
        """See Allocator."""
        most = np.where(state.remaining > 0, state.cap, 0.0)
        known = state.next_bytes > 0
        left = np.divide(state.remaining, state.next_bytes, np.ones(len(most)), where=known)
        weight = state.sockets * np.where(known, self._f(1.0 - left), 1.0)
        self._rates = np.zeros(len(most))
        weighted(state.paths, state.capacity, most, weight, self._rates)
        return self._rates.copy()

    def next_change(self, state: AllocationState) -> Floats:
        """See Allocator: weights change with every byte, and are followed in steps."""
        moves = (state.next_bytes > 0) & (self._rates > 0) & np.isfinite(self._rates)
        never = np.full(len(moves), np.inf)
        step = state.next_bytes * (SECOND / STEPS)
        changes: Floats = np.divide(step, self._rates, never, where=moves)
        return changes
