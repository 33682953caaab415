# SPDX-License-Identifier: Apache-2.0
# cython: infer_types=True
"""Sums over paths, and max-min fair rates. Compiled (fill.pxd); interpreted, it does the same.

F flows, L links. `paths` are int32[F, H], padded with L at their ends. Arrays over links have L + 1
entries; the last one belongs to the padding. Rates are bytes/s. Results go into the last argument.
"""

import math
from typing import Any

import numpy as np

from flowslot.policy.base import Floats, Paths

COMPILED = not __file__.endswith(".py")

_inf = math.inf  # as a C variable: fill.pxd declares it


def link_sum(paths: Paths, rates: Floats, sums: Floats) -> None:
    """Add `rates` float64[F] to `sums` float64[L + 1], on each link of the flows' paths."""
    for i in range(len(rates)):
        for h in range(paths.shape[1]):
            sums[paths[i, h]] += rates[i]


def max_min(paths: Paths, capacity: Floats, limit: Floats, rate: Floats) -> None:
    """Max-min fair rates, under `limit` float64[F] and `capacity` float64[L + 1]."""
    weighted(paths, capacity, limit, np.ones(len(limit)), rate)


def weighted(paths: Paths, capacity: Floats, limit: Floats, weight: Floats, rate: Floats) -> int:
    """Max-min fair rates where flow i counts as `weight[i]` > 0 flows: progressive filling
    (Bertsekas and Gallager, Data Networks, 6.5.2). Returns about how many entries it visited.

    Each round settles the flows that meet their limit below every share on their path, and all
    flows of links that are the tightest for all flows that cross them. Shares only grow from
    round to round, so both are final; that takes far fewer rounds than one link at a time.
    """
    last, n, visits = len(capacity) - 1, 0, 0
    # Two arrays in all: making one takes as long as most of these loops.
    work, counts = np.zeros(4 * last + 4 + len(limit)), np.zeros(2 * last + 2 + len(limit), np.intp)
    left, share = work[: last + 1], work[last + 1 : 2 * last + 2]
    taken, wish = work[2 * last + 2 : 3 * last + 3], work[3 * last + 3 : 4 * last + 4]
    users, tight = counts[: last + 1], counts[last + 1 : 2 * last + 2]
    levels, rows = work[4 * last + 4 :], counts[2 * last + 2 :]
    for link in range(last + 1):
        left[link] = max(capacity[link], 0.0)
    for i in range(len(limit)):
        rate[i] = 0.0
        if limit[i] > 0:
            rows[n] = i
            n += 1
    while n:
        visits += 6 * (n * paths.shape[1] + last)
        find_shares(paths, rows[:n], weight, left, users, wish, share)
        find_levels(paths, rows[:n], limit, weight, share, users, levels, tight)
        n = settle(paths, rows[:n], limit, weight, levels, tight, rate, taken)
        for link in range(last):
            left[link] = max(left[link] - taken[link], 0.0)
    return visits


def find_shares(  # noqa: PLR0917
    paths: Any, rows: Any, weight: Any, left: Any, users: Any, wish: Any, share: Any
) -> None:
    """What is left of each link for each unit of weight of those of the flows `rows` that cross
    the link; `users` says how many these are."""
    last = len(left) - 1
    for link in range(last + 1):
        users[link], wish[link] = 0, 0.0
    for k in range(len(rows)):
        for h in range(paths.shape[1]):
            if paths[rows[k], h] >= last:
                break
            users[paths[rows[k], h]] += 1
            wish[paths[rows[k], h]] += weight[rows[k]]
    for link in range(last):
        share[link] = left[link] / wish[link] if users[link] else 0.0
    share[last] = _inf


def find_levels(  # noqa: PLR0917
    paths: Any, rows: Any, limit: Any, weight: Any, share: Any, users: Any, levels: Any, tight: Any
) -> None:
    """The least of each flow's shares, and of its limit for each unit of weight. Links are `tight`,
    not 0, where none of their users is held below the share by something else."""
    last = len(share) - 1
    for link in range(last + 1):
        tight[link] = 0
    for k in range(len(rows)):
        i, level = rows[k], limit[rows[k]] / weight[rows[k]]
        for h in range(paths.shape[1]):
            if paths[i, h] >= last:
                break
            level = min(level, share[paths[i, h]])
        levels[i] = level
        for h in range(paths.shape[1]):
            if paths[i, h] >= last:
                break
            if level >= share[paths[i, h]] * (1 - 1e-12):
                tight[paths[i, h]] += 1
    for link in range(last + 1):
        tight[link] = link < last and tight[link] == users[link]


def settle(  # noqa: PLR0917
    paths: Any, rows: Any, limit: Any, weight: Any, levels: Any, tight: Any, rate: Any, taken: Any
) -> int:
    """Set the rates that are final among the flows `rows`. The other flows move to the front;
    returns how many these are. `taken`, float64[L + 1]: what was given out."""
    others, last = 0, len(taken) - 1
    for link in range(len(taken)):
        taken[link] = 0.0
    for k in range(len(rows)):
        i = rows[k]
        if levels[i] >= limit[i] / weight[i] or crosses(paths, i, tight):
            rate[i] = min(levels[i] * weight[i], limit[i])
            for h in range(paths.shape[1]):
                if paths[i, h] >= last:
                    break
                taken[paths[i, h]] += rate[i]
        else:
            rows[others] = i
            others += 1
    return others


def crosses(paths: Any, i: int, links: Any) -> bool:
    """Flow `i` crosses one of the links that `links`, intp[L + 1], is not 0 for."""
    for h in range(paths.shape[1]):
        if paths[i, h] >= len(links) - 1:
            break
        if links[paths[i, h]]:
            return True
    return False
