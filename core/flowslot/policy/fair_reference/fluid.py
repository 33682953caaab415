# SPDX-License-Identifier: Apache-2.0
"""The virtual run from event to event, for whose sake this file is compiled (types: fluid.pxd).

What is done is the same when it is not compiled. F flows, G groups of flows, J jobs, L links;
arrays over links have L + 1 entries, of which the last one counts for nothing. `paths`,
int32[G, H], padded with L; `need`, float64[J, L + 1]: bytes per iteration; `jobs` and `groups` are
what `table` makes of JOB[J] and GROUP[G]. Times are ns, rates payload bytes/s.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

COMPILED = not __file__.endswith(".py")

JOB = np.dtype(
    [
        ("runs", np.bool_),  # enough is known of it
        ("lead", np.int64),  # iterations that its virtual self has ended more than it has
        ("sends", np.bool_),  # its virtual self does, or else it computes
        ("under_way", np.int64),  # groups that have not sent all of the virtual iteration
        ("until", np.float64),  # when the virtual computation ends
        ("compute", np.float64),  # ns from the end of its communication to the next one's beginning
        ("active", np.bool_),  # its real self sends
        ("ended_at", np.float64),  # when that has ended to send; NaN: never
    ]
)
GROUP = np.dtype(
    [
        ("job", np.int64),
        ("bytes", np.float64),  # of an iteration
        ("weight", np.float64),  # so much faster than others it may be
        ("left", np.float64),  # part of the virtual iteration that is left
        ("speed", np.float64),  # part of it that is sent per ns
    ]
)
"""Flows of a job that take the same path."""
MOST_WORK = 1_000_000
"""Visits to groups on links, from one look to the next: some milliseconds. After more, what is left
of the time is left out: many tiny virtual iterations are not worth what they cost."""
PAUSE, PAUSE_NS = 3.0, 100e6
"""A job that computes for so many times longer than usual, and by so much, has paused: that is none
of our doing, and its virtual self begins anew together with it."""
LEAST_NS = 100e3
"""No virtual computation is shorter: thousands of virtual iterations between two looks say
nothing."""
SMOOTHING = 0.25
"""Weight of the latest observation in a job's computation time."""

# The same as C variables: fluid.pxd declares them.
_most_work, _inf, _second, _rounding = MOST_WORK, math.inf, 1e9, 1e-9
_pause, _pause_ns, _least_ns, _smoothing = PAUSE, PAUSE_NS, LEAST_NS, SMOOTHING


def table(rows: NDArray[np.void]) -> Any:
    """JOB[J] or GROUP[G] as the functions below want it."""
    return rows if COMPILED else rows.view(np.recarray)


def add_up(groups: Any, paths: NDArray[np.int32], need: NDArray[np.float64]) -> None:
    """Bytes per iteration of each job on each link: `need`, zero before."""
    for g in range(len(groups)):
        for h in range(paths.shape[1]):
            need[groups[g].job, paths[g, h]] += groups[g].bytes


def see(  # noqa: PLR0917
    now: float, jobs: Any, groups: Any, need: Any, job: Any, remaining: Any, wait: Any, idle: Any
) -> None:
    """Whose real communication has begun or ended since the last look.

    `job`, int64[F], and `remaining`, `wait` and `idle`, float64[F], as in AllocationState.
    """
    work = np.zeros((3, len(jobs)))
    sends, waits, idles = work[0], work[1], work[2]
    for j in range(len(jobs)):
        idles[j] = _inf
    for i in range(len(job)):
        j = job[i]
        idles[j] = min(idles[j], idle[i])
        if remaining[i] > 0:
            waits[j] = max(waits[j], wait[i]) if sends[j] else wait[i]
            sends[j] = 1.0
    for j in range(len(jobs)):
        if sends[j] and not jobs[j].active:
            jobs[j].active = True
            begin_anew(jobs, groups, j, now - waits[j])
            forgive(jobs, groups, j, need)
        elif jobs[j].active and not sends[j]:
            jobs[j].active = False
            jobs[j].ended_at = now - idles[j] if idles[j] < _inf else now
            jobs[j].lead -= 1


