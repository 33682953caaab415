# SPDX-License-Identifier: Apache-2.0
# cython: infer_types=True
"""MLCC's plans of all hosts of a cluster at once, for simulations of thousands. Compiled.

Algorithm 1 as `plan` has it, here line by line. A job's flows may be planned as one, which has a
link in its path as often as its flows cross it: then they move in step, and nothing is left for
Algorithm 2 to correct. F such flows, L links, K slots; `paths`, int32[F, H], padded with L.
"""

from collections import deque
from typing import Any

import numpy as np

from flowslot.model.slot import DEFAULT_SLOT, SlotGrid
from flowslot.model.units import SECOND, Nanos
from flowslot.policy.base import AllocationState, Allocator, Bools, Floats, Paths, Rows
from flowslot.policy.fill import link_sum, weighted
from flowslot.policy.mlcc.bandwidth import WINDOW
from flowslot.policy.mlcc.links import DUST
from flowslot.policy.mlcc.options import MlccOptions

COMPILED = not __file__.endswith(".py")

_dust = DUST  # as C variables: fleet.pxd declares them
_digits = 1e9  # as links.COST_DIGITS has it


class FleetAllocator(Allocator):
    """Asked once a slot. Links keep their numbers from one question to the next.

    With `options.atomic`, one flow after the other reserves, and sees all that is reserved by then.
    Otherwise each is planned against what all others had planned before, and links that too much is
    planned for are shared equally. `count_links`: see the paper's u_l in `bandwidth`; what links
    carried is taken to be what was given out. `seen`, bool[L]: links of which loads are known, None
    for all. Without switches those are the hosts' own, by which flows leave (section VI-H).
    """

    def __init__(
        self, options: MlccOptions, *, count_links: bool = False, seen: Bools | None = None
    ) -> None:
        self._options = options
        self._seen = None if seen is None else np.append(seen, True)
        self._window = count_links and options.bound == "paper"
        self._horizon = SlotGrid().horizon
        self._flows: np.ndarray[Any, np.dtype[np.uint64]] = np.zeros(0, np.uint64)  # ascending
        self._plans: Floats = np.zeros((0, self._horizon))
        self._slot = 0
        self._carried: deque[Floats] = deque(maxlen=WINDOW)

    def allocate(self, state: AllocationState, now: Nanos) -> Floats:
        """See Allocator."""
        n, last = len(state.remaining), len(state.capacity) - 1
        remaining = np.where((state.remaining > 0) & (state.cap > 0), state.remaining, 0.0)
        old, new = self._plans_of(state, now), np.zeros((n, self._horizon))
        load = np.zeros((last + 1, self._horizon))
        paths: Paths = state.paths
        if self._seen is not None:
            paths = np.where(self._seen[paths], paths, last).astype(np.int32)
        np.add.at(load, paths, old[:, None, :])
        limit = state.capacity.copy()
        if self._window and self._carried:
            limit = np.minimum(np.max(self._carried, axis=0), state.capacity)
        limit[last] = np.inf
        line = np.minimum(state.capacity[state.paths].min(axis=1), state.cap)
        order = self._order(state, remaining, line)
        need, rhs = remaining / (DEFAULT_SLOT / SECOND), self._options.cost == "rhs"
        plan_all(paths, order, need, line, limit, load, old, new, rhs, self._options.atomic)
        keep = np.argsort(state.flow, kind="stable")
        self._flows, self._plans = state.flow[keep], new[keep]
        rates: Floats = np.zeros(n)
        wanted = np.minimum(new[:, 0], state.cap)
        weighted(state.paths, state.capacity, wanted, np.ones(n), rates)
        if self._window:
            sums = np.zeros(last + 1)
            link_sum(state.paths, rates, sums)
            self._carried.append(sums)
        return rates

    def _plans_of(self, state: AllocationState, now: Nanos) -> Floats:
        """What was planned for these flows, from this slot on, float64[F, K]."""
        slot = now // DEFAULT_SLOT
        passed, self._slot = min(slot - self._slot, self._horizon), slot
        old = np.zeros((len(state.flow), self._horizon))
        at = np.searchsorted(self._flows, state.flow)
        at[at == len(self._flows)] = 0
        known = self._flows[at] == state.flow if len(self._flows) else np.zeros(len(at), np.bool_)
        old[known, : self._horizon - passed] = self._plans[at[known], passed:]
        old[state.remaining <= 0] = 0.0
        return old

    def _order(self, state: AllocationState, remaining: Floats, line: Floats) -> Rows:
        """Rows in the order in which they are planned."""
        active = np.flatnonzero(remaining > 0)
        key = -state.wait_ns[active]
        if self._options.order == "shortest":
            alone = remaining[active] / np.maximum(line[active], 1e-9)
            key = alone / (1.0 + state.wait_ns[active] / SECOND / np.maximum(alone, 1e-9))
        order: Rows = active[np.lexsort((state.flow[active], key))]
        return order


