# SPDX-License-Identifier: Apache-2.0
"""Y. Zhao et al., Dynamic Flow Scheduling for DNN Training Workloads in Data Centers (MLCC): what
Figs. 8, 9, 14 and 15 and their prose state.

Jobs queue for GPUs, and the network is shared slot by slot, as in the paper's simulation. TCP's
variants are taken for ideal max-min sharing (`fair`): there is neither loss nor lag here. A job's
flows move in step, and MLCC plans them as one, so that none waits for the one that it depends on,
but for `mlcc-prototype`, which plans flow by flow; those of `mcs` start after one another. The
paper says neither how long computations last nor how long jobs are, nor where workers are placed:
those are `Setup` and COMPUTE_MS, declared before anything was run.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypedDict

import numpy as np

from flowslot.model.slot import DEFAULT_SLOT
from flowslot.model.units import SECOND, Nanos
from flowslot.policy.base import AllocationState, Rows, View
from flowslot.policy.mlcc import MlccOptions, MlccPolicy
from flowslot.policy.mlcc.fleet import FleetAllocator
from flowslot_sim.cluster.jobs import JobSpec, Phase
from flowslot_sim.cluster.placement import Placement, Question
from flowslot_sim.cluster.policies import POLICIES
from flowslot_sim.cluster.run import Cluster
from flowslot_sim.cluster.slotted import Slots, Slotted
from flowslot_sim.cluster.tiers import Tiers
from flowslot_sim.papers.cells import Cell, half_width, interval
from flowslot_sim.traces import arrivals

RING = {"VGG19": 549e6, "GPT2": 1200e6}
"""Bytes of models that are all-reduced by 3 workers (section VI-A)."""
SERVERS = {"VGG16": 528e6, "ResNet50": 98e6}
"""Of those that have 2 servers and 2 workers."""
COMPUTE_MS = {"VGG19": 580.0, "GPT2": 900.0, "VGG16": 490.0, "ResNet50": 320.0}
"""External: of an iteration, about what a GTX 1080 Ti needs for a batch of 64."""
RING_WORKERS, PS_WORKERS = 3, 2
SPEED_GBPS = (10.0, 24.0)


@dataclass(frozen=True, slots=True)
class Setup:
    """External, but for the network. `jobs` arrive in about `arrivals_s`, at random; each does
    `iterations` (at least, at most). `block`: a job's workers are on different servers of one block
    of so many, at random; 0: of all. `arrivals_ns`: of as many jobs, instead of random ones."""

    cluster: Cluster
    network: Tiers
    jobs: int
    arrivals_s: float
    iterations: tuple[int, int] = (20, 60)
    block: int = 0
    arrivals_ns: tuple[int, ...] = ()


def testbed(gbps: float) -> Setup:
    """6 servers with 2 GPUs at one switch (section VI-A)."""
    network = Tiers(6, (gbps, gbps, gbps), servers_per_rack=6)
    return Setup(Cluster(6, 2, 1.0), network, 24, 240.0)


def cloud() -> Setup:
    """12 servers with 4 GPUs at 50 Gbit/s (section VI-H)."""
    network = Tiers(12, (50.0, 50.0, 50.0), servers_per_rack=12)
    return Setup(Cluster(12, 4, 1.0), network, 48, 120.0)


def large(servers: int, block: int = 10) -> Setup:
    """8 GPUs each, racks of 10, groups of 10 racks (section VII); as many jobs as servers."""
    return Setup(Cluster(servers, 8, 1.0), Tiers(servers), servers, 60.0, block=block)


def trace(seed: int, how: Setup) -> tuple[list[JobSpec], dict[str, str]]:
    """Jobs, and the model of each."""
    draw = np.random.default_rng([seed, 7])
    models = (*RING, *SERVERS)
    jobs, kinds = [], {}
    for k in range(how.jobs):
        model = models[draw.integers(len(models))]
        iterations = int(draw.integers(how.iterations[0], how.iterations[1] + 1))
        arrival = int(draw.random() * how.arrivals_s * SECOND)
        if how.arrivals_ns:
            arrival = how.arrivals_ns[k]
        compute = round(COMPUTE_MS[model] * 1e6)
        if model in RING:
            workers, volume = RING_WORKERS, 2 * (RING_WORKERS - 1) / RING_WORKERS * RING[model]
        else:
            workers, volume = 2 * PS_WORKERS, SERVERS[model] / PS_WORKERS
        name = f"{model}-{k}"
        kinds[name] = model
        jobs.append(JobSpec(name, workers, iterations, (Phase(compute, volume),), arrival, 1.0))
    return jobs, kinds


def shape_of(kinds: Mapping[str, str]) -> Callable[[JobSpec], list[tuple[int, int]]]:
    """A ring; or each of the first two workers to and from each of the last two."""

    def shape(job: JobSpec) -> list[tuple[int, int]]:
        if kinds[job.name] in RING:
            return [(k, (k + 1) % job.workers) for k in range(job.workers)]
        pairs = [(a, b) for a in range(PS_WORKERS) for b in range(PS_WORKERS, job.workers)]
        return pairs + [(b, a) for a, b in pairs]

    return shape


def apart(seed: int, block: int) -> Placement:
    """Workers on different servers of one block of so many (0: of all), at random; where no block
    has as many with a free GPU, the job waits."""
    draw = np.random.default_rng([seed, 8])

    def place(question: Question) -> Rows | None:
        fits = question.fits.reshape(-1, question.per_server)
        free = np.flatnonzero(fits.any(axis=1))
        size = block or len(fits)
        blocks, counts = np.unique(free // size, return_counts=True)
        enough = blocks[counts >= question.workers]
        if not len(enough):
            return None
        among = free[free // size == draw.choice(enough)]
        servers = draw.choice(among, question.workers, replace=False)
        gpus: Rows = servers * question.per_server + fits[servers].argmax(axis=1)
        return gpus

    return place


# --- who shares the network

VARIANTS = ("mlcc", "mlcc-literal", "mlcc-strict", "mlcc-prototype")
PATIENCE = 3.0
"""A run is given up when it has lasted so many times as long as under `fair`."""
WITHOUT_SWITCHES = "mlcc, no switches"
LARGE, CLOUD = "many servers", "12 servers"


def simulate(policy: str, seed: int, how: Setup, until_s: float) -> Slots:
    """One run."""
    return built(policy, seed, how).go_on(until_s)


def built(policy: str, seed: int, how: Setup) -> Slotted:
    """A run that has not begun."""
    jobs, kinds = trace(seed, how)
    rules = POLICIES["mlcc" if policy == WITHOUT_SWITCHES else policy]
    network = replace(how.network, top_up=rules.top_up)
    stages = {n: RING_WORKERS if m in RING else 2 for n, m in kinds.items()}
    sharing = rules.sharing(stages)
    if policy == WITHOUT_SWITCHES:
        up = np.arange(network.links) % 2 == 0  # as Tiers numbers them
        sharing = replace(sharing, allocator=FleetAllocator(MlccOptions.repaired(), seen=up))
    place = apart(seed, how.block)
    return Slotted(jobs, how.cluster, network, place, sharing, shape=shape_of(kinds))


class Figures(TypedDict):
    """Of one run. `jct_s`: the mean of all jobs. In a run that was `stalled`, those that were not
    done count as if they had ended when patience does: a lower bound. `speed`: mean iterations
    per second of the jobs of each model, while they run."""

    jct_s: float
    p99_s: float
    speed: dict[str, float]
    stalled: str
    slots: int


@dataclass(frozen=True, slots=True)
class Case:
    """One run, of `part` LARGE, CLOUD or one of `beds()`. `servers`, `block`, `trace` (a file of
    arrivals) with its checksum: of LARGE, see `large`. `until_s`: patience ends."""

    policy: str
    part: str
    seed: int
    servers: int = 0
    block: int = 0
    trace: str = ""
    checksum: int = 0
    until_s: float = 1e5

    def setup(self) -> Setup:
        """Where it runs."""
        if self.part == CLOUD:
            return cloud()
        if self.part != LARGE:
            return testbed(beds()[self.part])
        how = large(self.servers, self.block)
        if not self.trace:
            return how
        return replace(how, arrivals_ns=arrivals(Path(self.trace), how.jobs, how.arrivals_s))

    def figures(self) -> Figures:
        """What came out."""
        run = simulate(self.policy, self.seed, self.setup(), self.until_s)
        arrived = np.array([job.arrival_ns for job in run.jobs]) / SECOND
        jct = np.where(run.done, run.jct_s, self.until_s - arrived)
        speeds = run.iterations / np.maximum(run.run_s, 1e-9)
        models = np.array([job.name.rsplit("-", 1)[0] for job in run.jobs])
        return {
            "jct_s": float(jct.mean()),
            "p99_s": float(np.percentile(jct, 99)),
            "speed": {str(x): float(speeds[models == x].mean()) for x in np.unique(models)},
            "stalled": run.stalled,
            "slots": run.slots,
        }


def beds() -> dict[str, float]:
    """The testbed, by the Gbit/s of its NICs."""
    return {f"6 servers, {gbps:g} Gbit/s": gbps for gbps in SPEED_GBPS}


def baselines(seeds: int, servers: int, block: int, trace: Path | None) -> list[Case]:
    """All that the others are compared with."""
    checksum = zlib.crc32(trace.read_bytes()) if trace is not None else 0
    many = [
        Case("fair", LARGE, seed, servers, block, str(trace or ""), checksum)
        for seed in range(seeds)
    ]
    return many + [Case("fair", part, seed) for part in (*beds(), CLOUD) for seed in range(seeds)]


def others(base: Case, slots: int) -> list[Case]:
    """All that are compared with a baseline that took so many slots."""
    policies: tuple[str, ...] = VARIANTS
    if base.part == LARGE:
        policies = ("mcs", "mcs-pipelined", "ccml", *VARIANTS)
    elif base.part == CLOUD:
        policies = (WITHOUT_SWITCHES,)
    until_s = PATIENCE * slots * DEFAULT_SLOT / SECOND
    return [replace(base, policy=policy, until_s=until_s) for policy in policies]


# --- how long a decision takes


def decision_ms(seed: int, how: Setup, hosts: int = 200) -> float:
    """p90 of the time in which a host plans all of its flows, as its daemon would: real time of
    this machine, of so many hosts' decisions when most flows send while jobs arrive."""
    run = built("ccml", seed, how)
    run.go_on(how.arrivals_s)
    state = run.fullest
    assert state is not None, "jobs send before the last one has come"
    took = []
    for host in np.unique(state.paths[:, 0])[:hosts].tolist():
        view = _view(state, np.flatnonzero(state.paths[:, 0] == host))
        policy = MlccPolicy(MlccOptions.repaired(), DEFAULT_SLOT)
        policy.decide(Nanos(0), view)  # whoever decides for the first time warms up
        began = time.perf_counter()
        policy.decide(Nanos(DEFAULT_SLOT), replace(view, slot=1))
        took.append((time.perf_counter() - began) * 1e3)
    return float(np.percentile(took, 90))


