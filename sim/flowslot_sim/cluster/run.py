# SPDX-License-Identifier: Apache-2.0
"""Jobs arrive, queue for GPUs, are placed, train, and leave; or make room when leases end."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from flowslot.model.errors import FlowslotError
from flowslot.model.units import SECOND
from flowslot.policy.base import Floats, Ints, Paths, Rows
from flowslot.policy.gate import Gate, Transfers
from flowslot_sim.cluster.engine import NEVER, WAITS, Engine
from flowslot_sim.cluster.hosts import SHORTEST, HostScheduler, Standing, ring_part
from flowslot_sim.cluster.jobs import JobSpec, Table
from flowslot_sim.cluster.networks import Network
from flowslot_sim.cluster.placement import Placement, Question

NOTHING = 1e-6
"""Of an iteration: what is left by rounding."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """`servers` of `gpus_per_server`, each with so much memory."""

    servers: int
    gpus_per_server: int
    memory_mb: float

    @property
    def gpus(self) -> int:
        """In all."""
        return self.servers * self.gpus_per_server


@dataclass(frozen=True, slots=True)
class Load:
    """What counts as a GPU's load: each of its workers' remaining computation and, with
    `s_per_byte`, communication; `times_workers`: multiplied with the number of the job's GPUs."""

    s_per_byte: float = 0.0
    times_workers: bool = True


