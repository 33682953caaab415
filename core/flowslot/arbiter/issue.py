# SPDX-License-Identifier: Apache-2.0
"""From target rates to messages: which changes are worth a message, and which are safe now."""

from dataclasses import dataclass

import numpy as np

from flowslot.arbiter.config import ArbiterConfig
from flowslot.arbiter.flows import FlowTable
from flowslot.policy.base import Bools, Floats, Rows
from flowslot.policy.fill import link_sum

_ROUNDING = 1e-9


@dataclass(slots=True)
class Raises:
    """Rates that may go up now: `rates[i]` for row `rows[i]`."""

    rows: Rows
    rates: Floats


@dataclass(frozen=True, slots=True)
class _Measures:
    """`tightest`: least goodput on each row's path, inf when not known; `share`: see `shares`."""

    version: int
    tightest: Floats
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
        ceiling = self._measured().tightest[rows]
        return np.where(np.isfinite(ceiling), ceiling, 0.0)

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
            self._measures = _Measures(flows.version, goodput.min(axis=1), share)
        return self._measures

    def settle(self, target: Floats, capacity: Floats) -> None:
        """Turn targets into goals (rule 7): small changes are ignored, except to zero.

        Ignored lowers add up, so on a link whose goals exceed `capacity` none is ignored.
        """
        n, config = self._flows.n, self._config
        goal = self._flows.goal[:n]
        link = self._measured().tightest
        worth = np.minimum(
            config.min_change_link * link, config.min_change_rate * np.maximum(goal, target)
        )
        settled = np.where((np.abs(target - goal) < worth) & (target > 0), goal, target)
        full = self._flows.on_links(settled) > capacity * (1 + _ROUNDING)
        if full.any():
            crosses = np.append(full, False)[self._flows.paths[:n]].any(axis=1)
            settled = np.where(crosses, np.minimum(settled, target), settled)
        self._flows.goal[:n] = settled

    def lowers(self, mute: Bools) -> tuple[Rows, Floats]:
        """Rows that hold more than their goal, and the goals."""
        n = self._flows.n
        rows = np.flatnonzero((self._flows.goal[:n] < self._flows.grant[:n]) & ~mute)
        return rows, self._flows.goal[rows]

    def inherit(self, lowered: Rows) -> Floats:
        """Rates that flows take over from those in `lowered`, float64[n].

        Of the same daemon and on the same path only: one message lowers the one and raises the
        other, so there is nothing to wait for. Every row inherits from any number of others.
        """
        flows, n = self._flows, self._flows.n
        gain: Floats = np.zeros(n)
        # An older lower that is not acknowledged either says that it may still send more.
        donors = lowered[(flows.pending_seq[lowered, 1:] == 0).all(axis=1)]
        if not donors.size:
            return gain
        wish = np.where(flows.unplaced(), 0.0, flows.goal[:n] - flows.commitment())
        heirs: dict[tuple[int, bytes], list[int]] = {}
        rows = np.flatnonzero(wish > 0)[::-1]
        for row in rows[np.argsort(self._starved()[rows], kind="stable")].tolist():
            heirs.setdefault((int(flows.session[row]), flows.paths[row].tobytes()), []).append(row)
        if not heirs:
            return gain
        for donor in donors.tolist():
            waiting = heirs.get((int(flows.session[donor]), flows.paths[donor].tobytes()))
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

    def _starved(self) -> Bools:
        """Flows that want to send and have nothing, bool[n]."""
        flows, n = self._flows, self._flows.n
        starved: Bools = (flows.grant[:n] <= 0) & (flows.remaining[:n] > 0)
        return starved

    def _worth(self, row: int) -> float:
        """The least change that is worth a message."""
        link = float(self._measured().tightest[row])
        goal = float(self._flows.goal[row])
        return max(self._config.min_change_link * link, self._config.min_change_rate * goal)

    def raises(self, mute: Bools, free: Floats, gain: Floats) -> Raises:
        """Raises that fit into `free` float64[L], capacity minus all commitments (rules 4 to 6).

        `gain`: what each flow inherits, float64[n], at no cost. Flows that have nothing and want to
        send come first. When not all fit, each gets the same part of its wish on its tightest
        link; a part that is too small to be worth a message waits. What begins or ceases to be
        standing is said as well, with or without a raise.
        """
        flows, n = self._flows, self._flows.n
        grant, goal = flows.grant[:n], flows.goal[:n]
        news = (goal == grant) & (flows.standing[:n] != flows.told_standing[:n])
        rows = np.flatnonzero(((goal > grant) | news) & ~mute & ~flows.unplaced())
        if not rows.size:
            return Raises(rows, goal[rows])
        grant, goal, paths = grant[rows], goal[rows], flows.paths[rows]
        # Up to the commitment a raise costs nothing: the flow may still be sending that much.
        base = np.minimum(np.maximum(flows.commitment()[rows], grant) + gain[rows], goal)
        room = np.append(np.maximum(free, 0.0), np.inf)
        first = self._starved()[rows]
        rates = goal.copy()
        for turn in (first, ~first):
            if turn.any():
                wish = np.where(turn, goal - base, 0.0)
                wished = link_sum(paths, wish, flows.n_links)
                part = np.ones(len(wished))
                np.divide(room, wished, out=part, where=wished > room)
                share = part[paths].min(axis=1)
                got = np.where(share >= 1.0, wish, wish * share)
                rates[turn] = np.where(share >= 1.0, goal, base + got)[turn]
                room = np.maximum(room - link_sum(paths, got, flows.n_links), 0.0)
        worth = np.maximum(
            self._config.min_change_link * self._measured().tightest[rows],
            self._config.min_change_rate * goal,
        )
        send = (rates >= goal) | (rates - grant >= worth)
        return Raises(rows[send], rates[send])
