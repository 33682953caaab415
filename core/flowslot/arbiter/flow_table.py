# SPDX-License-Identifier: Apache-2.0
"""The flows of a contention domain in one packed array: no object per flow."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowslot.arbiter import rules
from flowslot.arbiter.rules import NEVER, PENDING
from flowslot.model.units import SECOND, Nanos
from flowslot.policy.base import AllocationState, Bools, Floats, Ints, Rows
from flowslot.protocol.messages import Demand

ROW = np.dtype(  # times are absolute, ns; `make pxd` writes the C struct
    [
        ("session", np.int64),
        ("flow", np.uint64),
        ("inc", np.int64),
        ("job", np.int64),
        ("remaining", np.float64),
        ("least", np.float64),
        ("cap", np.float64),
        ("ready_at", np.int64),
        ("period_ns", np.int64),
        ("due_at", np.int64),
        ("next_bytes", np.float64),
        ("idle_since", np.int64),
        ("began_at", np.int64),
        ("whole", np.float64),
        ("goal", np.float64),
        ("grant", np.float64),
        ("seq", np.int64),
        ("oldest_pending", np.int64),
        ("held_since", np.int64),
        ("standing", np.bool_),
        ("told_standing", np.bool_),
        ("called", np.bool_),
        ("heir", np.uint64),
        ("passed_on", np.float64),
        ("pending_seq", np.int64, (PENDING,)),
        ("pending_rate", np.float64, (PENDING,)),
    ]
)


class FlowTable:
    """Rows 0 .. n-1 are the flows; removing one moves the last row into its place.

    `commitment` is the protocol's rule 5: the larger of the grant and of every rate that a lower
    not yet acknowledged takes back. A row without a path (known only from Hello) counts on every
    link. `began_at` is when the phase of its job began in which the flow last began to send,
    `whole` with how many bytes, and `called` says that it is expected to begin now (rules.see).
    Each column of ROW is an attribute, of as many rows as there is room for.
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
    began_at: Ints
    whole: Floats
    goal: Floats
    grant: Floats
    seq: Ints
    oldest_pending: Ints
    held_since: Ints
    standing: Bools
    told_standing: Bools
    called: Bools
    heir: NDArray[np.uint64]
    passed_on: Floats
    pending_seq: Ints  # [F, PENDING]; the oldest first, 0 = none
    pending_rate: Floats

    def __init__(self, n_links: int) -> None:
        self.n_links = n_links
        self.n = 0
        self.rows: dict[tuple[int, int], int] = {}
        self.version = 0
        """Changes with the flows, their sessions, paths and jobs."""
        self.paths = np.full((0, 1), n_links, dtype=np.int32)
        self._rows: NDArray[np.void] = np.zeros(0, ROW)
        self.table: Any = None
        """The rows in use, for rules."""
        self._links: list[tuple[int, ...]] = []  # the same by row, as a daemon said it
        self._unplaced: tuple[int, Bools, bool] = (-1, np.zeros(0, np.bool_), False)
        self._grow(0)
        self._estimated_at = 0
        self.job_names: list[str] = []
        self._job_ids: dict[str, int] = {}
        self._job_flows: list[int] = []
        self._phases = np.zeros((0, 2), np.int64)  # [J, 2], see rules.report
        self.called_until = Nanos(0)
        """Until when some flows are waited for, see `rules.see`."""

    # --- rows

    def add(self, session: int, flow: int, inc: int) -> int:
        """A new row without path, demand or grant; returns its index."""
        if self.n == len(self._rows):
            self._grow(max(64, 2 * self.n))
        row, self.n = self.n, self.n + 1
        self.version += 1
        self.rows[session, flow] = row
        self._links.append(())
        self._rows[row] = np.zeros((), ROW)
        self.session[row], self.flow[row], self.inc[row] = session, flow, inc
        self.job[row] = self._job("")
        self.cap[row] = np.inf
        self.idle_since[row] = NEVER
        self.paths[row] = self.n_links
        self.table = rules.table(self._rows[: self.n])
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
            self._rows[row], self.paths[row] = self._rows[last], self.paths[last]
            self.rows[int(self.session[row]), int(self.flow[row])] = row
        self.table = rules.table(self._rows[: self.n])

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
        self.version += 1

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
                self._phases = np.append(self._phases, [[0, 0]], axis=0)
            else:
                del self._job_ids[self.job_names[free]]
            job = self._job_ids[name] = free
            self._phases[job] = NEVER
            self.job_names[job] = name
        self._job_flows[job] += 1
        return job

    def _leave_job(self, job: int) -> None:
        self._job_flows[job] -= 1

    def _grow(self, room: int) -> None:
        rows = np.zeros(room, ROW)
        paths = np.full((room, self.paths.shape[1]), self.n_links, dtype=np.int32)
        if self.n:
            rows[: self.n], paths[: self.n] = self._rows[: self.n], self.paths[: self.n]
        self._rows, self.paths = rows, paths
        self.table = rules.table(rows[: self.n])
        for name in ROW.names or ():
            setattr(self, name, rows[name])

    # --- demands

    def progress(self, now: Nanos) -> None:
        """Advance the estimates: an active flow has sent grant x time elapsed (rule 2)."""
        elapsed, self._estimated_at = (now - self._estimated_at) / SECOND, now
        if elapsed > 0:
            rules.progress(self.table, elapsed)

    def report(self, now: Nanos, rows: list[int], demands: Sequence[Demand]) -> None:
        """Take over what was reported; path and job are set already. Each row at most once."""
        said = [
            (d.inc, d.remaining, d.wait_ns, d.period_ns, d.next_in_ns, d.next_bytes)
            for d in demands
        ]
        at, cap = np.array(rows, dtype=np.intp), np.array([d.cap for d in demands])
        rules.report(now, self.table, at, np.array(said, dtype=np.int64), cap, self._phases)

    def state(self, now: Nanos, capacity: Floats, goodput: Floats) -> AllocationState:
        """What an allocator sees. Copies where it could be modified.

        `capacity`: what may be given out, float64[L]; `goodput`: float64[L + 1], last inf.
        """
        n = self.n
        paths, seen = self.paths[:n], np.empty((6, n))
        bounded = np.empty(self.n_links + 1)
        bounded[:-1], bounded[-1] = capacity, np.inf
        until = rules.see(now, self.table, paths, self.n_links, self._phases, seen)
        self.called_until = Nanos(until)
        return AllocationState(
            paths=paths,
            capacity=bounded,
            goodput=goodput,
            job=self.job[:n],
            job_names=self.job_names,
            flow=self.flow[:n],
            remaining=seen[0],
            cap=self.cap[:n],
            wait_ns=seen[1],
            period_ns=seen[2],
            due_ns=seen[3],
            next_bytes=seen[4],
            idle_ns=seen[5],
            goal=self.goal[:n],
        )

    def _missing(self) -> tuple[Bools, bool]:
        """Rows whose path is not known, bool[n], and whether there are any."""
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

    def commitments(self) -> Floats:
        """What flows may be sending at on each link, float64[L]; unknown paths count on all."""
        sums = np.zeros(self.n_links + 1)
        rules.commitments(self.table, self.paths[: self.n], sums)
        return sums[:-1]

    def on_links(self, rates: Floats) -> Floats:
        """Sum of `rates` float64[n] on each link, float64[L]; unknown paths count on all."""
        sums = np.zeros(self.n_links + 1)
        rules.add_up(self.paths[: self.n], rates, sums)
        return sums[:-1]

    def lower(self, now: Nanos, mute: Bools, short: Rows, seq: int) -> Rows:
        """Take back what is more than the goal, where there is room for one more lower; returns
        these rows, the first of which gets message number `seq`. `mute`: bool[n], not those;
        `short`: only on these links, see `rules.find_short`."""
        rows = np.zeros(self.n, np.intp)
        paths = self.paths[: self.n]
        return rows[: rules.lower(now, self.table, paths, mute, short, seq, rows)]

    def set_grants(self, rows: Rows, rates: Floats, seq: int) -> int:
        """Grant the flows `rows` these rates, in messages from number `seq` on; returns how many
        of them are raised."""
        return int(rules.set_grants(self.table, rows, rates, seq))

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
        rules.acknowledge(now, self.table, rows, upto)

    def overdue(self, before: int) -> set[int]:
        """Sessions with a lower that was sent earlier than `before` and is not acknowledged."""
        rows = np.zeros(self.n, np.intp)
        late = rules.overdue(self.table, before, rows)
        return set(self.session[rows[:late]].tolist()) if late else set()

    def unsettled(self) -> bool:
        """Some grants are not (yet) what they are to be, or not told to be standing."""
        return rules.unsettled(self.table)

    def settled(self) -> bool:
        """All hold standing grants, know that, and nothing is to change or to be heard of."""
        return rules.all_settled(self.table)
