# SPDX-License-Identifier: Apache-2.0
"""Jobs that queue, on a network that an allocator shares out slot by slot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from flowslot.model.slot import DEFAULT_SLOT
from flowslot.model.units import SECOND, Nanos
from flowslot.policy.base import AllocationState, Allocator, Bools, Floats, Keys, Paths, Rows
from flowslot.policy.cassini import Profile, alone, best
from flowslot.policy.gate import Gate
from flowslot.policy.mlcc import LivelockDetector
from flowslot_sim.cluster.hosts import SHORTEST, HostScheduler
from flowslot_sim.cluster.jobs import JobSpec
from flowslot_sim.cluster.placement import Placement
from flowslot_sim.cluster.run import Cluster, Rules, Run
from flowslot_sim.cluster.tiers import HOPS, Shape, Tiers, ring
from flowslot_sim.stalls import LIVELOCK_PATIENCE

ALMOST = 1 - 1e-9
"""Rates are so much lower, for the sake of rounding."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """How a network is shared. `allocator` None: max-min, as TCP would in the ideal; exactly when
    a slot begins, and roughly within it. `start_after`, by job: its flows go in so many stages, one
    after the other, and so have at most as much less on average; 1 where it is not named. `as_one`:
    the allocator sees a job's flows as one, which has a link in its path as often as they cross
    it. `gate`: which transfers may send, see Rules."""

    allocator: Allocator | None = None
    start_after: dict[str, int] = field(default_factory=dict)
    as_one: bool = False
    gate: Gate | None = None


@dataclass(frozen=True, slots=True)
class Slots:
    """Of a run. Per job, in order of the table: `jct_s`, from its arrival to its end; `run_s`, from
    its placement; of those not `done`, until the run was given up. `stalled`: why it was."""

    jobs: list[JobSpec]
    done: Bools
    jct_s: Floats
    run_s: Floats
    iterations: Floats
    utilisation: float
    slots: int
    stalled: str


class Slotted(Run):
    """The allocator is asked when a slot begins, about all flows that have bytes to send then. It
    sees jobs' flows one by one; a job's flows move in step, at the rate of the slowest. Periods
    that it sees are those of jobs alone, as if profiled in advance."""

    def __init__(
        self,
        jobs: Sequence[JobSpec],
        cluster: Cluster,
        network: Tiers,
        placement: Placement,
        sharing: Sharing,
        *,
        shape: Shape = ring,
        host: HostScheduler = SHORTEST,
    ) -> None:
        if sharing.start_after:
            network = replace(network, private=len(jobs))
        super().__init__(jobs, cluster, network, Rules(placement, sharing.gate, host=host))
        self.tiers, self._how, self._shape = network, sharing, shape
        counts = np.array([len(shape(job)) for job in self.table.jobs])
        rows, hops = (
            (np.ones_like(counts), HOPS * max(counts)) if sharing.as_one else (counts, HOPS)
        )
        self._first = np.concatenate(([0], np.cumsum(rows))).astype(np.intp)
        self._job_of = np.repeat(np.arange(len(counts)), rows).astype(np.intp)
        self._paths: Paths = np.full((len(self._job_of), hops), network.links, np.int32)
        self._cap = np.full(len(self._job_of), np.inf)
        self._goal = np.zeros(len(self._job_of))
        self._placed_at = np.full(len(counts), -1.0)
        self._capacity = network.capacity
        self._period = self.table.compute.sum(axis=1).astype(np.float64)  # ns, of jobs alone
        self._detector = LivelockDetector()
        self.fullest: AllocationState | None = None
        """What the allocator saw when most flows had bytes to send."""

    def go_on(self, until_s: float) -> Slots:
        """Until all jobs have ended, a time has come, or nothing moves any more."""
        engine, slot, stalled = self.engine, 0, ""
        while self._running and engine.now < until_s * SECOND and not stalled:
            stalled = self._look(slot)
            slot = max(slot + 1, self._idle_until(until_s) // DEFAULT_SLOT)
            while self._running and engine.now < slot * DEFAULT_SLOT:
                self._advance(slot * DEFAULT_SLOT)
        now = engine.now / SECOND
        done = self._ends > 0
        if not stalled and not done.all():
            stalled = f"{int((~done).sum())} of {len(done)} jobs were not done after {now:.0f} s"
        ends = np.where(done, self._ends, now)
        arrivals = np.array([job.arrival_ns for job in self.table.jobs]) / SECOND
        begun = np.where(self._placed_at >= 0, self._placed_at, now)
        busy = float(np.asarray(engine.busy).sum()) / max(engine.now * self.cluster.gpus, 1)
        iterations = np.asarray(engine.done).astype(np.float64)
        jct = np.maximum(ends - arrivals, 0.0)
        return Slots(self.table.jobs, done, jct, ends - begun, iterations, busy, slot, stalled)

    def _idle_until(self, until_s: float) -> int:
        """When the next job arrives, ns, if none runs or waits; 0: one does, or none comes."""
        jobs = self.table.jobs
        ended = len(jobs) - self._running
        if self._queue or self._arrived > ended or self._arrived == len(jobs):
            return 0
        return min(jobs[self._arrived].arrival_ns, round(until_s * SECOND))

    def _path(self, i: int, gpus: Rows) -> Sequence[int]:
        servers = (gpus // self.cluster.gpus_per_server).tolist()
        if self._placed_at[i] < 0:
            self._placed_at[i] = self.engine.now / SECOND
        self._paths[self._first[i] : self._first[i + 1]] = self.tiers.links
        path: list[int] = []
        job = replace(self.table.jobs[i], workers=len(gpus))
        for at, (a, b) in enumerate(self._shape(job), start=int(self._first[i])):
            way = self.tiers.way(servers[a], servers[b])
            if not self._how.as_one:
                self._paths[at, : len(way)] = way
            path += way
        if self._how.as_one:
            self._paths[i, : len(path)] = path
        if path:
            # At most so fast are its flows in step, with no other job.
            links, counts = np.unique(path, return_counts=True)
            fastest = float((self._capacity[links] / counts).min())
            stages = self._how.start_after.get(self.table.jobs[i].name, 1)
            self._cap[self._first[i] : self._first[i + 1]] = fastest / stages
            self._period[i] = (
                self.table.compute[i].sum() + self.table.volume[i].sum() / fastest * SECOND
            )
            if stages > 1 and self.tiers.top_up:
                own = self.tiers.shared + i
                np.asarray(self.engine.sharing.capacity)[own] = fastest / stages  # type: ignore[attr-defined]
                path.append(own)
        return path

    def _best(self, i: int, candidates: Sequence[Rows]) -> int:
        """See Run: by CASSINI's score of the links that the job would use."""
        all_used = {j: self._used(j, self._gpus_of(j)) for j in self._placed()}
        capacity = dict(enumerate(self._capacity[: self.tiers.shared].tolist()))
        found = []
        for gpus in candidates:
            mine = self._used(i, gpus)
            both = {
                j: near
                for j, used in all_used.items()
                if (near := {x: n for x, n in used.items() if x in mine})
            }
            profiles = [self._profile(j, used, capacity) for j, used in {**both, i: mine}.items()]
            found.append([each for each in profiles if each is not None])
        return best(found, capacity)[0]

    def _gpus_of(self, i: int) -> Rows:
        gpus = self._gpus[self.table.first[i] : self.table.first[i + 1]]
        return gpus[gpus >= 0]

    def _used(self, i: int, gpus: Rows) -> Counter[int]:
        """How many flows of job i cross each link, if it is on these GPUs."""
        servers = (gpus // self.cluster.gpus_per_server).tolist()
        job = replace(self.table.jobs[i], workers=len(gpus))
        return Counter(
            x for a, b in self._shape(job) for x in self.tiers.way(servers[a], servers[b])
        )

    def _profile(
        self, i: int, used: Mapping[int, int], capacity: Mapping[int, float]
    ) -> Profile | None:
        job = self.table.jobs[i]
        idle = sum(phase.compute_ns for phase in job.phases)
        return alone(job.name, idle, {x: n * job.volume for x, n in used.items()}, capacity)

    def _look(self, slot: int) -> str:
        """A slot begins. Why the run is given up, if it is."""
        engine, sharing = self.engine, self.engine.sharing
        rows = np.sort(np.asarray(sharing.live)[: sharing.n])
        rate, since = np.asarray(engine.rate)[rows], np.asarray(engine.since)[rows]
        sent = rate * np.maximum(engine.now - since, 0) / SECOND
        left = np.maximum(np.asarray(engine.left)[rows] - sent, 1.0)
        self._detector.feed(slot, rows.tolist(), left, np.ones(len(rows), np.bool_))
        if slot - self._detector.moved_at > LIVELOCK_PATIENCE:
            return (
                f"livelock: no byte after {self._detector.moved_at * DEFAULT_SLOT / SECOND:.1f} s"
            )
        if self._how.allocator is not None:
            self._allocate(self._how.allocator, rows, left)
        sharing.refresh()  # type: ignore[attr-defined]  # of those that Tiers makes
        engine.share_anew()
        return ""

    def _allocate(self, allocator: Allocator, rows: Rows, left: Floats) -> None:
        among = np.full(len(self.table.jobs), -1, np.intp)
        among[rows] = np.arange(len(rows))
        flows = np.flatnonzero((among[self._job_of] >= 0) & (self._paths[:, 0] < self.tiers.links))
        state = self._state(rows, among, flows, left)
        if self.fullest is None or len(flows) > len(self.fullest.flow):
            self.fullest = state
        self._goal[flows] = rates = allocator.allocate(state, Nanos(self.engine.now))
        slowest = np.full(len(rows), np.inf)
        np.minimum.at(slowest, state.job, rates)
        for i, each in zip(rows.tolist(), slowest.tolist(), strict=True):
            self.engine.sharing.reserve(i, each * ALMOST)  # type: ignore[attr-defined]

    def _state(self, rows: Rows, among: Rows, flows: Rows, left: Floats) -> AllocationState:
        engine = self.engine
        job = among[self._job_of[flows]]
        wait = (engine.now - np.asarray(engine.onset)[rows]).astype(np.float64)
        n, keys = len(flows), Keys(rows.astype(np.intp), np.zeros(len(rows), np.int64))
        return AllocationState(
            paths=self._paths[flows],
            capacity=self._capacity,
            goodput=self._capacity,
            job=job,
            job_names=[self.table.jobs[i].name for i in rows.tolist()],
            jobs=keys,
            flow=flows.astype(np.uint64),
            aggregate=np.arange(n),
            aggregates=Keys(flows, np.zeros(n, np.int64)),
            remaining=left[job],
            cap=self._cap[flows],
            sockets=np.ones(n),
            wait_ns=wait[job],
            period_ns=self._period[rows][job],
            due_ns=self._period[rows][job],
            next_bytes=np.asarray(engine.size)[rows][job],
            idle_ns=np.zeros(n),
            goal=self._goal[flows],
        )
