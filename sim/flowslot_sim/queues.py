# SPDX-License-Identifier: Apache-2.0
# cython: infer_types=True
"""Links with queues, and kernels that pace: what bpf/rate.h lets flows send, in small steps.

Compiled (types: queues.pxd); interpreted, the same. `rows` are fluid.FLOW[F], `kernel` KERNEL[F],
`live` the flows that are active; paths, links, `first` and `preds` as in fluid.py. `hops`,
int32[N, 4]: link, flow, the flow's next hop (-1: none), and whether this is its first, of all hops;
by link, and links in an order in which bytes cross them. Bytes, payload bytes/s, s.

In a step a flow sends what its pace allows of what it has. What comes to a link in one step is a
batch there; batches leave in order. What does not fit into the buffer is lost, and sent again.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowslot.model.top_up import (
    AHEAD_BYTES,
    BURST_PART,
    EPOCH_S,
    GAP_S,
    LEAST_RTT_S,
    LEAST_WINDOW,
    REFILL_S,
    SEGMENT_BYTES,
)
from flowslot.policy.base import Floats, Paths, Rows
from flowslot_sim.fluid import TAKEN_BYTES, arrive, brought

COMPILED = not __file__.endswith(".py")

KERNEL = np.dtype(
    [
        ("limited", np.bool_),  # else it is ordinary TCP, which fills its first link
        ("most", np.float64),  # rate that it never exceeds
        ("growth", np.float64),  # of its extra with no queue, bytes/s in a second
        ("burst", np.float64),  # bytes that its bucket holds
        ("least", np.float64),  # rate: a lower one becomes this one
        ("buffer", np.float64),  # s: its path's smallest buffer lasts, see top_up.py
        ("longest", np.float64),  # s: the queue at which its top-up is given up
        ("extra", np.float64),  # rate
        ("paced", np.float64),  # rate that it may send at now, with bursts
        ("credit", np.float64),  # bytes in its bucket; less than 0: it is ahead
        ("wait", np.float64),  # least time in queues in this epoch, s; inf: not seen
        ("wait_before", np.float64),  # and in the one before
        ("epoch", np.float64),  # when this one began
        ("has", np.float64),  # bytes that it could send
        ("sends", np.float64),  # and those that it does
        ("way", np.float64),  # bytes that it has sent and that have not arrived
        ("near", np.float64),  # of them, those in front of its first link
        ("idle", np.float64),  # since when nothing of it is on the way; inf: something is
    ]
)
QUEUE = np.dtype(
    [
        ("buffer", np.float64),  # bytes
        ("waiting", np.float64),  # bytes in front of a link
        ("head", np.int64),  # the first of its batches
        ("count", np.int64),  # of them
        ("reserved", np.float64),  # for flows that begin here and have something to send, rate
    ]
)
SMALL_QUEUE_S = 1 / 1024
"""TCP small queues: a socket hands so much of its rate to its own host's port, and two segments at
least; the rest waits in the socket (Linux, tcp_small_queue_check)."""
_inf = math.inf
_eps = 1.0
_least_rtt, _least_window, _taken = LEAST_RTT_S, float(LEAST_WINDOW), float(TAKEN_BYTES)
_burst_part = BURST_PART
_small = SMALL_QUEUE_S
_epoch, _gap, _refill = EPOCH_S, GAP_S, REFILL_S
_ahead, _segment = float(AHEAD_BYTES), float(SEGMENT_BYTES)


def table(kernel: NDArray[np.void]) -> Any:
    """KERNEL[F] as the functions below want it."""
    return kernel if COMPILED else kernel.view(np.recarray)


def step(  # noqa: PLR0917
    rows: Any,
    kernel: Any,
    live: Rows,
    paths: Paths,
    capacity: Floats,
    supply: tuple[Rows, Rows],
    line: Any,
    hops: Paths,
    coming: Floats,
    batches: Floats,
    sums: Floats,
    carried: Floats,
    now: float,
    seconds: float,
    at: Rows,
) -> int:
    """So much time passes, up to `now`. Of how many flows an iteration has arrived; which, in `at`,
    intp[F].

    `supply`: first, preds. `line`: QUEUE[L + 1]. `coming`, float64[N]: zeros. `batches`,
    float64[N, K]: bytes of each hop in each batch of its link; `sums`, float64[L + 1, K], of all.
    `carried`, float64[L + 1]: bytes by link, added to.
    """
    first, preds = supply
    claim(rows, kernel, live, paths, first, preds, line)
    for j in range(len(live)):
        i = live[j]
        up = paths[i, 0]
        may = pace(rows, kernel, i, capacity[up], line[up].reserved, now, seconds)
        kernel[i].sends = min(may, kernel[i].has)
        kernel[i].way += kernel[i].sends
    n = 0
    while n < len(hops):
        end = n
        while end < len(hops) and hops[end, 0] == hops[n, 0]:
            if hops[end, 3]:
                coming[end] = kernel[hops[end, 1]].sends
                kernel[hops[end, 1]].near += coming[end]
                kernel[hops[end, 1]].sends = 0.0
            end += 1
        come(kernel, line, hops, coming, batches, sums, n, end, capacity[hops[n, 0]] * seconds)
        go(rows, kernel, line, hops, coming, batches, sums, carried, n, end, capacity, seconds)
        n = end
    for j in range(len(live)):
        i = live[j]
        wait = 0.0
        for h in range(paths.shape[1]):
            wait += line[paths[i, h]].waiting / capacity[paths[i, h]]
        kernel[i].has = ready(rows, kernel, first, preds, i)
        # It waits for its predecessors, not for a link.
        rows[i].bound, rows[i].limit = kernel[i].has <= _eps and kernel[i].way <= _eps, 0.0
        steer(rows, kernel, i, wait, now, seconds)
        rows[i].rate /= seconds
    n = arrive(rows, live, at)
    for k in range(n):
        i = at[k]
        if not rows[i].active:
            kernel[i].way, kernel[i].near, kernel[i].idle = 0.0, 0.0, now
    return n


def claim(  # noqa: PLR0917
    rows: Any, kernel: Any, live: Rows, paths: Paths, first: Rows, preds: Rows, line: Any
) -> None:
    """Find what flows have to send, and what is reserved for them on their first links."""
    for j in range(len(live)):
        line[paths[live[j], 0]].reserved = 0.0
    for j in range(len(live)):
        i = live[j]
        rows[i].rate = 0.0
        kernel[i].has = ready(rows, kernel, first, preds, i)
        if kernel[i].limited and kernel[i].has > _eps:
            line[paths[i, 0]].reserved += rows[i].reserved


def come(  # noqa: PLR0917
    kernel: Any,
    line: Any,
    hops: Paths,
    coming: Floats,
    batches: Floats,
    sums: Floats,
    n: int,
    end: int,
    room: float,
) -> None:
    """What comes to the link of the hops from n to `end` is its last batch; `room`: bytes that it
    carries in this step."""
    link, size = hops[n, 0], 0.0
    for k in range(n, end):
        size += coming[k]
    if size <= 0:
        return
    space = line[link].buffer + room - line[link].waiting
    part = 1.0 if size <= space else max(space, 0.0) / size
    if line[link].count < batches.shape[1]:
        line[link].count += 1
        c = (line[link].head + line[link].count - 1) % batches.shape[1]
        sums[link, c] = 0.0
        for k in range(n, end):
            batches[k, c] = 0.0
    c = (line[link].head + line[link].count - 1) % batches.shape[1]
    for k in range(n, end):
        batches[k, c] += coming[k] * part
        kernel[hops[k, 1]].way -= coming[k] * (1.0 - part)
        if hops[k, 3]:
            kernel[hops[k, 1]].near -= coming[k] * (1.0 - part)
        coming[k] = 0.0
    sums[link, c] += size * part
    line[link].waiting += size * part


def go(  # noqa: PLR0917
    rows: Any,
    kernel: Any,
    line: Any,
    hops: Paths,
    coming: Floats,
    batches: Floats,
    sums: Floats,
    carried: Floats,
    n: int,
    end: int,
    capacity: Floats,
    seconds: float,
) -> None:
    """What the link of the hops from n to `end` carries comes to the next links, or has arrived."""
    link = hops[n, 0]
    room = capacity[link] * seconds
    while line[link].count > 0 and room > 0:
        c = line[link].head
        part = 1.0 if sums[link, c] <= room else room / sums[link, c]
        for k in range(n, end):
            goes = batches[k, c] * part
            batches[k, c] -= goes
            if hops[k, 3]:
                kernel[hops[k, 1]].near = max(kernel[hops[k, 1]].near - goes, 0.0)
            if hops[k, 2] >= 0:
                coming[hops[k, 2]] += goes
            else:
                rows[hops[k, 1]].sent += goes
                rows[hops[k, 1]].rate += goes
                kernel[hops[k, 1]].way -= goes
        goes = sums[link, c] * part
        carried[link] += goes
        line[link].waiting -= goes
        room -= goes
        sums[link, c] -= goes
        if part >= 1.0:
            line[link].head = (c + 1) % batches.shape[1]
            line[link].count -= 1
        else:
            room = 0.0
    if line[link].count == 0:
        line[link].waiting = 0.0


def ready(rows: Any, kernel: Any, first: Rows, preds: Rows, i: int) -> float:
    """Bytes that a flow has and has not sent: its own, and what has come."""
    most, before = rows[i].total, rows[i].total - rows[i].size
    for k in range(first[i], first[i + 1]):
        p = preds[k]
        came = brought(rows, i, p)
        if came < rows[p].size - _eps:
            part, came = rows[i].own - rows[i].head, max(came, 0.0) + _eps
            if part > 0:  # what comes goes on in parts of this size
                whole = int(came / part)
                came = whole * part if whole else 0.0  # a part may be infinite
            most = min(most, before + rows[i].own + came)
    return float(max(most - rows[i].sent - kernel[i].way, 0.0))


def pace(  # noqa: PLR0917
    rows: Any, kernel: Any, i: int, line: float, taken: float, now: float, seconds: float
) -> float:
    """Bytes that a flow may send now. `line`: what its first link carries; `taken`: of that, what
    is reserved for flows that have something to send, this one too."""
    if kernel[i].has > _eps and kernel[i].idle < _inf:
        wake(kernel, i, now)
    if not kernel[i].limited:
        return line * seconds
    reserved = rows[i].reserved
    most = max(min(kernel[i].most, line - taken + reserved), reserved)
    kernel[i].extra = min(kernel[i].extra, most - reserved)
    may = (reserved + kernel[i].extra) * seconds + max(kernel[i].credit, 0.0)
    may = max(min(may, most * seconds), kernel[i].least * seconds)
    rate = reserved + kernel[i].extra
    if kernel[i].credit >= _segment:
        rate = most
    kernel[i].paced = rate
    near = max(rate * _small, 2 * _segment)
    may = min(may, max(near - kernel[i].near, 0.0))
    credit = kernel[i].credit + reserved * seconds - min(may, kernel[i].has)
    kernel[i].credit = max(min(credit, kernel[i].burst), -_ahead)
    return float(may)


def wake(kernel: Any, i: int, now: float) -> None:
    """A flow sends again: the queue that its extra was fit for is history, its bucket fills."""
    gap = now - kernel[i].idle
    if gap > _gap:
        kernel[i].extra = 0.0
    if kernel[i].credit < kernel[i].burst:
        kernel[i].credit += (kernel[i].burst - kernel[i].credit) * min(gap / _refill, 1.0)
    kernel[i].wait = kernel[i].wait_before = _inf
    kernel[i].idle = _inf


def steer(  # noqa: PLR0917
    rows: Any, kernel: Any, i: int, wait: float, now: float, seconds: float
) -> None:
    """Top-up: while a flow has more to send than it may, its extra grows, the slower the longer
    queues are; when they are too long, it is gone at once, and so is its bucket when they are much
    too long. `wait`: in them, seconds."""
    if now - kernel[i].epoch > _epoch:
        kernel[i].wait_before = kernel[i].wait
        kernel[i].wait, kernel[i].epoch = _inf, now
    kernel[i].wait = min(kernel[i].wait, wait)
    least = min(kernel[i].wait, kernel[i].wait_before)
    if kernel[i].has <= _eps and kernel[i].way <= _eps and kernel[i].idle == _inf:
        kernel[i].idle = now
    hold(rows, kernel, i, 0.0 if least == _inf else least)
    if least > _burst_part * kernel[i].buffer:
        kernel[i].credit = min(kernel[i].credit, 0.0)
    slower = least / max(kernel[i].longest, 1e-6)
    if slower > 1.0:
        kernel[i].extra = 0.0
    elif kernel[i].has > _segment:
        room = max(kernel[i].most - rows[i].reserved, 0.0)
        up = kernel[i].growth * (1.0 - slower) * seconds
        kernel[i].extra = min(kernel[i].extra + up, room)


def hold(rows: Any, kernel: Any, i: int, wait: float) -> None:
    """A socket takes the more ahead, the larger its window has been, as far as that is paced."""
    if not kernel[i].limited:
        return
    rtt = max(wait, _least_rtt)
    window = _least_window + kernel[i].paced * (rtt + max(rtt / 4, _least_rtt)) / _segment
    rows[i].holds = max(rows[i].holds, _taken * window)
