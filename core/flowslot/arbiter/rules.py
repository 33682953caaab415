# SPDX-License-Identifier: Apache-2.0
# cython: infer_types=True
"""Loops over flows: of the arbiter's ledger, or of a batch (see batch.py). Compiled (types:
rules.pxd); interpreted, it does the same.

`rows` is what `table` makes of ROW[F], see ledger.py. `paths` are int32[F, H], padded with L: a row
of only L is a flow whose path is not known, which counts on every link. Rates are payload bytes/s,
times ns.
"""

import math
from typing import Any

import numpy as np

from flowslot.policy.base import Bools, Floats, Ints, Paths, Rows
from flowslot.policy.fill import crosses, link_sum

COMPILED = not __file__.endswith(".py")

PENDING = 4
"""Lowers per flow that may await their acknowledgement at the same time."""
NEVER = -(2**62)
LEAST_LEFT = 1 / 16
"""Of what was reported: an estimate never says that an active flow is done."""
PRESSING = 0.25
"""A flow that lacks more than this part of its goal waits for it; less can wait."""
SMALL_OF_LINK, SMALL_OF_RATE = 0.005, 0.1
"""A change of a flow's goal is ignored when it is smaller than both this part of the tightest link
and this part of the goal."""
TOGETHER_NS = 5_000_000
"""Flows of a job that begin within this time are one gang; in its next phase, those that have not
begun yet are waited for this long."""

# The same as C variables: rules.pxd declares them.
_pending, _never = PENDING, NEVER
_least_left, _pressing = LEAST_LEFT, PRESSING
_of_link, _of_rate = SMALL_OF_LINK, SMALL_OF_RATE
_together, _rounding, _second, _inf = TOGETHER_NS, 1e-9, 1e9, math.inf


def table(rows: Any) -> Any:
    """ROW[F] as the functions below want it."""
    flows = rows if COMPILED else rows.view(np.recarray)
    return flows


# --- what daemons say


def report(  # noqa: PLR0917
    now: int, rows: Any, at: Rows, said: Ints, bounds: Floats, phases: Ints
) -> None:
    """Take over what was said of the flows `rows[at]`: `said`, int64[D, 6]; `bounds`,
    float64[D, 2]: `cap` and `sockets` of Demand.

    Columns of `said`: incarnation, bytes remaining, ns since it became ready, period, ns until it
    is due, bytes of the next iteration. `phases`, int64[J, 2]: when the present phase of each job
    began, and when that one did in which the first of its flows took part before.
    """
    for k in range(len(at)):
        i, size = at[k], float(said[k, 1])
        if size <= 0 and rows[i].remaining > 0:
            rows[i].idle_since = now
        begun, job = now - said[k, 2], rows[i].job
        if size > 0 and rows[i].remaining > 0 and rows[i].inc == said[k, 0]:
            # The same phase. A late message makes it seem to have begun later.
            begun = min(begun, rows[i].ready_at)
        if size > 0 and rows[i].remaining <= 0:
            if begun > phases[job, 0] + _together:
                phases[job, 0], phases[job, 1] = begun, rows[i].began_at
            joins = begun >= phases[job, 0] - _together
            rows[i].began_at, rows[i].whole = phases[job, 0] if joins else begun, size
        elif now <= rows[i].began_at + _together:  # more of its sockets have begun
            rows[i].whole = max(rows[i].whole, size)
        rows[i].inc, rows[i].remaining, rows[i].as_of = said[k, 0], size, now
        rows[i].cap, rows[i].sockets = bounds[k, 0], bounds[k, 1]
        rows[i].least = max(size * _least_left, 1.0) if size > 0 else 0.0
        rows[i].ready_at, rows[i].due_at = begun, now + said[k, 4]
        rows[i].period_ns, rows[i].next_bytes = said[k, 3], float(said[k, 5])


def progress(now: int, rows: Any) -> None:
    """An active flow has sent grant x time elapsed (ADR 6)."""
    for i in range(len(rows)):
        sent = rows[i].grant * ((now - rows[i].as_of) / _second)
        rows[i].remaining, rows[i].as_of = max(rows[i].remaining - sent, rows[i].least), now


