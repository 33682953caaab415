# SPDX-License-Identifier: Apache-2.0
"""The flows that a decision looks at: what they are to have, and what of that can be said now."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flowslot.arbiter import rules
from flowslot.arbiter.ledger import ROW, Ledger
from flowslot.model.units import Nanos
from flowslot.policy.base import AllocationState, Bools, Floats, Ints, Keys, Paths, Rows, Terms
from flowslot.policy.fill import link_sum

_KEPT = 64  # batches whose numbering is kept: the same parts are looked at again and again
_OPAQUE = np.dtype((np.void, ROW.itemsize))  # NumPy copies a row at once, not field by field


class Numbering(NamedTuple):
    """What an allocator calls links, jobs and aggregates: see AllocationState; and what else does
    not change: `rows`, of the ledger's paths, and `part`, of each flow."""

    rows: Paths
    part: Rows
    links: Rows
    paths: Paths
    job: Ints
    job_names: Sequence[str]
    jobs: Keys
    aggregate: Ints
    aggregates: Keys


class Batch:
    """Whole parts of a ledger (see there), so no flow outside has a say in what these are to have.

    From `open` to `close`: F flows. `slots`: theirs in the ledger, intp[F], ascending; `rows`,
    ROW[F]: copies of the ledger's, or all of these. Links are those of the ledger.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._room = np.zeros(0, ROW)
        self._tables = rules.table(self._room)  # which takes longer than most loops
        self._numberings: dict[bytes, Numbering] = {}
        self._moves = 0

    def open(self, slots: Rows, now: Nanos) -> None:
        """Look at these flows, with estimates of what remains."""
        ledger, n = self._ledger, len(slots)
        if n > len(self._room):
            self._room = np.zeros(2 * n, ROW)
            self._tables = rules.table(self._room)
        self.slots, self.now = slots, now
        self._here = self._numbering()
        self._paths = self._here.rows
        self.rows: NDArray[np.void] = ledger.rows
        self._table = ledger.table
        if n < ledger.n:
            self.rows, self._table = self._room[:n], self._tables[:n]
            self.rows.view(_OPAQUE)[:] = ledger.rows.view(_OPAQUE)[slots]
        self._until = 0  # when the flows that are waited for are not any more, see rules.see
        rules.progress(now, self._table)

    def state(self, capacity: Floats) -> AllocationState:
        """What an allocator sees: packed, as compiled loops need it, and copies of what could be
        modified.

        `capacity`: what may be given out, float64[L].
        """
        ledger, rows, seen = self._ledger, self.rows, np.empty((6, len(self.slots)))
        n_links, phases = ledger.n_links, ledger.phases
        self._until = rules.see(self.now, self._table, self._paths, n_links, phases, seen)
        here = self._here
        return AllocationState(
            paths=here.paths,
            capacity=np.append(capacity, np.inf)[here.links],
            goodput=ledger.goodput[here.links],
            job=here.job,
            job_names=here.job_names,
            jobs=here.jobs,
            flow=rows["flow"],
            aggregate=here.aggregate,
            aggregates=here.aggregates,
            remaining=seen[0],
            cap=rows["cap"].copy(),
            sockets=rows["sockets"].copy(),
            wait_ns=seen[1],
            period_ns=seen[2],
            due_ns=seen[3],
            next_bytes=seen[4],
            idle_ns=seen[5],
            goal=rows["goal"].copy(),
            links=here.links[:-1],
        )

    def _numbering(self) -> Numbering:
        """The same for the same flows, until some come or go."""
        ledger, key = self._ledger, self.slots.tobytes()
        if self._moves != ledger.moves or len(self._numberings) > _KEPT:
            self._numberings, self._moves = {}, ledger.moves
        here = self._numberings.get(key)
        return here or self._numberings.setdefault(key, self._number())

    def _number(self) -> Numbering:
        ledger, slots = self._ledger, self.slots
        used, rows = np.zeros(ledger.n_links + 1, np.bool_), ledger.paths[slots]
        used[ledger.n_links] = True
        links, paths = _packed(rows, used)
        used = np.zeros(len(ledger.jobs.names), np.bool_)
        jobs, job = _packed(ledger.rows["job"][slots], used)
        used = np.zeros(len(ledger.aggregates.names), np.bool_)
        aggregates, aggregate = _packed(ledger.rows["aggregate"][slots], used)
        return Numbering(
            rows,
            ledger.part[slots],
            links,
            paths.astype(np.int32),
            job,
            [ledger.jobs.names[number] for number in jobs.tolist()],
            Keys(jobs, ledger.jobs.turns[jobs]),
            aggregate,
            Keys(aggregates, ledger.aggregates.turns[aggregates]),
        )

    def unsettled(self) -> bool:
        """See `rules.unsettled`."""
        return bool(rules.unsettled(self._table))

    def close(self, edges: Floats, slot: Nanos, coalesced: int, patience: int, latest: int) -> None:
        """What was decided is in force; look at the flows again as `rules.find_due` says."""
        ledger, part = self._ledger, self._here.part
        times = np.array((slot, self._until, coalesced, patience, latest))
        rules.find_due(
            self.now, self._table, self._paths, ledger.n_links, edges, times, part, ledger.look_at
        )
        if self.rows is not ledger.rows:
            ledger.rows.view(_OPAQUE)[self.slots] = self.rows.view(_OPAQUE)

    # --- from target rates to messages

    def settle(self, target: Floats, terms: Terms, capacity: Floats, since: int) -> None:
        """Turn targets, float64[F], into goals: small changes are ignored, except to zero.

        Ignored lowers add up, so on a link whose goals exceed `capacity` none is ignored. Flows
        without a path keep what they hold, if that was said after `since`. `terms`: what goes with
        the targets.
        """
        self.rows["standing"] = False if terms.standing is None else terms.standing
        self.rows["hold"] = 0 if terms.hold is None else terms.hold
        most = np.inf if terms.most is None else terms.most
        self.rows["most"] = most / self.rows["sockets"]  # each may top up by itself
        rules.settle(self._table, self._paths, target, since, capacity)

    def in_the_way(self, mute: Bools, limit: Floats) -> Bools:
        """See `rules.in_the_way`."""
        found = np.zeros(len(self.slots), np.bool_)
        rules.in_the_way(self._table, self._paths, mute, limit, found)
        return found

    def lower(self, may: Bools, seq: int) -> Rows:
        """Take back what is more than the goal from flows that `may` give way, bool[F], where
        there is room for one more lower; returns these flows, the first of which gets message
        number `seq`."""
        lowered = np.zeros(len(self.slots), np.intp)
        return lowered[: rules.lower(self.now, self._table, may, seq, lowered)]

    def borrow(self, lowered: Rows) -> Floats:
        """Rates that flows take over from those in `lowered`, float64[F].

        Of the same daemon and on the same path only: one message lowers the one and raises the
        other, so there is nothing to wait for. A flow borrows from any number of others.
        """
        gain, n_groups = np.zeros(len(self.slots)), len(self._ledger.groups.names)
        if lowered.size:
            rules.borrow(self._table, self.slots, n_groups, lowered, gain)
        return gain

    def raises(
        self, mute: Bools, limit: Floats, gain: Floats, *, pressing: bool
    ) -> tuple[Rows, Floats]:
        """Raises that are safe now: the flows, and their new rates.

        What is in `limit` float64[L] and not committed is free. `gain`: what each flow borrows,
        float64[F], at no cost. Flows that have nothing and want to send come first: what they wish
        for is kept for them on every link of their paths, and where that does not fit, only
        borrowers are raised besides (ADR 2). When not all fit, each gets the same part of its wish
        on its tightest link; a part that is too small to be worth a message waits. What begins or
        ceases to be standing is said as well, with or without a raise. `pressing`: only what flows
        wait for.
        """
        taken = np.zeros(len(limit) + 1)
        rules.commitments(self._table, self._paths, taken)
        link_sum(self._paths, gain, taken)
        raised, rates = np.zeros(len(self.slots), np.intp), np.zeros(len(self.slots))
        free = limit - taken[:-1]
        n = rules.find_raises(self._table, self._paths, mute, gain, free, pressing, raised, rates)
        return raised[:n], rates[:n]

    def set_grants(self, flows: Rows, rates: Floats, seq: int) -> int:
        """Grant the flows these rates, in messages from number `seq` on; returns how many of them
        are raised."""
        rows = self.rows
        raised = int((rates > rows["grant"][flows]).sum())
        rows["grant"][flows], rows["seq"][flows] = rates, np.arange(seq, seq + len(flows))
        return raised

    def tell(self, flows: Rows) -> NDArray[np.void]:
        """Copies of the rows of these flows, which are told of them: ROW[n]."""
        said: NDArray[np.void] = self.rows.view(_OPAQUE)[flows].view(ROW)
        for told in ("standing", "hold", "most"):
            self.rows[f"reported_{told}"][flows] = said[told]
        return said


def _packed(numbers: NDArray[np.integer], used: Bools) -> tuple[Rows, Rows]:
    """The numbers that occur, or are `used` anyway, ascending; and which of these each one is."""
    used[numbers] = True
    return np.flatnonzero(used), (np.cumsum(used) - 1)[numbers]
