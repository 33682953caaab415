# SPDX-License-Identifier: Apache-2.0
"""Which policy, with which placement, ends jobs soonest: many jobs on a network of three tiers.

The network is that of MLCC's section VII. Numbers of GPUs are drawn as often as in the trace of Q.
Wang et al. (Communication Contention Aware Scheduling, section V). Models, and their computation,
are those of `papers/mlcc.py`. The rest is declared here, and was so before anything was run: jobs
do 10 to 30 iterations, arrive within a minute, and all-reduce in one ring; as many as servers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypedDict

import numpy as np

from flowslot.model.errors import FlowslotError
from flowslot.model.settings import one_of
from flowslot.model.units import SECOND
from flowslot_sim.cluster.hosts import (
    SHORTEST,
    Alone,
    HostScheduler,
    Pollux,
    Themis,
    one_server_or_line,
)
from flowslot_sim.cluster.jobs import JobSpec, Phase
from flowslot_sim.cluster.placement import (
    Placement,
    at_random,
    cassini,
    first_fit,
    list_scheduling,
    lwf,
)
from flowslot_sim.cluster.policies import POLICIES as TABLE
from flowslot_sim.cluster.policies import UNSTAGED
from flowslot_sim.cluster.run import Cluster
from flowslot_sim.cluster.slotted import Slots, Slotted
from flowslot_sim.cluster.tiers import Tiers
from flowslot_sim.papers.mlcc import COMPUTE_MS, RING, SERVERS
from flowslot_sim.recording.clusters import Watch
from flowslot_sim.recording.record import Recording

GPUS = {1: 80, 2: 14, 4: 26, 8: 30, 16: 8, 32: 2}
"""How many jobs of 160 have so many."""
BYTES = {**RING, **SERVERS}
ITERATIONS = 10, 30
ARRIVALS_S = 60.0

POLICIES = UNSTAGED
PLACEMENTS: dict[str, Callable[[int], Placement]] = {
    "random": at_random,
    "first-fit": lambda seed: first_fit,
    "list": lambda seed: list_scheduling,
    "lwf1": lambda seed: lwf(1),
    "cassini": cassini,
}
LEASE_NS = 60 * SECOND
HOSTS: dict[str, Callable[[Alone], HostScheduler]] = {
    "shortest": lambda alone: SHORTEST,
    "themis": lambda alone: Themis(alone, LEASE_NS),
    "pollux": lambda alone: Pollux(alone, LEASE_NS),
}


class Figures(TypedDict):
    """Of jobs' completion times, s: mean, 99th percentile, and all percentiles from 0 to 100;
    `stalled`: why it was given up."""

    mean_s: float
    p99_s: float
    jct_s: list[float]
    utilisation: float
    slots: int
    stalled: str


@dataclass(frozen=True, slots=True)
class Contest:
    """One run. FlowslotError: a field is out of range."""

    policy: str = "fair"
    placement: str = "random"
    servers: int = 1000
    jobs: int = 1000
    seed: int = 1
    load: float = 1.0
    """Bytes of each iteration, times as many."""
    host: str = "shortest"
    """Host scheduler."""
    gpus: int = 8
    """Of each server."""

    def __post_init__(self) -> None:
        for name, value, known in (
            ("policy", self.policy, POLICIES),
            ("placement", self.placement, tuple(PLACEMENTS)),
            ("host", self.host, tuple(HOSTS)),
        ):
            if value not in known:
                raise FlowslotError(f'{name}: "{value}" is unknown: {one_of(value, known)}')
        for name in ("servers", "jobs"):
            if not 1 <= getattr(self, name) <= 100_000:
                raise FlowslotError(f"{name}: must be from 1 to 100000")
        if not 0 <= self.seed < 2**63:
            raise FlowslotError("seed: must be from 0 to 2**63 - 1")
        if not 0 < self.load < 1e6:
            raise FlowslotError("load: must be more than 0, and less than 1e6")
        if not 1 <= self.gpus <= 64:
            raise FlowslotError("gpus: must be from 1 to 64")
        if self.servers * self.gpus < max(GPUS):
            least = -(-max(GPUS) // self.gpus)
            raise FlowslotError(f"servers: must be at least {least}, for the jobs")

    def trace(self) -> list[JobSpec]:
        """Its jobs: the same under each policy and placement."""
        draw = np.random.default_rng([self.seed, 33])
        sizes, weights = list(GPUS), np.array(list(GPUS.values()), float)
        models, jobs = list(BYTES), []
        for k in range(self.jobs):
            n = int(draw.choice(sizes, p=weights / weights.sum()))
            model = models[draw.integers(len(models))]
            volume = 2 * (n - 1) / n * BYTES[model] * self.load
            iterations = int(draw.integers(ITERATIONS[0], ITERATIONS[1] + 1))
            arrival = int(draw.random() * ARRIVALS_S * SECOND)
            phase = Phase(round(COMPUTE_MS[model] * 1e6), volume)
            jobs.append(JobSpec(f"{model}-{k}", n, iterations, (phase,), arrival, 1.0))
        return jobs

    def built(self) -> Slotted:
        """The run, not begun."""
        policy = TABLE[self.policy]
        place = PLACEMENTS[self.placement](self.seed)
        network = Tiers(self.servers, top_up=policy.top_up)
        host = HOSTS[self.host](one_server_or_line(network.capacity[0], self.gpus))
        cluster = Cluster(self.servers, self.gpus, 1.0)
        return Slotted(self.trace(), cluster, network, place, policy.sharing(), host=host)

    def ideal_s(self) -> float:
        """Mean completion time of its jobs if each had GPUs at once, and NICs for itself."""
        nic = Tiers(self.servers).capacity[0]
        alone = [
            job.compute_ns / SECOND + job.iterations * job.volume / nic for job in self.trace()
        ]
        return float(np.mean(alone))

    def recorded(self, until_s: float = 1e5) -> Recording:
        """The run, and what happened in it."""
        run, network = self.built(), Tiers(self.servers)
        watch = Watch(run, network.names, network.capacity[:-1])
        run.go_on(until_s)
        return watch.end()

    def figures(self, until_s: float = 1e5) -> Figures:
        """What came out."""
        run: Slots = self.built().go_on(until_s)
        return {
            "mean_s": float(run.jct_s.mean()),
            "p99_s": float(np.percentile(run.jct_s, 99)),
            "jct_s": np.percentile(run.jct_s, range(101)).tolist(),
            "utilisation": run.utilisation,
            "slots": run.slots,
            "stalled": run.stalled,
        }