def acknowledge(now: int, rows: Any, at: Rows, upto: Ints) -> None:
    """In `rows[at[k]]` everything up to message `upto[k]` has been applied."""
    for k in range(len(at)):
        i, still = at[k], 0
        # A number that was never sent is nothing that an honest daemon says.
        if rows[i].pending_seq[0] == 0 or upto[k] > rows[i].seq:
            continue
        if rows[i].pending_seq[0] > upto[k]:
            continue  # they are in order: none of them was meant
        for p in range(_pending):
            seq, rate = rows[i].pending_seq[p], rows[i].pending_rate[p]
            rows[i].pending_seq[p], rows[i].pending_rate[p] = 0, 0.0
            if seq > upto[k]:
                rows[i].pending_seq[still], rows[i].pending_rate[still] = seq, rate
                still += 1
        rows[i].oldest_pending, rows[i].lent = now if still else 0, 0.0


# --- what is known


def see(  # noqa: PLR0917
    now: int, rows: Any, paths: Paths, n_links: int, phases: Ints, seen: Floats
) -> int:
    """What an allocator sees, float64[6, F]: `remaining`, `wait_ns`, `period_ns`, `due_ns`,
    `next_bytes` and `idle_ns` of AllocationState. Flows without a path have nothing to send.

    An idle flow is `anticipated` when others have begun that it began together with the last time
    (`phases`, see `report`). It counts as active, with as many bytes as then. Returns until when
    some flows are anticipated; 0: none is.
    """
    until = 0
    for i in range(len(rows)):
        placed, active, job = paths[i, 0] < n_links, rows[i].remaining > 0, rows[i].job
        rows[i].anticipated = (
            not active
            and rows[i].whole > 0
            and rows[i].began_at == phases[job, 1]
            and now - phases[job, 0] <= _together
        )
        seen[0, i] = rows[i].remaining if placed else 0.0
        if rows[i].anticipated:
            active, seen[0, i] = True, rows[i].whole if placed else 0.0
            until = max(until, phases[job, 0] + _together)
        seen[1, i] = now - rows[i].ready_at if rows[i].remaining > 0 else 0
        seen[2, i] = rows[i].period_ns
        seen[3, i] = rows[i].due_at - now
        seen[4, i] = rows[i].next_bytes if placed else 0.0
        if active:
            seen[5, i] = 0.0
        else:
            seen[5, i] = now - rows[i].idle_since if rows[i].idle_since != _never else _inf
    return until


def commitment(rows: Any, i: int) -> float:
    """What flow `i` may be sending at."""
    most: float = rows[i].grant
    for p in range(_pending):
        most = max(most, rows[i].pending_rate[p])
    return most


def commitments(rows: Any, paths: Paths, sums: Floats) -> None:
    """Add up on each link what flows may be sending at: `sums`, float64[L + 1], zero before."""
    rates = np.zeros(len(rows))
    for i in range(len(rows)):
        rates[i] = commitment(rows, i)
    add_up(paths, rates, sums)


def add_up(paths: Paths, rates: Floats, sums: Floats) -> None:
    """As fill.link_sum, but flows without a path count on every link."""
    last, everywhere = len(sums) - 1, 0.0
    link_sum(paths, rates, sums)
    for i in range(len(rates)):
        if paths[i, 0] == last:
            everywhere += rates[i]
    for link in range(last):
        sums[link] += everywhere


def overdue(rows: Any, at: Rows, before: int) -> set[int]:
    """Sessions of those of the flows `rows[at]` whose lowers have waited for any acknowledgement
    since `before`."""
    sessions = set()
    for k in range(len(at)):
        if 0 < rows[at[k]].oldest_pending < before:
            sessions.add(int(rows[at[k]].session))
    return sessions


def find_shares(  # noqa: PLR0917
    rows: Any, paths: Paths, at: Rows, goodput: Floats, crossing: Ints, shares: Floats
) -> None:
    """Goodput of the path of each of the flows `rows[at]`, divided among all flows of its job on
    the tightest link: `shares`, float64[n]; inf when the path is not known. `goodput`,
    float64[L + 1]; `crossing`, int64[J, L + 1]: flows by job and link."""
    for k in range(len(at)):
        i, shares[k] = at[k], _inf
        for h in range(paths.shape[1]):
            link = paths[i, h]
            if link < len(goodput) - 1:
                shares[k] = min(shares[k], goodput[link] / crossing[rows[i].job, link])


