# SPDX-License-Identifier: Apache-2.0
"""What each flow of a contention domain demands, has been granted, and may be sending at."""

from bisect import insort
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowslot.arbiter import connected, rules
from flowslot.arbiter.connected import FREE
from flowslot.arbiter.rules import NEVER, PENDING
from flowslot.model.units import Nanos
from flowslot.policy.base import Floats, Ints, Rows
from flowslot.protocol.messages import Demand, Held

ROW = np.dtype(  # times are absolute, ns; rules.pxd has the same columns in the same order
    [
        ("session", np.int64),  # FREE: the slot belongs to no flow
        ("flow", np.uint64),
        ("inc", np.int64),
        ("job", np.int64),  # number in `jobs`
        ("aggregate", np.int64),  # number in `aggregates`: of its job, on its path
        ("group", np.int64),  # number in `groups`: of its session, on its path; -1: no path
        ("tightest", np.float64),  # least goodput on the path; inf: the path is not known
        ("remaining", np.float64),  # at ...
        ("as_of", np.int64),  # ... this time
        ("least", np.float64),  # `remaining` is not estimated to be less
        ("cap", np.float64),  # most it can use, see Demand
        ("sockets", np.float64),
        ("ready_at", np.int64),
        ("period_ns", np.int64),
        ("due_at", np.int64),
        ("next_bytes", np.float64),
        ("idle_since", np.int64),
        ("began_at", np.int64),  # when the phase of the job began in which the flow last began
        ("whole", np.float64),  # bytes that the flow began with
        ("goal", np.float64),  # what it is to have
        ("grant", np.float64),  # what it was granted last
        ("seq", np.int64),  # number of that message
        ("oldest_pending", np.int64),  # since when lowers wait for a next acknowledgement; 0: none
        ("held_since", np.int64),  # when a Hello first named it
        ("hold", np.int64),  # until when it is to send nothing; 0: it may
        ("reported_hold", np.int64),
        ("most", np.float64),  # up to which each of its sockets may top up
        ("reported_most", np.float64),
        ("standing", np.bool_),
        ("reported_standing", np.bool_),
        ("anticipated", np.bool_),  # expected to begin now, see rules.see
        ("borrower", np.int64),  # slot of the flow that has ...
        ("lent", np.float64),  # ... so much of what this flow's newest lower takes back
        ("pending_seq", np.int64, (PENDING,)),  # lowers not acknowledged, the oldest first; 0: none
        ("pending_rate", np.float64, (PENDING,)),  # what they take back
    ]
)
_EXACT = 1 + 1e-9
"""Sums of rates have rounding errors."""
_EMPTY = np.zeros((), ROW)
_EMPTY["session"], _EMPTY["group"], _EMPTY["idle_since"] = FREE, -1, NEVER
_EMPTY["tightest"] = _EMPTY["cap"] = _EMPTY["most"] = _EMPTY["reported_most"] = np.inf
_EMPTY["sockets"] = 1.0
AT_ONCE, FOREVER = 0, 2**62
"""Times."""
NO_SLOTS: Rows = np.zeros(0, np.intp)


