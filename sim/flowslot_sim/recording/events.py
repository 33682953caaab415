# SPDX-License-Identifier: Apache-2.0
"""Watches a run of the event-driven simulator."""

from __future__ import annotations

import numpy as np

from flowslot.model.units import Nanos
from flowslot_sim.recording.record import Recording
from flowslot_sim.simulation import Simulation

LITTLE = 0.01
"""Part of the slowest link of its path below which a flow counts as held back."""
_IDLE, _SENDS, _HELD, _WAITS = range(4)
_NAMES = ("", "sends", "held back", "waits for its predecessor")


class Watch:
    """Of `sim`, from its beginning. Flows are tracks of the hosts that send them."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self.recording = Recording(sim.world.links, np.array(sim.world.capacity))
        n, network = len(sim.flows), sim.network
        self._state, self._since = np.zeros(n, np.intp), np.zeros(n, np.int64)
        self._little = network.capacity[network.paths].min(axis=1) * LITTLE
        self._sends: list[list[int]] = [[] for _ in sim.progress]
        sim.accounts.append(self._account)

    def _account(self, now: Nanos, elapsed: Nanos) -> None:
        network, rows = self._sim.network, self._sim.network.rows
        self.recording.use.feed(now + elapsed * network.queued, network.carried[:-1])
        for sends, progress in zip(self._sends, self._sim.progress, strict=True):
            if len(sends) < progress.phases:
                sends.append(progress.sends_since)
        slow = rows["rate"] <= self._little
        dry = rows["bound"] & (rows["rate"] >= rows["limit"])
        state = np.where(slow, np.where(dry, _WAITS, _HELD), _SENDS) * rows["active"]
        for row in np.flatnonzero(state != self._state).tolist():
            self._close(row, now)
            self._state[row] = state[row]

    def _close(self, row: int, now: int) -> None:
        """The state of a flow ends."""
        flow, job = self._sim.flows[row], self._sim.world.jobs[self._sim.job_of[row]]
        if self._state[row] != _IDLE:
            track = f"{job.name} to {flow.to or '?'}, flow {row}"
            self.recording.add(
                f"host {flow.host}", track, _NAMES[self._state[row]], int(self._since[row]), now
            )
        self._since[row] = now

    def end(self) -> Recording:
        """The run is over."""
        sim, now = self._sim, int(self._sim.now)
        self.recording.use.feed(now, sim.network.carried[:-1])
        for row in range(len(sim.flows)):
            self._close(row, now)
        for job, progress, sends in zip(sim.world.jobs, sim.progress, self._sends, strict=True):
            for k, began in enumerate(progress.began):
                ends = progress.ends[k] if k < len(progress.ends) else now
                first = sends[k] if k < len(sends) else now
                # The first worker may begin before the last one has ended the iteration before.
                first = max(first, began)
                ready = min(began + job.compute_ns(k), first)
                for name, a, b in (
                    (f"iteration {k + 1}", began, ends),
                    ("computes", began, ready),
                    ("held back", ready, first),
                    ("communicates", first, ends),
                ):
                    self.recording.add("jobs", job.name, name, a, b)
        return self.recording
