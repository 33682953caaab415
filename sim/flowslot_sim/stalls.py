# SPDX-License-Identifier: Apache-2.0
"""Watches a run for flows that do not move, and gives it up when that would go on for ever."""

from __future__ import annotations

import numpy as np

from flowslot.model.slot import DEFAULT_SLOT
from flowslot.model.units import SECOND, Nanos
from flowslot.policy.base import Bools
from flowslot.policy.mlcc import LivelockDetector, Stall
from flowslot_sim.simulation import Simulation

LIVELOCK_PATIENCE = 200
"""Slots (12 s of 60 ms), twenty horizons: what has not moved in so many plans does not move."""
PHASE_PATIENCE = 2000
"""Slots (2 min) in one communication phase: a flow that starves beside others that move, or that
trickles, would keep a run that is to do so many iterations from ever ending."""

CRAWL = 0.05
"""Of a link's capacity. In a slot that should have been idle, what an older plan has for the first
two messages' time of 1 ms, until the new one is made, is a thirtieth."""


class Livelock(Exception):
    """A run is given up: its flows do not get on, and there is no reason why that should change."""


class StallWatch:
    """Looks at all flows whenever a slot ends, under whatever control plane.

    `slots`: so many are over. `idle`: in so many of them bytes waited from the beginning on, and
    not one was sent. `crawled`: in so many of them, the idle ones included, no flow ended and no
    link carried CRAWL of what it can. `stalls`: what the detector reported.
    """

    def __init__(
        self,
        sim: Simulation,
        slot_ns: Nanos = DEFAULT_SLOT,
        livelock_patience: int = LIVELOCK_PATIENCE,
        phase_patience: int = PHASE_PATIENCE,
    ) -> None:
        """Patience: in slots."""
        self.slots = 0
        self.idle = 0
        self.crawled = 0
        self.stalls: list[Stall] = []
        self._sim = sim
        self._slot_ns = slot_ns
        self._patience = livelock_patience, phase_patience
        self._detector = LivelockDetector()
        self._rows = range(len(sim.flows))
        self._carried = np.zeros(len(sim.world.links))
        self._whole = np.array(sim.world.capacity) * (slot_ns / SECOND)
        self._active = np.zeros(len(sim.flows), np.bool_)  # when the slot began
        self._still = 0  # idle slots up to now, without one that was not
        self._phase = np.zeros(len(sim.flows), np.int64)  # slots in this communication phase
        self._done = np.zeros(len(sim.flows), np.int64)  # iterations then

    def start(self) -> None:
        """The run begins."""
        self._sim.events.after(self._slot_ns, self._tick)

    def report(self) -> list[str]:
        """What was found, a line each, for people."""
        return [self._line(stall) for stall in self.stalls]

    def _tick(self, now: Nanos) -> None:
        """A slot is over. Raises Livelock."""
        rows, slot = self._sim.network.rows, self.slots
        active = rows["active"]
        left = np.where(active, rows["total"] - rows["sent"], 0.0)
        carried = self._sim.network.carried[:-1].copy()
        bytes_of_links = carried - self._carried
        waited = bool(self._active.any())
        idle = waited and float(bytes_of_links.max(initial=0.0)) < 1.0
        crawls = waited and bool(active[self._active].all())
        self.idle += idle
        self.crawled += crawls and bool((bytes_of_links < CRAWL * self._whole).all())
        self._still = self._still + 1 if idle else 0
        self.slots, self._carried, self._active = slot + 1, carried, active.copy()
        self.stalls += self._detector.feed(slot, self._rows, left, active)
        self._count_phases(active)
        self._give_up()
        self._sim.events.after(self._slot_ns, self._tick)

    def _count_phases(self, active: Bools) -> None:
        progress = self._sim.progress
        done = np.array([len(progress[j].ends) for j in self._sim.job_of])
        self._phase = np.where(active & (done == self._done), self._phase + 1, 0)
        self._done = done

    def _give_up(self) -> None:
        """Raises Livelock when patience is at its end."""
        still, phase = self._patience
        if self._still >= still and any(stall.kind == "livelock" for stall in self.stalls):
            last = next(s for s in reversed(self.stalls) if s.kind == "livelock")
            raise Livelock(f"{self._line(last)}; given up after {still} slots without a byte")
        longest = int(self._phase.max(initial=0))
        if longest >= phase:
            flows = np.flatnonzero(self._phase == longest).tolist()
            raise Livelock(
                f"{self._names(flows)} did not end an iteration in {phase} slots; given up"
            )

    def _line(self, stall: Stall) -> str:
        at_s = stall.since * self._slot_ns / SECOND
        return (
            f"{stall.kind} from slot {stall.since} ({at_s:.2f} s) on: "
            f"{len(stall.flows)} flows of {self._names(stall.flows)}"
        )

    def _names(self, flows: tuple[int, ...] | list[int]) -> str:
        jobs = sorted({self._sim.job_of[flow] for flow in flows})
        return ", ".join(self._sim.world.jobs[j].name for j in jobs)
