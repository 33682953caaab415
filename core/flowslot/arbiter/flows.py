# SPDX-License-Identifier: Apache-2.0
"""The flows of a contention domain in packed columns: no object per flow."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowslot.messages import Demand
from flowslot.policy.base import AllocationState, Bools, Floats, Ints, Rows
from flowslot.policy.fill import link_sum
from flowslot.units import SECOND, Nanos

PENDING = 4
"""Lowers per flow that may await their acknowledgement at the same time."""
NEVER = -(2**62)
_LEAST_LEFT = 1 / 16  # of what was reported: an estimate never says that an active flow is done

# Columns: name -> type. Times are absolute, ns.
_COLUMNS: dict[str, type] = {
    "session": np.int64,
    "flow": np.uint64,
    "inc": np.int64,
    "job": np.int64,
    "remaining": np.float64,
    "least": np.float64,
    "cap": np.float64,
    "ready_at": np.int64,
    "period_ns": np.int64,
    "due_at": np.int64,
    "next_bytes": np.float64,
    "idle_since": np.int64,
    "goal": np.float64,
    "grant": np.float64,
    "seq": np.int64,
    "oldest_pending": np.int64,
    "held_since": np.int64,
    "standing": np.bool_,
    "told_standing": np.bool_,
    "heir": np.uint64,
    "passed_on": np.float64,
}


class FlowTable:
    """Rows 0 .. n-1 are the flows; removing one moves the last row into its place.

    `commitment` is the protocol's rule 5: the larger of the grant and of every rate that a lower
    not yet acknowledged takes back. A row without a path (known only from Hello) counts on every
    link.
    """

    session: Ints
    flow: NDArray[np.uint64]
    inc: Ints
    job: Ints
    remaining: Floats
    least: Floats
    cap: Floats
    ready_at: Ints
    period_ns: Ints
    due_at: Ints
    next_bytes: Floats
    idle_since: Ints
    goal: Floats
    grant: Floats
    seq: Ints
    oldest_pending: Ints
    held_since: Ints
    standing: Bools
    told_standing: Bools
    heir: NDArray[np.uint64]
    passed_on: Floats

    def __init__(self, n_links: int) -> None:
        self.n_links = n_links
        self.n = 0
        self.rows: dict[tuple[int, int], int] = {}
        self._room = 0
        self.version = 0
        """Changes with the flows, their paths and jobs."""
        self.paths = np.full((0, 1), n_links, dtype=np.int32)
        self._links: list[tuple[int, ...]] = []  # the same by row, as a daemon said it
        self._unplaced: tuple[int, Bools, bool] = (-1, np.zeros(0, np.bool_), False)
        self.pending_seq = np.zeros((0, PENDING), dtype=np.int64)
        self.pending_rate = np.zeros((0, PENDING))
        for name, kind in _COLUMNS.items():
            setattr(self, name, np.zeros(0, dtype=kind))
        self._estimated_at = 0
        self.job_names: list[str] = []
        self._job_ids: dict[str, int] = {}
        self._job_flows: list[int] = []

    # --- rows

    def add(self, session: int, flow: int, inc: int) -> int:
        """A new row without path, demand or grant; returns its index."""
        if self.n == self._room:
            self._grow(max(64, 2 * self._room))
        row, self.n = self.n, self.n + 1
        self.version += 1
        self.rows[session, flow] = row
        self._links.append(())
        for name in _COLUMNS:
            getattr(self, name)[row] = 0
        self.session[row], self.flow[row], self.inc[row] = session, flow, inc
        self.job[row] = self._job("")
        self.cap[row] = np.inf
        self.idle_since[row] = NEVER
        self.paths[row] = self.n_links
        self.pending_seq[row] = 0
        self.pending_rate[row] = 0.0
        return row

    def remove(self, session: int, flow: int) -> None:
        """Remove a row and all that it commits."""
        row = self.rows.pop((session, flow))
        self._disinherit(session, flow)
        self._leave_job(int(self.job[row]))
        last = self.n = self.n - 1
        self.version += 1
        self._links[row] = self._links[last]
        del self._links[last]
        if row != last:
            for column in self._arrays():
                column[row] = column[last]
            self.rows[int(self.session[row]), int(self.flow[row])] = row

    def of_session(self, session: int) -> list[int]:
        """Identifiers of a session's flows."""
        mine = self.session[: self.n] == session
        flows: list[int] = self.flow[: self.n][mine].tolist()
        return flows

    def move(self, row: int, session: int) -> None:
        """The row now belongs to another session (of the same daemon)."""
        flow = int(self.flow[row])
        del self.rows[int(self.session[row]), flow]
        self.rows[session, flow] = row
        self.session[row] = session

    def restate(self, now: Nanos, row: int, inc: int, rate: float) -> None:
        """The row's daemon says that it enforces exactly this, and awaits nothing."""
        self.inc[row] = inc
        self.grant[row] = self.goal[row] = rate
        self.held_since[row] = now
        self.told_standing[row] = False
        self.passed_on[row] = 0.0
        self.pending_seq[row] = 0
        self.pending_rate[row] = 0.0

    def set_path(self, row: int, links: Sequence[int]) -> None:
        """Give a row its path."""
        if len(links) > self.paths.shape[1]:
            wider = np.full((len(self.paths), len(links)), self.n_links, dtype=np.int32)
            wider[:, : self.paths.shape[1]] = self.paths
            self.paths = wider
        self.paths[row] = self.n_links
        self.paths[row, : len(links)] = links
        self._links[row] = tuple(links)
        self.version += 1

    def path(self, row: int) -> tuple[int, ...]:
        """The row's links; empty when they are not known."""
        return self._links[row]

    def set_job(self, row: int, name: str) -> None:
        """Make the row's flow part of a job."""
        if self.job_names[self.job[row]] != name:
            self._leave_job(int(self.job[row]))
            self.job[row] = self._job(name)
            self.version += 1

    def _job(self, name: str) -> int:
        job = self._job_ids.get(name)
        if job is None:
            free = next((j for j, flows in enumerate(self._job_flows) if not flows), None)
            if free is None:
                free = len(self.job_names)
                self.job_names.append(name)
                self._job_flows.append(0)
            else:
                del self._job_ids[self.job_names[free]]
            job = self._job_ids[name] = free
            self.job_names[job] = name
        self._job_flows[job] += 1
        return job

    def _leave_job(self, job: int) -> None:
        self._job_flows[job] -= 1

    def _grow(self, room: int) -> None:
        for name in (*_COLUMNS, "paths", "pending_seq", "pending_rate"):
            old = getattr(self, name)
            new = np.zeros((room, *old.shape[1:]), dtype=old.dtype)
            new[: self.n] = old[: self.n]
            setattr(self, name, new)
        self.paths[self.n :] = self.n_links
        self._room = room

    def _arrays(self) -> list[NDArray[Any]]:
        names = (*_COLUMNS, "paths", "pending_seq", "pending_rate")
        return [getattr(self, name) for name in names]

    # --- demands

    def progress(self, now: Nanos) -> None:
        """Advance the estimates: an active flow has sent grant x time elapsed (rule 2)."""
        n, elapsed = self.n, (now - self._estimated_at) / SECOND
        self._estimated_at = now
        if n and elapsed > 0:
            left = self.remaining[:n] - self.grant[:n] * elapsed
            self.remaining[:n] = np.maximum(left, self.least[:n])

    def report(self, now: Nanos, rows: list[int], demands: Sequence[Demand]) -> None:
        """Take over what was reported; path and job are set already. Each row at most once."""
        at = np.array(rows, dtype=np.intp)
        said = np.array(
            [
                (d.inc, d.remaining, d.wait_ns, d.period_ns, d.next_in_ns, d.next_bytes)
                for d in demands
            ],
            dtype=np.int64,
        )
        size = said[:, 1].astype(np.float64)
        self.idle_since[at[(size <= 0) & (self.remaining[at] > 0)]] = now
        self.inc[at] = said[:, 0]
        self.remaining[at] = size
        self.least[at] = np.where(size > 0, np.maximum(size * _LEAST_LEFT, 1.0), 0.0)
        self.cap[at] = [d.cap for d in demands]
        self.ready_at[at] = now - said[:, 2]
        self.period_ns[at] = said[:, 3]
        self.due_at[at] = now + said[:, 4]
        self.next_bytes[at] = said[:, 5]

    def state(self, now: Nanos, capacity: Floats) -> AllocationState:
        """What an allocator sees; `capacity` float64[L]. Copies where it could be modified."""
        n = self.n
        active = self.remaining[:n] > 0
        placed = ~self.unplaced()
        idle_since = self.idle_since[:n]
        idle = np.where(idle_since == NEVER, np.inf, now - idle_since.astype(np.float64))
        return AllocationState(
            paths=self.paths[:n],
            capacity=np.append(capacity, np.inf),
            job=self.job[:n],
            job_names=self.job_names,
            flow=self.flow[:n],
            remaining=np.where(placed, self.remaining[:n], 0.0),
            cap=self.cap[:n],
            wait_ns=np.where(active, now - self.ready_at[:n], 0).astype(np.float64),
            period_ns=self.period_ns[:n].astype(np.float64),
            due_ns=(self.due_at[:n] - now).astype(np.float64),
            next_bytes=np.where(placed, self.next_bytes[:n], 0.0),
            idle_ns=np.where(active, 0.0, idle),
            goal=self.goal[:n],
        )

    def unplaced(self) -> Bools:
        """Rows whose path is not known, bool[n]. Not to be modified."""
        return self._missing()[0]

    def _missing(self) -> tuple[Bools, bool]:
        """`unplaced`, and whether there are any."""
        if self._unplaced[0] != self.version:
            missing: Bools = self.paths[: self.n, 0] == self.n_links
            self._unplaced = self.version, missing, bool(missing.any())
        return self._unplaced[1:]

    def keep_unplaced(self, target: Floats, since: int) -> Floats:
        """Targets, in which rows still without a path keep what they hold, if known since then."""
        unplaced, there_are_any = self._missing()
        if not there_are_any:
            return target
        return np.where(
            unplaced & (self.held_since[: self.n] > since), self.grant[: self.n], target
        )

    # --- commitments

    def commitment(self) -> Floats:
        """What each flow may be sending at, float64[n]."""
        pending: Floats = self.pending_rate[: self.n].max(axis=1, initial=0.0)
        return np.maximum(self.grant[: self.n], pending)

    def on_links(self, rates: Floats) -> Floats:
        """Sum of `rates` float64[n] on each link, float64[L]; unknown paths count everywhere."""
        sums = link_sum(self.paths[: self.n], rates, self.n_links)[:-1]
        unplaced, there_are_any = self._missing()
        return sums + float(rates[unplaced].sum()) if there_are_any else sums

    def lower(self, now: Nanos, rows: Rows, rates: Floats, first_seq: int) -> Rows:
        """Take rates back; returns the rows really lowered (those with room for one more).

        Row `rows[i]` gets message number `first_seq + i`.
        """
        room = self.pending_seq[rows, PENDING - 1] == 0
        rows, rates = rows[room], rates[room]
        slot = (self.pending_seq[rows] != 0).sum(axis=1)
        self.oldest_pending[rows] = np.where(slot == 0, now, self.oldest_pending[rows])
        seqs = first_seq + np.arange(len(rows))
        self.pending_seq[rows, slot] = seqs
        self.pending_rate[rows, slot] = self.grant[rows]
        self.grant[rows] = rates
        self.seq[rows] = seqs
        return rows

    def pass_on(self, row: int, heir: int, rate: float) -> None:
        """Part of what row `row` has just lost is `heir`'s, of the same session and path.

        One message tells the daemon both, so the two together never send more: what the one is
        still committed to until it is acknowledged, the other is committed to instead.
        """
        self.pending_rate[row, 0] -= rate
        self.passed_on[row] = rate
        self.heir[row] = self.flow[heir]

    def _disinherit(self, session: int, flow: int) -> None:
        """An heir has gone, perhaps before its daemon has read what it was to inherit."""
        at = np.flatnonzero(self.passed_on[: self.n])
        if at.size:
            at = at[(self.session[at] == session) & (self.heir[at] == flow)]
            self.pending_rate[at, 0] += self.passed_on[at]
            self.passed_on[at] = 0.0

    def give_back(self, row: int, seq: int) -> None:
        """The daemon has stopped using grant `seq` by itself: it commits nothing any more.

        Without effect when another message is on its way: the daemon will obey that one.
        """
        if seq == self.seq[row] and not self.pending_seq[row, 0]:
            self.grant[row] = self.goal[row] = 0.0

    def acknowledge(self, now: Nanos, seqs: Mapping[int, int]) -> None:
        """In each row, everything up to message `seqs[row]` has been applied."""
        rows = np.fromiter(seqs, dtype=np.intp, count=len(seqs))
        upto = np.fromiter(seqs.values(), dtype=np.int64, count=len(seqs))
        # A number that was never sent is nothing that an honest daemon says.
        sent = upto <= self.seq[rows]
        rows, upto = rows[sent], upto[sent]
        pending = self.pending_seq[rows]
        still = pending > upto[:, None]
        fewer = still.sum(axis=1) < (pending != 0).sum(axis=1)
        rows, still = rows[fewer], still[fewer]
        if still.any():
            order = np.argsort(~still, axis=1, kind="stable")
            for column in (self.pending_seq, self.pending_rate):
                values = np.where(still, column[rows], 0)
                column[rows] = np.take_along_axis(values, order, axis=1)
        else:
            self.pending_seq[rows], self.pending_rate[rows] = 0, 0.0
        self.oldest_pending[rows] = now
        self.passed_on[rows] = 0.0

    def overdue(self, before: int) -> set[int]:
        """Sessions with a lower that was sent earlier than `before` and is not acknowledged."""
        n = self.n
        late = (self.pending_seq[:n, 0] != 0) & (self.oldest_pending[:n] < before)
        return set(self.session[:n][late].tolist())
