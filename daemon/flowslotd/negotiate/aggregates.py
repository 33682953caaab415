# SPDX-License-Identifier: Apache-2.0
"""What is negotiated: one reservation for all flows of a job on one path, shared out here.

The flows of a job that leave this host on the same path meet the same links and end together or
not at all, so an arbiter has nothing to tell apart in them. It grants the aggregate a rate; who of
its flows sends at which part of it changes with every acknowledgement, and nobody else need know.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain, count

import numpy as np
from numpy.typing import NDArray

from flowslot.model.units import MILLISECOND, Nanos
from flowslot.protocol.aggregate import Aggregate, ended
from flowslot.protocol.grantbook import Granted
from flowslot.protocol.messages import Demand, Done
from flowslotd.observe import learning
from flowslotd.observe.flow_info import Rows
from flowslotd.observe.flow_table import FlowTable

_Key = tuple[str, tuple[int, ...]]
"""Job and path."""


@dataclass
class _Groups:
    """Which rows of the flow table belong to which aggregate: one look at its `version`."""

    version: int = -1
    members: list[Aggregate] = field(default_factory=list)
    of: NDArray[np.intp] = field(default_factory=lambda: np.zeros(0, np.intp))
    """intp[F]: index into members; as many as there are members: in no aggregate."""

    def __post_init__(self) -> None:
        """Room for what `learning.add_up` says."""
        self.times = np.zeros((len(self.members) + 1, 5), np.int64)
        self.sizes = np.zeros((len(self.members) + 1, 3))


class Aggregates:
    """All aggregates of the mapped flows of a table."""

    def __init__(self, table: FlowTable, *, tops_up: bool = True) -> None:
        """`tops_up`: a flow may send, if there is room, although it is granted nothing. Only then
        may one that has nothing to send ask for nothing: its next bytes are seen by being sent."""
        self._table = table
        self._tops_up = tops_up
        self._by_key: dict[_Key, Aggregate] = {}
        self._by_id: dict[int, Aggregate] = {}
        self._gone: list[Done] = []
        self._groups = _Groups()
        self._dirty = False  # a grant came, or flows came or went: share out in any case

    # -- what flows do

    def look(self, now: Nanos) -> None:
        """Sum up what the table knows of the flows."""
        groups = self._grouped(now)
        if not groups.members:
            return
        learning.add_up(
            now, learning.table(self._table.rows), groups.of, groups.times, groups.sizes
        )
        for aggregate, (active, onset, due, period, stalled), sizes in zip(
            groups.members, groups.times.tolist(), groups.sizes.tolist(), strict=False
        ):
            aggregate.active, aggregate.due, aggregate.period = bool(active), due, period
            aggregate.remaining, aggregate.target, aggregate.expected = sizes
            aggregate.stalled = bool(active and stalled and self._tops_up)
            if active:
                aggregate.onset = onset

    def waiting(self) -> bool:
        """The arbiter waits for news of an aggregate that it knows nothing of (any more)."""
        return any(aggregate.told is None for aggregate in self._by_id.values())

    def ended(self, lent: Callable[[], Rows]) -> list[int]:
        """Aggregates with grants, of jobs whose last active flow here has ended since it was told.

        `lent`, rows, asked for when it matters: flows whose rate another one uses. Their aggregates
        are not free yet.
        """
        members = self._groups.members
        over = ended(members)
        if not over:
            return []
        of = set(self._groups.of[lent()].tolist()) - {len(members)}
        used = {members[i].id for i in of}
        return [aggregate.id for aggregate in over if aggregate.id not in used]

    def demands(self, now: Nanos, small: bool = False) -> list[Demand]:
        """What the arbiter does not know yet, with or without `small` news; it counts as told."""
        told = [aggregate for aggregate in self._groups.members if aggregate.has_news(now, small)]
        return [aggregate.demand(now) for aggregate in told]

    def take_gone(self) -> list[Done]:
        """Aggregates that have lost their last flow since the last call."""
        gone, self._gone = self._gone, []
        return gone

    # -- what the arbiter gives

    def grant(self, grants: Iterable[Granted]) -> None:
        """What aggregates may send; NaN: nobody has a say. `share_out` passes it on to flows."""
        for grant in grants:
            aggregate = self._by_id.get(grant.flow)
            if aggregate is None:
                continue
            self._dirty = True
            aggregate.take(grant)

    def share_out(self, now: Nanos) -> set[int]:
        """Give each flow its part; returns, by cookie, whose changes or was granted anew."""
        groups, rows = self._grouped(now), self._table.rows
        if not groups.members:
            return set()
        members, of, n = groups.members, groups.of, len(rows)
        rate = np.array([aggregate.rate for aggregate in members] + [np.nan])
        at_work = np.array([b.active and not b.standing for b in members] + [False], np.int64)
        weight, parts, before = np.empty(n), np.empty(n), rows["rate"].copy()
        learning.weigh(now, learning.table(rows), of, at_work, weight)
        learning.split(of, rate, before, weight, parts)
        changed = ~((parts == before) | (np.isnan(parts) & np.isnan(before)))
        rows["rate"] = parts
        if self._dirty:
            self._dirty = False
            terms = [(b.ceiling, b.share / b.flows, b.standing, b.granted) for b in groups.members]
            columns = map(np.array, zip(*terms, (np.nan, 0.0, False, False), strict=True))
            ceiling, share, standing, granted = (column[groups.of] for column in columns)
            rows["ceiling"], rows["share"], rows["quiet"] = ceiling, share, standing
            changed |= granted
            for aggregate in groups.members:
                aggregate.granted = False
        cookies: list[int] = rows["cookie"][changed].tolist()
        return set(cookies)

    # -- inside

    def _grouped(self, now: Nanos) -> _Groups:
        if self._groups.version != self._table.version:  # flows came or went
            self._groups = self._regroup(now)
            self._dirty = True
        return self._groups

    def _regroup(self, now: Nanos) -> _Groups:
        rows_of: dict[_Key, list[int]] = {}
        for row, info in enumerate(self._table.infos):
            if info.path:
                rows_of.setdefault((info.job, info.path), []).append(row)
        for key in [key for key in self._by_key if key not in rows_of]:
            aggregate = self._by_key.pop(key)
            del self._by_id[aggregate.id]
            self._gone.append(Done(aggregate.id, aggregate.inc))
        of = np.full(len(self._table), len(rows_of), np.intp)
        for i, (key, rows) in enumerate(rows_of.items()):
            if key not in self._by_key:
                self._by_key[key] = self._make(now, key, rows)
            self._by_key[key].flows = len(rows)
            of[rows] = i
        members = [self._by_key[key] for key in rows_of]
        return _Groups(self._table.version, members, of)

    def _make(self, now: Nanos, key: _Key, rows: list[int]) -> Aggregate:
        """A new aggregate, named after its first flow (that no other one is named after)."""
        cookies = (self._table.infos[row].cookie for row in rows)
        free = next(n for n in chain(cookies, count(1)) if n not in self._by_id)
        # No job has 1000 iterations a second: higher than that of any earlier one of this name.
        made = self._by_id[free] = Aggregate(free, *key, inc=now // MILLISECOND)
        return made