def _view(state: AllocationState, rows: Rows) -> View:
    """Of a host; half of every link is reserved in every slot."""
    load = np.repeat(state.capacity[:-1, None] * 0.5, 10, axis=1)
    return View(
        slot=0,
        horizon=10,
        capacity=state.capacity[:-1],
        flow=state.flow[rows],
        paths=state.paths[rows],
        job=state.job[rows],
        job_names=state.job_names,
        remaining=state.remaining[rows],
        guaranteed=np.zeros(len(rows), np.bool_),
        load=load,
    )


# --- cells

Runs = Sequence[Mapping[str, Figures]]
"""Of each seed."""


def cells_large(runs: Runs, decisions: Sequence[float], servers: int) -> list[Cell]:
    """Fig. 15."""
    found = []
    for variant in VARIANTS:
        for base, published in (("mcs", 0.336), ("ccml", 0.233)):
            found.append(_saves("Fig. 15a", variant, base, published, runs))
        for base in ("mcs-pipelined", "fair"):
            found.append(_saves("Fig. 15a", variant, base, None, runs))
    for base in ("mcs", "mcs-pipelined", "ccml"):
        found.append(_saves("Fig. 15a", base, "fair", None, runs))
    # A bound from one side, on another machine, in another language: nothing to agree with.
    told = f"on this machine, with half of every link reserved; {interval(decisions)[2]}"
    mean, sd, _ = interval(decisions)
    cell = f"a host's decision at {servers} servers, p90, ms"
    found.append(Cell("Fig. 15b", cell, 1.5, mean, sd, len(decisions), None, told))
    return found


