# SPDX-License-Identifier: Apache-2.0
"""The event-driven simulator's worlds, slot by slot: jobs that have their places."""

from __future__ import annotations

import numpy as np

from flowslot.arbiter import ArbiterConfig
from flowslot.model.errors import FlowslotError
from flowslot.model.slot import DEFAULT_SLOT
from flowslot.model.units import SECOND, Nanos
from flowslot.policy.base import AllocationState, Allocator, Floats, Ints, Keys, Paths, Rows
from flowslot.policy.gate import Transfers
from flowslot_sim.cluster.engine import NEVER, Engine
from flowslot_sim.cluster.jobs import JobSpec, Phase, Table
from flowslot_sim.cluster.run import counted
from flowslot_sim.cluster.sharing import MaxMin
from flowslot_sim.world import SimJob, World

ROWS, LINKS = 64, 256
"""An allocator keeps its arrays for shapes that it knows: these are filled up to multiples."""


class Steps:
    """`world` from slot to slot. A job's flows move in step; what one may be ahead of another, and
    background, are not simulated.

    Without an `allocator`, links are shared max-min: exactly when a slot begins, and within the
    slot as MaxMin does it roughly. With one, it is asked once a slot about the
    transfers that are ready, and its rates are in force until the next slot; what is left, and
    becomes free, is shared max-min on top. It is not shown jobs that compute.
    FlowslotError: a job's flows are not all of the same length.
    """

    def __init__(
        self,
        world: World,
        allocator: Allocator | None = None,
        iterations: int = 1 << 20,
        record: int = 0,
    ) -> None:
        """`record`: see Engine."""
        self.table = Table([_spec(job, iterations) for job in world.jobs])
        of = {job.name: job for job in world.jobs}
        links = len(world.capacity)
        repeated = [
            [link for flow in of[job.name].flows for link in flow.links] for job in self.table.jobs
        ]
        chains = [counted(path) for path in repeated]
        self._chains = chains
        longest = max((len(path) for path in repeated), default=1)
        self._repeated: Paths = np.full((len(chains), longest), links, np.int32)
        """As an allocator wants them: a link stands there for each flow that crosses it."""
        for row, path in zip(self._repeated, repeated, strict=True):
            row[: len(path)] = path
        width = max((len(chain) for chain, _ in chains), default=1)
        self.paths: Paths = np.full((len(chains), width), links, np.int32)
        self.capacity = np.array([*world.capacity, np.inf])
        self._allocator = allocator
        self.flows: Paths = np.zeros_like(self.paths)
        self.sharing = MaxMin(self.paths, self.flows, self.capacity, roughly=True)
        # A job's GPUs are its own and compute alike: one stands for all.
        transfers = Transfers(self.paths, links)
        self.engine = Engine(self.table, len(chains), transfers, self.sharing, record=record)
        self._goal = np.zeros(len(chains))
        self._placed = 0

    def run(self, until_ns: int) -> None:
        """On to a time, at which a slot should end."""
        while self.engine.now < until_ns:
            if self._allocator is not None:
                self._allocate(self._allocator)
            self.sharing.refresh()
            self.engine.share_anew()
            self._go(min(self.engine.now + DEFAULT_SLOT, until_ns))

    def _go(self, until_ns: int) -> None:
        jobs = self.table.jobs
        while self.engine.now < until_ns:
            at = self._placed
            begins = jobs[at].arrival_ns if at < len(jobs) else NEVER
            if begins <= self.engine.now:
                self.engine.place(at, np.array([at]), *self._chains[at])
                self._placed += 1
            else:
                self.engine.run(min(begins, until_ns))

    def _allocate(self, allocator: Allocator) -> None:
        """New rates for those that send."""
        engine, sharing = self.engine, self.sharing
        rows = np.sort(np.asarray(sharing.live)[: sharing.n])
        if not len(rows):
            return
        state = self._state(rows)
        rates = allocator.allocate(state, Nanos(engine.now))[: len(rows)]
        self._goal[rows] = rates
        for i, rate in zip(rows.tolist(), rates.tolist(), strict=True):
            sharing.reserve(i, rate)

    def _state(self, rows: Rows) -> AllocationState:
        """Of the transfers `rows`, on the links that they cross. Filled up with flows of which
        nothing is known, and links that nobody crosses."""
        engine, now, last = self.engine, self.engine.now, len(self.capacity) - 1
        n = -(-len(rows) // ROWS) * ROWS
        crossed = np.zeros(last + 1, np.bool_)
        crossed[self._repeated[rows]] = True
        links = np.flatnonzero(crossed[:-1])
        m = -(-max(len(links), 1) // LINKS) * LINKS
        local = np.full(last + 1, m, np.int32)
        local[links] = np.arange(len(links))
        paths = np.full((n, self._repeated.shape[1]), m, np.int32)
        paths[: len(rows)] = local[self._repeated[rows]]
        goodput = np.ones(m + 1)
        goodput[: len(links)], goodput[-1] = self.capacity[links], np.inf

        def filled(values: Floats | Ints, rest: float = 0.0) -> Floats:
            return np.append(np.asarray(values, np.float64), np.full(n - len(rows), rest))

        rate, since = np.asarray(engine.rate)[rows], np.asarray(engine.since)[rows]
        sent = rate * np.maximum(now - since, 0) / SECOND
        remaining = np.maximum(np.asarray(engine.left)[rows] - sent, 1.0)
        others = np.arange(n - len(rows)) + len(self.table.jobs)
        keys = Keys(np.append(rows, others).astype(np.intp), np.zeros(n, np.int64))
        names = [self.table.jobs[i].name for i in rows.tolist()] + [""] * len(others)
        return AllocationState(
            paths=paths,
            capacity=goodput * ArbiterConfig().target,
            goodput=goodput,
            job=np.arange(n),
            job_names=names,
            jobs=keys,
            flow=np.arange(n, dtype=np.uint64),
            aggregate=np.arange(n),
            aggregates=keys,
            remaining=filled(remaining),
            cap=filled(np.full(len(rows), np.inf)),
            sockets=np.ones(n),
            wait_ns=filled(now - np.asarray(engine.onset)[rows]),
            period_ns=filled(np.asarray(engine.period)[rows]),
            due_ns=filled(np.asarray(engine.period)[rows]),
            next_bytes=filled(np.asarray(engine.size)[rows]),
            idle_ns=filled(np.zeros(len(rows)), np.inf),
            goal=filled(self._goal[rows]),
        )


def _spec(job: SimJob, iterations: int) -> JobSpec:
    if job.latency_ns:
        raise FlowslotError(f"job {job.name}: latency is not simulated slot by slot")
    volumes = {flow.total for flow in job.flows}
    if len(volumes) != 1:
        raise FlowslotError(f"job {job.name}: its flows have {len(volumes)} lengths, 1 is needed")
    mean_ns = max(round(job.ideal_s * SECOND), 1)

    def stretch(k: int) -> float:
        return job.compute_ns(k) / mean_ns

    phases = (Phase(mean_ns, volumes.pop()),)
    return JobSpec(job.name, 1, iterations, phases, job.start_ns, stretch=stretch)
