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


class Lending:
    """`donor_of`, intp[F]: the row of whose rate this flow uses once that has drained; or -1."""

    def __init__(self) -> None:
        self.donor_of: Rows = np.zeros(0, np.intp)
        self._cookies = np.zeros(0, np.uint64)

    def donors(self) -> dict[int, int]:
        """By cookie: from whom each heir inherits."""
        heirs = np.flatnonzero(self.donor_of >= 0)
        lenders = self._cookies[self.donor_of[heirs]]
        return dict(zip(self._cookies[heirs].tolist(), lenders.tolist(), strict=True))

    def update(self, rows: Records, all_quiet: bool) -> dict[int, int]:
        """Work out who inherits from whom (see `donors`); `rows`: ROW[F].

        `all_quiet`: nobody waits for news of any flow. A donor that has ended keeps its heir for
        as long as it keeps its rate.
        """
        self._follow(rows)
        table = learning.table(rows)
        learning.keep(table, all_quiet, self.donor_of)
        found = np.empty((2, len(rows)), np.intp)
        fastest = np.zeros(int(rows["path"].max(initial=0)) + 1)
        n_donors, n_heirs = learning.candidates(
            table, all_quiet, WANTING, fastest, self.donor_of, (found[0], found[1])
        )
        if n_donors and n_heirs:
            self._pair(rows, found[0, :n_donors], found[1, :n_heirs])
        return self.donors()

    def in_use(self, now: Nanos, rows: Records) -> Rows:
        """Rows of the donors whose heirs send, or are about to."""
        self._follow(rows)
        heirs = np.flatnonzero(self.donor_of >= 0)
        if not heirs.size:
            return heirs
        due = np.abs(rows["onset"][heirs] + rows["period"][heirs] - now) < SOON_NS
        donors: Rows = self.donor_of[heirs[rows["active"][heirs] | due]]
        return donors

    def _follow(self, rows: Records) -> None:
        """Flows may have come or gone, or have got other rows."""
        if np.array_equal(rows["cookie"], self._cookies):
            return
        old = self.donors()
        self._cookies = rows["cookie"].copy()
        place = {cookie: row for row, cookie in enumerate(self._cookies.tolist())}
        self.donor_of = np.full(len(rows), -1, np.intp)
        for heir, donor in old.items():
            if heir in place:
                self.donor_of[place[heir]] = place.get(donor, -1)

    def _pair(self, rows: Records, donors: Rows, heirs: Rows) -> None:
        # The fastest first; who has waited longest, then who is due first.
        donors = donors[np.lexsort((-rows["rate"][donors], rows["path"][donors]))]
        active = rows["active"][heirs]
        due = np.where(active, 0, rows["period"][heirs]) + rows["onset"][heirs]
        heirs = heirs[np.lexsort((due, ~active, rows["path"][heirs]))]
        next_donor = np.zeros(int(rows["job"].max()) + 1, np.intp)
        learning.pair(learning.table(rows), donors, heirs, next_donor, self.donor_of)