def unsettled(rows: Any) -> bool:
    """Some grants are not (yet) what they are to be, or what goes with them is not reported."""
    for i in range(len(rows)):  # noqa: SIM110 (a generator is not compiled to a loop)
        if rows[i].goal != rows[i].grant or untold(rows, i):
            return True
    return False


def less_told(rows: Any, i: int) -> bool:
    """What flow `i` has to be told about holds and top-up makes room for others, or ends a hold."""
    told: bool = rows[i].hold != rows[i].reported_hold or rows[i].most < rows[i].reported_most
    return told


def untold(rows: Any, i: int) -> bool:
    """What goes with the grant of flow `i` is not what was reported."""
    told: bool = (
        rows[i].standing == rows[i].reported_standing
        and rows[i].hold == rows[i].reported_hold
        and rows[i].most == rows[i].reported_most
    )
    return not told


def find_due(  # noqa: PLR0917
    now: int,
    rows: Any,
    paths: Paths,
    n_links: int,
    edges: Floats,
    times: Ints,
    part: Rows,
    look_at: Ints,
) -> None:
    """When parts are to be looked at although nothing is said: `look_at`, int64[P + 1]. `part`,
    intp[F]: of each flow. `edges`, float64[F]: see Allocator.next_change. `times`, int64[5]: when
    the next slot begins, when anticipation ends, when changes that can wait are made, how long an
    acknowledgement may take, and the latest time to look."""
    for i in range(len(rows)):
        look_at[part[i]] = times[4]
    for i in range(len(rows)):
        due = times[4]
        if paths[i, 0] == n_links or edges[i] <= 0:
            due = min(due, times[0])
        elif edges[i] < _inf:
            due = min(due, now + int(edges[i]) + 1)
        if rows[i].anticipated:
            due = min(due, times[1] + 1)
        if rows[i].goal != rows[i].grant or untold(rows, i):
            due = min(due, times[0], times[2])
        if rows[i].oldest_pending >= max(now - times[3], 1):
            due = min(due, rows[i].oldest_pending + times[3] + 1)
        look_at[part[i]] = min(look_at[part[i]], due)


# --- what is to change


def settle(rows: Any, paths: Paths, target: Floats, since: int, capacity: Floats) -> None:
    """Turn targets, float64[F], into goals; see Batch.settle. `capacity`: float64[L]."""
    n_links = len(capacity)
    goals, sums = np.zeros((2, len(rows))), np.zeros(n_links + 1)
    wanted, found = goals[0], goals[1]
    for i in range(len(rows)):
        wanted[i] = target[i]
        if paths[i, 0] == n_links and rows[i].held_since > since:
            wanted[i] = rows[i].grant
        goal = rows[i].goal
        small = min(_of_link * rows[i].tightest, _of_rate * max(goal, wanted[i]))
        found[i] = goal if abs(wanted[i] - goal) < small and wanted[i] > 0 else wanted[i]
    add_up(paths, found, sums)
    for i in range(len(rows)):
        rows[i].goal = found[i]
        for h in range(paths.shape[1]):
            link = paths[i, h]
            if link < n_links and sums[link] > capacity[link] * (1 + _rounding):
                rows[i].goal = min(found[i], wanted[i])


def find_short(  # noqa: PLR0917
    rows: Any, paths: Paths, mute: Bools, limit: Floats, first: Floats, others: Floats
) -> None:
    """Which links lack room for what flows wait for, even when all acknowledgements are in: their
    `others`, float64[L + 1], is 1 then, else 0; the last one, of flows that count on all links, is
    1 if any is. `first`: of those that have nothing. Both are zero before. `limit`, `mute`: see
    `in_the_way`."""
    last, grants, used = len(limit), np.zeros(len(rows)), np.zeros(len(first))
    for i in range(len(rows)):
        grants[i] = rows[i].grant
        lack = rows[i].goal - rows[i].grant
        if paths[i, 0] < last and not mute[i] and lack > _pressing * rows[i].goal:
            for h in range(paths.shape[1]):
                if starved(rows, i):
                    first[paths[i, h]] += lack
                else:
                    others[paths[i, h]] += lack
    add_up(paths, grants, used)
    others[last] = 0.0
    for link in range(last):
        room = max(limit[link] - used[link], 0.0)
        rest = max(room - first[link], 0.0)
        enough = (1 - _pressing) * first[link] <= room and (1 - _pressing) * others[link] <= rest
        others[link] = 0.0 if enough else 1.0
        others[last] = max(others[last], others[link])