def cells_testbed(by_bed: Mapping[str, Runs], in_cloud: Runs) -> list[Cell]:
    """Figs. 8, 9 and 14: TCP's variants are `fair`."""
    found = []
    for bed, runs in by_bed.items():
        gbps = beds()[bed]
        for variant in VARIANTS:
            found.append(_saves(f"Fig. 8, {gbps:g} Gbit/s", variant, "fair", 0.15, runs))
        published = {10.0: 0.22, 24.0: 0.142}.get(gbps)
        for variant in VARIANTS:
            found.append(_faster(f"Fig. 9, {gbps:g} Gbit/s", variant, "VGG19", published, runs))
    found.append(_saves("Fig. 14a", WITHOUT_SWITCHES, "fair", 0.085, in_cloud))
    found.append(_faster("Fig. 14b", WITHOUT_SWITCHES, "GPT2", 0.15, in_cloud))
    return found


def _saves(table: str, policy: str, base: str, published: float | None, runs: Runs) -> Cell:
    """By how much the mean JCT is shorter."""
    ours = [1 - run[policy]["jct_s"] / run[base]["jct_s"] for run in runs]
    cell = f"{policy} against {base}: part of the mean JCT that is saved"
    return _cell(table, cell, published, ours, _stalls(runs, policy, base))


