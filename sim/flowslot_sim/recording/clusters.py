# SPDX-License-Identifier: Apache-2.0
"""Watches a run of a cluster (cluster/run.py), and is told by its engine what happens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flowslot.policy.base import Floats
from flowslot_sim.cluster.engine import COMPUTES, IDLE, SENDS, WAITS
from flowslot_sim.cluster.run import Run
from flowslot_sim.recording.record import Recording

_NAMES = {WAITS: "held back", SENDS: "sends", COMPUTES: "computes"}


class Watch:
    """Of `run`, from its beginning, over links with these names and capacities (bytes/s). GPUs are
    tracks of their servers. Where a job is `alone` on a server it only computes."""

    def __init__(self, run: Run, links: Sequence[str], capacity: Floats) -> None:
        self._run, self._engine = run, run.engine
        self.recording = Recording(links, capacity)
        n = len(run.table.jobs)
        self._state, self._since = np.full(n, IDLE), np.zeros(n, np.int64)
        run.watch = run.engine.log = self

    def look(self) -> None:
        """Some time has passed."""
        engine, sharing = self._engine, self._engine.sharing
        carried = np.asarray(engine.carried).copy()
        rows = np.asarray(sharing.live)[: sharing.n]
        since = np.maximum(engine.now - np.asarray(engine.since)[rows], 0)
        sent = np.minimum(
            np.asarray(engine.rate)[rows] * since / 1e9, np.asarray(engine.left)[rows]
        )
        flows = np.asarray(engine.flows)[rows]
        np.add.at(carried, np.asarray(engine.paths)[rows], sent[:, None] * flows)
        self.recording.use.feed(engine.now, carried[: len(self.recording.links)])

    def placed(self, i: int, waits_since: int) -> None:
        """Job i has GPUs."""
        job, now = self._run.table.jobs[i], self._engine.now
        self.recording.add("jobs", job.name, "queued", waits_since, now)
        self.turned(i, COMPUTES)

    def computed(self, w: int, g: int) -> None:
        """GPU g has done a phase of worker w."""
        i, per_server = self._engine.job_of[w], self._run.cluster.gpus_per_server
        server, gpu = divmod(g, per_server)
        name, began = self._run.table.jobs[i].name, self._engine.began[g]
        self.recording.add(f"server {server}", f"GPU {gpu}", name, began, self._engine.now)

    def turned(self, i: int, state: int) -> None:
        """Job i has a transfer that WAITS or SENDS, or has none and COMPUTES, or it is gone (IDLE);
        states are the engine's."""
        now = self._engine.now
        if self._state[i] in _NAMES:
            name = _NAMES[int(self._state[i])]
            job = self._run.table.jobs[i].name
            self.recording.add("jobs", job, name, int(self._since[i]), now)
        self._state[i], self._since[i] = state, now

    def end(self) -> Recording:
        """The run is over."""
        self.look()
        for i in range(len(self._state)):
            self.turned(i, IDLE)
        return self.recording
