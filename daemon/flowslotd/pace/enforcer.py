# SPDX-License-Identifier: Apache-2.0
"""Turns decisions into entries of the pacer; only what changed goes down."""

from collections.abc import Iterable
from itertools import count, repeat

import numpy as np

from flowslot.model.units import Nanos
from flowslot.policy.base import Pace
from flowslotd.flows.flow_table import FlowTable
from flowslotd.flows.rows import Rows, Typed
from flowslotd.pace import rate_table
from flowslotd.pace.pacer import ENTRY, Entries, PaceEntry, Pacer
from flowslotd.trace import Trace


class Enforcer:
    """What the pacer holds at present: an entry for each row of the flow table.

    Flows that have gone are to be released before anything is decided on the flows that have got
    their rows since.
    """

    def __init__(self, pacer: Pacer, hard: bool, trace: Trace | None = None) -> None:
        """`hard`: no top-up beyond the reserved rate."""
        self._pacer = pacer
        self._trace = trace
        self.hard = hard
        self._rows_view = Typed(rate_table.typed_rows)
        self._entries_view = Typed(rate_table.typed_entries)
        self._entries: Entries = np.zeros(0, ENTRY)  # cookie 0: not paced
        self._plans: dict[int, tuple[Pace, int]] = {}
        self.rate_writes = 0

    def paced(self) -> dict[int, PaceEntry]:
        """What the pacer holds, by socket cookie."""
        held = self._entries[self._entries["cookie"] != 0]
        return {entry[0]: PaceEntry(*entry) for entry in held.tolist()}

    def plan(self, slots: Iterable[int]) -> dict[int, list[float]]:
        """By socket cookie: the rates of paced flows in these slots, as last decided."""
        slots = list(slots)
        return {
            flow: [float(pace.schedule.at(slot)[i]) for slot in slots]
            for flow, (pace, i) in self._plans.items()
        }

    def apply(
        self,
        slot: int,
        pace: Pace | None,
        *,
        table: FlowTable,
        deadline: Nanos,
        rows: Rows,
    ) -> None:
        """Make the kernel do what `pace` says for `slot` about the flows of these rows.

        Those of which it says nothing are let go; other flows stay as they are. Entries lapse in
        the kernel at `deadline` (monotonic) unless they are refreshed.
        """
        missing = len(table.rows) - len(self._entries)
        if missing > 0:
            more = np.zeros(max(missing, len(self._entries)), ENTRY)
            self._entries = np.concatenate((self._entries, more))
        entries, at, changed = self._entries, rows[:0], rows[:0]
        if pace is not None and len(pace.flows):
            at, changed = self._pace(pace, slot, table, rows)
        if at is not rows:
            held = entries["cookie"][np.setdiff1d(rows, at)]
            self.release(held[held != 0].tolist())
        if changed.size:
            self.rate_writes += self._pacer.apply(entries[changed], deadline)
            if self._trace is not None:
                self._trace.in_force(entries[["cookie", "reserved"]][changed].tolist())

    def refresh(self, deadline: Nanos) -> None:
        """All entries stay in force until `deadline`. Also when there are none: we are alive."""
        if not self._pacer.refresh(deadline):
            held = self._entries[self._entries["cookie"] != 0]
            self.rate_writes += self._pacer.apply(held, deadline)

    def forget(self, flow: int) -> None:
        """The kernel has only now met this flow: what was written before did not reach it."""
        # As no entry is, so that the next one is written; it can still be let go.
        self._entries["queue_us"][self._entries["cookie"] == flow] = -1

    def release(self, flows: Iterable[int]) -> None:
        """Let these flows go at once: they are ordinary TCP connections again."""
        flows = list(flows)
        if not flows:
            return
        at = np.isin(self._entries["cookie"], np.array(flows, np.uint64))
        for flow in self._entries["cookie"][at].tolist():
            self._pacer.release(flow)
        self._entries["cookie"][at] = 0
        for flow in flows:
            self._plans.pop(flow, None)
        if self._trace is not None:
            self._trace.let_go(flows)

    def release_all(self) -> None:
        """Let every flow go."""
        self.release(list(self.paced()))

    def _pace(self, pace: Pace, slot: int, table: FlowTable, rows: Rows) -> tuple[Rows, Rows]:
        """Change the entries of these flows; returns their rows, and the rows of those whose
        entries are not as before."""
        flows = pace.flows.tolist()
        self._plans.update(zip(flows, zip(repeat(pace), count()), strict=False))
        at, structs = rows, self._rows_view(table.rows)
        columns = pace.schedule.at(slot), pace.ceilings, pace.guaranteed.view(np.uint8)
        if not rate_table.are(structs, rows, pace.flows):
            at = np.array([-1 if (p := table.find(flow)) is None else p for flow in flows], np.intp)
            mine = at >= 0
            rates, ceilings, guaranteed = columns
            at, columns = at[mine], (rates[mine], ceilings[mine], guaranteed[mine])
        changed = np.empty(len(at), np.intp)
        held = self._entries_view(self._entries)
        n = rate_table.put(held, structs, at, columns, self.hard, changed)
        return at, changed[:n]
