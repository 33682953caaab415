# SPDX-License-Identifier: Apache-2.0
# cython: infer_types=True
"""Loops over the flows of a simulated network, for whose sake this file is compiled.

Types: fluid.pxd. What is done is the same when it is not compiled. F flows, L links, P
dependencies. `paths` are int32[F, H], padded with L; arrays over links have L + 1 entries, of which
the last one has no bound. Bytes, payload bytes/s and seconds. `rows` is what `table` makes of
FLOW[F]; `live` are those that are active, intp[N], in their order. `small` are their paths, in a
numbering of their own of the M links that they cross, whose `capacity` is float64[M + 1].

Flow i forwards what its predecessors bring: in an iteration, unless p has sent all of it, i sends
at most `own[i]`, or `head[i]` and what p has sent where that is more. The predecessors of i are
`preds[first[i]:first[i + 1]]`. A flow may begin an iteration before all of the last one has
arrived: hosts are not in step.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowslot.policy.base import Floats, Paths, Rows
from flowslot.policy.fill import max_min

COMPILED = not __file__.endswith(".py")

FLOW = np.dtype(
    [
        ("active", np.bool_),  # not all of what it has begun has arrived
        ("size", np.float64),  # bytes per iteration
        ("begun", np.int64),  # iterations
        ("total", np.float64),  # bytes of these
        ("goal", np.float64),  # of those up to the first iteration that has not arrived
        ("sent", np.float64),  # bytes that have arrived
        ("holds", np.float64),  # bytes that its socket takes before they have arrived
        ("own", np.float64),  # of an iteration, that it has whatever its predecessors do
        ("head", np.float64),  # and those that it may be ahead of its predecessors
        ("reserved", np.float64),  # rate that it may send at whatever others do
        ("ceiling", np.float64),  # most that it may send at; what is between is shared max-min
        ("rate", np.float64),  # the result
        ("limit", np.float64),  # what its predecessors let it send at
        ("bound", np.bool_),  # it has nothing to send but what comes from them
    ]
)
FIRST_WINDOW, STARTED_WINDOW = 10, 80
"""Segments: TCP's first window; and that of a flow when it is paced for the first time, some
milliseconds after it has begun (measured)."""
TAKEN_BYTES = 2 * 2304
"""What a socket takes for each segment of the largest window that it has had: room for two of
them, with their headers (Linux, tcp_sndbuf_expand)."""
_inf = math.inf
_free, _fed, _dry = range(3)  # what `stage` says
_rounds = 12
"""Rates of flows that wait for each other are found by repetition, at most so many times."""
_near, _eps, _rounding = 1e-6, 1.0, 1e-9
"""Relative difference of rates, and bytes, that do not matter."""


def table(rows: NDArray[np.void]) -> Any:
    """FLOW[F] as the functions below want it."""
    return rows if COMPILED else rows.view(np.recarray)


def brought(rows: Any, i: int, p: int) -> float:
    """What predecessor p has came of the iteration that flow i has begun last; less than 0: p
    has not sent all of the one before."""
    came: float = rows[p].sent - (rows[i].begun - 1) * rows[p].size
    return came


def forwarded(rows: Any, i: int) -> float:
    """What has arrived of a flow in the iteration that it has begun last, likewise."""
    sent: float = rows[i].sent - (rows[i].total - rows[i].size)
    return sent


def stage(rows: Any, i: int, p: int) -> int:
    """What predecessor p means to flow i: `_free`, nothing now; `_fed`, what it sends goes on at
    once; `_dry`, it has to bring more before anything can go on."""
    came, own = brought(rows, i, p), max(rows[i].own, rows[i].head)
    if came >= rows[p].size - _eps:
        return _free
    if own > rows[i].head + came + _eps:
        return _dry if own - forwarded(rows, i) <= _eps else _free
    return _fed if rows[i].head + came - forwarded(rows, i) <= _eps else _free


def find_bound(rows: Any, live: Rows, first: Rows, preds: Rows) -> int:
    """Which flows have caught up with a predecessor: `bound`, and their first `limit`. Returns how
    many."""
    n = 0
    for j in range(len(live)):
        i = live[j]
        rows[i].bound, rows[i].limit = False, _inf
        for k in range(first[i], first[i + 1]):
            state = stage(rows, i, preds[k])
            if state != _free:
                rows[i].bound = True
            if state == _dry:
                rows[i].limit = 0.0
        n += rows[i].bound
    return n


def supply(rows: Any, first: Rows, preds: Rows, i: int) -> float:
    """Rate at which a bound flow is supplied: its slowest predecessor's, of those that bind it."""
    least = _inf
    for k in range(first[i], first[i + 1]):
        state = stage(rows, i, preds[k])
        if state == _dry:
            return 0.0
        if state == _fed:
            least = min(least, rows[preds[k]].rate)
    return least