class Ledger:
    """A flow has the same slot from `add` to `remove`; then the slot may become another flow's.

    Slots 0 .. n-1 are in use, or free with one in use above them. To sums a free slot is a flow
    without a path that has nothing, so loops need not ask which are free. A flow without a path
    (known only from Hello) counts on every link.

    Flows fall into parts: sets that share no link and no job with any flow outside. Parts have no
    influence on each other, so a decision looks only at those of which something was said, or whose
    time has come.

    `commitment` (ADR 1, 3): the largest of the grant and of every rate that a lower not yet
    acknowledged takes back.
    """

    def __init__(self, goodput: Floats) -> None:
        """`goodput`: float64[L]."""
        self.n_links = len(goodput)
        self.goodput = np.append(goodput, np.inf)
        self.slots: dict[tuple[int, int], int] = {}
        """By session and flow."""
        self._free: list[int] = []  # below n, ascending
        self._all_rows: NDArray[np.void] = np.zeros(0, ROW)
        self._all_paths = np.full((0, 1), self.n_links, np.int32)
        self.jobs, self.aggregates, self.groups = Numbers(), Numbers(), Numbers()
        self._crossing = np.zeros((1, self.n_links + 1), np.int64)  # flows by job and link
        self.phases = np.full((1, 2), NEVER)  # [J, 2], see rules.report
        self.jobs.take("")  # 0, of flows whose job and path are not known, and of free slots
        self.aggregates.take(("", ()))
        self._all_parts: Rows = np.zeros(0, np.intp)
        self.look_at = np.full(1, AT_ONCE)
        """Of each part; the last one: of slots in none."""
        self._members: list[Rows] = []  # of each part: its slots, ascending
        self._moved = False  # flows have come or gone, or have another path
        self.moves = 0
        """So often has `due` seen that."""
        self._resize(0)

    # --- slots

    def add(self, session: int, flow: int, inc: int) -> int:
        """A slot for a new flow without path, demand or grant."""
        slot = self._free.pop(0) if self._free else self.n
        if slot == self.n:
            self._resize(self.n + 1)
        self.slots[session, flow] = slot
        row = self.rows[slot]
        row["session"], row["flow"], row["inc"] = session, flow, inc
        self.jobs.take("")
        self._moved = True
        return slot

    def remove(self, session: int, flow: int) -> None:
        """Free a flow's slot. All that it commits ends."""
        slot = self.slots.pop((session, flow))
        # What was lent to the flow is its lender's again: its daemon may not have read of the loan.
        rows = self.rows
        lenders = np.flatnonzero((rows["lent"] > 0) & (rows["borrower"] == slot))
        rows["pending_rate"][lenders, 0] += rows["lent"][lenders]
        rows["lent"][lenders] = 0.0
        self._leave(slot)
        rows[slot], self.paths[slot] = _EMPTY, self.n_links
        self.part[slot] = -1
        insort(self._free, slot)
        n = self.n
        while self._free and self._free[-1] == n - 1:
            n = self._free.pop()
        self._resize(n)

    def of_session(self, session: int) -> list[int]:
        """Identifiers of a session's flows."""
        flows: list[int] = self.rows["flow"][self.rows["session"] == session].tolist()
        return flows

    def move(self, slot: int, session: int) -> None:
        """The flow now belongs to another session (of the same daemon)."""
        row = self.rows[slot]
        flow = int(row["flow"])
        self.slots[session, flow] = self.slots.pop((int(row["session"]), flow))
        row["session"] = session
        if row["group"] >= 0:
            self.groups.drop(int(row["group"]))
            row["group"] = self.groups.take((session, self.path(slot)))

    def overstated(self, session: int, held: Iterable[Held]) -> int | None:
        """A flow of which more is held than its daemon was granted, whatever of the messages to it
        has been read; None: there is none. Of a loan either the lender or the borrower holds a
        part, not both: one message tells of both."""
        rows, claims = self.rows, np.zeros(self.n)
        for one in held:
            slot = self.slots.get((session, one.flow))
            if slot is not None:
                claims[slot] = one.rate
            elif one.rate > 0:
                return one.flow
        pending, lent = rows["pending_rate"], rows["lent"]
        own = np.maximum(rows["grant"], pending.max(axis=1))
        over = claims > np.maximum(own, pending[:, 0] + lent) * _EXACT
        kept = np.clip(claims - own, 0.0, lent)
        lenders = np.flatnonzero(kept)
        np.add.at(claims, rows["borrower"][lenders], kept[lenders])
        over |= claims - kept > own * _EXACT
        return int(rows["flow"][over][0]) if over.any() else None

    def restate(self, now: Nanos, slot: int, inc: int, rate: float) -> None:
        """The flow's daemon says that it enforces exactly this rate, and awaits nothing.

        A lower that it has not followed stays as old as it is: no new stream puts it off.
        """
        row = self._touch(now, slot)
        if rate <= row["grant"]:
            row["oldest_pending"] = 0
        row["inc"], row["grant"], row["goal"] = inc, rate, rate
        row["reported_standing"], row["reported_hold"], row["lent"] = False, 0, 0.0
        row["reported_most"] = np.nan  # it keeps a ceiling that another arbiter may have said
        row["pending_seq"], row["pending_rate"] = 0, 0.0
        row["ready_at"] = now  # how long it waits is said anew

    def path(self, slot: int) -> tuple[int, ...]:
        """The flow's links; empty when they are not known."""
        path: tuple[int, ...] = self.aggregates.names[self.rows["aggregate"][slot]][1]
        return path

    def place(self, slot: int, job: str, links: tuple[int, ...]) -> None:
        """Make the flow part of a job, on a path."""
        if self.aggregates.names[self.rows["aggregate"][slot]] == (job, links):
            return
        self._leave(slot)
        row = self.rows[slot]
        if len(links) > self._all_paths.shape[1]:
            wider = np.full((len(self._all_paths), len(links)), self.n_links, np.int32)
            wider[:, : self._all_paths.shape[1]] = self._all_paths
            self._all_paths, self.paths = wider, wider[: self.n]
        self.paths[slot, : len(links)] = links
        known = job in self.jobs
        row["job"] = number = self.jobs.take(job)
        if number == len(self.phases):
            self.phases = np.append(self.phases, [[0, 0]], axis=0)
            self._crossing = np.append(self._crossing, np.zeros_like(self._crossing[:1]), axis=0)
        if not known:
            self.phases[number] = NEVER
        self._crossing[number, list(links)] += 1
        row["aggregate"] = self.aggregates.take((job, links))
        row["group"] = self.groups.take((int(row["session"]), links))
        row["tightest"] = self.goodput[self.paths[slot]].min()

    def _leave(self, slot: int) -> None:
        """The flow is not part of its job any more, nor on its path."""
        if self.part[slot] >= 0:
            self.look_at[self.part[slot]] = AT_ONCE
        self._moved, row = True, self.rows[slot]
        self.jobs.drop(int(row["job"]))
        if row["group"] >= 0:
            self.groups.drop(int(row["group"]))
            self._crossing[row["job"], list(self.path(slot))] -= 1
            self.aggregates.drop(int(row["aggregate"]))

    def _resize(self, n: int) -> None:
        if n > len(self._all_rows):
            room = max(64, 2 * len(self._all_rows)) - len(self._all_rows)
            more = np.full((room, self._all_paths.shape[1]), self.n_links, np.int32)
            self._all_paths = np.concatenate((self._all_paths, more))
            self._all_rows = np.concatenate((self._all_rows, np.full(room, _EMPTY)))
            self._all_parts = np.append(self._all_parts, np.full(room, -1))
        self.n = n
        self.rows, self.paths = self._all_rows[:n], self._all_paths[:n]
        self.part = self._all_parts[:n]
        self.table = rules.table(self.rows)

    # --- when to look at them

    def due(self, now: Nanos) -> Rows:
        """Slots of all flows of the parts of which something was said, or whose time has come."""
        if self._moved:
            self._find_parts()
        parts = np.flatnonzero(self.look_at[:-1] <= now).tolist()
        if len(parts) == 1:
            return self._members[parts[0]]
        members = [NO_SLOTS, *(self._members[part] for part in parts)]
        return np.sort(np.concatenate(members), kind="stable")

    def _find_parts(self) -> None:
        """Number the parts anew. One in which anything is new, or was to be looked at, is."""
        before = self.look_at[self.part]  # of flows that are new: at once
        session, job = self.rows["session"], self.rows["job"]
        n_jobs = len(self.jobs.names)
        n = connected.parts(session, job, self.paths, self.n_links, n_jobs, self.part)
        self.look_at = np.full(n + 1, FOREVER)
        np.minimum.at(self.look_at, self.part, before)
        self.look_at[-1] = AT_ONCE
        order = np.argsort(self.part, kind="stable")
        ends = np.searchsorted(self.part[order], np.arange(n + 1))
        self._members = [order[a:b] for a, b in pairwise(ends.tolist())]
        self._moved, self.moves = False, self.moves + 1

    def next_due(self, now: Nanos) -> int:
        """When the time of the next part comes, after now."""
        return int(self.look_at[self.look_at > now].min(initial=FOREVER))

    def look_at_all(self) -> None:
        """Whatever was decided has to be decided anew."""
        self.look_at[:] = AT_ONCE

    def look_at_session(self, session: int) -> None:
        """The same for a session's flows."""
        self.look_at[self.part[self.rows["session"] == session]] = AT_ONCE

    def _touch(self, now: Nanos, slot: int) -> Any:
        """The flow's row, with an estimate of what remains, before its grant is changed."""
        self.look_at[self.part[slot]] = AT_ONCE
        rules.progress(now, self.table[slot : slot + 1])
        return self.rows[slot]

    # --- what daemons say

    def report(self, now: Nanos, slots: list[int], demands: Sequence[Demand]) -> None:
        """Take over what was reported; the flows are placed already. Each slot at most once."""
        said = [
            (d.inc, d.remaining, d.wait_ns, d.period_ns, d.next_in_ns, d.next_bytes)
            for d in demands
        ]
        at, bounds = np.array(slots, np.intp), np.array([(d.cap, d.sockets) for d in demands])
        rules.report(now, self.table, at, np.array(said, np.int64), bounds, self.phases)
        self.look_at[self.part[at]] = AT_ONCE

    def commitments(self) -> Floats:
        """What flows may be sending at on each link, float64[L]; unknown paths count on all."""
        sums = np.zeros(self.n_links + 1)
        rules.commitments(self.table, self.paths, sums)
        return sums[:-1]

    def give_back(self, now: Nanos, slot: int, seq: int) -> None:
        """The daemon has stopped using grant `seq` by itself: it commits nothing any more.

        Without effect when another message is on its way: the daemon will obey that one.
        """
        row = self.rows[slot]
        if seq == row["seq"] and not row["pending_seq"][0]:
            self._touch(now, slot)
            row["grant"] = row["goal"] = 0.0

    def acknowledge(self, now: Nanos, seqs: Mapping[int, int]) -> None:
        """In each slot, everything up to message `seqs[slot]` has been applied."""
        slots = np.fromiter(seqs, np.intp, len(seqs))
        rules.acknowledge(now, self.table, slots, np.fromiter(seqs.values(), np.int64, len(seqs)))
        self.look_at[self.part[slots]] = AT_ONCE

    def overdue(self, slots: Rows, before: int) -> set[int]:
        """See rules.overdue."""
        return rules.overdue(self.table, slots, before)

    def shares(self, slots: Rows) -> Floats:
        """See rules.find_shares."""
        shares = np.zeros(len(slots))
        rules.find_shares(self.table, self.paths, slots, self.goodput, self._crossing, shares)
        return shares


class Numbers:
    """Small numbers for names in use. A name keeps its number after its last use, until another
    name gets that number: the longest unused one first."""

    def __init__(self) -> None:
        self.names: list[Any] = []
        self.turns: Ints = np.zeros(0, np.int64)
        """How often each number was not in use, and then was again."""
        self._uses: list[int] = []
        self._numbers: dict[Hashable, int] = {}
        self._unused: dict[int, None] = {}

    def __contains__(self, name: Hashable) -> bool:
        return name in self._numbers

    def take(self, name: Hashable) -> int:
        """The name's number, for one more use."""
        number = self._numbers.get(name)
        if number is None:
            if self._unused:
                number = next(iter(self._unused))
                del self._numbers[self.names[number]]
                self.names[number] = name
            else:
                number = len(self.names)
                self.names.append(name)
                self._uses.append(0)
                self.turns = np.append(self.turns, 0)
            self._numbers[name] = number
        self._unused.pop(number, None)
        self.turns[number] += not self._uses[number]
        self._uses[number] += 1
        return number

    def drop(self, number: int) -> None:
        """One use of it has ended."""
        self._uses[number] -= 1
        if not self._uses[number]:
            self._unused[number] = None
