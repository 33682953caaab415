# SPDX-License-Identifier: Apache-2.0
# cython: infer_types=True
"""Jobs that are served one after the other, each as a gang: all of its flows end together.

F flows, L links, J jobs. `paths` are int32[F, H], padded with L; arrays over links have L + 1
entries, the last one of which counts for nothing. Bytes, bytes/s. Compiled (gangs.pxd).
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from flowslot.policy.base import AllocationState, Floats, Paths, Rows
from flowslot.policy.fill import weighted

COMPILED = not __file__.endswith(".py")

_inf = math.inf  # as a C variable: gangs.pxd declares it


def can_send(state: AllocationState) -> Floats:
    """Bytes left of each flow that can send now, float64[F]; 0 of the others."""
    return np.where((state.remaining > 0) & (state.cap > 0), state.remaining, 0.0)


def seconds_alone(state: AllocationState, paths: Paths) -> Floats:
    """What each job needs for what is left on its slowest link, by itself, s, float64[J]."""
    jobs = len(state.job_names)
    rows, starts = by_job(state, np.arange(jobs))
    seconds = np.zeros(jobs)
    time_gangs(paths, rows, starts, can_send(state), state.capacity, seconds)
    return seconds


def in_turns(state: AllocationState, paths: Paths, key: Floats) -> Floats:
    """Rates, float64[F], on links of `paths`: gang by gang, the least of `key`, float64[J], first,
    ties by name; what that leaves is shared max-min. No more than a flow can use."""
    names: Sequence[str] = state.job_names
    values: list[float] = key.tolist()
    order = np.array(sorted(range(len(names)), key=lambda j: (values[j], names[j])), np.intp)
    rows, starts = by_job(state, order)
    left, rates = np.maximum(state.capacity, 0.0), np.zeros(len(state.remaining))
    serve(paths, rows, starts, can_send(state), state.cap, left, rates)
    more = np.zeros(len(rates))
    most = np.where(state.remaining > 0, state.cap - rates, 0.0)
    weighted(paths, left, most, state.sockets, more)
    return rates + more


def by_job(state: AllocationState, order: Rows) -> tuple[Rows, Rows]:
    """All flows, intp[F], those of each job side by side, jobs in this order; and where each job
    begins, intp[J + 1]."""
    rank = np.empty(len(order), np.intp)
    rank[order] = np.arange(len(order))
    place = rank[state.job]
    rows: Rows = np.argsort(place, kind="stable")
    return rows, np.searchsorted(place[rows], np.arange(len(order) + 1)).astype(np.intp)


def time_gangs(  # noqa: PLR0917
    paths: Any, rows: Any, starts: Any, volume: Any, room: Any, seconds: Any
) -> None:
    """Set `seconds` of each gang: what its bytes need on its slowest link, with so much room."""
    need = np.zeros(len(room))
    for g in range(len(starts) - 1):
        seconds[g] = slowest(paths, rows[starts[g] : starts[g + 1]], volume, room, need)


def serve(  # noqa: PLR0917
    paths: Any, rows: Any, starts: Any, volume: Any, cap: Any, left: Any, rates: Any
) -> None:
    """Gang after gang takes what it can of `left`. One for which a link has nothing left gets
    nothing."""
    need, last = np.zeros(len(left)), len(left) - 1
    for g in range(len(starts) - 1):
        gang = rows[starts[g] : starts[g + 1]]
        seconds = slowest(paths, gang, volume, left, need)
        if 0.0 < seconds < _inf:
            for k in range(len(gang)):
                i = gang[k]
                rates[i] = min(volume[i] / seconds, cap[i])
                for h in range(paths.shape[1]):
                    link = paths[i, h]
                    if link < last:
                        left[link] = max(left[link] - rates[i], 0.0)


def slowest(paths: Any, gang: Any, volume: Any, room: Any, need: Any) -> float:
    """Seconds of one gang; `need`, float64[L + 1], is 0 before and after."""
    last, seconds = len(room) - 1, 0.0
    for k in range(len(gang)):
        for h in range(paths.shape[1]):
            need[paths[gang[k], h]] += volume[gang[k]]
    for k in range(len(gang)):
        for h in range(paths.shape[1]):
            link = paths[gang[k], h]
            if link < last and need[link] > 0.0:
                each = need[link] / room[link] if room[link] > 0.0 else _inf
                seconds = max(seconds, each)
    for k in range(len(gang)):
        for h in range(paths.shape[1]):
            need[paths[gang[k], h]] = 0.0
    return seconds
