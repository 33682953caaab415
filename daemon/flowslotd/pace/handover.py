# SPDX-License-Identifier: Apache-2.0
# cython: infer_types=True
"""Who borrows a flow's rate in the moment in which it has sent everything (compiled: handover.pxd).

Negotiation takes milliseconds, in which the link would be idle between one job and the next. A
waiting flow may send at the rate of a flow of another job, on the same path, that has drained. The
kernel sees to it at once. The arbiter, which hears of it afterwards, need not know: together the
two never have more than it granted.

The lender of a flow is a column of its row. `rows` is ROW[F], or what `as_structs` makes of it.
What is done is the same when this file is not compiled.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowslot.model.units import MILLISECOND, Nanos
from flowslotd.flows.rows import Records, Rows

BORROWER_DUE_NS = 60 * MILLISECOND
"""A lender waits for an idle borrower that is due within this; otherwise its rate is for others."""
WANTING = 0.25
"""A flow whose rate is below this share of the lender's may borrow."""


def update(rows: Records, structs: Any, all_suppressed: bool) -> dict[int, int]:
    """Work out who borrows from whom; returns the lender of each borrower, by cookie.

    `structs`: what a Typed makes of `rows`. `all_suppressed`: nobody waits for news of any flow. A
    lender that has ended keeps its borrower for as long as it keeps its rate.
    """
    paths = int(rows["path"].max(initial=0)) + 1
    lenders, borrowers = candidates(structs, all_suppressed, WANTING, paths)
    if lenders.size and borrowers.size:
        # The fastest lender first. The borrower that has waited longest first, then what is due
        # first.
        lenders = lenders[np.lexsort((-rows["rate"][lenders], rows["path"][lenders]))]
        active = rows["active"][borrowers]
        due = np.where(active, 0, rows["period"][borrowers]) + rows["onset"][borrowers]
        borrowers = borrowers[np.lexsort((due, ~active, rows["path"][borrowers]))]
        next_lender = np.zeros(int(rows["job"].max()) + 1, np.intp)
        pair(structs, lenders, borrowers, next_lender)
    borrowers = np.flatnonzero(rows["lender"] >= 0)
    cookies = rows["cookie"]
    lent = cookies[rows["lender"][borrowers]]
    return dict(zip(cookies[borrowers].tolist(), lent.tolist(), strict=True))


def in_use(now: Nanos, rows: Records) -> Rows:
    """Rows of the lenders whose borrowers send, or are about to."""
    borrowers = np.flatnonzero(rows["lender"] >= 0)
    if not borrowers.size:
        return borrowers
    due = np.abs(rows["onset"][borrowers] + rows["period"][borrowers] - now) < BORROWER_DUE_NS
    used: Rows = rows["lender"][borrowers[rows["active"][borrowers] | due]]
    return used


# --- loops


def typed(rows: Any) -> Any:
    """See Typed."""
    return rows


def candidates(rows: Any, all_suppressed: bool, wanting: float, paths: int) -> tuple[Rows, Rows]:
    """Who may lend its rate, and who needs one.

    Lenders are at work at a granted rate, and the kernel knows what they have left. Borrowers have
    no lender yet, and less than the share `wanting` of the fastest one of their path. They keep
    only lenders that have ended and still have a rate. `paths`: more than the number of any path.
    """
    found = np.empty((2, len(rows)), np.intp)
    fastest = np.zeros(paths)
    at, n_lenders, n_borrowers = found, 0, 0
    for i in range(len(rows)):
        suppressed = all_suppressed or rows[i].suppressed
        known = rows[i].kernel and rows[i].path > 0
        if known and rows[i].active and not suppressed and rows[i].rate > 0:
            at[0, n_lenders] = i
            n_lenders += 1
            fastest[rows[i].path] = max(fastest[rows[i].path], rows[i].rate)
        d = rows[i].lender
        if d >= 0:
            ended = rows[d].kernel and not rows[d].active and rows[d].path > 0
            if all_suppressed or rows[d].suppressed or not (ended and rows[d].rate > 0):
                rows[i].lender = -1
    for i in range(len(rows)):
        known = rows[i].kernel and rows[i].path > 0 and rows[i].rate >= 0
        if known and rows[i].lender < 0 and rows[i].rate < wanting * fastest[rows[i].path]:
            at[1, n_borrowers] = i
            n_borrowers += 1
    return found[0, :n_lenders], found[1, :n_borrowers]


def pair(
    rows: Any,
    lenders: NDArray[np.intp],
    borrowers: NDArray[np.intp],
    next_lender: NDArray[np.intp],
) -> None:
    """Give each of the `borrowers`, in this order, the first of the `lenders` on its path that is
    free and of another job.

    Both are in the order of their paths. `next_lender`, intp[J]: zero.
    """
    taken = np.zeros(len(lenders), np.uint8)
    for i in range(len(borrowers)):
        job, path = rows[borrowers[i]].job, rows[borrowers[i]].path
        # What this job has passed over is taken, its own, or on a path that is done with.
        for at in range(next_lender[job], len(lenders)):
            if rows[lenders[at]].path > path:
                break
            next_lender[job] = at + 1
            if rows[lenders[at]].path == path and rows[lenders[at]].job != job and not taken[at]:
                rows[borrowers[i]].lender, taken[at] = lenders[at], 1
                break
