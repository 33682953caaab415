# SPDX-License-Identifier: Apache-2.0
"""Watches a run for flows that do not move, and gives it up when that would go on for ever."""

from __future__ import annotations

from flowslot.model.slot import DEFAULT_SLOT
from flowslot.model.units import SECOND, Nanos
from flowslot.policy.mlcc import LivelockDetector, Stall
from flowslot_sim.simulation import Simulation

LIVELOCK_PATIENCE = 200
"""Slots (12 s of 60 ms), twenty horizons: what has not moved in so many plans does not move."""
PHASE_PATIENCE = 2000
"""Slots (2 min) in one communication phase: a flow that starves beside others that move, or that
trickles, would keep a run that is to do so many iterations from ever ending."""


class Livelock(Exception):
    """A run is given up: its flows do not get on, and there is no reason why that should change."""


class StallWatch:
    """Shows all flows to the detector whenever a slot ends, under whatever control plane.

    `stalls`: what the detector reported.
    """

    def __init__(self, sim: Simulation, phase_patience: int = PHASE_PATIENCE) -> None:
        self.stalls: list[Stall] = []
        self._sim = sim
        self._phase_patience = phase_patience
        self._detector = LivelockDetector()
        self._slot = 0

    def start(self) -> None:
        """The run begins."""
        self._sim.events.after(DEFAULT_SLOT, self._tick)

    def report(self) -> list[str]:
        """What was found, a line each, for people."""
        return [self._line(stall) for stall in self.stalls]

    def _tick(self, now: Nanos) -> None:
        """A slot is over. Raises Livelock."""
        network = self._sim.network
        active, flows = network.rows["active"], range(len(network.rows))
        self.stalls += self._detector.feed(self._slot, flows, network.left(), active)
        self._give_up(now)
        self._slot += 1
        self._sim.events.after(DEFAULT_SLOT, self._tick)

    def _give_up(self, now: Nanos) -> None:
        """Raises Livelock when patience is at its end."""
        # Bytes may have come in the first one.
        if self._slot - self._detector.moved_at > LIVELOCK_PATIENCE:
            last = next(s for s in reversed(self.stalls) if s.kind == "livelock")
            why = f"given up after {LIVELOCK_PATIENCE} slots without a byte"
            raise Livelock(f"{self._line(last)}; {why}")
        long = [
            job.name
            for job, progress in zip(self._sim.world.jobs, self._sim.progress, strict=True)
            if progress.left and now - progress.sends_since >= self._phase_patience * DEFAULT_SLOT
        ]
        if long:
            jobs = ", ".join(sorted(long))
            phase = f"{self._phase_patience} slots"
            raise Livelock(f"{jobs} did not end an iteration in {phase}; given up")

    def _line(self, stall: Stall) -> str:
        at_s = stall.since * DEFAULT_SLOT / SECOND
        jobs = sorted({self._sim.job_of[flow] for flow in stall.flows})
        names = ", ".join(self._sim.world.jobs[j].name for j in jobs)
        return (
            f"{stall.kind} from slot {stall.since} ({at_s:.2f} s) on: "
            f"{len(stall.flows)} flows of {names}"
        )
