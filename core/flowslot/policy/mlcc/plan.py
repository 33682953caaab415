# SPDX-License-Identifier: Apache-2.0
"""Algorithm 1: the rates of one flow in each of the next K slots.

For each completion slot the paper fills the slots up to it, those with the least load on the path
first, and keeps the schedule with the lowest "transmission cost" (lines 1 to 13). What that cost
is has two readings, between which the paper does not decide:

- `literal`: what line 8 adds up, rate times unit cost of the slot. The arg min of section IV-B,
  "transmission costs induced by schedules", read word for word.
- `rhs`: the right-hand side of (11), which the same section says is minimised: the completion
  slot plus that sum.

No schedule sends everything when there is too little room in all K slots; the paper then says
nothing. All room is taken here: the rest of the bytes wait for the slots after the horizon.
"""

import heapq
import math
from collections.abc import Iterable
from typing import Literal

import numpy as np

from flowslot.policy.base import Floats

Reading = Literal["literal", "rhs"]


def plan(
    remaining: float, free: Floats, cost: Floats, slot_s: float, reading: Reading = "literal"
) -> Floats:
    """Payload bytes/s of a flow with `remaining` bytes in each slot, float64[K].

    `free`: payload bytes/s that the path has left, float64[K], below 0 counts as none. `cost`: of
    a unit of rate in each slot, float64[K], finite and at least 0; for `rhs` in slots per
    (payload byte/s), for `literal` only the order counts. `slot_s`: length of a slot, s. Raises
    ValueError when the shapes differ, or a number is not one.
    """
    if free.ndim != 1 or free.shape != cost.shape:
        raise ValueError("free and cost must have one number for each slot")
    if not slot_s > 0.0 or math.isnan(remaining) or np.isnan(free).any():
        raise ValueError("slot_s must be greater than 0, remaining and free must be numbers")
    if not (np.isfinite(cost).all() and np.all(cost >= 0.0)):
        raise ValueError("costs must be finite and at least 0")
    room: list[float] = np.maximum(free, 0.0).tolist()
    costs: list[float] = cost.tolist()
    need = max(remaining, 0.0) / slot_s  # in slots' worth of rate: the sum of rates that ends it
    slots = _completion(need, room, costs) if reading == "rhs" else len(room)
    # Equal costs: the earlier slot. With it, one pass over all slots finds what the literal
    # reading ends with: a later completion slot only adds choice, so it never costs more, and of
    # schedules that cost the same this is the one that the earliest completion slot gives.
    return np.array(_fill(need, room, sorted(range(slots), key=costs.__getitem__)))


def _fill(need: float, room: list[float], order: Iterable[int]) -> list[float]:
    """Lines 4 to 9: as much as there is room for, slot by slot in `order`, float64[K]."""
    rates = [0.0] * len(room)
    for k in order:
        if need <= room[k]:
            rates[k] = need
            break
        rates[k] = room[k]
        need -= room[k]
    return rates


def _completion(need: float, room: list[float], costs: list[float]) -> int:
    """How many slots the schedule that minimises the RHS of (11) looks at; ties: the fewest.

    Moving the completion slot on by one adds one slot to choose from, which pushes out the
    dearest of what was chosen before, and nothing that was pushed out ever comes back. So each
    slot enters and leaves a heap once: O(K log K) for all completion slots together, against
    O(K^2 log K) of lines 1 to 13 as they are written.
    """
    least = min((c for c, r in zip(costs, room, strict=True) if r > 0.0), default=0.0)
    chosen: list[tuple[float, int]] = []  # the dearest on top
    taken = list(room)
    total = spent = 0.0
    best, best_value, enough = len(room), math.inf, False
    for k, free in enumerate(room):
        if free > 0.0:
            heapq.heappush(chosen, (-costs[k], -k))
            total += free
            spent += free * costs[k]
        enough = enough or total >= need
        while total > need:
            dearest = -chosen[0][1]
            given_up = min(taken[dearest], total - need)
            spent -= given_up * costs[dearest]
            if given_up < taken[dearest]:
                taken[dearest] -= given_up
                total = need
                break
            heapq.heappop(chosen)
            total -= given_up
        if enough:
            if k + 1 + spent < best_value:
                best, best_value = k + 1, k + 1 + spent
            if k + 2 + need * least >= best_value:  # no later one can be better
                break
    return best
