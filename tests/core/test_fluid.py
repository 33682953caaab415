# SPDX-License-Identifier: Apache-2.0
"""Whole jobs in the fluid model: how well turns are taken, and at what cost in messages.

Slowdown = mean iteration / ideal, where ideal uses all of a link's goodput. Grants leave 4 % of it
to the kernel's top-up, so 1.02 to 1.04 is the best that these runs without top-up can show.
"""

from collections.abc import Callable

import numpy as np
import pytest
from fluid import Cluster, Fluid, slowdowns

from flowslot.policy.base import AllocationState, Allocator, Floats
from flowslot.units import MILLISECOND, SECOND, Nanos

MBPS_400 = 400e6


def rings(jobs: int, compute_s: float, volume: float = 5e6) -> Cluster:
    cluster = Cluster(2, MBPS_400)
    for j in range(jobs):
        cluster.ring(f"ring{j}", volume, compute_s, 2)
    return cluster


def incast() -> Cluster:
    cluster = Cluster(5, MBPS_400)
    cluster.ps("ps", 1.6e6, 0.020, workers=[1, 2, 3, 4], sockets=4)
    return cluster


def mix() -> Cluster:
    cluster = Cluster(2, MBPS_400)
    cluster.ring("large", 20e6, 0.30, 2)
    cluster.ring("small", 4.8e6, 0.15, 2)
    return cluster


def ps_plus_ring() -> Cluster:
    cluster = Cluster(4, 200e6)
    cluster.ring("ring", 3e6, 0.10, 4)
    cluster.ps("ps", 1e6, 0.05, workers=[1, 2, 3], sockets=2)
    return cluster


def run(
    cluster: Cluster, seconds: float, *, top_up: bool = False, allocator: Allocator | None = None
) -> Fluid:
    sim = Fluid(cluster, top_up=top_up, allocator=allocator)
    sim.run(seconds)
    assert sim.worst_use <= 0.96 + 1e-6, "never over the target"
    assert sim.arbiter.expired == 0
    return sim


def grants_after(sim: Fluid, seconds: float) -> int:
    return sum(at > seconds * SECOND for at in sim.grants_at)


def test_a_ring_alone_keeps_its_grants() -> None:
    sim = run(rings(1, 0.125), 5)
    assert grants_after(sim, 0.75) == 0
    assert slowdowns(sim)["ring0"] < 1.04


def test_incast_alone_keeps_its_grants() -> None:
    """16 push and 16 pull flows; workers compute with jitter, pulls depend on pushes."""
    sim = run(incast(), 6)
    assert grants_after(sim, 1.5) == 0
    # 2 ms of it are the pipeline of keys, which ideal leaves out, and the model's time steps.
    assert slowdowns(sim)["ps"] < 1.09


@pytest.mark.parametrize(("jobs", "compute_s"), [(2, 0.125), (3, 0.24)])
def test_equal_jobs_take_turns(jobs: int, compute_s: float) -> None:
    """They start together, and from then on each is ready at about the time that another ends."""
    sim = run(rings(jobs, compute_s), 9)
    assert max(slowdowns(sim).values()) < 1.05
    assert min(len(job.times) for job in sim.cluster.jobs) > 20
    # Per iteration and job: two flows are lowered once and raised once; 5.0 and 6.2 were seen.
    iterations = sum(len(job.times) for job in sim.cluster.jobs)
    assert sim.counts["grants"] < 7 * iterations


def test_jobs_out_of_step_find_their_standing_grants() -> None:
    """Each begins at full rate, without a negotiation, although the other one had it between."""
    cluster = Cluster(2, MBPS_400)
    cluster.ring("first", 5e6, 0.16, 2)
    cluster.ring("second", 5e6, 0.16, 2, offset_s=0.13)
    sim = run(cluster, 20)
    rates = []
    for at, flow, rate in sim.starts:
        before = [t for t, other, _ in sim.starts if other // 2 != flow // 2 and t < at]
        # A phase takes 109 ms. They drift: starts while the other one still sends do not count.
        if at > 2 * SECOND and at - max(before) > 120 * MILLISECOND:
            rates.append(rate)
    assert len(rates) > 40
    assert np.mean(np.array(rates) > 0.9 * 0.96 * cluster.capacity[0]) > 0.97
    assert max(slowdowns(sim).values()) < 1.04


class Nothing:
    """Grants nothing: with top-up, the flows share the links max-min, as TCP ideally does."""

    def allocate(self, state: AllocationState, now: Nanos) -> Floats:
        return np.zeros(len(state.flow))

    def next_change(self, state: AllocationState, now: Nanos) -> Nanos | None:
        return None

    def standing(self) -> None:
        return None


@pytest.mark.parametrize("build", [mix, ps_plus_ring], ids=["mix", "ps-plus-ring"])
def test_unequal_jobs_fare_no_worse_than_under_fair_sharing(
    build: Callable[[], Cluster],
) -> None:
    ours = slowdowns(run(build(), 12, top_up=True))
    fair = slowdowns(run(build(), 12, top_up=True, allocator=Nothing()))
    assert np.mean(list(ours.values())) < np.mean(list(fair.values()))
    assert max(ours.values()) < max(fair.values()) * 1.05, "nobody starves"


def test_is_reproducible() -> None:
    first, second = run(rings(2, 0.125), 2), run(rings(2, 0.125), 2)
    assert first.grants_at == second.grants_at and first.grants_at
