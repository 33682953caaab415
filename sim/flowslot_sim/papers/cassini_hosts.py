# SPDX-License-Identifier: Apache-2.0
"""CASSINI's choice of a placement beside the thesis' host schedulers, where jobs come and go
(sections 4.5.2 and 4.5.3).

Wiring and models are those of cassini_cluster.py. Printed: jobs arrive at random at a load of 80 to
100 %, on 1 to 12 GPUs, for 200 to 1,000 iterations; everybody's GPUs are given out anew every 10
minutes. Here the load is 90 %, and iterations and minutes are a tenth of that. Links are shared
max-min. Jobs are not shifted: what is shown is what the choice alone brings. What of Themis and
Pollux is left out, cluster/hosts.py says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from flowslot.model.units import MILLISECOND, SECOND
from flowslot_sim.cluster.hosts import Alone, HostScheduler, Pollux, Themis, one_server_or_line
from flowslot_sim.cluster.jobs import JobSpec, Phase
from flowslot_sim.cluster.placement import Placement, at_random, cassini
from flowslot_sim.cluster.run import Cluster
from flowslot_sim.cluster.slotted import Sharing, Slotted
from flowslot_sim.cluster.tiers import Tiers
from flowslot_sim.papers.cassini import JOBS, LINE, compute_ms, moved
from flowslot_sim.papers.cassini_cluster import PER_RACK, RACKS, SERVERS
from flowslot_sim.papers.cells import Cell, compare

ARRIVALS, LOAD = 40, 0.9
WORKERS, ITERATIONS = (1, 12), (20, 100)
LEASE_NS = 60 * SECOND
HOSTS: dict[str, Callable[[Alone], HostScheduler]] = {
    "Themis": lambda alone: Themis(alone, LEASE_NS),
    "Pollux": lambda alone: Pollux(alone, LEASE_NS),
}
FOR_EVER_S = 1e5


def drawn(seed: int) -> list[JobSpec]:
    """Jobs, with arrivals."""
    draw = np.random.default_rng([seed, 45])
    alone = one_server_or_line(LINE, 1)
    jobs = []
    for k in range(ARRIVALS):
        model = list(JOBS)[draw.integers(len(JOBS))]
        n = int(draw.integers(WORKERS[0], WORKERS[1] + 1))
        phase = Phase(round(compute_ms(model) * MILLISECOND), moved(n, JOBS[model]))
        iterations = int(draw.integers(ITERATIONS[0], ITERATIONS[1] + 1))
        jobs.append(JobSpec(f"{k}:{model}", n, iterations, (phase,), memory_mb=1.0))
    work = [job.workers * job.iterations * alone(job, job.workers) for job in jobs]
    gaps = draw.exponential(np.mean(work) / (SERVERS * LOAD), ARRIVALS)
    return [
        JobSpec(x.name, x.workers, x.iterations, x.phases, round(at * SECOND), x.memory_mb)
        for x, at in zip(jobs, np.cumsum(gaps).tolist(), strict=True)
    ]


def gain(host: str, seed: int) -> tuple[float, float]:
    """JCT with random placement by JCT with CASSINI's choice: mean, 99th percentile."""
    network = Tiers(SERVERS, (50.0, 50.0, 50.0), PER_RACK, RACKS)
    rules = HOSTS[host](one_server_or_line(float(network.capacity[0]), 1))

    def jct(place: Placement) -> tuple[float, float]:
        cluster = Cluster(SERVERS, 1, 1.0)
        found = Slotted(drawn(seed), cluster, network, place, Sharing(), host=rules)
        jct_s = found.go_on(FOR_EVER_S).jct_s
        return float(jct_s.mean()), float(np.percentile(jct_s, 99))

    plain, chosen = jct(at_random(seed)), jct(cassini(seed))
    return plain[0] / chosen[0], plain[1] / chosen[1]


def cells(found: Mapping[str, Sequence[tuple[float, float]]]) -> list[Cell]:
    """Of each host scheduler, by its seeds."""
    why = "jobs come and go, no shifts; published gains are of iterations, with shifts"
    return [
        compare("ours", f"{host}: {what} that the choice among placements gains", None, some, why)
        for host, gains in found.items()
        for what, some in zip(("mean JCT", "p99 of JCT"), zip(*gains, strict=True), strict=True)
    ]
