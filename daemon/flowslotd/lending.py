# SPDX-License-Identifier: Apache-2.0
"""Who takes over a flow's rate in the moment in which it has sent everything.

Negotiation takes milliseconds, in which the link would be idle between one job and the next. A
waiting flow of the same path (of another job) may send at the rate of one that has drained: the
kernel sees to it at once, and the arbiter, which hears of it afterwards, need not know: together
the two never have more than it granted.
"""

import numpy as np
from numpy.typing import NDArray

from flowslot.units import MILLISECOND, Nanos
from flowslotd.progress import Records

SOON_NS = 60 * MILLISECOND
"""An idle heir due within this is worth waiting for; otherwise its donor's rate is for others."""
WANTING = 0.25
"""Whose rate is below this share of the donor's may be an heir."""


class Lending:
    """`donors[heir]`: the flow (by cookie) whose rate `heir` uses once it has drained."""

    def __init__(self) -> None:
        self.donors: dict[int, int] = {}

    def update(self, rows: Records, quiet: NDArray[np.bool_]) -> dict[int, int]:
        """Work out who inherits from whom; `rows`: ROW[F], `quiet`: bool[F].

        Donors are at work at a granted rate, and the kernel knows what they have left. One that
        has ended keeps its heir for as long as it keeps its rate.
        """
        known = rows["kernel"] & (rows["path"] > 0) & (rows["rate"] >= 0)
        donors = known & rows["active"] & ~quiet & (rows["rate"] > 0)
        if not (donors.any() or self.donors):
            return self.donors
        kept = self._kept(rows, known & ~rows["active"] & ~quiet & (rows["rate"] > 0))
        for path in np.unique(rows["path"][donors]).tolist():
            here = known & (rows["path"] == path)
            self._pair(rows, np.flatnonzero(here & donors), np.flatnonzero(here), kept)
        self.donors = kept
        return kept

    def in_use(self, now: Nanos, rows: Records) -> set[int]:
        """Donors whose heirs send, or are about to."""
        if not self.donors:
            return set()
        due = np.abs(rows["onset"] + rows["period"] - now) < SOON_NS
        awake = set(rows["cookie"][rows["active"] | due].tolist())
        return {donor for heir, donor in self.donors.items() if heir in awake}

    def _kept(self, rows: Records, ended: NDArray[np.bool_]) -> dict[int, int]:
        if not self.donors:
            return {}
        over, all_flows = set(rows["cookie"][ended].tolist()), set(rows["cookie"].tolist())
        return {h: d for h, d in self.donors.items() if d in over and h in all_flows}

    def _pair(
        self,
        rows: Records,
        donors: NDArray[np.intp],
        flows: NDArray[np.intp],
        pairs: dict[int, int],
    ) -> None:
        """Add heirs for the `donors` among the `flows`, all of one path."""
        rate = rows["rate"]
        heirs = flows[rate[flows] < WANTING * rate[donors].max()]
        # Who has waited longest, then who is due first.
        due = np.where(rows["active"], 0, rows["period"]) + rows["onset"]
        heirs = heirs[np.lexsort((due[heirs], ~rows["active"][heirs]))]
        left: dict[int, list[int]] = {}  # by job, the fastest last
        for i in donors[np.argsort(-rate[donors], kind="stable")][::-1].tolist():
            left.setdefault(int(rows["job"][i]), []).append(int(rows["cookie"][i]))
        for heir, job in zip(
            rows["cookie"][heirs].tolist(), rows["job"][heirs].tolist(), strict=True
        ):
            others = next((flows for j, flows in left.items() if j != job and flows), None)
            if others and heir not in pairs:
                pairs[heir] = others.pop()
