# SPDX-License-Identifier: Apache-2.0
"""Who takes over a flow's rate in the moment in which it has sent everything.

Negotiation takes milliseconds, in which the link would be idle between one job and the next. A
waiting flow of the same path (of another job) may send at the rate of one that has drained: the
kernel sees to it at once, and the arbiter, which hears of it afterwards, need not know: together
the two never have more than it granted.
"""

import numpy as np

from flowslot.model.units import MILLISECOND, Nanos
from flowslotd.observe import learning
from flowslotd.observe.flow_info import Rows
from flowslotd.observe.progress import Records

SOON_NS = 60 * MILLISECOND
"""An idle heir due within this is worth waiting for; otherwise its donor's rate is for others."""
WANTING = 0.25
"""Whose rate is below this share of the donor's may be an heir."""


def donors(rows: Records) -> dict[int, int]:
    """By cookie: from whom each heir inherits."""
    heirs = np.flatnonzero(rows["lender"] >= 0)
    cookies, lenders = rows["cookie"], rows["lender"][heirs]
    return dict(zip(cookies[heirs].tolist(), cookies[lenders].tolist(), strict=True))


def update(rows: Records, all_quiet: bool) -> dict[int, int]:
    """Work out who inherits from whom (see `donors`); `rows`: ROW[F], whose `lender` is updated.

    `all_quiet`: nobody waits for news of any flow. A donor that has ended keeps its heir for as
    long as it keeps its rate.
    """
    table = learning.table(rows)
    learning.keep(table, all_quiet)
    found = np.empty((2, len(rows)), np.intp)
    fastest = np.zeros(int(rows["path"].max(initial=0)) + 1)
    n_donors, n_heirs = learning.candidates(
        table, all_quiet, WANTING, fastest, (found[0], found[1])
    )
    if n_donors and n_heirs:
        _pair(rows, found[0, :n_donors], found[1, :n_heirs])
    return donors(rows)


def in_use(now: Nanos, rows: Records) -> Rows:
    """Rows of the donors whose heirs send, or are about to."""
    heirs = np.flatnonzero(rows["lender"] >= 0)
    if not heirs.size:
        return heirs
    due = np.abs(rows["onset"][heirs] + rows["period"][heirs] - now) < SOON_NS
    lenders: Rows = rows["lender"][heirs[rows["active"][heirs] | due]]
    return lenders


def _pair(rows: Records, donors: Rows, heirs: Rows) -> None:
    # The fastest first; who has waited longest, then who is due first.
    donors = donors[np.lexsort((-rows["rate"][donors], rows["path"][donors]))]
    active = rows["active"][heirs]
    due = np.where(active, 0, rows["period"][heirs]) + rows["onset"][heirs]
    heirs = heirs[np.lexsort((due, ~active, rows["path"][heirs]))]
    next_donor = np.zeros(int(rows["job"].max()) + 1, np.intp)
    learning.pair(learning.table(rows), donors, heirs, next_donor)
