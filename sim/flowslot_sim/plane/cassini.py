# SPDX-License-Identifier: Apache-2.0
"""CASSINI as a control plane: links are shared as TCP would, and jobs' starts are shifted."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from flowslot.model.units import Nanos
from flowslot.policy.cassini import Coordinator
from flowslot_scenario.results import Evidence
from flowslot_sim.plane.messages import Plant
from flowslot_sim.simulation import Control, Simulation


class Cassini(Control):
    """See Control. One coordinator is told of all jobs' transfers, and says who is to be held back;
    both take a message's delay. All of a job's flows are held back alike."""

    def __init__(self, sim: Simulation, plant: Plant, seed: int) -> None:
        self._sim = sim
        self._plant = plant
        self._random = np.random.default_rng([seed, 13])
        self.coordinator = Coordinator(dict(enumerate(sim.world.capacity)))
        self._names = [job.name for job in sim.world.jobs]
        self._active = [0] * len(self._names)
        self._phase = [0] * len(self._names)
        self._start = [Nanos(0)] * len(self._names)
        self._until = [Nanos(0)] * len(self._names)
        self._counted = [-1] * len(self._names)  # phase
        self._sent = 0  # messages
        self.held_ns = [0] * len(self._names)
        """For how long each job was held back; its first worker."""
        self._sends: list[dict[int, float]] = [{} for _ in self._names]
        for row, flow in enumerate(sim.flows):
            sends = self._sends[sim.job_of[row]]
            for link in flow.links:
                sends[link] = sends.get(link, 0.0) + flow.total

    def hold(self, now: Nanos, job: int) -> Nanos:
        """See Control."""
        until = self._until[job]
        if until > now and self._sim.progress[job].phases > self._counted[job]:
            self._counted[job] = self._sim.progress[job].phases
            self.held_ns[job] += until - now
        return until

    def began(self, now: Nanos, job: int, flows: Sequence[int]) -> None:
        """See Control. A job's transfer begins with its first flow."""
        phase = self._sim.progress[job].phases
        if phase > self._phase[job]:
            if self._active[job]:  # its workers are not in step: the last transfer goes on
                self._tell(partial(self._ended, job))
            self._phase[job] = phase
            self._start[job], self._until[job] = now, Nanos(0)
            self._tell(partial(self._started, job))
        self._active[job] = self._sending(job)

    def ended(self, now: Nanos, flows: Sequence[int]) -> None:
        """See Control."""
        for job in {self._sim.job_of[row] for row in flows}:
            before, self._active[job] = self._active[job], self._sending(job)
            if before and not self._active[job]:
                self._tell(partial(self._ended, job))

    def _sending(self, job: int) -> int:
        return int(self._sim.network.rows["active"][self._sim.rows_of[job]].sum())

    def evidence(self) -> Evidence:
        """See Control."""
        return Evidence(control_packets=self._sent)

    def _tell(self, deliver: partial[None]) -> None:
        """The coordinator, once the daemon has looked."""
        self._sent += 1
        delay = self._plant.look_ns + self._plant.delays.draw(self._random)
        self._sim.events.after(delay, deliver)

    def _started(self, job: int, now: Nanos) -> None:
        self.coordinator.started(self._names[job], now, self._sends[job])

    def _ended(self, job: int, now: Nanos) -> None:
        self.coordinator.ended(self._names[job], now)
        for name, after in self.coordinator.changed().items():
            held = self._names.index(name)
            self._sent += 1
            until = Nanos(self._start[held] + after)
            delay = self._plant.delays.draw(self._random)
            self._sim.events.after(delay, partial(self._held, held, self._start[held], until))

    def _held(self, job: int, start: Nanos, until: Nanos, now: Nanos) -> None:
        """The hold has arrived; it is about the iteration after the one that began at `start`."""
        if self._start[job] == start:
            self._until[job] = until
