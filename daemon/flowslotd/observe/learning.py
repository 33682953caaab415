# SPDX-License-Identifier: Apache-2.0
# cython: infer_types=True
"""What is learnt of flows by looking at them (compiled: learning.pxd).

A look at 100 flows touches some tens of numbers of each. With arrays that takes hundreds of calls,
each of which is slow when the caches are cold; here it takes a few. What is done is the same when
this file is not compiled.

`rows` is what `as_structs` makes of ROW[F]. Times are ns.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowslot.model.units import MILLISECOND
from flowslot_shm.layout import State, offset
from flowslotd.flows.rows import UNREPORTED, headers, whole

SMOOTHING = 0.25
"""Weight of the latest iteration in learnt periods and volumes."""
MOST_PHASES = 1000
"""From one look to the next: a record that says more lies."""
SHORTEST = MILLISECOND
"""No period is shorter."""
WINDOW_NS = 60_000_000
"""How long what a flow uses of its rate is measured at least."""
WASTED, USED, WASTES = 0.7, 0.9, 2
"""A flow that has bytes to send and uses less than the first part of its rate, in so many windows,
can use no more than it used, and some room; until it uses more than the second part of that."""
ROOM = 1.25
"""So many times what it used: else it could not show that it can use more again."""
SUPPRESSED, IDLE, SEEN = 1, 2, 4
"""What `signs` tells."""

# C variables: learning.pxd declares them, and those above that only this file reads.
_unreported, _active, _window = UNREPORTED, State.ACTIVE.value, WINDOW_NS
_iteration, _ready, _posted = offset("iteration") // 8, offset("ready") // 8, offset("posted") // 8
_done, _total = offset("done") // 8, offset("iteration_total") // 8
_start, _phases = offset("t_iteration_start_ns") // 8, offset("phases") // 8
_period = offset("period_ns") // 8
_inf, _second = math.inf, 1e9


def typed(rows: Any) -> Any:
    """See Typed."""
    return rows


def find(cookies: Any, cookie: Any) -> int:
    """Index of a cookie in uint64[C], ascending; -1: it is not there."""
    low, high = 0, len(cookies)
    while low < high:
        middle = (low + high) // 2
        if cookies[middle] < cookie:
            low = middle + 1
        else:
            high = middle
    return low if low < len(cookies) and cookies[low] == cookie else -1


def advance(  # noqa: PLR0917
    now: int,
    rows: Any,
    at: NDArray[np.intp],
    words: NDArray[np.int64],
    slots: NDArray[np.intp],
    cookies: NDArray[np.uint64],
    counters: NDArray[np.int64],
    all_late: bool,
) -> int:
    """Take one look at the flows `rows[at]`, which have the slots `words[slots]` of a record.
    Returns how many of them have done more than send: a phase began or ended, or its bytes changed.

    `words`, int64[S, 32]: the slots, sound. `cookies`, ascending, and `counters`, int64[2, C]: what
    the kernel has sent, and what of it was acknowledged, bytes. `all_late`: nobody waits for news
    of any flow, or the record is written by somebody who looks at the job from outside. Flows of
    which nobody waits for news are looked at now and then only: a phase may have come and gone.

    What remains is what the iteration's total says minus what the kernel has sent in it,
    headers left out (without a kernel counter: minus what the record calls done).
    """
    moved = 0
    for i in range(len(at)):
        r, s = at[i], slots[i]
        iteration, ready, posted = words[s, _iteration], words[s, _ready], words[s, _posted]
        done, total = words[s, _done], words[s, _total]
        working = ((words[s, 0] >> 32) & 0xFFFF) == _active
        place = find(cookies, rows[r].cookie)
        kernel = place >= 0
        counter = counters[0, place] if kernel else 0
        way = counter - counters[1, place] if kernel else 0
        seen = rows[r].seen
        began = not seen or iteration != rows[r].iteration
        base = rows[r].origin
        # The record lags behind the kernel, so `counter - done` is never below the true base: the
        # smallest one seen is the best estimate, and what is called done needs no other witness.
        most = max(counter - done, 0)
        joined = kernel and not (rows[r].kernel and seen)
        if began:
            if rows[r].target > 0:
                rows[r].expected = smooth(rows[r].expected, rows[r].target, SMOOTHING)
            learn_unreported(rows, r)
            rows[r].inc += 1
            # An iteration that was complete ended at the counter's last value: libraries send
            # some bytes that they do not report (headers), and these must not add up.
            over = rows[r].remaining == 0
            end = base + rows[r].target + headers(rows[r].unreported, rows[r].target)
            base = min(rows[r].counter if over else end, counter)
            # Iterations that were not seen have also been sent.
            joined = joined or (kernel and missed(rows, r, words, s))
        if joined:
            base = most
        elif kernel:
            base = min(base, most)
        # What is expected, while it works; once it is idle, what it has really handed over.
        target = posted
        if working:
            target = max(total, ready) if total > 0 else max(ready, rows[r].expected)
        sent = max(reported(rows, r, counter - base, target), done) if kernel else done
        remaining = max(target - sent, 0)
        if not working and ready == 0 and total > 0:
            rows[r].expected = total

        still = not began and ready == rows[r].ready and remaining == rows[r].remaining
        supply(now, rows, r, still, 0 < ready <= sent)
        counted, backlog = kernel and not joined, max(ready, posted) - sent + way
        measure(now, rows, r, counter - way, backlog, began, counted)
        same = rows[r].kernel == kernel and rows[r].active == (remaining > 0)
        if began or not same or rows[r].origin + rows[r].target != base + target:
            moved += 1
        rows[r].origin, rows[r].counter, rows[r].kernel = base, counter, kernel
        rows[r].announced = total > 0 or target == 0
        rows[r].seen, rows[r].looked, rows[r].drained = True, now, False
        rows[r].iteration, rows[r].target = iteration, target
        rows[r].phases = words[s, _phases]
        rows[r].remaining, rows[r].active = remaining, remaining > 0
        rows[r].ready = ready
        late = (all_late or rows[r].suppressed) and target > 0
        if (remaining > 0 or late) and rows[r].onset_inc != rows[r].inc:
            begin(now, rows, r, late, words[s, _start], words[s, _period])
    return moved


def missed(rows: Any, r: int, words: NDArray[np.int64], s: int) -> bool:
    """Whether row `r`, of slot `s`, has had bytes in iterations that nobody has looked at. Only
    where the record does not say do the job's numbers tell: they may skip."""
    if words[s, _phases] > 0:
        present = 1 if words[s, _ready] > 0 else 0
        return bool(words[s, _phases] - present > rows[r].phases)
    return bool(words[s, _iteration] > rows[r].iteration + 1)


