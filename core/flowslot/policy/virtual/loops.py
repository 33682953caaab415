# SPDX-License-Identifier: Apache-2.0
"""The virtual run from event to event, for whose sake this file is compiled (types: loops.pxd).

What is done is the same when it is not compiled. F flows, J jobs, L links; arrays over links have
L + 1 entries, of which the last one counts for nothing. `need`, float64[J, L + 1]: bytes per
iteration; `jobs` is what `table` makes of JOB[J]. Times are ns, rates payload bytes/s.
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
        ("left", np.float64),  # part of the virtual communication that is left; 0: it computes
        ("until", np.float64),  # when the virtual computation ends
        ("compute", np.float64),  # ns from the end of its communication to the next one's beginning
        ("weight", np.float64),  # so much faster than others it may be
        ("most", np.float64),  # bytes on its busiest link
        ("speed", np.float64),  # part of its communication that it does per ns
        ("active", np.bool_),  # its real self sends
        ("ended_at", np.float64),  # when that has ended to send; NaN: never
    ]
)
MOST_STEPS = 1000
"""Virtual events from one look to the next; after more, what is left of the time is left out."""
PAUSE, PAUSE_NS = 3.0, 100e6
"""A job that computes for so many times longer than usual, and by so much, has paused: that is none
of our doing, and its virtual self begins anew together with it."""
LEAST_NS = 100e3
"""No virtual computation is shorter: thousands of virtual iterations between two looks say
nothing."""
SMOOTHING = 0.25
"""Weight of the latest observation in a job's computation time."""

# The same as C variables: loops.pxd declares them.
_most_steps, _inf, _second, _rounding = MOST_STEPS, math.inf, 1e9, 1e-9
_pause, _pause_ns, _least_ns, _smoothing = PAUSE, PAUSE_NS, LEAST_NS, SMOOTHING


def table(jobs: NDArray[np.void]) -> Any:
    """JOB[J] as the functions below want it."""
    return jobs if COMPILED else jobs.view(np.recarray)


def add_up(
    paths: NDArray[np.int32],
    job: NDArray[np.int64],
    volume: NDArray[np.float64],
    need: NDArray[np.float64],
    flows: NDArray[np.float64],
) -> None:
    """Bytes per iteration of each job on each link, from those of its flows, and how many flows:
    `need` and `flows`, zero before. `paths`, int32[F, H], padded with L."""
    for i in range(len(job)):
        if volume[i] > 0:
            for h in range(paths.shape[1]):
                need[job[i], paths[i, h]] += volume[i]
                flows[job[i], paths[i, h]] += 1.0