def in_the_way(rows: Any, paths: Paths, mute: Bools, limit: Floats, found: Bools) -> None:
    """Set `found`, bool[n], where flows are on links without room for what others wait for.

    `limit`, float64[L]: what may be given out. `mute`, bool[n]: no one waits for these.
    """
    last = len(limit)
    first, short = np.zeros(last + 1), np.zeros(last + 1)
    find_short(rows, paths, mute, limit, first, short)
    for i in range(len(rows)):
        if paths[i, 0] == last:
            found[i] = short[last] > 0
        else:
            for h in range(paths.shape[1]):
                if paths[i, h] < last and short[paths[i, h]] > 0:
                    found[i] = True


def lower(now: int, rows: Any, may: Bools, seq: int, lowered: Rows) -> int:
    """Flows that `may` give way, hold more than their goal, and have room for one more lower, hold
    their goal: by messages `seq`, `seq + 1` ... Returns how many; their indices are put into
    `lowered`."""
    n = 0
    for i in range(len(rows)):
        if rows[i].goal >= rows[i].grant and rows[i].pending_seq[0] == 0:
            rows[i].oldest_pending = 0  # what a Hello claimed is what the flow is to have
        more = rows[i].goal < rows[i].grant and rows[i].pending_seq[_pending - 1] == 0
        if more and may[i]:
            slot = 0
            while rows[i].pending_seq[slot] != 0:
                slot += 1
            if rows[i].oldest_pending == 0:
                rows[i].oldest_pending = now
            rows[i].pending_seq[slot], rows[i].pending_rate[slot] = seq + n, rows[i].grant
            rows[i].grant, rows[i].seq = rows[i].goal, seq + n
            lowered[n] = i
            n += 1
    return n


def starved(rows: Any, i: int) -> bool:
    """Flow `i` wants to send, or will at any moment, and has nothing."""
    return bool(rows[i].grant <= 0 and (rows[i].remaining > 0 or rows[i].anticipated))


def find_borrowers(rows: Any, wish: Any, first: Any, following: Any) -> None:
    """Which flows of each group wait for more than they may be sending at: `wish`, float64[F], is
    how much more; `first[g]` is the first in line, -1 for none, and `following[i]` the one after
    `i`.

    Flows that have nothing come before those that have something already.
    """
    for g in range(len(first)):
        first[g] = -1
    for i in range(len(rows)):
        wish[i] = rows[i].goal - commitment(rows, i) if rows[i].group >= 0 else 0.0
    for turn in range(2):
        for k in range(len(rows)):
            i = len(rows) - 1 - k
            if wish[i] > 0 and starved(rows, i) == (turn == 1):
                following[i], first[rows[i].group] = first[rows[i].group], i


def borrow(rows: Any, slots: Rows, n_groups: int, lowered: Rows, gain: Floats) -> None:
    """Part of what the flows `lowered` have just lost is lent to others: `gain`, float64[F].
    `slots`, intp[F]: what a borrower is called.

    One message tells the daemon both, so the two together never send more: what the lender is
    still committed to until it is acknowledged, the borrower is committed to instead.
    """
    first, following = np.zeros(n_groups, np.intp), np.zeros(len(rows), np.intp)
    wish = np.zeros(len(rows))
    find_borrowers(rows, wish, first, following)
    for k in range(len(lowered)):
        i = lowered[k]
        group = rows[i].group
        # An older lower that is not acknowledged either says that it may still send more.
        if group < 0 or rows[i].pending_seq[1] != 0 or first[group] < 0:
            continue
        # One borrower for each, and it is the next in line: many small rates must not mean that
        # every flow is compared with every other one.
        to = first[group]
        rate = min(rows[i].pending_rate[0] - rows[i].grant, wish[to])
        least = max(_of_link * rows[to].tightest, _of_rate * rows[to].goal)
        if rate == wish[to] or rate >= least:
            rows[i].pending_rate[0] -= rate
            rows[i].lent, rows[i].borrower = rate, slots[to]
            gain[to] += rate
            wish[to] -= rate
            if wish[to] <= 0:
                first[group] = following[to]


