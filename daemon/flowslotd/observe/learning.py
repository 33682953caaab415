# SPDX-License-Identifier: Apache-2.0
"""Loops over the daemon's flows, for whose sake this file is compiled (types: learning.pxd).

A look at 100 flows touches some tens of numbers of each. With arrays that takes hundreds of calls,
each of which is slow when the caches are cold; here it takes a few. What is done is the same when
this file is not compiled. (A column must not be called as an attribute of NumPy's arrays.)

`rows` is what `table` makes of ROW[F]; progress.py says what its columns mean. Times are ns.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowslot_shm.layout import State, offset

COMPILED = not __file__.endswith(".py")

SMOOTHING = 0.25
"""Weight of the latest iteration in learnt periods and volumes."""
MOST_STEPS, MOST_STEPS_QUIET = 8, 1000
"""Iterations from one look to the next; more say nothing about the period."""
SOON_NS, LATE_NS = 10_000_000, 20_000_000
"""An idle flow of an active aggregate keeps its part from so long before its start to so long after
it was expected."""
KEEP_RATIO = 1.1
KEEP_SLACK_S = 0.004
"""Flows keep their rates while the last one ends at most 10 % + 4 ms later than it could."""
UNREPORTED = 2
"""At most a part of 1 in so many of what is reported; more is not taken for headers."""
TRAILING = 64
"""Headers beyond a part of 1 in so many of what is reported go before its last byte; the others may
go after it (the next requests), and an end that waits for them comes late."""
STALLED_NS = 60_000_000
"""Who had nothing to send for so long, and got nothing, is not given a rate until it has: a slot of
usual length, or from one look to the next where slots are longer."""
QUIET, IDLE, SEEN = 1, 2, 4
"""What `signs` tells."""
NEVER = 2**62

# The same as C variables: learning.pxd declares them.
_smoothing, _most_steps, _most_steps_quiet = SMOOTHING, MOST_STEPS, MOST_STEPS_QUIET
_soon, _late, _keep_ratio, _keep_slack = SOON_NS, LATE_NS, KEEP_RATIO, KEEP_SLACK_S
_never, _millisecond, _second = NEVER, 1_000_000, 1_000_000_000
_full, _stalled, _unreported, _trailing = 1 + 1e-9, STALLED_NS, UNREPORTED, TRAILING
_active = State.ACTIVE.value
_iteration, _ready, _posted = offset("iteration") // 8, offset("ready") // 8, offset("posted") // 8
_done, _total = offset("done") // 8, offset("iteration_total") // 8
_start = offset("t_iteration_start_ns") // 8


def table(rows: NDArray[np.void]) -> Any:
    """ROW[F] as the functions below want it."""
    return rows if COMPILED else rows.view(np.recarray)


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
    acked: NDArray[np.int64],
    all_quiet: bool,
) -> int:
    """Take one look at the flows `rows[at]`, which have the slots `words[slots]` of a record.
    Returns how many of them have done more than send: a phase began or ended, or its bytes changed.

    `words`, int64[S, 32]: the slots, sound. `cookies`, ascending, and `acked`: the kernel's
    counters of acknowledged bytes. `all_quiet`: nobody waits for news of any flow; where nobody
    does, flows are looked at now and then only, so that a phase may have come and gone.

    What remains is what the iteration's total says minus what the kernel saw acknowledged in it,
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
        counter = acked[place] if kernel else 0
        seen = rows[r].seen
        began = not seen or iteration != rows[r].iteration
        base = rows[r].origin
        # The record lags behind the kernel, so `counter - done` is never below the true base: the
        # smallest one seen is the best estimate, and what is called done needs no other witness.
        most = max(counter - done, 0)
        joined = kernel and not (rows[r].kernel and seen)
        if began:
            if rows[r].target > 0:
                rows[r].expected = smooth(rows[r].expected, rows[r].target, _smoothing)
            learn_unreported(rows, r)
            rows[r].inc += 1
            # An iteration that was complete ended at the counter's last value: libraries send
            # some bytes that they do not report (headers), and these must not add up.
            over = rows[r].remaining == 0
            end = base + rows[r].target + headers(rows, r, rows[r].target)
            base = min(rows[r].counter if over else end, counter)
            # Iterations that were not seen have also been sent.
            joined = joined or (kernel and iteration > rows[r].iteration + 1)
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

        supply(now, rows, r, ready, sent, remaining, began)
        same = rows[r].kernel == kernel and rows[r].active == (remaining > 0)
        if began or not same or rows[r].origin + rows[r].target != base + target:
            moved += 1
        rows[r].origin, rows[r].counter, rows[r].kernel = base, counter, kernel
        rows[r].announced = total > 0 or target == 0
        rows[r].seen, rows[r].looked, rows[r].drained = True, now, False
        rows[r].iteration, rows[r].target = iteration, target
        rows[r].remaining, rows[r].active = remaining, remaining > 0
        rows[r].ready = ready
        quiet = (all_quiet or rows[r].quiet) and target > 0
        if (remaining > 0 or quiet) and rows[r].onset_inc != rows[r].inc:
            begin(now, rows, r, quiet, words[s, _start])
    return moved


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


