# SPDX-License-Identifier: Apache-2.0
"""The CASSINI thesis' cluster (section 4.5) on a wiring and with jobs of ours: Figs. 4.11
and 4.13; the others of section 4.5 are not run.

Not published: wiring, traces, seeds, bandwidths, and most profiles. Declared here: 12 racks of two
servers with one GPU and 50 Gbit/s each, and one link of 50 Gbit/s from each rack to one switch: 13
switches and 2:1, as printed, but 36 links, not 48. Jobs are data parallel, of the models with a
profile in cassini.py, equally likely, on 2 to 12 servers, until no server is left. All placements
put the same jobs on as many servers: finish-time fairness decides nothing here; where jobs come
and go it does, in cassini_hosts.py. The baseline takes the
first of ten, as Themis does, which does not look at links, and shares links fairly. CASSINI takes
the best of the ten, and shifts. Model parallel jobs and ECN marks are not simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from flowslot.model.units import MILLISECOND, Nanos
from flowslot.policy.base import Floats
from flowslot.policy.cassini import Profile, alone, best
from flowslot.policy.cassini.shifts import MOST_CANDIDATES
from flowslot_sim.network import FlowSpec
from flowslot_sim.papers.cassini import JOBS, LINE, MB, compute_ms
from flowslot_sim.papers.cells import Cell, compare
from flowslot_sim.plane.cassini import Cassini
from flowslot_sim.plane.messages import Plant
from flowslot_sim.simulation import Control, Simulation
from flowslot_sim.world import SimJob, World

SERVERS, PER_RACK = 24, 2
RACKS = SERVERS // PER_RACK
WORKERS = (2, 12)
JITTER = 0.02
WARMUP, ITERATIONS = 10, 60
"""Of every job, and so many after these; the thesis has 200 to 1,000, and profiles jobs before."""


class Training(NamedTuple):
    """A job: a name, what it is, on which servers."""

    name: str
    model: str
    servers: tuple[int, ...]


class Ratios(NamedTuple):
    """Iteration times of a drawn cluster, baseline / CASSINI: of all jobs' iterations together,
    mean and 99th percentile; the mean with shifts only, on the baseline's placement; CASSINI's
    mean slowdown."""

    mean: float
    p99: float
    shifted: float
    slowdown: float


def draw(seed: int) -> list[list[Training]]:
    """Ten placements of the same jobs."""
    random = np.random.default_rng([seed, 44])
    sizes: list[int] = []
    while sum(sizes) <= SERVERS - WORKERS[0]:
        room = SERVERS - sum(sizes)
        size = int(random.integers(WORKERS[0], min(WORKERS[1], room) + 1))
        size -= room - size == 1 and size > WORKERS[0]  # none is left alone
        sizes.append(size)
    models = [str(model) for model in random.choice(list(JOBS), len(sizes))]
    edges = np.cumsum([0, *sizes])
    found = []
    for _ in range(MOST_CANDIDATES):
        order = random.permutation(SERVERS).tolist()
        found.append(
            [
                Training(f"{k}:{model}", model, tuple(sorted(order[edges[k] : edges[k + 1]])))
                for k, model in enumerate(models)
            ]
        )
    return found


def path(src: int, dst: int) -> tuple[int, ...]:
    """Links: to and from each server, then up and down from each rack."""
    ends = src, 2 * SERVERS + src // PER_RACK
    down = 2 * SERVERS + RACKS + dst // PER_RACK, SERVERS + dst
    if src // PER_RACK == dst // PER_RACK:
        return ends[0], down[1]
    return (*ends, *down)


def sends(job: Training) -> list[FlowSpec]:
    """A ring over its servers, in order."""
    n = len(job.servers)
    size = 2 * (n - 1) / n * JOBS[job.model].size_mb * MB
    ring = zip(job.servers, (*job.servers[1:], job.servers[0]), strict=True)
    return [FlowSpec(f"h{src}", path(src, dst), size) for src, dst in ring]


def profile(job: Training, capacity: Mapping[int, float]) -> Profile:
    """As it is alone."""
    on: dict[int, float] = {}
    for flow in sends(job):
        for link in flow.links:
            on[link] = on.get(link, 0.0) + flow.total
    found = alone(job.name, round(compute_ms(job.model) * MILLISECOND), on, capacity)
    assert found is not None
    return found


def ratios(seed: int) -> Ratios:
    """Of one drawn cluster."""
    candidates = draw(seed)
    capacity = dict.fromkeys(range(2 * (SERVERS + RACKS)), LINE)
    chosen, _ = best([[profile(job, capacity) for job in each] for each in candidates], capacity)
    first, top = candidates[0], candidates[chosen]

    def plane(sim: Simulation) -> Control:
        return Cassini(sim, Plant(), seed)

    fair, _ = lasted(first, seed, lambda _: Control(), capacity)
    shifted, _ = lasted(first, seed, plane, capacity)
    ours, slowdown = lasted(top, seed, plane, capacity)
    tails = [float(np.percentile(each, 99)) for each in (fair, ours)]
    return Ratios(
        float(fair.mean() / ours.mean()),
        tails[0] / tails[1],
        float(fair.mean() / shifted.mean()),
        float(slowdown.mean()),
    )


def lasted(
    jobs: Sequence[Training],
    seed: int,
    control: Callable[[Simulation], Control],
    capacity: Mapping[int, float],
) -> tuple[Floats, Floats]:
    """Iteration times of all jobs, s, and the same as slowdowns, float64[jobs * ITERATIONS]."""
    made = []
    for k, job in enumerate(jobs):
        ideal = profile(job, capacity).period_ns / 1e9
        compute = _compute(seed, k, compute_ms(job.model))
        made.append(SimJob(job.name, tuple(sends(job)), compute, Nanos(0), ideal))
    links = tuple(f"l{k}" for k in capacity)
    hosts = tuple(f"h{k}" for k in range(SERVERS))
    sim = Simulation(World(links, tuple(capacity.values()), hosts, tuple(made)), control)
    sim.run(iterations=WARMUP + ITERATIONS)
    counted = slice(WARMUP, WARMUP + ITERATIONS)
    times = [np.subtract(each.ends[counted], each.began[counted]) / 1e9 for each in sim.progress]
    slow = [each / job.ideal_s for each, job in zip(times, made, strict=True)]
    return np.concatenate(times), np.concatenate(slow)


def _compute(seed: int, job: int, ms: float) -> Callable[[int], int]:
    def length(iteration: int) -> int:
        noise = np.random.default_rng([seed, job, iteration]).standard_normal()
        return round(ms * MILLISECOND * max(1 + JITTER * noise, 0.0))

    return length


WHY = "external: wiring, trace and profiles are not published; ours are declared"
NOT_RUN = "external, not run: "
MODEL_PARALLEL = NOT_RUN + "profiles of model parallel jobs are drawn, not printed"
POLLUX = NOT_RUN + "jobs of this cluster keep their GPUs; see cassini_hosts.py"
MARKS = NOT_RUN + "no marks in a fluid network"
UNRUN = (
    ("Fig. 4.12", "model parallel, Themis: mean", 1.2, MODEL_PARALLEL),
    ("Fig. 4.12", "model parallel, Themis: p99", 1.6, MODEL_PARALLEL),
    ("Fig. 4.13", "dynamic, Pollux: mean", 1.6, POLLUX),
    ("Fig. 4.13", "dynamic, Pollux: p99", 2.5, POLLUX),
    ("Fig. 4.14", "ECN marks of DLRM, Themis", 27.0, MARKS),
    ("Fig. 4.14", "ECN marks of DLRM, Pollux", 33.0, MARKS),
    ("Fig. 4.15", "dynamic, model parallel, Themis: mean", 1.2, MODEL_PARALLEL),
    ("Fig. 4.15", "dynamic, model parallel, Themis: p99", 1.6, MODEL_PARALLEL),
)


def cells(found: Sequence[Ratios]) -> list[Cell]:
    """Gains, published beside those of the drawn clusters: one of ours for both traces."""
    rows: list[Cell] = []
    if found:
        mean, p99 = [each.mean for each in found], [each.p99 for each in found]
        for table, trace, printed in (
            ("Fig. 4.11", "Poisson", (1.6, 1.8)),
            ("Fig. 4.13", "dynamic", (1.5, 2.2)),
        ):
            rows.append(compare(table, f"{trace}, Themis: mean", printed[0], mean, WHY))
            rows.append(compare(table, f"{trace}, Themis: p99", printed[1], p99, WHY))
        shifted = [each.shifted for each in found]
        rows.append(compare("ours", "mean gain of shifts alone", None, shifted, WHY))
        slow = [each.slowdown for each in found]
        rows.append(compare("ours", "CASSINI, mean slowdown against Ideal", None, slow, WHY))
    return rows + [Cell(t, c, printed, None, 0.0, 0, None, why) for t, c, printed, why in UNRUN]