def find_raises(  # noqa: PLR0917
    rows: Any,
    paths: Paths,
    mute: Bools,
    gain: Floats,
    free: Floats,
    pressing: bool,
    raised: Rows,
    rates: Floats,
) -> int:
    """How many flows get a message that raises nothing or something; see Batch.raises.

    `free`, float64[L]: what may be given out. `pressing`: only of those that wait for it, and of
    borrowers. Put into `raised` and `rates`: indices, and what they may have.
    """
    last, n, sent = len(free), 0, 0
    base, room = np.zeros(len(rows)), np.zeros(len(free) + 1)
    room[last] = _inf
    for link in range(last):
        room[link] = max(free[link], 0.0)
    for i in range(len(rows)):
        grant, goal = rows[i].grant, rows[i].goal
        if pressing:
            meant = (goal > grant and gain[i] > 0) or goal - grant > _pressing * goal
            meant = meant or (goal == grant and less_told(rows, i))
        else:
            meant = goal > grant or (goal == grant and untold(rows, i))
        if meant and not mute[i] and paths[i, 0] < last:
            # Up to the commitment a raise costs no room: the flow may still be sending that much.
            base[n] = min(commitment(rows, i) + gain[i], goal)
            raised[n] = i
            n += 1
    if n:
        share_out(rows, paths, raised[:n], base, room, rates, True)
        n = keep_room(rows, paths, raised[:n], gain, room, base, rates)
        share_out(rows, paths, raised[:n], base, room, rates, False)
    for k in range(n):
        i = raised[k]
        grant, goal = rows[i].grant, rows[i].goal
        least = max(_of_link * rows[i].tightest, _of_rate * goal)
        if rates[k] >= goal or rates[k] - grant >= least:
            raised[sent], rates[sent] = i, rates[k]
            sent += 1
    return sent


def bare(rows: Any, i: int) -> bool:
    """Flow `i` is starved, and knows of no grant either that it might still be using."""
    return starved(rows, i) and commitment(rows, i) <= 0


def keep_room(  # noqa: PLR0917
    rows: Any, paths: Any, raised: Any, gain: Any, room: Any, base: Any, rates: Any
) -> int:
    """Strike from `raised`, with `base` and `rates`, flows that have something and cross a link
    where there is too little for those that are bare. Returns how many are left.

    They are not even given what would cost no room: flows that are lowered and raised in turns,
    faster than they acknowledge it, would be committed to all that they ever had. Borrowers are
    left, as their lender is committed to so much less.
    """
    n, owing = 0, np.zeros(len(room), np.intp)
    for link in range(len(room)):
        owing[link] = room[link] < -1.0  # byte/s
    for k in range(len(raised)):
        i = raised[k]
        waits = rows[i].goal > rows[i].grant and gain[i] <= 0 and not bare(rows, i)
        if not (waits and crosses(paths, i, owing)):
            raised[n], base[n], rates[n] = i, base[k], rates[k]
            n += 1
    return n


def share_out(  # noqa: PLR0917
    rows: Any, paths: Any, raised: Any, base: Any, room: Any, rates: Any, first: bool
) -> None:
    """Share `room` out among those of the flows `raised` that are bare (`first`), or the others.

    Each gets the same part of its wish, the difference from `base` to its goal, as the others do
    on its tightest link. The whole wish is taken from every link of the path, whatever part of it
    is granted: less than nothing is left where it does not fit.
    """
    wished = np.zeros(len(room))
    for k in range(len(raised)):
        i = raised[k]
        if bare(rows, i) == first:
            for h in range(paths.shape[1]):
                wished[paths[i, h]] += rows[i].goal - base[k]
    for k in range(len(raised)):
        i = raised[k]
        if bare(rows, i) == first:
            part = 1.0  # of what is wished for there is room on the tightest link
            for h in range(paths.shape[1]):
                link = paths[i, h]
                if wished[link] > room[link]:
                    part = min(part, room[link] / wished[link] if room[link] > 0 else 0.0)
            rates[k] = rows[i].goal if part >= 1.0 else base[k] + part * (rows[i].goal - base[k])
    for link in range(len(room)):
        room[link] -= wished[link]