def _faster(table: str, policy: str, model: str, published: float | None, runs: Runs) -> Cell:
    """By how much jobs of a model train faster."""
    both = [
        (run[policy]["speed"][model], run["fair"]["speed"][model])
        for run in runs
        if model in run[policy]["speed"]
    ]
    ours = [mine / its - 1 for mine, its in both] or [0.0]
    cell = f"{policy} against fair: {model} trains so much faster"
    return _cell(table, cell, published, ours, _stalls(runs, policy, "fair"))


def _cell(
    table: str, cell: str, published: float | None, ours: Sequence[float], stalls: str
) -> Cell:
    mean, sd, told = interval(ours)
    # Not by the spread of single runs, which is wide: by what is known of the mean.
    agrees = None if published is None else abs(mean - published) <= half_width(ours)
    if stalls:
        agrees = None if published is None else False
    why = "; ".join(text for text in (told, stalls) if text)
    return Cell(table, cell, published, mean, sd, len(ours), agrees, why)


def _stalls(runs: Runs, *policies: str) -> str:
    """Runs that were given up, if any: they are bounds."""
    told = []
    for policy in policies:
        why = [run[policy]["stalled"] for run in runs if run[policy]["stalled"]]
        if why:
            told.append(f"{policy} was given up in {len(why)} of {len(runs)} runs ({why[0]})")
    return "; ".join(told)


NOT_RUN = (
    "learning-based baselines (28.9 %): not built",
    "Fig. 10: there is no loss in the simulator; `flowslot lab run` with losses measures it",
    "Table I and the curves of Figs. 8 and 9: drawn, or only a caption in the text",
)
EXTERNAL = (
    "computation times",
    "iterations per job",
    "arrivals: uniform at random; the paper's are from Google's trace",
    "placement",
    "cross traffic is left out",
)
