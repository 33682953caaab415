# SPDX-License-Identifier: Apache-2.0
"""What is negotiated: one reservation for all flows of a job on one path, shared out here.

Such flows meet the same links, and end together or not at all: to an arbiter they are all alike. It
grants the aggregate a rate. Which flow sends at which part of that rate changes with every
acknowledgement, and only this host needs to know.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, count

import numpy as np

from flowslot.model.units import MILLISECOND, Nanos
from flowslot.protocol.aggregate import Aggregate, report, take
from flowslot.protocol.grants import Granted
from flowslot.protocol.host import Host
from flowslot.protocol.messages import Done
from flowslotd.flows.flow_info import FlowInfo
from flowslotd.flows.flow_table import FlowTable
from flowslotd.flows.rows import Rows, Typed
from flowslotd.negotiate import shares
from flowslotd.trace import Trace

Lent = Callable[[Nanos], Rows]
"""Rows of flows whose rate another one uses."""
_Key = tuple[str, tuple[int, ...]]
"""Job and path."""
NOBODY = Aggregate(0, "", (), 0)
"""In the place of an aggregate that has gone."""


class Aggregates:
    """All aggregates of the mapped flows of a table."""

    def __init__(self, table: FlowTable, trace: Trace | None = None) -> None:
        self._table = table
        self._trace = trace
        self._view = Typed(shares.typed)
        self._at: dict[_Key, int] = {}
        self._members = [NOBODY]
        """By the number that is in the column `aggregate`; 0 stays free."""
        self._by_id: dict[int, Aggregate] = {}
        self._gone: list[Done] = []
        self._dirty = False  # a grant came, or flows came or went: share out in any case

    def follow(self, now: Nanos, new: Iterable[FlowInfo], gone: Iterable[FlowInfo]) -> None:
        """Flows have come and gone, as the table says. Called before anything else in a pass."""
        left = [self._at[info.job, info.path] for info in gone if info.path]
        new = [info for info in new if info.path]
        self._dirty |= bool(left or new)
        for at in left:
            self._members[at].flows -= 1
        for info in new:
            at = self._at.get((info.job, info.path)) or self._make(now, info, new)
            self._members[at].flows += 1
            self._table.rows["aggregate"][info.row] = at
        for at in dict.fromkeys(left):
            aggregate = self._members[at]
            if not aggregate.flows:
                del self._at[aggregate.job, aggregate.links], self._by_id[aggregate.id]
                self._members[at] = NOBODY
                self._gone.append(Done(aggregate.id, aggregate.inc))

    # -- what flows do

    def _look(self, now: Nanos, tops_up: bool) -> None:
        """Sum up what the table knows of the flows."""
        times = np.zeros((len(self._members), 5), np.int64)
        sums = np.zeros((len(self._members), 4))
        shares.add_up(now, self._view(self._table.rows), tops_up, times, sums)
        for aggregate, (active, onset, due, period, sockets), (*sizes, usable) in zip(
            self._members, times.tolist(), sums.tolist(), strict=True
        ):
            if aggregate is NOBODY:
                continue
            aggregate.active, aggregate.due, aggregate.period = bool(active), due, period
            aggregate.remaining, aggregate.target, aggregate.expected = sizes
            aggregate.sockets = max(sockets, 1)
            aggregate.cap = usable if active else math.inf
            if active:
                aggregate.onset = onset

    def report(
        self, now: Nanos, host: Host, *, small: bool, lent: Lent, tops_up: bool = True
    ) -> None:
        """Look at the flows, and say what the arbiters do not know yet (see core's `report`).

        `lent` is called when it matters: the aggregates of these flows are not free yet. `tops_up`:
        a flow may send, if there is room, although it is granted nothing. Only then may one that
        has nothing to send ask for nothing: its next bytes leave at once.
        """
        self._look(now, tops_up)
        gone, self._gone = self._gone, []

        def used() -> set[int]:
            at: list[int] = self._table.rows["aggregate"][lent(now)].tolist()
            return {self._members[i].id for i in at}

        granted = report(now, host, self._by_id, gone, small=small, lent=used)
        self._dirty |= bool(granted)
        if self._trace is not None:
            told = [b for b in self._by_id.values() if b.reported and b.reported.at == now]
            self._trace.asked((b.id, b.remaining) for b in told if b.active)
            self._trace.granted(granted)

    def waiting(self) -> bool:
        """An arbiter knows nothing (any more) of some aggregate, and waits for news of it."""
        return any(aggregate.reported is None for aggregate in self._by_id.values())

    # -- what the arbiter gives

    def grant(self, grants: Sequence[Granted]) -> None:
        """What aggregates may send; NaN: no arbiter has a say. See `share_out`."""
        self._dirty |= bool(take(self._by_id, grants))
        if self._trace is not None:
            self._trace.granted(grants)

    def share_out(self, now: Nanos) -> set[int]:
        """Give each flow its part of the rate. Returns the cookies of the flows whose part has
        changed, or was granted anew."""
        rows, members = self._table.rows, self._members
        if not self._by_id:
            return set()
        of_each = (
            (
                b.rate,
                b.active > b.standing,
                b.ceiling,
                b.share,
                max(b.flows, 1),
                b.standing,
                b.granted,
            )
            for b in members
        )
        terms = np.array(list(of_each), np.float64)
        changed = np.zeros(len(rows), np.bool_)
        shares.share_out(now, self._view(rows), terms, changed.view(np.uint8))
        if self._dirty:
            self._dirty = False
            shares.hand_out(self._view(rows), terms, changed.view(np.uint8))
            for aggregate in self._by_id.values():
                aggregate.granted = False
        cookies: list[int] = rows["cookie"][changed].tolist()
        return set(cookies)

    # -- inside

    def _make(self, now: Nanos, first: FlowInfo, new: Iterable[FlowInfo]) -> int:
        """Make an aggregate; returns its number. It is named after the first of its flows after
        which no other one is named."""
        key = first.job, first.path
        cookies = (info.cookie for info in new if (info.job, info.path) == key)
        free = next(n for n in chain(cookies, count(1)) if n not in self._by_id)
        at = next((i for i, b in enumerate(self._members) if i and b is NOBODY), len(self._members))
        # No job has 1000 iterations a second: higher than that of any earlier one of this name.
        made = self._by_id[free] = Aggregate(free, *key, inc=now // MILLISECOND)
        self._members[at:], self._at[key] = [made, *self._members[at + 1 :]], at
        return at
