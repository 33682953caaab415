# SPDX-License-Identifier: Apache-2.0
"""Who takes over a flow's rate in the moment in which it has sent everything.

Negotiation takes milliseconds, in which the link would be idle between one job and the next. A
waiting flow of the same path (of another job) may send at the rate of one that has drained: the
kernel sees to it at once, and the arbiter, which hears of it afterwards, need not know: together
the two never have more than it granted.
"""

import numpy as np
from numpy.typing import NDArray

from flowslotd.progress import Records

WANTING = 0.25
"""Whose rate is below this share of the donor's may be an heir."""


class Lending:
    """`donors[heir]`: the flow (by cookie) whose rate `heir` uses once it has drained."""

    def __init__(self) -> None:
        self.donors: dict[int, int] = {}

    def update(self, rows: Records, quiet: NDArray[np.bool_]) -> dict[int, int]:
        """Work out who inherits from whom; `rows`: ROW[F], `quiet`: bool[F].

        Donors are at work at a guaranteed rate, and the kernel knows what they have left. One that
        has ended keeps its heir for as long as it keeps its rate.
        """
        working = rows["active"] & rows["kernel"] & ~quiet & (rows["rate"] > 0)
        if not (working.any() or self.donors):
            return self.donors
        index = {int(cookie): i for i, cookie in enumerate(rows["cookie"])}
        kept = {
            heir: donor
            for heir, donor in self.donors.items()
            if heir in index
            and (d := index.get(donor)) is not None
            and not rows["active"][d]
            and not quiet[d]
            and rows["rate"][d] > 0
        }
        free = np.array([c not in kept for c in rows["cookie"].tolist()], np.bool_)
        for path in np.unique(rows["path"][working]).tolist():
            if path:
                here = free & (rows["path"] == path)
                kept |= self._pair(rows, np.flatnonzero(here & working), np.flatnonzero(here))
        self.donors = kept
        return kept

    def _pair(
        self, rows: Records, donors: NDArray[np.intp], flows: NDArray[np.intp]
    ) -> dict[int, int]:
        """Heirs for the `donors` among the `flows`, all of one path."""
        most = float(rows["rate"][donors].max())
        wanting = (rows["rate"][flows] < WANTING * most) & rows["kernel"][flows]
        # Who has waited longest, then who is due first.
        heirs = sorted(
            flows[wanting].tolist(),
            key=lambda i: (not rows["active"][i], rows["onset"][i] + rows["period"][i]),
        )
        left = donors[np.argsort(-rows["rate"][donors], kind="stable")].tolist()
        pairs: dict[int, int] = {}
        for heir in heirs:
            donor = next((d for d in left if rows["job"][d] != rows["job"][heir]), None)
            if donor is not None:
                left.remove(donor)
                pairs[int(rows["cookie"][heir])] = int(rows["cookie"][donor])
        return pairs
