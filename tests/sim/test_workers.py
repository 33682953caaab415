# SPDX-License-Identifier: Apache-2.0
"""Workers that do not wait for each other, against what can be worked out by hand."""

import itertools
from pathlib import Path

import pytest

from flowslot.model.units import Nanos
from flowslot_scenario.scenario import load
from flowslot_sim.network import FlowSpec
from flowslot_sim.simulation import Control, Simulation
from flowslot_sim.world import SimJob, Worker, World, from_scenario

MB = 1e6
SCENARIOS = Path(__file__).parents[2] / "lab" / "scenarios"


def two(compute_s: float, *sizes_mb: float) -> Simulation:
    """Two workers that send to each other, at 100 MB/s each; nothing else is waited for."""
    flows = tuple(FlowSpec(f"h{k}", (k,), size * MB) for k, size in enumerate(sizes_mb))
    workers = Worker((0,), (1,)), Worker((1,), (0,))
    compute = round(compute_s * 1e9)
    job = SimJob("a", flows, lambda _: compute, Nanos(0), 1.0, workers=workers)
    world = World(("l0", "l1"), (100 * MB, 100 * MB), ("h0", "h1"), (job,))
    return Simulation(world, lambda _: Control())


def ends(sim: Simulation, n: int) -> list[float]:
    sim.run(iterations=n)
    return [end / 1e9 for end in sim.progress[0].ends[:n]]


def test_a_worker_goes_on_when_what_it_waits_for_has_come() -> None:
    """Worker 1 has everything at 0.4 s and sends again at 0.7; worker 0 has at 0.5 and sends at
    0.8. Both have the second iteration's bytes at 0.9, and are in step again."""
    sim = two(0.3, 10, 20)
    assert ends(sim, 4) == pytest.approx([0.5, 0.9, 1.4, 1.8])
    assert sim.progress[0].began == [0, *sim.progress[0].ends]


@pytest.mark.parametrize(("held_mb", "period_s"), [(100, 0.5), (50, 0.5), (20, 0.5), (0, 0.6)])
def test_a_socket_holds_what_has_not_arrived(held_mb: float, period_s: float) -> None:
    """Worker 1 sends for 0.5 s and computes for 0.1: while it does, its link goes on if its socket
    holds enough; it is the only one that is ever full."""
    sim = two(0.1, 10, 50)
    sim.network.rows["holds"] = held_mb * MB
    found = ends(sim, 20)
    lasted = [b - a for a, b in itertools.pairwise(found)]
    assert sum(lasted[5:]) / len(lasted[5:]) == pytest.approx(period_s, rel=0.01)
    assert sim.network.carried[1] >= 20 * 50 * MB - 1


@pytest.mark.parametrize("name", ["ring4-two-jobs", "ps-incast"])
def test_each_worker_of_a_scenarios_job_sends_its_own_and_waits_for_what_comes_to_it(
    name: str,
) -> None:
    world = from_scenario(load(SCENARIOS / f"{name}.toml"))
    for job in world.jobs:
        begun = [k for worker in job.workers for k in worker.begins]
        awaited = [k for worker in job.workers for k in worker.awaits]
        assert len(set(begun)) == len(begun) and len(set(awaited)) == len(awaited)
        for worker in job.workers:
            (host,) = {job.flows[k].host for k in worker.begins}
            assert {job.flows[k].to for k in worker.awaits} == {host}
        pulls = {k for k, flow in enumerate(job.flows) if flow.group and flow.group.role == "pull"}
        assert set(range(len(job.flows))) - set(begun) == pulls


def test_what_waits_for_a_flow_of_the_next_iteration_waits() -> None:
    """A ring of two, out of step: what the slow link brings late is forwarded only then."""
    flows = (
        FlowSpec("h0", (0,), 20 * MB, own=10 * MB, head=9 * MB, preds=(1,)),
        FlowSpec("h1", (1,), 20 * MB, own=10 * MB, head=9 * MB, preds=(0,)),
    )
    workers = Worker((0,), (1,)), Worker((1,), (0,))
    job = SimJob("a", flows, lambda _: 10_000_000, Nanos(0), 1.0, workers=workers)
    world = World(("l0", "l1"), (100 * MB, 30 * MB), ("h0", "h1"), (job,))
    sim = Simulation(world, lambda _: Control())
    sim.run(until_ns=1)
    rows = sim.network.rows
    while len(sim.progress[0].ends) < 5:
        sim._step(10 * 10**9)
        for i, p in ((0, 1), (1, 0)):
            before = (rows["begun"][i] - 1) * 20 * MB
            came = min(max(rows["sent"][p] - before, 0.0), 20 * MB)
            most = 20 * MB if came >= 20 * MB - 1 else max(10 * MB, 9 * MB + came)
            assert rows["sent"][i] <= before + most + 10
    assert sim.progress[0].ends[4] / 1e9 >= 5 * 20 / 30, "the slow link carries it all"
