# SPDX-License-Identifier: Apache-2.0
"""Scenarios under policies, seed after seed, with results as the lab's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from flowslot.policy.registry import PolicyOptions, get
from flowslot.policy.static import StaticPolicy
from flowslot_scenario.results import JobRun, Results, Run
from flowslot_scenario.scenario import Scenario
from flowslot_sim.budget import Ledger
from flowslot_sim.plane.messages import Messages, Plant
from flowslot_sim.plane.mlcc import VARIANTS, Mlcc
from flowslot_sim.plane.simple import Exact, Fixed
from flowslot_sim.simulation import Control, Simulation
from flowslot_sim.stalls import Livelock
from flowslot_sim.world import World, from_scenario

STANDARD, DEFAULTS = Plant(), PolicyOptions()
EXACT = "-exact"
"""Ending of a policy's name: its allocator knows everything at once, and needs no messages."""
POLICIES = ("stagger", "stagger-exact", "static", "fair", *VARIANTS)
"""`fair`: what TCP would do in the ideal, max-min sharing."""


@dataclass(frozen=True, slots=True)
class Options:
    """What `sim run` was asked for. `iterations`: measured ones per job and seed."""

    policies: tuple[str, ...]
    seeds: int = 1
    iterations: int | None = None
    use_switch: bool = True
    per_rack: bool = False
    plant: Plant = STANDARD
    budget: bool = False
    """Account for where the time goes."""


def control(
    policy: str, plant: Plant, seed: int, options: PolicyOptions = DEFAULTS
) -> Callable[[Simulation], Control]:
    """What makes the control plane of a policy. FlowslotError: there is no such policy."""
    name = policy.removesuffix(EXACT)
    if name == "fair":
        return lambda _: Control()
    if name == "static":
        return lambda sim: Fixed(sim, StaticPolicy())
    if name in VARIANTS:
        return lambda sim: Mlcc(sim, VARIANTS[name], plant, seed)
    make = get(name).allocator
    assert make is not None
    if policy.endswith(EXACT):
        return lambda sim: Exact(sim, make(options))
    return lambda sim: Messages(sim, make, options, plant, seed)


def simulate(scenario: Scenario, options: Options) -> Results:
    """All runs of all policies, each with the seeds from the scenario's on."""
    runs = []
    for k in range(options.seeds):
        seeded = scenario.model_copy(update={"seed": (scenario.seed + k) % 2**32})
        world = from_scenario(seeded, options.use_switch, options.per_rack)
        for policy in options.policies:
            runs.append(_run(seeded, world, policy, k + 1, options))
    return Results(scenario, runs, {})


def _run(scenario: Scenario, world: World, policy: str, repeat: int, options: Options) -> Run:
    sim = Simulation(world, control(policy, options.plant, scenario.seed))
    measured = options.iterations or scenario.iterations
    ledger = Ledger(sim, scenario, grants=policy != "fair") if options.budget else None
    if ledger is not None:
        sim.account = ledger.account
    livelock = ""
    try:
        sim.run(iterations=scenario.warmup + measured)
    except Livelock as error:  # a finding about the policy, not a failure of the run
        livelock = str(error)
    jobs = []
    for job, progress in zip(scenario.jobs, sim.progress, strict=True):
        # Jobs that are quicker than others went on meanwhile.
        done = slice(scenario.warmup, scenario.warmup + measured)
        lasted = np.subtract(progress.ends, progress.began[: len(progress.ends)])[done]
        jobs.append(JobRun(job, scenario.ideal_s(job), lasted / 1e9, {}))
    carried = sim.network.carried[:-1] / np.array(world.capacity) / (sim.now / 1e9)
    used = dict(zip(world.links, carried.tolist(), strict=True))
    run = Run(policy, repeat, sim.control.evidence(), jobs, 0, used, livelock)
    if ledger is not None:
        run.budget = ledger.budgets()
    return run