def begin_anew(jobs: Any, groups: Any, j: int, at: float) -> None:
    """A job's real communication has begun: how long has it computed?"""
    if math.isnan(jobs[j].ended_at):
        return
    took = max(at - jobs[j].ended_at, _least_ns)
    if jobs[j].runs and took > _pause * jobs[j].compute + _pause_ns:
        restart(jobs, groups, j)
    elif jobs[j].runs:
        jobs[j].compute += (took - jobs[j].compute) * _smoothing
    else:
        # Known from now on: its virtual self begins together with it.
        jobs[j].runs, jobs[j].compute = True, took
        restart(jobs, groups, j)


def forgive(jobs: Any, groups: Any, j: int, need: Any) -> None:
    """Where everybody is late, nobody can be helped: all would have their fair shares for ever,
    and never take turns again. Such a job begins anew together with its virtual self."""
    if jobs[j].lead <= 0:
        return
    others = 0
    for k in range(len(jobs)):
        if jobs[k].runs and meet(need, j, k):
            if jobs[k].lead <= 0:
                return
            others += 1
    if others > 1:
        restart(jobs, groups, j)


def restart(jobs: Any, groups: Any, j: int) -> None:
    """A job's virtual self begins an iteration together with the real one."""
    jobs[j].lead = 0
    start(jobs, groups, j)


def meet(need: Any, j: int, k: int) -> bool:
    """Whether two jobs use the same link."""
    for link in range(need.shape[1] - 1):  # noqa: SIM110 (a generator is not compiled to a loop)
        if need[j, link] > 0 and need[k, link] > 0:
            return True
    return False


def run(  # noqa: PLR0917
    begin: float, end: float, jobs: Any, groups: Any, paths: Any, goodput: NDArray[np.float64]
) -> None:
    """Go on from one time to another: somebody has sent everything, or has computed."""
    work, rows = np.zeros((2, len(goodput))), np.zeros((2, len(groups)), np.intp)
    now, left, stale, n = begin, float(_most_work), True, 0
    count(jobs, groups, now)
    while now < end and left > 0:
        if stale:
            n = find_sending(jobs, groups, rows[0])
            left -= find_speeds(groups, paths, goodput, rows[0][:n], rows[1], work)
        step = until_next(jobs, groups, rows[0][:n], now, end - now)
        now += step
        stale = send(jobs, groups, rows[0][:n], now, step)
        for j in range(len(jobs)):
            if jobs[j].runs and not jobs[j].sends and now >= jobs[j].until:
                start(jobs, groups, j)
                left -= len(groups)
                stale = True
        left -= n + len(jobs)


def count(jobs: Any, groups: Any, now: float) -> None:
    """Flows have come and gone: what is each job's virtual self sending?"""
    known = np.zeros(len(jobs), np.intp)
    for j in range(len(jobs)):
        jobs[j].under_way = 0
    for g in range(len(groups)):
        if groups[g].bytes > 0:
            known[groups[g].job] += 1
            jobs[groups[g].job].under_way += groups[g].left > 0
    for j in range(len(jobs)):
        # A job all of whose flows have gone stands still.
        if jobs[j].sends and jobs[j].under_way == 0 and known[j] > 0:
            end_iteration(jobs, j, now)


def until_next(jobs: Any, groups: Any, sending: Any, now: float, most: float) -> float:
    """In how many ns the first group has sent all, or the first job begins; at most `most`."""
    step = most
    for k in range(len(sending)):
        g = sending[k]
        if groups[g].speed > 0:
            step = min(step, groups[g].left / groups[g].speed)
    for j in range(len(jobs)):
        if jobs[j].runs and not jobs[j].sends:
            step = min(step, max(jobs[j].until - now, 0.0))
    return step


