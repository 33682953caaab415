# SPDX-License-Identifier: Apache-2.0
"""Turns decisions into entries of the pacer; only what changed goes down."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from flowslot.decision import Decision, Hold, Pace
from flowslot.schedule import Schedule
from flowslot.units import Nanos
from flowslotd.flowtable import FlowTable
from flowslotd.pacing.base import PaceEntry, Pacer

GROWTH_PER_MS = 0.001
"""Top-up grows by this share of the bottleneck per ms, all flows of a job there together. Ten times
as much gave 1.22 of Ideal instead of 1.18 in ps-incast, one run each: within reach of noise."""
WAITING = 0.25
"""Flows with less than this part of their share wait for another job. Their top-up fills what it
leaves when it ends, before anybody has noticed and negotiated: in at most..."""
FEEDBACK_MS = 4.0
"""... the time after which a queue that is too long shows in the RTT; until then top-up may..."""
QUEUE_PART = 0.3
"""... fill this part of the smallest buffer, and grow by..."""
FASTEST_PER_MS = 0.1
"""... no more than this share of the bottleneck per ms."""


def _growth(rate: float, share: float, queue_us: int) -> float:
    """Bytes/s of top-up per ms, for a flow with `share` of its bottleneck for itself."""
    if rate >= WAITING * share:
        return GROWTH_PER_MS * share
    # Growing by g per ms, it sends g t^2 / 2 too much in t ms: that must fit.
    fits = 2.0 * QUEUE_PART * (queue_us / 1000.0) / FEEDBACK_MS**2
    return min(max(fits, GROWTH_PER_MS), FASTEST_PER_MS) * share


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
        self.hard = hard
        self.paced: dict[int, Paced] = {}
        self.schedules: dict[int, Schedule] = {}
        self.rate_writes = 0
        self.holds = 0

    def apply(
        self,
        now: Nanos,
        slot: int,
        decisions: Sequence[Decision],
        *,
        table: FlowTable,
        deadline: Nanos,
        flows: Iterable[int],
    ) -> None:
        """Make the kernel do what was decided for `slot` about `flows`.

        Those without a decision are let go; other flows stay as they are. Entries lapse in the
        kernel at `deadline` (monotonic) unless they are refreshed.
        """
        paces = [d for d in decisions if isinstance(d, Pace) and d.flow in table]
        wanted = self._paced(slot, paces, table)
        held = {d.target for d in decisions if isinstance(d, Hold) and d.until_ns > now}
        if held:
            self._hold(held, wanted, table)
        self.release(flow for flow in flows if flow not in wanted)
        changed = [
            PaceEntry(flow, *paced)
            for flow, paced in wanted.items()
            if self.paced.get(flow) != paced
        ]
        self.paced.update(wanted)
        if changed:
            self.rate_writes += self._pacer.apply(changed, deadline)

    def _paced(self, slot: int, paces: list[Pace], table: FlowTable) -> dict[int, Paced]:
        if not paces:
            return {}
        at = [row for flow, *_ in paces if (row := table.find(flow)) is not None]
        # The arbiter also knows the job's flows on other hosts.
        known = table.rows["share"][at]
        shares = np.where(known > 0, known, table.share[at]).tolist()
        queues = table.queue_us[at].tolist()
        wanted: dict[int, Paced] = {}
        for pace, share, queue_us in zip(paces, shares, queues, strict=True):
            flow, schedule, ceiling, guaranteed = pace
            rate = schedule.rate_at(slot)
            self.schedules[flow] = schedule
            hard = self.hard or ceiling <= rate
            growth = 0.0 if hard else _growth(rate, share, queue_us)
            wanted[flow] = Paced(rate, rate if hard else ceiling, guaranteed, growth, queue_us)
        return wanted

    def refresh(self, deadline: Nanos) -> None:
        """All entries stay in force until `deadline`."""
        if self.paced:
            self._pacer.refresh(deadline)

    def forget(self, flow: int) -> None:
        """The kernel has only now met this flow: what was written before did not reach it."""
        self.paced.pop(flow, None)

    def release(self, flows: Iterable[int]) -> None:
        """Let these flows go at once: they are ordinary TCP connections again."""
        for flow in flows:
            self.schedules.pop(flow, None)
            if self.paced.pop(flow, None) is not None:
                self._pacer.release(flow)

    def release_all(self) -> None:
        """Let every flow go."""
        self.release(list(self.paced))

    def _hold(self, held: set[str | int], wanted: dict[int, Paced], table: FlowTable) -> None:
        """Stop the flows that are named, themselves or by their job."""
        for row, info in enumerate(table.infos):
            if info.cookie in held or info.job in held:
                before = self.paced.get(info.cookie)
                guaranteed = before is not None and before.guaranteed
                queue_us = int(table.queue_us[row])
                wanted[info.cookie] = Paced(0.0, 0.0, guaranteed, 0.0, queue_us)
                self.holds += before is None or before.ceiling > 0.0
