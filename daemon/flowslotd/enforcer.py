# SPDX-License-Identifier: Apache-2.0
"""Turns decisions into entries of the pacer; only what changed goes down."""

from collections.abc import Iterable
from typing import NamedTuple

from flowslot.decision import Decision, Hold, Pace
from flowslot.schedule import Schedule
from flowslot.units import Nanos

from flowslotd.flowtable import FlowTable
from flowslotd.pacing.base import PaceEntry, Pacer

GROWTH_PER_MS = 0.01
"""Top-up grows by this share of the bottleneck per ms, all flows of a job there together."""


class Paced(NamedTuple):
    """What the pacer holds for a flow; payload bytes/s, `growth` per ms of top-up."""

    reserved: float
    ceiling: float
    guaranteed: bool
    growth: float
    queue_us: int


class Enforcer:
    """What the pacer holds at present, by socket cookie."""

    def __init__(self, pacer: Pacer, hard: bool) -> None:
        """`hard`: no top-up beyond the reserved rate."""
        self._pacer = pacer
        self._hard = hard
        self.paced: dict[int, Paced] = {}
        self.schedules: dict[int, Schedule] = {}
        self.rate_writes = 0
        self.holds = 0

    def apply(
        self,
        now: Nanos,
        slot: int,
        decisions: Iterable[Decision],
        table: FlowTable,
        deadline: Nanos,
    ) -> None:
        """Make the kernel do what was decided for `slot`; flows without a decision are let go.

        Entries lapse in the kernel at `deadline` (monotonic) unless they are refreshed.
        """
        wanted: dict[int, Paced] = {}
        schedules: dict[int, Schedule] = {}
        held: set[str | int] = set()
        for decision in decisions:
            if isinstance(decision, Pace):
                flow, schedule, ceiling, guaranteed = decision
                row = table.find(flow)
                if row is None:
                    continue
                rate = schedule.rate_at(slot)
                schedules[flow] = schedule
                hard = self._hard or ceiling <= rate
                wanted[flow] = Paced(
                    reserved=rate,
                    ceiling=rate if hard else ceiling,
                    guaranteed=guaranteed,
                    growth=0.0 if hard else GROWTH_PER_MS * float(table.share[row]),
                    queue_us=int(table.queue_us[row]),
                )
            elif isinstance(decision, Hold) and decision.until_ns > now:
                held.add(decision.target)
        if held:
            self._hold(held, wanted, table)
        for flow in self.paced.keys() - wanted.keys():
            self._pacer.release(flow)
        before = self.paced
        changed = [
            PaceEntry(flow, *paced) for flow, paced in wanted.items() if before.get(flow) != paced
        ]
        self.paced, self.schedules = wanted, schedules
        if changed:
            self.rate_writes += self._pacer.apply(changed, deadline)

    def refresh(self, deadline: Nanos) -> None:
        """All entries stay in force until `deadline`."""
        if self.paced:
            self._pacer.refresh(deadline)

    def forget(self, flow: int) -> None:
        """The kernel has only now met this flow: what was written before did not reach it."""
        self.paced.pop(flow, None)

    def release_all(self) -> None:
        """Let every flow go at once: it is an ordinary TCP connection again."""
        paced, self.paced, self.schedules = self.paced, {}, {}
        for flow in paced:
            self._pacer.release(flow)

    def _hold(self, held: set[str | int], wanted: dict[int, Paced], table: FlowTable) -> None:
        """Stop the flows that are named, themselves or by their job."""
        for row, info in enumerate(table.infos):
            if info.cookie in held or info.job in held:
                before = self.paced.get(info.cookie)
                guaranteed = before is not None and before.guaranteed
                wanted[info.cookie] = Paced(0.0, 0.0, guaranteed, 0.0, int(table.queue_us[row]))
                self.holds += before is None or before.ceiling > 0.0