def plan_all(  # noqa: PLR0917
    paths: Any,
    order: Any,
    need: Any,
    line: Any,
    limit: Any,
    load: Any,
    old: Any,
    new: Any,
    rhs: bool,
    atomic: bool,
) -> None:
    """Set `new`, float64[F, K]: rates of the flows `order`.

    `need`: bytes left / length of a slot. `line`: most that each can use. `limit`, float64[L + 1],
    and `load`, float64[L + 1, K], which is that of `old`; with `atomic` it becomes that of `new`,
    plan by plan.
    """
    slots = load.shape[1]
    free, cost, best = np.zeros(slots), np.zeros(slots), np.zeros(slots)
    rank = np.zeros(slots, np.intp)
    for at in range(len(order)):
        i = order[at]
        add(paths, i, old, -1.0, load)
        look(paths, i, line[i], limit, load, free, cost)
        plan_one(need[i], free, cost, rank, best, rhs)
        for k in range(slots):
            new[i, k] = best[k]
        add(paths, i, new if atomic else old, 1.0, load)


def add(paths: Any, i: int, rates: Any, sign: float, load: Any) -> None:
    """The plan of flow i, on all links of its path."""
    last = load.shape[0] - 1
    for h in range(paths.shape[1]):
        link = paths[i, h]
        if link < last:
            for k in range(load.shape[1]):
                load[link, k] += sign * rates[i, k]


def look(  # noqa: PLR0917
    paths: Any, i: int, line: float, limit: Any, load: Any, free: Any, cost: Any
) -> None:
    """What flow i finds: see `Links.free` and `Links.cost`."""
    last = load.shape[0] - 1
    for k in range(load.shape[1]):
        free[k], cost[k] = line, 0.0
    for h in range(paths.shape[1]):
        link, times = paths[i, h], 0
        if link < last:
            for g in range(paths.shape[1]):
                times += paths[i, g] == link
            for k in range(load.shape[1]):
                taken = max(load[link, k], 0.0)
                free[k] = min(free[k], (limit[link] - taken) / times)
                cost[k] += taken
    for k in range(load.shape[1]):
        if free[k] <= _dust * line:
            free[k] = 0.0
        cost[k] = rounded(cost[k] / line) / line if line > 0.0 else 0.0


def plan_one(  # noqa: PLR0917
    need: float, free: Any, cost: Any, rank: Any, best: Any, rhs: bool
) -> None:
    """Algorithm 1 for one flow, into `best`, float64[K]; see `plan`."""
    slots = len(free)
    chosen = slots
    if rhs:
        least, total = -1.0, 0.0
        for n in range(1, slots + 1):
            total += free[n - 1]
            if total >= need:
                value = n + fill(need, n, free, cost, rank, best)
                if least < 0.0 or value < least:
                    least, chosen = value, n
    fill(need, chosen, free, cost, rank, best)


def fill(  # noqa: PLR0917
    need: float, n: int, free: Any, cost: Any, rank: Any, best: Any
) -> float:
    """Lines 2 to 9: the first n slots, those with the least cost first. Returns what it costs."""
    for k in range(len(free)):
        best[k] = 0.0
    for k in range(n):
        at = k
        while at > 0 and cost[rank[at - 1]] > cost[k]:
            rank[at] = rank[at - 1]
            at -= 1
        rank[at] = k
    spent = 0.0
    for at in range(n):
        k = rank[at]
        best[k] = min(need, free[k])
        need -= best[k]
        spent += best[k] * cost[k]
        if need <= 0.0:
            break
    return spent


def rounded(x: float) -> float:
    """To COST_DIGITS digits; `x` at least 0."""
    whole = int(x * _digits + 0.5)
    return whole / _digits
