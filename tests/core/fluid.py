# SPDX-License-Identifier: Apache-2.0
"""A small fluid model: training jobs, links, one arbiter and a grant book per host.

Bytes flow at the enforced rate of each flow; every message takes a while. Jobs are rings and
parameter servers whose workers compute, then communicate. Deterministic for a seed.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from flowslot.arbiter import Arbiter, ArbiterConfig
from flowslot.grantbook import GrantBook
from flowslot.messages import Demand, Grant
from flowslot.policy.base import Allocator, Floats
from flowslot.policy.fill import link_sum, max_min
from flowslot.policy.stagger import StaggerAllocator
from flowslot.units import MILLISECOND, SECOND, Nanos, goodput

STEP_NS = MILLISECOND // 2
CAP_EVERY_NS = 20 * MILLISECOND
EPS = 1.0  # bytes


@dataclass
class Flow:
    """`volume` bytes per iteration from `host` over `links`; `follows`: whom it forwards."""

    job: str
    host: str
    links: tuple[int, ...]
    volume: float
    worker: int
    chunk: float = 0.0  # bytes that may be sent ahead of the flows followed (ring steps)
    follows: tuple[int, ...] = ()
    begins: bool = True  # starts when its worker has computed; otherwise only `follows` counts


@dataclass
class Job:
    """Worker w ends an iteration when all flows of `waits[w]` have ended it."""

    name: str
    compute_s: float
    flows: list[int]
    waits: Sequence[tuple[int, ...]]
    offset_s: float = 0.0
    jitter: float = 0.02  # of the computation time, standard deviation
    iteration: list[int] = field(default_factory=list)
    until: list[float] = field(default_factory=list)  # end of computation, inf: communicating
    started: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # iteration times of worker 0, s


class Cluster:
    """Hosts on one switch: a link up and a link down for each, all of the same capacity."""

    def __init__(self, hosts: int, capacity_bps: float) -> None:
        self.hosts = [f"h{i}" for i in range(hosts)]
        self.capacity = np.full(2 * hosts, goodput(capacity_bps))
        self.flows: list[Flow] = []
        self.jobs: list[Job] = []

    def path(self, src: int, dst: int) -> tuple[int, ...]:
        """Up link of one host, down link of the other."""
        return (2 * src, 2 * dst + 1)

    def ring(
        self, name: str, volume: float, compute_s: float, hosts: int, offset_s: float = 0.0
    ) -> None:
        """A ring all-reduce; each worker sends `volume` bytes per iteration in 2 (n - 1) steps."""
        first = len(self.flows)
        for w in range(hosts):
            self.flows.append(
                Flow(
                    name,
                    self.hosts[w],
                    self.path(w, (w + 1) % hosts),
                    volume,
                    w,
                    chunk=volume / (2 * (hosts - 1)),
                    follows=(first + (w - 1) % hosts,),
                )
            )
        flows = [first + w for w in range(hosts)]
        waits = [(first + w, first + (w - 1) % hosts) for w in range(hosts)]
        self.jobs.append(Job(name, compute_s, flows, waits, offset_s))

    def ps(
        self,
        name: str,
        volume: float,
        compute_s: float,
        *,
        workers: list[int],
        sockets: int,
        server: int = 0,
        offset_s: float = 0.0,
    ) -> None:
        """A parameter server; push and pull of `volume` bytes per worker, pipelined."""
        first, per = len(self.flows), volume / sockets
        n = len(workers) * sockets
        for w, host in enumerate(workers):
            for _ in range(sockets):
                self.flows.append(Flow(name, self.hosts[host], self.path(host, server), per, w))
        pushes = tuple(range(first, first + n))
        for w, host in enumerate(workers):
            for _ in range(sockets):
                self.flows.append(
                    Flow(
                        name,
                        self.hosts[server],
                        self.path(server, host),
                        per,
                        w,
                        chunk=per / 64,
                        follows=pushes,
                        begins=False,
                    )
                )
        pulls = [
            tuple(range(first + n + w * sockets, first + n + (w + 1) * sockets))
            for w in range(len(workers))
        ]
        self.jobs.append(Job(name, compute_s, list(range(first, first + 2 * n)), pulls, offset_s))

    def ideal_s(self, job: Job) -> float:
        """Computation plus the job's bytes on its busiest link at that link's goodput."""
        load = np.zeros(len(self.capacity))
        for f in job.flows:
            load[list(self.flows[f].links)] += self.flows[f].volume
        return job.compute_s + float((load / self.capacity).max())


class Daemon:
    """One host: reports its flows, keeps its grants."""

    def __init__(self, sim: "Fluid", name: str, session: int, flows: list[int]) -> None:
        self.sim, self.session, self.flows = sim, session, flows
        self.book = GrantBook(name, sim.config.lease_ns)
        self.active = dict.fromkeys(flows, False)
        self.since = dict.fromkeys(flows, 0)  # when it became active or idle
        self.gap = dict.fromkeys(flows, 0.0)  # smoothed idle time, ns
        self.period = dict.fromkeys(flows, 0.0)
        self.ready_at = dict.fromkeys(flows, 0)
        self.beats = 0
        self.caps: dict[int, float] = {}

    def demand(self, flow: int) -> Demand:
        """The flow's present state."""
        sim, now = self.sim, self.sim.now
        spec, active = sim.flows[flow], self.active[flow]
        learnt = self.gap[flow] > 0
        return Demand(
            flow=flow,
            inc=int(sim.iteration[flow]),
            job=spec.job,
            links=spec.links,
            remaining=math.ceil(sim.due[flow] - sim.sent[flow]) if active else 0,
            cap=self.caps.get(flow, math.inf) if active else math.inf,
            wait_ns=now - self.ready_at[flow] if active else 0,
            period_ns=int(self.period[flow]),
            next_in_ns=int(self.since[flow] + self.gap[flow] - now) if learnt else 0,
            next_bytes=int(spec.volume) if learnt or active else 0,
        )

    def observe(self) -> None:
        """Look at all flows; report those that became ready or ended, and all at a slot start."""
        sim, now = self.sim, self.sim.now
        changed = []
        for flow in self.flows:
            if not self.active[flow] and sim.ready[flow] - sim.sent[flow] > EPS:
                self._became_ready(flow)
                changed.append(flow)
            elif self.active[flow] and sim.due[flow] - sim.sent[flow] <= EPS:
                self.active[flow], self.since[flow] = False, now
                changed.append(flow)
        if now % CAP_EVERY_NS < STEP_NS:
            changed += self._new_caps()
        if now % sim.config.slot_ns < STEP_NS:
            changed = [f for f in self.flows if sim.iteration[f] > 0]
        if now % (sim.config.slot_ns // 2) < STEP_NS:
            self._beat()
        if changed:
            demands = [self.demand(f) for f in dict.fromkeys(changed)]
            sim.counts["demands"] += len(demands)
            sim.post(self.session, lambda: sim.arbiter.demand(sim.now, self.session, demands))

    def _became_ready(self, flow: int) -> None:
        now, first = self.sim.now, self.ready_at[flow] == 0
        if not first:
            gap, period = now - self.since[flow], now - self.ready_at[flow]
            old = self.gap[flow]
            self.gap[flow] = gap if not old else 0.7 * old + 0.3 * gap
            self.period[flow] = period if not old else 0.7 * self.period[flow] + 0.3 * period
        self.active[flow], self.since[flow], self.ready_at[flow] = True, now, now
        self.sim.starts.append((now, flow, float(self.sim.enforced[flow])))

    def _new_caps(self) -> list[int]:
        """Rule 1: 1.05 x predecessor's rate + backlog / 40 ms, when it moved by more than 10 %."""
        sim, changed = self.sim, []
        for flow in self.flows:
            spec = sim.flows[flow]
            if spec.begins or not self.active[flow]:
                continue
            came = sim.ready[flow] - sim.ready_before[flow]
            backlog = sim.ready[flow] - sim.sent[flow]
            sim.ready_before[flow] = sim.ready[flow]
            cap = 1.05 * came / CAP_EVERY_NS * SECOND + backlog / 0.040
            if abs(cap - self.caps.get(flow, 0.0)) > 0.1 * self.caps.get(flow, 0.0):
                self.caps[flow] = cap
                changed.append(flow)
        return changed

    def _beat(self) -> None:
        sim, n = self.sim, self.beats
        self.beats += 1
        self.book.sent_heartbeat(sim.now, n)

        def arrive() -> None:
            if sim.arbiter.heartbeat(sim.now, self.session):
                sim.post(-self.session, lambda: self.book.echoed(sim.now, n))

        sim.post(self.session, arrive)

    def receive(self, grants: list[Grant]) -> None:
        """Grants arrive: enforce, then acknowledge."""
        sim = self.sim
        acks = self.book.receive(sim.now, self.session, grants).acks
        for flow in self.flows:
            sim.enforced[flow] = self.book.grant(flow).rate
        if acks:
            sim.counts["acks"] += len(acks)
            sim.post(self.session, lambda: sim.arbiter.ack(sim.now, self.session, acks))


class Fluid:
    """The simulation. `top_up`: flows also use what is free at the moment, as the kernel does."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        seed: int = 0,
        delay_ms: tuple[float, float] = (0.3, 1.0),
        top_up: bool = False,
        config: ArbiterConfig | None = None,
        allocator: Allocator | None = None,
    ) -> None:
        self.cluster, self.flows = cluster, cluster.flows
        self.config = config or ArbiterConfig()
        self.arbiter = Arbiter(cluster.capacity, self.config, allocator or StaggerAllocator())
        self.now = Nanos(0)
        self.top_up = top_up
        self.counts = dict.fromkeys(("demands", "acks", "grants", "steps"), 0)
        self.grants_at: list[int] = []  # time of each grant message
        self.starts: list[tuple[int, int, float]] = []  # (time, flow, its enforced rate then)
        self.worst_use = 0.0  # largest sum of enforced rates / capacity
        n = len(self.flows)
        self.volume = np.array([f.volume for f in self.flows])
        self.sent, self.ready, self.due = np.zeros(n), np.zeros(n), np.zeros(n)
        self.ready_before = np.zeros(n)
        self.iteration = np.zeros(n, dtype=int)
        self.enforced: Floats = np.zeros(n)
        self.paths = np.array([f.links for f in self.flows], dtype=np.int32)
        self._limit = np.append(cluster.capacity, np.inf)
        # Apart, so that one message more does not change how long jobs compute.
        self._network, self._noise = (np.random.default_rng([seed, i]) for i in range(2))
        self._delay = delay_ms
        self._queue: list[tuple[int, int, Callable[[], object]]] = []
        self._order = 0
        self._fifo: dict[int, int] = {}
        self._dirty = False
        self._wake = 0
        self.daemons = [
            Daemon(self, host, i + 1, [k for k, f in enumerate(self.flows) if f.host == host])
            for i, host in enumerate(cluster.hosts)
        ]
        for daemon in self.daemons:
            hello = daemon.book.connect(self.now, daemon.session)
            self.post(daemon.session, lambda h=hello: self.arbiter.hello(self.now, h))  # type: ignore[misc]
        for job in cluster.jobs:
            workers = len(job.waits)
            job.iteration, job.times = [0] * workers, []
            job.until, job.started = [job.offset_s] * workers, [math.nan] * workers

    def post(self, stream: int, action: Callable[[], object]) -> None:
        """Deliver after a delay, in order within a stream."""
        delay = int(self._network.uniform(*self._delay) * MILLISECOND)
        at = self._fifo[stream] = max(self.now + delay, self._fifo.get(stream, 0))
        self._order += 1
        heapq.heappush(self._queue, (at, self._order, action))

    def run(self, seconds: float) -> None:
        """Advance by so much simulated time."""
        end = self.now + int(seconds * SECOND)
        while self.now < end:
            self._deliver()
            for job in self.cluster.jobs:
                self._work(job)
            self._follow()
            for daemon in self.daemons:
                daemon.observe()
            self._move()
            self.now = Nanos(self.now + STEP_NS)

    def _deliver(self) -> None:
        dirty = self.now >= self._wake
        while self._queue and self._queue[0][0] <= self.now:
            heapq.heappop(self._queue)[2]()
            dirty = True
        if not dirty:
            return
        self.counts["steps"] += 1
        for session, grants in self.arbiter.step(self.now).items():
            daemon = self.daemons[session - 1]
            self.counts["grants"] += len(grants)
            self.grants_at += [self.now] * len(grants)
            self.post(-session, lambda d=daemon, g=grants: d.receive(g))  # type: ignore[misc]
        self._wake = self.arbiter.next_wakeup(self.now)

    def _work(self, job: Job) -> None:
        """Workers that have computed release their flows; those whose flows ended compute."""
        now = self.now / SECOND
        for w, waits in enumerate(job.waits):
            if job.until[w] <= now:
                job.until[w] = math.inf
                job.iteration[w] += 1
                for f in job.flows:
                    if self.flows[f].worker == w:
                        self.iteration[f] = job.iteration[w]
                        self.due[f] = job.iteration[w] * self.volume[f]
            elif job.until[w] == math.inf and all(
                self.sent[f] >= job.iteration[w] * self.volume[f] - EPS for f in waits
            ):
                if w == 0:
                    if not math.isnan(job.started[0]):
                        job.times.append(now - job.started[0])
                    job.started[0] = now
                noise = 1.0 + job.jitter * float(np.clip(self._noise.standard_normal(), -3, 3))
                job.until[w] = now + job.compute_s * noise

    def _follow(self) -> None:
        """Bytes that may be sent by now, counted from the beginning."""
        for f, spec in enumerate(self.flows):
            ready = self.due[f]
            if spec.follows:
                came = min(self.sent[g] / self.volume[g] for g in spec.follows) * spec.volume
                steps = math.floor((came + EPS) / spec.chunk) + (1 if spec.begins else 0)
                ready = min(ready, steps * spec.chunk)
            self.ready[f] = max(ready, self.ready[f])

    def _move(self) -> None:
        backlog = (self.ready - self.sent) / STEP_NS * SECOND
        want = np.where(backlog * STEP_NS / SECOND > EPS / 2, backlog, 0.0)
        use = link_sum(self.paths, self.enforced, len(self.cluster.capacity))[:-1]
        self.worst_use = max(self.worst_use, float((use / self.cluster.capacity).max()))
        rate = np.minimum(self.enforced, want)
        if self.top_up:
            left = self._limit - link_sum(self.paths, rate, len(self.cluster.capacity))
            rate = rate + max_min(self.paths, left, want - rate)
        self.sent += rate * STEP_NS / SECOND


def slowdowns(sim: Fluid, skip: int = 5) -> dict[str, float]:
    """Mean iteration time / ideal of each job, after `skip` iterations."""
    return {
        job.name: float(np.mean(job.times[skip:])) / sim.cluster.ideal_s(job)
        for job in sim.cluster.jobs
    }