@dataclass(frozen=True, slots=True)
class Rules:
    """How GPUs are given out and transfers scheduled, and how exact the run is: see Engine."""

    placement: Placement
    gate: Gate | None = None
    load: Load = Load()
    tick_ns: int = 1
    latency_ns: int = 0
    recount: bool = False
    host: HostScheduler = SHORTEST


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of a run. `jct_s`: of each of `jobs`, from its arrival to its end. `utilisation`: part of all
    GPUs' time until the last job's end in which they computed."""

    jobs: list[JobSpec]
    jct_s: Floats
    utilisation: float
    makespan_s: float
    carried: Floats


def counted(path: Sequence[int]) -> tuple[Paths, Paths]:
    """Each link of a path once, where it stands first, and how often it stands there."""
    counts = Counter(path)  # in that order: AdaDUAL looks at a job's servers in theirs
    return np.array(list(counts), np.int32), np.array(list(counts.values()), np.int32)


class Watcher(Protocol):
    """Who records a run: see recording/clusters.py."""

    def look(self) -> None:
        """Some time has passed."""
        ...

    def placed(self, i: int, waits_since: int) -> None:
        """Job i has GPUs."""
        ...


class Stuck(FlowslotError):
    """Jobs wait, and nothing can ever happen any more."""


class Run:
    """One run; `go` does it all."""

    def __init__(
        self, jobs: Sequence[JobSpec], cluster: Cluster, network: Network, rules: Rules
    ) -> None:
        """FlowslotError: a job that cannot be placed on the empty cluster."""
        self.table, self.cluster, self.network, self.rules = Table(jobs), cluster, network, rules
        for job in self.table.jobs:
            if job.workers > cluster.gpus or job.memory_mb > cluster.memory_mb:
                raise FlowslotError(
                    f'job "{job.name}": {job.workers} GPUs with {job.memory_mb:g} MB; the cluster '
                    f"has {cluster.gpus} with {cluster.memory_mb:g} MB"
                )
        most = max((job.workers for job in self.table.jobs), default=1)
        width = max(network.width(min(most, cluster.servers)), 1)
        paths: Paths = np.full((len(self.table.jobs), width), network.links, np.int32)
        self.engine = Engine(
            self.table,
            cluster.gpus,
            Transfers(paths, network.links),
            network.sharing(paths, np.zeros_like(paths)),
            rules.gate,
            tick_ns=rules.tick_ns,
            latency_ns=rules.latency_ns,
            recount=rules.recount,
        )
        self.watch: Watcher | None = None
        self._memory = np.full(cluster.gpus, float(cluster.memory_mb))
        self._gpus = np.full(len(self.table.job_of), -1, np.intp)
        self._spread = np.zeros(len(self.table.jobs), np.bool_)
        self._queue: list[int] = []
        self._stopping: set[int] = set()
        """Jobs that make room, and for whom they do."""
        self._meant: set[int] = set()
        self._lease_at = rules.host.lease_ns or NEVER
        self._waits_since = [job.arrival_ns for job in self.table.jobs]
        self._left = np.array([job.iterations for job in self.table.jobs], np.float64)
        """Iterations with all workers, when it was placed or stopped last; and since its placement:
        what an iteration is `_worth`, and how many were done when it `_began`."""
        self._worth: Floats = np.ones(len(self._left))
        self._began: Ints = np.zeros(len(self._left), np.int64)
        self._arrived, self._running = 0, len(self.table.jobs)
        self._ends: Floats = np.zeros(self._running)

    def go(self) -> Outcome:
        """Until all jobs have ended. Stuck: they never do."""
        while self._running:
            if not self._advance(NEVER):
                raise Stuck(f"{self._running} jobs wait for ever")
        return self._outcome()

    def _advance(self, until: int) -> bool:
        """Until jobs end, until the next one arrives, or until a time. Whether anything can still
        happen."""
        jobs, engine = self.table.jobs, self.engine
        arrives = jobs[self._arrived].arrival_ns if self._arrived < len(jobs) else NEVER
        finished = engine.run(min(arrives, until, self._lease_at))
        if self.watch is not None:
            self.watch.look()
        for i in np.asarray(engine.finished)[:finished].tolist():
            self._stop(i)
        while self._arrived < len(jobs) and jobs[self._arrived].arrival_ns <= engine.now:
            self._queue.append(self._arrived)
            self._arrived += 1
        if engine.now >= self._lease_at:
            self._end_leases()
        self._place()
        return finished > 0 or min(arrives, until, self._lease_at) < NEVER

    def _stop(self, i: int) -> None:
        """Job i has ended, or makes room."""
        now, done = self.engine.now, int(self.engine.done[i])
        self._left[i] -= (done - self._began[i]) * self._worth[i]
        self._began[i] = done
        self._stopping.discard(i)
        self._leave(i)
        if self._left[i] < NOTHING:
            self._ends[i] = now / SECOND
            self._running -= 1
        else:
            self._queue.append(i)
            self._waits_since[i] = now

    def _end_leases(self) -> None:
        """All GPUs are given out anew. Who is to have others stops after this iteration."""
        engine, host = self.engine, self.rules.host
        self._lease_at = engine.now + host.lease_ns
        free, has = self.cluster.gpus, {}
        for i, n in self._shares():
            if n <= free:
                free -= n
                has[i] = n
        iterations = np.asarray(engine.iterations)
        for i in self._placed():
            if has.get(i) != engine.members[i]:
                iterations[i] = engine.done[i] + 1
                self._stopping.add(i)
        self._meant = set(has)

    def _placed(self) -> list[int]:
        jobs: list[int] = np.unique(self.table.job_of[self._gpus >= 0]).tolist()
        return jobs

    def _shares(self) -> list[tuple[int, int]]:
        """Of the jobs that are here, if there are leases, or else that wait: what the host
        scheduler gives them."""
        now, table, engine = self.engine.now, self.table, self.engine
        here = [*self._placed(), *self._queue] if self.rules.host.lease_ns else self._queue
        left = self._left - (np.asarray(engine.done) - self._began) * self._worth
        jobs = [
            Standing(
                i,
                table.jobs[i],
                (now - table.jobs[i].arrival_ns) / SECOND,
                float(left[i]),
                int(table.service[i]),
            )
            for i in here
        ]
        return self.rules.host.shares(jobs, self.cluster.gpus)

    def _outcome(self) -> Outcome:
        jobs, engine = self.table.jobs, self.engine
        jct = self._ends - np.array([job.arrival_ns for job in jobs]) / SECOND
        busy = float(np.asarray(engine.busy).sum()) / max(engine.now * self.cluster.gpus, 1)
        carried = np.asarray(engine.carried)[:-1].copy()
        return Outcome(jobs, jct, busy, engine.now / SECOND, carried)

    def _place(self) -> None:
        """Those of the queue for which there is room, in the host scheduler's order."""
        if not self._queue:
            return
        queue, load = set(self._queue), self._load()
        for i, n in self._shares():
            if i not in queue or (self._stopping and i not in self._meant):
                continue
            job = self.table.jobs[i]
            question = Question(
                job.name,
                n,
                self._memory >= job.memory_mb,
                load,
                self.cluster.gpus_per_server,
                partial(self._best, i),
            )
            gpus = self.rules.placement(question)
            if gpus is not None:
                self._queue.remove(i)
                self._enter(i, gpus.astype(np.intp))
                load = self._load()

    def _best(self, i: int, candidates: Sequence[Rows]) -> int:
        """Which GPUs are best for job i beside the others; here nobody knows."""
        return 0

    def _enter(self, i: int, gpus: Rows) -> None:
        job, n, per_server = self.table.jobs[i], len(gpus), self.cluster.gpus_per_server
        servers = list(dict.fromkeys((gpus // per_server).tolist()))
        self._memory[gpus] -= job.memory_mb
        self._gpus[self.table.first[i] : self.table.first[i] + n] = gpus
        self._spread[i] = len(servers) > 1
        factor = self.network.bytes_per_flow(len(servers)) * ring_part(job, n)
        self.table.volume[i, : len(job.phases)] = [phase.volume * factor for phase in job.phases]
        self._worth[i] = self.rules.host.worth(job, n)
        todo = max(math.ceil(self._left[i] / self._worth[i] - NOTHING), 1)
        np.asarray(self.engine.iterations)[i] = self.engine.done[i] + todo
        np.asarray(self.engine.service)[i] = todo * int(self.table.compute[i].sum()) * n
        self.engine.place(i, gpus, *counted(self._path(i, gpus)))
        if self.watch is not None:
            self.watch.placed(i, self._waits_since[i])

    def _path(self, i: int, gpus: Rows) -> Sequence[int]:
        """The links of job i's transfers on these GPUs, one entry for each flow on a link."""
        return self.network.path(
            list(dict.fromkeys((gpus // self.cluster.gpus_per_server).tolist()))
        )

    def _leave(self, i: int) -> None:
        workers = slice(self.table.first[i], self.table.first[i + 1])
        gpus = self._gpus[workers]
        self._memory[gpus[gpus >= 0]] += self.table.jobs[i].memory_mb
        self._gpus[workers] = -1

    def _load(self) -> Floats:
        """Of each GPU, s."""
        table, rules = self.table, self.rules.load
        left = table.iterations - np.asarray(self.engine.done)
        sends = np.array([job.volume for job in table.jobs]) * rules.s_per_byte * self._spread
        per_worker = left * (table.compute.sum(axis=1) / SECOND + sends)
        here = np.flatnonzero(self._gpus >= 0)
        job = table.job_of[here]
        # Phases that a worker has done in this iteration.
        done = np.concatenate((np.zeros((len(left), 1)), np.cumsum(table.compute, axis=1)), axis=1)
        phase = np.asarray(self.engine.phase)[here] + (np.asarray(self.engine.state)[here] == WAITS)
        share = per_worker[job] - done[job, phase] / SECOND
        if rules.times_workers:
            share = share * np.asarray(self.engine.members)[job]
        load = np.bincount(self._gpus[here], weights=share, minlength=self.cluster.gpus)
        return load.astype(np.float64)