def see(  # noqa: PLR0917
    now: float, jobs: Any, need: Any, job: Any, remaining: Any, wait: Any, idle: Any
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
            begin_anew(jobs, j, now - waits[j])
            forgive(jobs, j, need)
        elif jobs[j].active and not sends[j]:
            jobs[j].active = False
            jobs[j].ended_at = now - idles[j] if idles[j] < _inf else now
            jobs[j].lead -= 1


def begin_anew(jobs: Any, j: int, at: float) -> None:
    """A job's real communication has begun: how long has it computed?"""
    if math.isnan(jobs[j].ended_at):
        return
    took = max(at - jobs[j].ended_at, _least_ns)
    if jobs[j].runs and took > _pause * jobs[j].compute + _pause_ns:
        jobs[j].lead, jobs[j].left = 0, 1.0
    elif jobs[j].runs:
        jobs[j].compute += (took - jobs[j].compute) * _smoothing
    else:
        # Known from now on: its virtual self begins together with it.
        jobs[j].runs, jobs[j].compute, jobs[j].lead, jobs[j].left = True, took, 0, 1.0


def forgive(jobs: Any, j: int, need: Any) -> None:
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
        jobs[j].lead, jobs[j].left = 0, 1.0


def meet(need: Any, j: int, k: int) -> bool:
    """Whether two jobs use the same link."""
    for link in range(need.shape[1] - 1):  # noqa: SIM110 (a generator is not compiled to a loop)
        if need[j, link] > 0 and need[k, link] > 0:
            return True
    return False


def run(  # noqa: PLR0917
    begin: float,
    end: float,
    jobs: Any,
    need: NDArray[np.float64],
    flows: NDArray[np.float64],
    goodput: NDArray[np.float64],
) -> None:
    """Go on from one time to another: somebody has sent everything, or has computed.

    `flows`, float64[J, L + 1]: of how many flows each job counts as on each link.
    """
    work = np.zeros((3, len(goodput)))
    now, stale = begin, True
    find_most(jobs, need, flows)
    for _ in range(_most_steps):
        if now >= end:
            return
        if stale:
            find_speeds(jobs, need, goodput, work)
            stale = False
        step = until_next(jobs, now, end - now)
        now += step
        for j in range(len(jobs)):
            if jobs[j].runs and advance(jobs, j, now, step):
                stale = True


def find_most(jobs: Any, need: Any, flows: Any) -> None:
    """Bytes of each job on its busiest link, `most`, and how many of its flows cross that."""
    for j in range(len(jobs)):
        jobs[j].most, jobs[j].weight = 0.0, 1.0
        for link in range(need.shape[1] - 1):
            if need[j, link] > jobs[j].most:
                jobs[j].most, jobs[j].weight = need[j, link], flows[j, link]


def until_next(jobs: Any, now: float, most: float) -> float:
    """In how many ns the first job ends, or begins, to send; at most `most`."""
    step = most
    for j in range(len(jobs)):
        if jobs[j].runs and jobs[j].left > 0:
            if jobs[j].speed > 0:
                step = min(step, jobs[j].left / jobs[j].speed)
        elif jobs[j].runs:
            step = min(step, max(jobs[j].until - now, 0.0))
    return step


def advance(jobs: Any, j: int, now: float, step: float) -> bool:
    """So much time has passed for a job; True: it has ended, or begun, to send."""
    if jobs[j].left > 0:
        jobs[j].left -= step * jobs[j].speed
        if jobs[j].left > _rounding:
            return False
        jobs[j].left, jobs[j].until = 0.0, now + jobs[j].compute
        jobs[j].lead += 1
        return True
    if now < jobs[j].until:
        return False
    jobs[j].left = 1.0
    return True


def find_speeds(jobs: Any, need: Any, goodput: Any, work: Any) -> None:
    """Progressive filling: the rates of all jobs on their busiest links grow, each by its weight,
    until a link of theirs is full. `work`: float64[3, L + 1]."""
    left, wish, waiting, level = work[0], work[1], 0, 0.0
    for link in range(len(goodput)):
        left[link] = goodput[link]
    for j in range(len(jobs)):
        jobs[j].speed = 0.0
        if jobs[j].runs and jobs[j].left > 0:
            # -1: its rate still grows. A job all of whose flows have gone stands still.
            jobs[j].speed = -1.0 if jobs[j].most > 0 else 0.0
            waiting += jobs[j].most > 0
    while waiting:
        add_wishes(jobs, need, wish)
        step = _inf
        for link in range(len(goodput) - 1):
            if wish[link] > 0:
                step = min(step, left[link] / wish[link])
        level += step
        for link in range(len(goodput) - 1):
            left[link] = max(left[link] - step * wish[link], 0.0)
        waiting -= settle(jobs, need, goodput, work, level)


def add_wishes(jobs: Any, need: Any, wish: Any) -> None:
    """How much of each link is used for each byte/s of growth: `wish`, float64[L + 1]."""
    for link in range(need.shape[1] - 1):
        wish[link] = 0.0
        for j in range(len(jobs)):
            if jobs[j].speed < 0:
                wish[link] += jobs[j].weight * need[j, link] / jobs[j].most


def settle(jobs: Any, need: Any, goodput: Any, work: Any, level: float) -> int:
    """Jobs that cross a full link have the rate `level`, times their weights, on their busiest one;
    how many do."""
    left, wish, n = work[0], work[1], 0
    for j in range(len(jobs)):
        if jobs[j].speed >= 0:
            continue
        for link in range(len(goodput) - 1):
            full = wish[link] > 0 and left[link] <= _rounding * goodput[link]
            if full and need[j, link] > 0:
                jobs[j].speed = level * jobs[j].weight / jobs[j].most / _second
                n += 1
                break
    return n
