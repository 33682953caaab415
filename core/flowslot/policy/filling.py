# SPDX-License-Identifier: Apache-2.0
"""Loops over flows and the links of their paths, for whose sake this file is compiled (types:
filling.pxd). What is done is the same when it is not compiled.

F flows, L links. `paths` are int32[F, H], padded with L; arrays over links have L + 1 entries, of
which the last one counts for nothing. Rates are bytes/s.
"""

import math
from typing import Any

import numpy as np

from flowslot.policy.base import Floats, Paths

COMPILED = not __file__.endswith(".py")

_inf = math.inf  # as a C variable: filling.pxd declares it


def link_sum(paths: Paths, rates: Floats, sums: Floats) -> None:
    """Add `rates` float64[F] to `sums` float64[L + 1], on each link of the flows' paths."""
    for i in range(len(rates)):
        for h in range(paths.shape[1]):
            sums[paths[i, h]] += rates[i]


def max_min(paths: Paths, capacity: Floats, limit: Floats, rate: Floats) -> None:
    """Put max-min fair rates into `rate`, float64[F]; see fill.max_min."""
    last, n = len(capacity) - 1, 0
    left, sums = np.maximum(capacity, 0.0), np.zeros((2, last + 1))
    share, taken = sums[0], sums[1]
    counts = np.zeros((2, last + 1), np.intp)
    users, tight = counts[0], counts[1]
    rows, levels = np.zeros(len(limit), np.intp), np.zeros(len(limit))
    for i in range(len(limit)):
        rate[i] = 0.0
        if limit[i] > 0:
            rows[n] = i
            n += 1
    while n:
        find_shares(paths, rows[:n], left, users, share)
        find_levels(paths, rows[:n], limit, share, users, levels, tight)
        n = fix(paths, rows[:n], limit, levels, tight, rate, taken)
        for link in range(last):
            left[link] = max(left[link] - taken[link], 0.0)


def find_shares(paths: Any, rows: Any, left: Any, users: Any, share: Any) -> None:
    """What is left of each link, divided by those of the flows `rows` that cross it."""
    last = len(left) - 1
    for link in range(last + 1):
        users[link] = 0
    for k in range(len(rows)):
        for h in range(paths.shape[1]):
            users[paths[rows[k], h]] += 1
    for link in range(last):
        share[link] = left[link] / max(users[link], 1)
    share[last] = _inf


def find_levels(  # noqa: PLR0917
    paths: Any, rows: Any, limit: Any, share: Any, users: Any, levels: Any, tight: Any
) -> None:
    """The least of each flow's limit and shares. Links are `tight`, not 0, where none of their
    users is held below its share by something else."""
    last = len(share) - 1
    for link in range(last + 1):
        tight[link] = 0
    for k in range(len(rows)):
        i, level = rows[k], limit[rows[k]]
        for h in range(paths.shape[1]):
            level = min(level, share[paths[i, h]])
        levels[i] = level
        for h in range(paths.shape[1]):
            if level >= share[paths[i, h]] * (1 - 1e-12):
                tight[paths[i, h]] += 1
    for link in range(last + 1):
        tight[link] = link < last and tight[link] == users[link]


def fix(  # noqa: PLR0917
    paths: Any, rows: Any, limit: Any, levels: Any, tight: Any, rate: Any, taken: Any
) -> int:
    """Give those of the flows `rows` their levels whose rates are final, and move the others to
    the front; returns how many these are. `taken`, float64[L + 1]: what was given out."""
    others = 0
    for link in range(len(taken)):
        taken[link] = 0.0
    for k in range(len(rows)):
        i = rows[k]
        if levels[i] >= limit[i] or crosses(paths, i, tight):
            rate[i] = levels[i]
            for h in range(paths.shape[1]):
                taken[paths[i, h]] += levels[i]
        else:
            rows[others] = i
            others += 1
    return others


def crosses(paths: Any, i: int, links: Any) -> bool:
    """Flow `i` crosses one of the links that `links`, intp[L + 1], is not 0 for."""
    for h in range(paths.shape[1]):  # noqa: SIM110 (a generator is not compiled to a loop)
        if links[paths[i, h]]:
            return True
    return False
