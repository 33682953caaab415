# SPDX-License-Identifier: Apache-2.0
"""The slot-stepped engine against the event-driven one."""

from dataclasses import replace

import numpy as np
import pytest
from bench.worlds import MIXES, on_one_link, on_two_tiers

from flowslot.model.errors import FlowslotError
from flowslot.model.units import SECOND
from flowslot.policy.stagger import StaggerAllocator
from flowslot_sim.cluster.worlds import Steps
from flowslot_sim.simulation import Control, Simulation
from flowslot_sim.world import World

END_S = 60


def slowdowns(world: World) -> tuple[np.ndarray, np.ndarray]:
    """Of each job, by both engines: mean of the iterations that both have ended."""
    sim, steps = Simulation(world, lambda _: Control()), Steps(world, record=256)
    sim.run(until_ns=END_S * SECOND)
    steps.run(END_S * SECOND)
    rows = {job.name: i for i, job in enumerate(steps.table.jobs)}
    found = []
    for job, progress in zip(world.jobs, sim.progress, strict=True):
        ends = np.asarray(steps.engine.ends)[rows[job.name]]
        n = min(len(progress.ends), int((ends > 0).sum()))
        if n:
            both = progress.ends[n - 1], int(ends[n - 1])
            found.append([(end - job.start_ns) / n / SECOND / job.ideal_s for end in both])
    by_events, by_steps = np.array(found).T
    return by_events, by_steps


@pytest.mark.parametrize("name", MIXES)
def test_jobs_on_one_link_are_equally_fast_in_both(name: str) -> None:
    by_events, by_steps = slowdowns(on_one_link(name, 3))
    assert by_steps == pytest.approx(by_events, rel=0.01)


def in_step(world: World) -> World:
    """Its rings: no flow can be ahead of the one before it by more than 1/500."""
    rings = [
        replace(
            job,
            flows=tuple(replace(f, own=f.total / 500, head=f.total / 500) for f in job.flows),
        )
        for job in world.jobs
        if job.name.startswith("ring")
    ]
    return replace(world, jobs=tuple(rings))


@pytest.mark.parametrize("load", ["lo", "hi"])
def test_rings_in_two_tiers_are_equally_fast_in_both(load: str) -> None:
    for seed in range(3):
        world = in_step(on_two_tiers(load, seed))
        by_events, by_steps = slowdowns(world)
        assert len(by_events) >= 12
        assert by_steps.mean() == pytest.approx(by_events.mean(), rel=0.01)


def test_allocated_rates_never_exceed_a_link() -> None:
    world = on_two_tiers("hi", 1)
    steps = Steps(world, StaggerAllocator())
    links = len(world.capacity)
    busy = 0
    for k in range(1, 400):
        steps.run(k * 60_000_000 - 30_000_000)  # at a slot's end, before rates are exact again
        live = np.asarray(steps.sharing.live)[: steps.sharing.n]
        load = np.zeros(links + 1)
        rates, paths = np.asarray(steps.sharing.rate)[live], steps.paths[live]
        np.add.at(load, paths, rates[:, None] * steps.flows[live])
        assert (load[:-1] <= np.array(world.capacity) * (1 + 1e-6)).all()
        busy += len(live) > 0
    assert busy > 300


def test_flows_of_different_lengths_are_refused() -> None:
    world = on_two_tiers("mid", 1)
    first = world.jobs[0]
    flows = (replace(first.flows[0], total=1.0), *first.flows[1:])
    world = replace(world, jobs=(replace(first, flows=flows),))
    with pytest.raises(FlowslotError, match=f"job {first.name}: its flows have 2 lengths"):
        Steps(world)