def send(jobs: Any, groups: Any, sending: Any, now: float, step: float) -> bool:
    """All groups have sent for so long; True: one of them has nothing left."""
    ended = False
    for k in range(len(sending)):
        g = sending[k]
        groups[g].left -= step * groups[g].speed
        if groups[g].left <= _rounding:
            groups[g].left, ended, j = 0.0, True, groups[g].job
            jobs[j].under_way -= 1
            if jobs[j].under_way == 0:
                end_iteration(jobs, j, now)
    return ended


def end_iteration(jobs: Any, j: int, now: float) -> None:
    """A virtual job has sent everything, and computes."""
    jobs[j].sends, jobs[j].until = False, now + jobs[j].compute
    jobs[j].lead += 1


def start(jobs: Any, groups: Any, j: int) -> None:
    """A virtual job begins to send."""
    jobs[j].sends, jobs[j].under_way = True, 0
    for g in range(len(groups)):
        if groups[g].job == j:
            # Also where it is not known yet how much: the job waits for that.
            groups[g].left = 1.0
            jobs[j].under_way += groups[g].bytes > 0


def find_sending(jobs: Any, groups: Any, sending: Any) -> int:
    """Put the groups that have something to send into `sending`, intp[G]; how many they are."""
    n = 0
    for g in range(len(groups)):
        j = groups[g].job
        if jobs[j].runs and jobs[j].sends and groups[g].left > 0 and groups[g].bytes > 0:
            sending[n] = g
            n += 1
    return n


def find_speeds(  # noqa: PLR0917
    groups: Any, paths: Any, goodput: Any, sending: Any, rising: Any, work: Any
) -> int:
    """Progressive filling: the rates of all groups grow, each by its weight, until a link of theirs
    is full. Returns how many visits to groups on links it took.

    `rising`, intp[G], and `work`, float64[2, L + 1], are for its own use.
    """
    left, wish, n, level, visits = work[0], work[1], len(sending), 0.0, 0
    for link in range(len(goodput)):
        left[link] = goodput[link]
    for k in range(n):
        rising[k] = sending[k]
    while n:
        visits += 2 * n * paths.shape[1] + 3 * len(goodput)
        add_wishes(groups, paths, rising[:n], wish)
        step = _inf
        for link in range(len(goodput) - 1):
            if wish[link] > 0:
                step = min(step, left[link] / wish[link])
        level += step
        for link in range(len(goodput) - 1):
            left[link] = max(left[link] - step * wish[link], 0.0)
        n = settle(groups, paths, goodput, rising[:n], left, level)
    return visits


def add_wishes(groups: Any, paths: Any, rising: Any, wish: Any) -> None:
    """How much of each link is used for each byte/s of growth: `wish`, float64[L + 1]."""
    for link in range(len(wish)):
        wish[link] = 0.0
    for k in range(len(rising)):
        for h in range(paths.shape[1]):
            wish[paths[rising[k], h]] += groups[rising[k]].weight


def settle(  # noqa: PLR0917
    groups: Any, paths: Any, goodput: Any, rising: Any, left: Any, level: float
) -> int:
    """Groups that cross a full link have the rate `level`, times their weights. The others move to
    the front; how many they are."""
    others = 0
    for k in range(len(rising)):
        g = rising[k]
        if crosses_full(paths, g, goodput, left):
            groups[g].speed = level * groups[g].weight / groups[g].bytes / _second
        else:
            rising[others] = g
            others += 1
    return others


def crosses_full(paths: Any, g: int, goodput: Any, left: Any) -> bool:
    """A link on the path of group `g` has nothing left."""
    last = len(goodput) - 1
    for h in range(paths.shape[1]):
        link = paths[g, h]
        if link < last and left[link] <= _rounding * goodput[link]:
            return True
    return False
