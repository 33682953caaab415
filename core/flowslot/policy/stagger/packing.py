# SPDX-License-Identifier: Apache-2.0
# cython: infer_types=True
"""Which of two jobs goes first, where the other one can use what that leaves. Compiled (types:
packing.pxd); interpreted, it does the same.

A job that comes first goes as fast as its slowest link lets it. On its other links it leaves
something, and the next job has that. So two orders differ in how much is sent in all, and not only
in who waits. F flows, J jobs, L links, C cells (see JobLinks).
"""

import numpy as np

from flowslot.policy.base import Floats, Rows
from flowslot.policy.fair_reference.fluid import meets
from flowslot.policy.job_links import JobLinks

COMPILED = not __file__.endswith(".py")

PACKS = 1.02
"""Jobs change places where that is worth so many times as much. Each change costs messages."""
REACH = 16
"""A job is compared with so many before it at most."""

# The same as C variables: packing.pxd declares them.
_packs, _reach = PACKS, REACH


def pack(cells: JobLinks, need: Floats, capacity: Floats, worth: Floats, order: Rows) -> None:
    """Change `order`, intp[N], of jobs: each goes before one that it meets if both together are
    worth more then. What serving a job is worth: `worth`, float64[J], by how long it takes to the
    end of its phase. `need`, float64[C]: bytes; `capacity`, float64[L + 1]."""
    room, speeds = np.array(capacity), np.zeros(len(worth))
    uses = np.zeros(cells.links, np.intp)
    for k in range(len(order)):
        job = order[k]
        mark(cells, need, job, uses, 1)
        at = i = k
        while i > 0 and k - i < _reach:
            other = order[i - 1]
            hand(cells, need, other, -speeds[other], room)
            if meets(cells, need, other, uses):
                behind = both(cells, need, worth, other, job, room)
                if both(cells, need, worth, job, other, room) <= _packs * behind:
                    hand(cells, need, other, speeds[other], room)
                    break
                at = i - 1
            i -= 1
        mark(cells, need, job, uses, 0)
        for m in range(k - at):
            order[k - m] = order[k - m - 1]
        order[at] = job
        for m in range(i, k + 1):
            speeds[order[m]] = speed(cells, need, order[m], room)
            hand(cells, need, order[m], speeds[order[m]], room)


def both(  # noqa: PLR0917
    cells: JobLinks, need: Floats, worth: Floats, first: int, then: int, room: Floats
) -> float:
    """What it is worth to serve two jobs in this order, on links with this `room`."""
    one = speed(cells, need, first, room)
    hand(cells, need, first, one, room)
    other = speed(cells, need, then, room)
    hand(cells, need, first, -one, room)
    value: float = worth[first] * one + worth[then] * other
    return value


def speed(cells: JobLinks, need: Floats, job: int, room: Floats) -> float:
    """Phases per second of a job that has all of this `room`."""
    seconds = cells.bottleneck(need, job, room, 1.0)
    return 1.0 / seconds if seconds > 0 else 0.0


def hand(cells: JobLinks, need: Floats, job: int, rate: float, room: Floats) -> None:
    """Take from `room` what a job uses at this speed; if that is negative, give it back."""
    for c in range(cells.start[job], cells.start[job + 1]):
        room[cells.link[c]] -= rate * need[c]


def mark(cells: JobLinks, need: Floats, job: int, uses: Rows, value: int) -> None:
    """Set `uses`, intp[L], to this on the links that a job needs."""
    for c in range(cells.start[job], cells.start[job + 1]):
        if need[c] > 0:
            uses[cells.link[c]] = value
