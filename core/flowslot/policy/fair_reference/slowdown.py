# SPDX-License-Identifier: Apache-2.0
# cython: infer_types=True
"""Which jobs pay for others. Compiled (types: slowdown.pxd); interpreted, it does the same.

F flows, J jobs, L links, C cells (see JobLinks). A job's *slowdown* is the time that its iterations
take, in parts of what they would take alone: its computation, and its bytes on its slowest link.
"""

import math

import numpy as np

from flowslot.policy.base import Bools, Floats, Ints
from flowslot.policy.fair_reference.fluid import meets
from flowslot.policy.job_links import JobLinks

COMPILED = not __file__.endswith(".py")

SIMILAR = 0.5
"""Turns cost a job little that others take who need less than this part of its time."""

# The same as C variables: slowdown.pxd declares them.
_second, _similar = 1e9, SIMILAR


def shorten(job: Ints, period: Floats, takes: Floats) -> None:
    """No job's iterations take longer than was seen, `takes`, float64[J], nor than is said:
    `period`, float64[F], ns; 0: nothing is said. What is said alone could be a lie, and what is
    seen lacks an iteration where hosts are far out of step."""
    said = np.zeros(len(takes))
    for i in range(len(job)):
        said[job[i]] = max(said[job[i]], period[i])
    for j in range(len(takes)):
        if 0 < said[j] < takes[j]:
            takes[j] = said[j]


def measure(  # noqa: PLR0917
    cells: JobLinks, need: Floats, goodput: Floats, compute: Floats, takes: Floats, found: Floats
) -> None:
    """By job: its slowdown, NaN where it is not known, the ns that its bytes need on its slowest
    link, and those of an iteration alone: `found`, float64[3, J]. `need`, float64[C]: bytes per
    iteration; `goodput`, float64[L + 1]; `compute` and `takes`, of an iteration: float64[J], ns,
    NaN where that is not known."""
    for j in range(len(compute)):
        found[1, j] = cells.bottleneck(need, j, goodput, 1.0) * _second
        found[2, j] = alone = compute[j] + found[1, j]
        found[0, j] = takes[j] / alone if alone > 0 else math.nan  # NaN: no


def spare(cells: JobLinks, need: Floats, found: Floats, lags: Bools) -> None:
    """Jobs that do not pay for others do not lag: `lags`, bool[J]. Those that are slowed down less
    than the average of themselves and of all that share links with them and need at least SIMILAR
    times as long there. `found`: see `measure`."""
    slowdowns, lengths = found[0], found[1]
    uses = np.zeros(cells.links, np.intp)
    for j in range(len(lags)):
        if lags[j] and not math.isnan(slowdowns[j]):
            for c in range(cells.start[j], cells.start[j + 1]):
                uses[cells.link[c]] = need[c] > 0
            total, n = slowdowns[j], 1
            for k in range(len(lags)):
                counts = k != j and lengths[k] >= _similar * lengths[j]
                if counts and not math.isnan(slowdowns[k]) and meets(cells, need, k, uses):
                    total += slowdowns[k]
                    n += 1
            if slowdowns[j] * n < total:
                lags[j] = False
            for c in range(cells.start[j], cells.start[j + 1]):
                uses[cells.link[c]] = 0
