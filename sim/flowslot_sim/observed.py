# SPDX-License-Identifier: Apache-2.0
"""What daemons see of the jobs' flows: those of a job that leave a host on one path are one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flowslot.model.units import Nanos
from flowslot.policy.base import Floats, Ints
from flowslot_sim.simulation import Simulation

SMOOTHING = 0.25
"""Weight of the latest iteration in the learnt period, as in the daemon."""
NEVER = -(1 << 62)


@dataclass(frozen=True, slots=True)
class Bunch:
    """The flows of a job that have one path from one host, which are negotiated as one."""

    job: str
    host: str
    links: tuple[int, ...]
    rows: tuple[int, ...]


class Observer:
    """All of a simulation's flows, as their daemons see them: arrays over B bunches.

    Times in ns, 0 unknown. `expected`: bytes per iteration, 0 before the first has begun. `active`:
    how many flows send. `inc`: iterations begun.
    """

    def __init__(self, sim: Simulation) -> None:
        groups: dict[tuple[str, int, tuple[int, ...]], list[int]] = {}
        for row, flow in enumerate(sim.flows):
            groups.setdefault((flow.host, sim.job_of[row], flow.links), []).append(row)
        self.bunches = [
            Bunch(sim.world.jobs[job].name, host, links, tuple(rows))
            for (host, job, links), rows in groups.items()
        ]
        self.of = np.zeros(len(sim.flows), np.intp)
        for b, bunch in enumerate(self.bunches):
            self.of[list(bunch.rows)] = b
        self._network = sim.network
        self._whole = self._sum(sim.network.rows["size"])
        n = len(self.bunches)
        self.expected: Floats = np.zeros(n)
        self.inc, self.onset, self.period, self.active = np.zeros((4, n), np.int64)
        self.idle_since: Ints = np.full(n, NEVER, np.int64)

    def _sum(self, values: Floats) -> Floats:
        return np.bincount(self.of, values, len(self.bunches)).astype(np.float64)

    def began(self, now: Nanos, rows: Sequence[int]) -> list[int]:
        """These flows, all of a job, have begun; returns the bunches that they are."""
        touched = np.unique(self.of[list(rows)])
        again, known = self.inc[touched] > 0, self.period[touched] > 0
        sample, old = now - self.onset[touched], self.period[touched]
        learnt = np.where(known, old + ((sample - old) * SMOOTHING).astype(np.int64), sample)
        self.period[touched] = np.where(again, learnt, 0)
        self.inc[touched] += 1
        self.onset[touched] = now
        self.active[touched] = [len(self.bunches[b].rows) for b in touched]
        self.expected[touched] = self._whole[touched]
        began: list[int] = touched.tolist()
        return began

    def ended(self, now: Nanos, rows: Sequence[int]) -> list[int]:
        """These flows have ended; returns the bunches that are idle by that."""
        np.subtract.at(self.active, self.of[list(rows)], 1)
        touched = np.unique(self.of[list(rows)])
        idle = touched[self.active[touched] == 0]
        self.idle_since[idle] = now
        ended: list[int] = idle.tolist()
        return ended

    def due(self, now: Nanos) -> Ints:
        """When each is to begin again; before a period is known: as if computing took as long as
        communicating does."""
        due: Ints = self.onset + np.where(self.period > 0, self.period, 2 * (now - self.onset))
        return due

    def remaining(self) -> Floats:
        """Bytes that active flows have left, float64[B]; 0: idle."""
        return self._sum(self._network.left())

    def split(self, rates: Floats) -> Floats:
        """Rates of bunches, float64[B], as rates of flows, float64[F], so that those of a bunch end
        together; of an idle one, for the next iteration."""
        left = self._network.left()
        idle = self.active[self.of] == 0
        weight = np.where(idle, self._network.rows["size"], left)
        parts: Floats = rates[self.of] * weight / np.maximum(self._sum(weight), 1.0)[self.of]
        return parts

    def split_one(self, b: int, rate: float) -> Floats:
        """The same for one bunch, float64[its flows]."""
        rows = np.array(self.bunches[b].rows, np.intp)
        if len(rows) == 1:
            return np.array([rate])
        network = self._network
        weight = network.left(rows) if self.active[b] else network.rows["size"][rows]
        parts: Floats = rate * weight / max(float(weight.sum()), 1.0)
        return parts

    def going_on(self, rows: Sequence[int]) -> list[int]:
        """Bunches of these flows, which are about to end, that have others."""
        ending = np.bincount(self.of[list(rows)], minlength=len(self.bunches))
        left: list[int] = np.flatnonzero((ending > 0) & (ending < self.active)).tolist()
        return left
