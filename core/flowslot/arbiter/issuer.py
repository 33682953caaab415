# SPDX-License-Identifier: Apache-2.0
"""From target rates to messages: which changes are worth a message, and which are safe now."""

from dataclasses import dataclass

import numpy as np

from flowslot.arbiter import rules
from flowslot.arbiter.config import ArbiterConfig
from flowslot.arbiter.flow_table import FlowTable
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
        self._groups: tuple[int, Rows] = (-1, np.zeros(0, np.intp))

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
        rules.settle(
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
        flows, gain = self._flows, np.zeros(self._flows.n)
        if lowered.size:
            rules.inherit(
                flows.table,
                self._grouped(),
                lowered,
                self._measured().worth,
                self._config.min_change_rate,
                gain,
            )
        return gain

    def _grouped(self) -> Rows:
        """By row: a number for its session and path, less than n; -1: its path is not known."""
        flows = self._flows
        if self._groups[0] != flows.version:
            numbers: dict[tuple[int, tuple[int, ...]], int] = {}
            paths = map(flows.path, range(flows.n))
            keys = zip(flows.session[: flows.n].tolist(), paths, strict=True)
            groups = [numbers.setdefault(k, len(numbers)) if k[1] else -1 for k in keys]
            self._groups = flows.version, np.array(groups, np.intp)
        return self._groups[1]

    def short(self, mute: Bools, limit: Floats) -> Rows:
        """Links where others have to give way to flows that wait, intp[L + 1] (rules.find_short);
        `limit`: float64[L]."""
        flows, short = self._flows, np.zeros(len(limit) + 1, np.intp)
        rules.find_short(flows.table, flows.paths[: flows.n], mute, limit, short)
        return short

    def raises(self, mute: Bools, free: Floats, gain: Floats, *, pressing: bool) -> Raises:
        """Raises that fit into `free` float64[L], capacity minus all commitments (rules 4 to 6).

        `gain`: what each flow inherits, float64[n], at no cost. Flows that have nothing and want to
        send come first: what they wish for is kept for them on every link of their paths, and
        where it does not fit, nobody else is raised but heirs (ADR 27). When not all fit, each gets
        the same part of its wish on its tightest link; a part that is too small to be worth a
        message waits. What begins or ceases to be standing is said as well, with or without a
        raise. `pressing`: only what flows wait for.
        """
        flows, n = self._flows, self._flows.n
        rows, rates = np.zeros(n, np.intp), np.zeros(n)
        sent = rules.find_raises(
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