def headers(rows: Any, r: int, target: int) -> int:
    """What the kernel sends besides the `target` bytes of an iteration of row `r`."""
    known: int = min(rows[r].unreported, target // _unreported)
    return known


def whole(rows: Any, r: int, target: int) -> int:
    """What the kernel sends until the last of the `target` bytes of an iteration of row `r`."""
    return target + max(headers(rows, r, target) - target // _trailing, 0)


def gross(target: NDArray[np.int64], unreported: NDArray[np.int64]) -> NDArray[np.float64]:
    """`whole` / `target` of each flow, float64[F]; 1 where there is no target."""
    before = np.minimum(unreported, target // UNREPORTED) - target // TRAILING
    return 1.0 + np.maximum(before, 0) / np.maximum(target, 1)


def reported(rows: Any, r: int, sent: int, target: int) -> int:
    """How many of an iteration's `target` bytes are among the first `sent` that the kernel has sent
    in it: headers are taken to be spread evenly over them."""
    size = whole(rows, r, target)
    if size == target:
        return sent
    return target if sent >= size else int(sent * (target / size))


def supply(  # noqa: PLR0917
    now: int, rows: Any, r: int, ready: int, sent: int, remaining: int, began: bool
) -> None:
    """Unless row `r` is dry: it has nothing to send, has got nothing, and has sent nothing since
    the last look. A job that does not say what is ready is never taken to have nothing."""
    still = ready == rows[r].ready and remaining == rows[r].remaining
    if began or not (still and 0 < ready <= sent):
        rows[r].supplied = now


def begin(now: int, rows: Any, r: int, quiet: bool, told: int) -> None:
    """A communication phase of row `r` has begun: learn the period from one to the next.

    `told`: when the iteration began, as the record says. Where nobody looks at once, that is
    better than when it was noticed, if it can be true.
    """
    onset = rows[r].onset
    start = told if quiet and onset < told <= now else now
    steps = rows[r].iteration - rows[r].onset_iteration
    # Several iterations at once: notice came late, or the job skips numbers.
    most = _most_steps_quiet if quiet else _most_steps
    if onset > 0 and 1 <= steps <= most:
        sample = max((start - onset) // steps, _millisecond)
        # One sample of several iterations counts as much as they would have one by one.
        weight = 1.0 - (1.0 - _smoothing) ** steps
        rows[r].period = smooth(rows[r].period, sample, weight)
    rows[r].onset, rows[r].onset_inc = start, rows[r].inc
    rows[r].onset_iteration = rows[r].iteration


def smooth(old: int, new: int, weight: float) -> int:
    """Exponentially weighted mean; the first sample counts alone."""
    return old + int((new - old) * weight) if old > 0 else new


def signs(rows: Any, at: NDArray[np.intp], all_quiet: bool, ends_are_told: bool) -> int:
    """Of the flows `rows[at]` of one process: QUIET, nobody waits for news of any of them; IDLE,
    none is active; SEEN, the kernel tells of all their ends. None of it where bytes are not
    announced."""
    result = QUIET | IDLE | (SEEN if ends_are_told else 0)
    for i in range(len(at)):
        r = at[i]
        if not rows[r].announced:  # only the end of a phase tells how much it was
            return 0
        if not (rows[r].quiet or all_quiet):
            result &= ~QUIET
        if not rows[r].kernel:
            result &= ~SEEN
        if rows[r].active:
            result &= ~IDLE
    return result


def watch(rows: Any, all_quiet: bool, at: NDArray[np.intp]) -> int:
    """The kernel is to report when these flows have sent everything, and does not know yet: how
    many; which, in `at`, intp[F]. Their `watched` is then up to date."""
    n = 0
    for i in range(len(rows)):
        end = rows[i].origin + rows[i].target + headers(rows, i, rows[i].target)
        heard = rows[i].kernel and not (rows[i].quiet or all_quiet)
        if rows[i].active and heard and rows[i].watched != end:
            rows[i].watched = end
            at[n] = i
            n += 1
    return n


def drain(rows: Any, ended: NDArray[np.intp], at_work: NDArray[np.int64]) -> None:
    """The kernel has seen everything of the flows `rows[ended]` acknowledged. Counts those that
    are still at work by job and path: `at_work`, int64[J, P], zero before."""
    for i in range(len(ended)):
        rows[ended[i]].drained = True
    for i in range(len(rows)):
        if rows[i].active and not rows[i].drained:
            at_work[rows[i].job, rows[i].path] += 1


# --- lending


def keep(rows: Any, all_quiet: bool) -> None:
    """Only those donors stay that have ended and still have a rate."""
    for i in range(len(rows)):
        d = rows[i].lender
        if d >= 0:
            ended = rows[d].kernel and not rows[d].active and rows[d].path > 0
            if all_quiet or rows[d].quiet or not (ended and rows[d].rate > 0):
                rows[i].lender = -1


def candidates(
    rows: Any,
    all_quiet: bool,
    wanting: float,
    fastest: NDArray[np.float64],
    found: tuple[NDArray[np.intp], NDArray[np.intp]],
) -> tuple[int, int]:
    """Who may lend its rate, and who needs one; how many of each, and which, in `found`.

    Donors are at work at a granted rate, and the kernel knows what they have left. Heirs have no
    donor yet, and less than the share `wanting` of the fastest one of their path. `fastest`,
    float64[P]: zero.
    """
    donors, heirs = found
    n_donors, n_heirs = 0, 0
    for i in range(len(rows)):
        quiet = all_quiet or rows[i].quiet
        known = rows[i].kernel and rows[i].path > 0
        if known and rows[i].active and not quiet and rows[i].rate > 0:
            donors[n_donors] = i
            n_donors += 1
            fastest[rows[i].path] = max(fastest[rows[i].path], rows[i].rate)
    for i in range(len(rows)):
        known = rows[i].kernel and rows[i].path > 0 and rows[i].rate >= 0
        if known and rows[i].lender < 0 and rows[i].rate < wanting * fastest[rows[i].path]:
            heirs[n_heirs] = i
            n_heirs += 1
    return n_donors, n_heirs


def pair(
    rows: Any,
    donors: NDArray[np.intp],
    heirs: NDArray[np.intp],
    next_donor: NDArray[np.intp],
) -> None:
    """Give each of the `heirs`, in this order, the first of the `donors` on its path that is free
    and of another job.

    Both are in the order of their paths. `next_donor`, intp[J]: zero.
    """
    taken = np.zeros(len(donors), np.uint8)
    for i in range(len(heirs)):
        job, path = rows[heirs[i]].job, rows[heirs[i]].path
        # What this job has passed over is taken, its own, or on a path that is done with.
        for at in range(next_donor[job], len(donors)):
            if rows[donors[at]].path > path:
                break
            next_donor[job] = at + 1
            if rows[donors[at]].path == path and rows[donors[at]].job != job and not taken[at]:
                rows[heirs[i]].lender, taken[at] = donors[at], 1
                break


# --- aggregates


def size_of(rows: Any, i: int) -> float:
    """Bytes that a flow's iterations are expected to send, headers included."""
    size = rows[i].expected if rows[i].expected > 0 else rows[i].target
    expected: float = whole(rows, i, size)
    return expected


def left(now: int, rows: Any, i: int) -> float:
    """Bytes that an active flow has yet to send, headers included, estimated for now."""
    if rows[i].drained:
        return 0.0
    more, target = rows[i].remaining, rows[i].target
    if target > 0:
        more = more * (whole(rows, i, target) / target)
    sent = rows[i].rate * (now - rows[i].looked) / _second if rows[i].rate > 0 else 0.0
    remains: float = max(more - sent, 1.0)
    return remains


def add_up(
    now: int,
    rows: Any,
    times: NDArray[np.int64],
    sizes: NDArray[np.float64],
) -> None:
    """Sum up flows by aggregate; 0 is none, and its sums mean nothing.

    `times`, int64[B, 5]: 1 if any is active, when the first active one began, when the first one
    is due again, the longest period, 1 if no active one has had anything to send for STALLED_NS.
    `sizes`, float64[B, 3]: bytes remaining, of this iteration, and expected of each iteration; with
    headers, because links and rates carry these too.
    """
    for b in range(len(times)):
        times[b, 0], times[b, 1], times[b, 2], times[b, 3] = 0, _never, _never, 0
        times[b, 4] = 1
        sizes[b, 0], sizes[b, 1], sizes[b, 2] = 0.0, 0.0, 0.0
    for i in range(len(rows)):
        b = rows[i].aggregate
        onset, period = rows[i].onset, rows[i].period
        if rows[i].active:
            times[b, 0] = 1
            if rows[i].looked - rows[i].supplied < _stalled:
                times[b, 4] = 0
            times[b, 1] = min(times[b, 1], onset)
            sizes[b, 0] += left(now, rows, i)
        if onset > 0:
            # Before the first period is known: as if computing took as long as communicating.
            times[b, 2] = min(times[b, 2], onset + (period if period > 0 else 2 * (now - onset)))
        times[b, 3] = max(times[b, 3], period)
        sizes[b, 1] += whole(rows, i, rows[i].target)
        sizes[b, 2] += size_of(rows, i)


def weigh(
    now: int,
    rows: Any,
    at_work: NDArray[np.int64],
    weight: NDArray[np.float64],
) -> None:
    """How many bytes of each flow its aggregate's rate is for: `weight`, float64[F].

    `at_work`, int64[B]: not 0 where the phase is on, and rates follow what remains.
    """
    for i in range(len(rows)):
        size = size_of(rows, i)
        if not at_work[rows[i].aggregate]:
            weight[i] = size  # for the next phase, or for all of them
        elif rows[i].active:
            weight[i] = left(now, rows, i)
        else:
            due = rows[i].onset + rows[i].period - now
            coming = rows[i].period > 0 and -_late < due < _soon
            weight[i] = size if coming else 0.0


def split(
    rows: Any,
    rate: NDArray[np.float64],
    weight: NDArray[np.float64],
    parts: NDArray[np.float64],
) -> None:
    """Share `rate[b]` out among the flows of aggregate b, so that all end together.

    An aggregate keeps the rates that its flows have (NaN: none) while they add up to what it may
    send and nobody is held up by that. `weight`, float64[F]: bytes to send; an aggregate without
    any gives all its flows the same. Where `rate` is NaN, so are the `parts`, float64[F].
    """
    n = len(rate)
    sums = np.zeros((n, 4))  # weight, flows, present rate, seconds until the last one ends
    fill(rows, weight, sums)
    for i in range(len(rows)):
        b = rows[i].aggregate
        size, flows, used, lasts = sums[b, 0], sums[b, 1], sums[b, 2], sums[b, 3]
        # Not less than all of it either: what nobody uses might be given to somebody else.
        keep = rate[b] > 0 and used <= rate[b] * _full and used * _full >= rate[b]
        if keep and size > 0:
            keep = lasts <= _keep_ratio * (size / rate[b]) + _keep_slack
        if keep:
            parts[i] = rows[i].rate
        elif size > 0:
            parts[i] = rate[b] * (weight[i] / size)
        else:
            parts[i] = rate[b] / flows


def fill(rows: Any, weight: Any, sums: Any) -> None:
    """The sums of `split`, by aggregate. Without a rate yet, a flow lasts for ever."""
    for i in range(len(rows)):
        b, present = rows[i].aggregate, rows[i].rate
        sums[b, 0] += weight[i]
        sums[b, 1] += 1.0
        sums[b, 2] += present  # NaN is kept by nobody
        if weight[i] > 0:
            lasts = weight[i] / present if present > 0 else _never
            sums[b, 3] = max(sums[b, 3], lasts)
