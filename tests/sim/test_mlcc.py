# SPDX-License-Identifier: Apache-2.0
"""MLCC in the simulator: as published it stops and says so, repaired it gets on."""

import json
import math
from collections.abc import Callable

import numpy as np
import pytest
from bench.worlds import WORLDS, IdleSlots, slowdowns
from scenariofiles import SCENARIOS
from typer.testing import CliRunner

from flowslot.model.slot import DEFAULT_SLOT
from flowslot.policy.mlcc import MlccOptions
from flowslot_scenario import scenario as scenarios
from flowslot_sim.cli import app
from flowslot_sim.network import FlowSpec
from flowslot_sim.plane.messages import Plant
from flowslot_sim.plane.mlcc import VARIANTS, Mlcc, Variant
from flowslot_sim.runner import POLICIES
from flowslot_sim.simulation import Control, Simulation
from flowslot_sim.stalls import Livelock, StallWatch
from flowslot_sim.world import SimJob, World, from_scenario


def world_of(name: str) -> World:
    if name in WORLDS:
        return WORLDS[name](0)
    return from_scenario(scenarios.load(SCENARIOS / f"{name}.toml", []))


def made(world: World, variant: Variant) -> tuple[Simulation, Mlcc, IdleSlots]:
    sim = Simulation(world, lambda sim: Mlcc(sim, variant, Plant(), seed=0))
    return sim, sim.control, IdleSlots(sim)


def each_slot(sim: Simulation, seconds: float, look: Callable[[], None]) -> None:
    for slot in range(int(seconds * 1e9) // DEFAULT_SLOT):
        sim.run(until_ns=(slot + 1) * DEFAULT_SLOT - DEFAULT_SLOT // 3)
        look()


def test_all_variants_are_policies() -> None:
    assert set(VARIANTS) < set(POLICIES)


@pytest.mark.parametrize("name", ["mix-a", "two-equal"])
def test_to_the_letter_it_never_begins_and_the_run_ends(name: str) -> None:
    sim, plane, seen = made(world_of(name), VARIANTS["mlcc-strict"])
    with pytest.raises(Livelock, match="given up after 200 slots without a byte"):
        sim.run(iterations=10)
    assert [stall.kind for stall in plane.watch.stalls] == ["livelock"]
    assert sim.network.carried.sum() == 0.0
    assert seen.idle >= 200


def test_as_published_hosts_evade_each_other() -> None:
    sim, plane, seen = made(world_of("mix-d"), VARIANTS["mlcc-literal"])
    sim.run(until_ns=45 * 10**9)
    assert any("livelock" in line for line in plane.watch.report())
    assert seen.idle > 0.05 * seen.slots
    # What is left with atomic reservations is the literal cost's own preference for later slots.
    sim, plane, atomic = made(world_of("mix-d"), Variant(MlccOptions(atomic=True), False))
    sim.run(until_ns=45 * 10**9)
    assert 0 < atomic.idle < seen.idle and plane.evidence().refused > 0


@pytest.mark.parametrize("name", ["mix-a", "mix-c", "two-equal", "ps-plus-ring"])
def test_repaired_all_jobs_get_on(name: str) -> None:
    """Without reserving more than there is, in any slot, or pacing at more than was reserved."""
    sim, plane, seen = made(world_of(name), VARIANTS["mlcc"])
    capacity = np.array(sim.world.capacity)

    def look() -> None:
        load = plane.switch.fetch(sim.now, tuple(range(len(capacity)))).load
        assert np.all(load <= capacity[:, None] * (1 + 1e-6))
        reserved = np.zeros(len(capacity) + 1)
        for row, path in enumerate(sim.network.paths):
            reserved[path] += sim.network.rows["reserved"][row]
        assert np.all(reserved[:-1] <= load[:, 0] + 1e-6 * capacity)

    each_slot(sim, 10, look)
    assert seen.idle == 0 and not plane.watch.stalls
    assert plane.evidence().scheduled > plane.evidence().granted == 0, "as the lab counts them"
    fair = Simulation(world_of(name), lambda _: Control())
    fair.run(until_ns=10 * 10**9)
    for ours, theirs in zip(sim.progress, fair.progress, strict=True):
        assert len(ours.ends) > 0.5 * len(theirs.ends)


def test_a_job_alone_is_at_its_ideal_but_for_messages() -> None:
    one = FlowSpec("h0", (0,), 5e6)
    job = SimJob("a", (one,), lambda _: 100_000_000, 13, 0.2)  # type: ignore[arg-type]
    # As published: up to a slot before the first byte, and slots that are not filled.
    for name, least, most in (("mlcc", 0.9999, 1.0001), ("mlcc-rhs", 1.1, 1.6)):
        sim, *_ = made(World(("l",), (5e7,), ("h0",), (job,)), VARIANTS[name])
        sim.run(until_ns=10 * 10**9)
        assert least < np.mean(slowdowns(job, sim.progress[0], 0, sim.now)) < most


def test_hosts_tell_each_other_what_the_daemons_do() -> None:
    """By core's book, of flows named as in their jobs' records, a message's delay later."""
    sim, plane, _ = made(world_of("ps-plus-ring"), VARIANTS["mlcc"])
    waits: dict[str, set[bool]] = {}
    groups = {row: flow.group for row, flow in enumerate(sim.flows)}
    decided = {row: 0 for row in groups}

    def look() -> None:
        for host in plane.hosts.values():
            for row, of in host.planner._policy.dependencies.items():
                group = groups[row]
                assert group is not None and sim.flows[row].host == host.name
                waits.setdefault(group.role, set()).add(of.lead < math.inf)
                decided[row] += 1

    each_slot(sim, 3, look)
    assert waits == {"ring": {True}, "push": {False}, "pull": {True}}
    assert min(decided.values()) > 0


def test_a_phase_without_an_end_is_given_up_too() -> None:
    """Two jobs, one of which gets nothing while the other moves for ever."""
    big, small = FlowSpec("h0", (0,), 1e12), FlowSpec("h1", (0,), 1e6)
    jobs = [
        SimJob(name, (flow,), lambda _: 1, 0, 1.0)  # type: ignore[arg-type]
        for name, flow in (("big", big), ("small", small))
    ]
    sim = Simulation(World(("l",), (1e8,), ("h0", "h1"), tuple(jobs)), lambda _: Control())
    sim.network.rows["ceiling"][1] = 0.0
    seen, watch = IdleSlots(sim), StallWatch(sim, phase_patience=60)
    watch.start()
    with pytest.raises(Livelock, match="big, small did not end an iteration in 60 slots"):
        sim.run(iterations=1)
    assert [stall.kind for stall in watch.stalls] == ["starvation"]
    assert seen.idle == 0


def test_the_command_prints_a_livelock_as_a_finding() -> None:
    command = ["run", str(SCENARIOS / "two-equal.toml"), "--policy", "mlcc-strict,fair"]
    command += ["--iterations", "3"]
    table = CliRunner().invoke(app, command)
    assert table.exit_code == 0, table.output
    assert "livelock from slot 2" in table.output
    result = CliRunner().invoke(app, [*command, "-o", "json"])
    assert result.exit_code == 0
    strict, fair = json.loads(result.stdout)["runs"]
    assert "livelock" in strict["livelock"] and fair["livelock"] is None
    assert "livelock" in strict["evidence"]["errors"][0]
    assert strict["jobs"][0]["iterations"] == 0 and strict["jobs"][0]["mean_s"] is None
