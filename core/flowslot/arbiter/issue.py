# SPDX-License-Identifier: Apache-2.0
"""From target rates to messages: which changes are worth a message, and which are safe now."""

from dataclasses import dataclass

import numpy as np

from flowslot.arbiter import loops
from flowslot.arbiter.config import ArbiterConfig
from flowslot.arbiter.flows import FlowTable
from flowslot.policy.base import Bools, Floats, Rows


@dataclass(slots=True)
class Raises:
    """Rates that may go up now: `rates[i]` for row `rows[i]`."""

    rows: Rows
    rates: Floats


@dataclass(frozen=True, slots=True)
class _Measures:
    """`worth`: least part of the tightest link on each row's path that is worth a message, inf when
    the path is not known; `ceiling`, `share`: see `ceilings`, `shares`."""

    version: int
    worth: Floats
    ceiling: Floats
    share: Floats


class Issuer:
    """Rules 4 to 7, vectorised over the flow table. `goodput`: float64[L]."""

    def __init__(self, flows: FlowTable, goodput: Floats, config: ArbiterConfig) -> None:
        self._flows = flows
        self._goodput = np.append(goodput, np.inf)
        self._config = config
        self._measures: _Measures | None = None

    def ceilings(self, rows: Rows) -> Floats:
        """Goodput of the tightest link on each row's path (0 when the path is not known)."""
        return self._measured().ceiling[rows]

    def shares(self, rows: Rows) -> Floats:
        """Goodput of each row's path, divided among all flows of its job on the tightest link."""
        return self._measured().share[rows]

    def _measured(self) -> _Measures:
        """What hangs on paths and jobs alone; worked out anew when these change."""
        flows, n = self._flows, self._flows.n
        if self._measures is None or self._measures.version != flows.version:
            goodput = self._goodput[flows.paths[:n]]
            cells = flows.job[:n, None] * (flows.n_links + 1) + flows.paths[:n]
            share = (goodput / np.bincount(cells.ravel())[cells]).min(axis=1)
            share = np.where(np.isfinite(share), share, 0.0)
            tightest = goodput.min(axis=1)
            worth = self._config.min_change_link * tightest
            ceiling = np.where(np.isfinite(tightest), tightest, 0.0)
            self._measures = _Measures(flows.version, worth, ceiling, share)
        return self._measures

    def settle(self, target: Floats, capacity: Floats) -> None:
        """Turn targets into goals (rule 7): small changes are ignored, except to zero.

        Ignored lowers add up, so on a link whose goals exceed `capacity` none is ignored.
        """
        flows = self._flows
        loops.settle(
            flows.table,
            flows.paths[: flows.n],
            target,
            self._measured().worth,
            capacity,
            self._config.min_change_rate,
        )

    def inherit(self, lowered: Rows) -> Floats:
        """Rates that flows take over from those in `lowered`, float64[n].

        Of the same daemon and on the same path only: one message lowers the one and raises the
        other, so there is nothing to wait for. Every row inherits from any number of others.
        """
        flows, n = self._flows, self._flows.n
        gain = np.zeros(n)
        if not lowered.size:
            return gain
        # An older lower that is not acknowledged either says that it may still send more.
        donors = lowered[flows.pending_seq[lowered, 1] == 0]
        if not donors.size:
            return gain
        wish, rows = np.zeros(n), np.zeros(n, np.intp)
        waits = loops.find_heirs(flows.table, flows.paths[:n], flows.n_links, wish, rows)
        heirs: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        for row in rows[:waits].tolist():
            heirs.setdefault((int(flows.session[row]), flows.path(row)), []).append(row)
        if not heirs:
            return gain
        for donor in donors.tolist():
            waiting = heirs.get((int(flows.session[donor]), flows.path(donor)))
            if not waiting:
                continue
            # One heir for each, and it is the next in line: many small rates must not mean that
            # every flow is compared with every other one.
            heir = waiting[-1]
            left = float(flows.pending_rate[donor, 0] - flows.grant[donor])
            rate = min(left, float(wish[heir]))
            if rate == wish[heir] or rate >= self._worth(heir):
                flows.pass_on(donor, heir, rate)
                gain[heir] += rate
                wish[heir] -= rate
                if wish[heir] <= 0:
                    waiting.pop()
        return gain

    def _worth(self, row: int) -> float:
        """The least change that is worth a message."""
        goal = float(self._flows.goal[row])
        return max(float(self._measured().worth[row]), self._config.min_change_rate * goal)

    def short(self, mute: Bools, limit: Floats) -> Rows:
        """Links where others have to give way to flows that wait, intp[L + 1] (loops.find_short);
        `limit`: float64[L]."""
        flows, short = self._flows, np.zeros(len(limit) + 1, np.intp)
        loops.find_short(flows.table, flows.paths[: flows.n], mute, limit, short)
        return short

    def raises(self, mute: Bools, free: Floats, gain: Floats, *, pressing: bool) -> Raises:
        """Raises that fit into `free` float64[L], capacity minus all commitments (rules 4 to 6).

        `gain`: what each flow inherits, float64[n], at no cost. Flows that have nothing and want to
        send come first. When not all fit, each gets the same part of its wish on its tightest
        link; a part that is too small to be worth a message waits. What begins or ceases to be
        standing is said as well, with or without a raise. `pressing`: only what flows wait for.
        """
        flows, n = self._flows, self._flows.n
        rows, rates = np.zeros(n, np.intp), np.zeros(n)
        sent = loops.find_raises(
            flows.table,
            flows.paths[:n],
            mute,
            gain,
            self._measured().worth,
            self._config.min_change_rate,
            free,
            pressing,
            rows,
            rates,
        )
        return Raises(rows[:sent], rates[:sent])