def learn_unreported(rows: Any, r: int) -> None:
    """An iteration of row `r` is over: how much did the kernel send that no record speaks of?

    Only when all of that has gone is the flow at its end, and may lend its rate. The least of two
    iterations: with too much the kernel would wait for an end that never comes.
    """
    beyond = rows[r].counter - rows[r].origin - rows[r].target
    ended = rows[r].kernel and rows[r].remaining == 0
    if not (ended and 0 <= beyond <= rows[r].target // _unreported):
        beyond = 0
    rows[r].unreported = min(beyond, rows[r].unreported_last)
    rows[r].unreported_last = beyond


def reported(rows: Any, r: int, sent: int, target: int) -> int:
    """How many of an iteration's `target` bytes are among the first `sent` that the kernel has sent
    in it: headers are taken to be spread evenly over them."""
    size = whole(rows[r].unreported, target)
    if size == target:
        return sent
    return target if sent >= size else int(sent * (target / size))


def supply(now: int, rows: Any, r: int, still: bool, dry: bool) -> None:
    """Row `r` moves, unless it is `still`: it has got nothing and sent nothing since the last look.
    It is supplied, unless it is dry besides: it has nothing to send. A job that does not say what
    is ready is never taken to be dry."""
    if not still:
        rows[r].moved = now
    if not (still and dry):
        rows[r].supplied = now


def measure(  # noqa: PLR0917
    now: int, rows: Any, r: int, counter: int, backlog: int, began: bool, counted: bool
) -> None:
    """What can row `r` use of its rate? Its peer may read slowly, or not at all any more.

    Measured by what the kernel saw acknowledged, window by window. Who hung and moves, or begins an
    iteration, can use all. `backlog`: bytes that could be sent and are not acknowledged;
    `counted`: the kernel counts, and did so at the last look.
    """
    moved, elapsed = counter - rows[r].window_from, now - rows[r].window_at
    rate = rows[r].rate if rows[r].rate > 0 else 0.0
    if not counted or (rows[r].usable <= 0 and (began or moved > 0)):
        rows[r].usable, rows[r].wastes = _inf, 0
    elif began:
        rows[r].wastes = 0
    elif elapsed < _window:
        rows[r].window_rate = min(rows[r].window_rate, rate)
        return
    else:
        judge(rows, r, moved, moved * _second / elapsed, min(rows[r].window_rate, rate))
    rows[r].window_at, rows[r].window_from = now, counter
    rows[r].window_left, rows[r].window_rate = backlog, rate


def judge(rows: Any, r: int, moved: int, used: float, rate: float) -> None:
    """A window of row `r` is over, in which it has `used` so much of this rate, bytes/s.

    If all bytes have gone that were there at its beginning, that is not little: more may not have
    been ready. Nor is anything where there was no rate.
    """
    if used > USED * rows[r].usable:
        rows[r].usable, rows[r].wastes = _inf, 0
    elif moved >= rows[r].window_left or used >= WASTED * rate:
        rows[r].wastes = 0
    else:
        rows[r].wastes = min(rows[r].wastes + 1, WASTES)
        if moved == 0 or rows[r].wastes == WASTES:
            rows[r].usable = ROOM * used


def begin(now: int, rows: Any, r: int, late: bool, said: int, period: int) -> None:  # noqa: PLR0917
    """A communication phase of row `r` has begun: learn the period from one to the next.

    `said`: when the iteration began, as the record says; 0 in the first one: that is not known, and
    nothing can be learnt from it. Where a begin is noticed `late`, what was said is better, if it
    can be true. `period`: as the record says, which then holds (below SHORTEST: it is not known
    yet); 0: it does not say.
    """
    onset = rows[r].onset
    if said == 0 and rows[r].inc == 1:
        rows[r].onset_inc = rows[r].inc
        return
    start = said if late and onset < said <= now else now
    # More than one: notice came late. The job's own numbers may skip, and fall.
    phases = min(max(rows[r].phases - rows[r].onset_phases, 1), MOST_PHASES)
    if period > 0:
        rows[r].period = period if period >= SHORTEST else 0
    elif onset > 0:
        sample = max((start - onset) // phases, SHORTEST)
        # One sample of several phases counts as much as they would have one by one. The first few
        # count alike.
        weight = 1.0 - (1.0 - SMOOTHING) ** phases
        weight = max(weight, 1.0 / max(rows[r].inc - 1, 1))
        rows[r].period = smooth(rows[r].period, sample, weight)
    rows[r].onset, rows[r].onset_inc = start, rows[r].inc
    rows[r].onset_phases = rows[r].phases


def smooth(old: int, new: int, weight: float) -> int:
    """Exponentially weighted mean; the first sample counts alone."""
    return old + int((new - old) * weight) if old > 0 else new


def signs(rows: Any, at: NDArray[np.intp], all_suppressed: bool, ends_are_reported: bool) -> int:
    """What is true of all flows `rows[at]` of one process. SUPPRESSED: nobody waits for news of
    any. IDLE: none is active. SEEN: the kernel reports their ends. 0 where bytes are not announced.
    """
    result = SUPPRESSED | IDLE | (SEEN if ends_are_reported else 0)
    for i in range(len(at)):
        r = at[i]
        if not rows[r].announced:  # only the end of a phase tells how much it was
            return 0
        if not (rows[r].suppressed or all_suppressed):
            result &= ~SUPPRESSED
        if not rows[r].kernel:
            result &= ~SEEN
        if rows[r].active:
            result &= ~IDLE
    return result


def watch(rows: Any, all_suppressed: bool, at: NDArray[np.intp]) -> int:
    """The kernel is to report when these flows have sent everything, and does not know yet: how
    many; which, in `at`, intp[F]. Their `watched` is then up to date."""
    n = 0
    for i in range(len(rows)):
        end = rows[i].origin + rows[i].target + headers(rows[i].unreported, rows[i].target)
        heard = rows[i].kernel and not (rows[i].suppressed or all_suppressed)
        if rows[i].active and heard and rows[i].watched != end:
            rows[i].watched = end
            at[n] = i
            n += 1
    return n


def drain(rows: Any, ended: NDArray[np.intp], at_work: NDArray[np.int64]) -> None:
    """The kernel has sent everything of the flows `rows[ended]`. Counts those that
    are still at work by job and path: `at_work`, int64[J, P], zero before."""
    for i in range(len(ended)):
        rows[ended[i]].drained = True
    for i in range(len(rows)):
        if rows[i].active and not rows[i].drained:
            at_work[rows[i].job, rows[i].path] += 1