def follow(rows: Any, live: Rows, first: Rows, preds: Rows) -> bool:
    """Let the limits of bound flows follow their predecessors' rates; True: some have changed."""
    changed = False
    for j in range(len(live)):
        i = live[j]
        if rows[i].bound:
            least = supply(rows, first, preds, i)
            too_fast = rows[i].rate > least * (1 + _near)
            held_up = rows[i].limit < least * (1 - _near) and (
                rows[i].rate >= rows[i].limit * (1 - _near)
            )
            if too_fast or held_up:
                rows[i].limit = least
                changed = True
    return changed


def allot(rows: Any, live: Rows, small: Paths, capacity: Floats, work: Floats) -> None:
    """Rates within the limits: what is reserved, then the rest max-min up to the ceilings.

    Reservations that do not fit are cut max-min. `work`: float64[3, at least N and M + 1].
    """
    most, got, left = work[0, : len(live)], work[1, : len(live)], work[2, : len(capacity)]
    reserved = False
    for k in range(len(live)):
        i = live[k]
        most[k], got[k] = min(rows[i].reserved, rows[i].limit), 0.0
        reserved = reserved or most[k] > 0
    if reserved:
        max_min(small, capacity, most, got)
    for link in range(len(capacity)):
        left[link] = capacity[link]
    for k in range(len(live)):
        i = live[k]
        rows[i].rate = got[k]
        most[k] = max(min(rows[i].ceiling, rows[i].limit) - got[k], 0.0)
        for h in range(small.shape[1]):
            left[small[k, h]] -= got[k]
    for k in range(len(live)):
        for h in range(small.shape[1]):
            link = small[k, h]
            if link < len(capacity) - 1 and left[link] <= _rounding * capacity[link]:
                most[k] = 0.0
    max_min(small, left, most, got)
    for k in range(len(live)):
        rows[live[k]].rate += got[k]


def share(  # noqa: PLR0917
    rows: Any, live: Rows, small: Paths, capacity: Floats, first: Rows, preds: Rows, work: Floats
) -> None:
    """Find all rates, so that flows without anything of their own follow their predecessors."""
    bound = find_bound(rows, live, first, preds)
    allot(rows, live, small, capacity, work)
    if not bound:
        return
    for _ in range(_rounds):
        if not follow(rows, live, first, preds):
            break
        allot(rows, live, small, capacity, work)
    changed = True
    while changed:  # where that did not settle, nobody runs ahead all the same
        changed = False
        for j in range(len(live)):
            i = live[j]
            if rows[i].bound:
                least = supply(rows, first, preds, i)
                if rows[i].rate > least:
                    rows[i].rate, changed = least, True


def until_next(rows: Any, live: Rows, first: Rows, preds: Rows) -> float:
    """Seconds until an iteration of a flow has arrived, or its socket has taken all; until it
    catches up with a predecessor, or gets its first bytes from one; inf: never, at these rates."""
    soonest: float = _inf
    for j in range(len(live)):
        i = live[j]
        rate, own = rows[i].rate, max(rows[i].own, rows[i].head)
        if rate > 0:
            soonest = min(soonest, (rows[i].goal - rows[i].sent) / rate)
            lack = rows[i].total - rows[i].holds - rows[i].sent
            if lack > _eps:
                soonest = min(soonest, lack / rate)
        for k in range(first[i], first[i + 1]):
            p = preds[k]
            came = brought(rows, i, p)
            if came >= rows[p].size - _eps:
                continue
            lack = own - rows[i].head - came
            if lack > _eps:
                gap = own - forwarded(rows, i)
                if gap > _eps and rate > 0:
                    soonest = min(soonest, gap / rate)
                elif gap <= _eps and rows[p].rate > 0:
                    soonest = min(soonest, lack / rows[p].rate)
            else:
                gap = rows[i].head + came - forwarded(rows, i)
                if gap > _eps and rate > rows[p].rate:
                    soonest = min(soonest, gap / (rate - rows[p].rate))
    return soonest


def advance(  # noqa: PLR0917
    rows: Any, live: Rows, seconds: float, paths: Paths, carried: Floats, at: Rows
) -> int:
    """So much time passes. Of how many flows an iteration has arrived; which, in `at`, intp[F].
    `carried`, float64[L + 1]: bytes by link, added to."""
    for j in range(len(live)):
        i = live[j]
        if rows[i].rate > 0:
            sent = min(rows[i].rate * seconds, rows[i].total - rows[i].sent)
            rows[i].sent += sent
            for h in range(paths.shape[1]):
                carried[paths[i, h]] += sent
    return arrive(rows, live, at)


def arrive(rows: Any, live: Rows, at: Rows) -> int:
    """See `advance`. Flows of which all has arrived are not active any more."""
    n = 0
    for j in range(len(live)):
        i = live[j]
        if rows[i].goal - rows[i].sent <= _eps:
            at[n] = i
            n += 1
    for k in range(n):  # only now: all that end at this moment end together
        i = at[k]
        if rows[i].goal < rows[i].total:
            rows[i].goal += rows[i].size
        else:
            rows[i].active, rows[i].sent = False, rows[i].total
            rows[i].rate, rows[i].limit, rows[i].bound = 0.0, 0.0, False
    return n
