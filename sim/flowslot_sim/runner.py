# SPDX-License-Identifier: Apache-2.0
"""Scenarios under policies, seed after seed, with results as the lab's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from flowslot.policy import registry
from flowslot.policy.mltcp import MltcpAllocator
from flowslot.policy.registry import PolicyOptions, get
from flowslot.policy.static import StaticPolicy
from flowslot_scenario.results import JobRun, Results, Run
from flowslot_scenario.scenario import Scenario
from flowslot_sim.budget import Ledger
from flowslot_sim.plane.cassini import Cassini
from flowslot_sim.plane.messages import Messages, Plant
from flowslot_sim.plane.mlcc import VARIANTS, Mlcc
from flowslot_sim.plane.simple import Exact, Fixed
from flowslot_sim.recording.events import Watch
from flowslot_sim.recording.record import Recording
from flowslot_sim.simulation import Control, Simulation
from flowslot_sim.stalls import Livelock
from flowslot_sim.world import World, from_scenario

STANDARD, DEFAULTS = Plant(), PolicyOptions()
EXACT = "-exact"
"""Ending of a policy's name: its allocator knows everything at once, and needs no messages."""
ARBITERS = tuple(name for name in registry.names() if get(name).needs_arbiter)
OVER_TCP = "cassini-tcp"
POLICIES = (*ARBITERS, "stagger-exact", "static", "fair", "mltcp", OVER_TCP, *VARIANTS)
"""`fair`: what TCP would do in the ideal, max-min sharing; `mltcp`: what MLTCP would;
`cassini-tcp`: as `fair`, with shifted starts, as in the thesis. `cassini`: at our arbiter."""
UNPACED = ("fair", "mltcp", OVER_TCP)
"""Nobody grants rates."""


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
    nobody_grants: dict[str, Callable[[Simulation], Control]] = {
        "fair": lambda _: Control(),
        "static": lambda sim: Fixed(sim, StaticPolicy()),
        "mltcp": lambda sim: Exact(sim, MltcpAllocator()),  # flows need nobody to tell them
        OVER_TCP: lambda sim: Cassini(sim, plant, seed),
    }
    if name in nobody_grants:
        return nobody_grants[name]
    if name in VARIANTS:
        return lambda sim: Mlcc(sim, VARIANTS[name], plant, seed)
    make = partial(registry.allocator, name)
    if policy.endswith(EXACT):
        return lambda sim: Exact(sim, make(options))
    return lambda sim: Messages(sim, make, options, plant, seed)


def simulate(
    scenario: Scenario, options: Options, recordings: dict[str, Recording] | None = None
) -> Results:
    """All runs of all policies, each with the seeds from the scenario's on. `recordings`: to be
    filled, by policy, with those of the first seed."""
    runs = []
    for k in range(options.seeds):
        seeded = scenario.model_copy(update={"seed": (scenario.seed + k) % 2**32})
        world = from_scenario(seeded, options.use_switch, options.per_rack)
        for policy in options.policies:
            into = recordings if k == 0 else None
            runs.append(_run(seeded, world, policy, k + 1, options, recordings=into))
    return Results(scenario, runs, {})


def _run(
    scenario: Scenario,
    world: World,
    policy: str,
    repeat: int,
    options: Options,
    *,
    recordings: dict[str, Recording] | None,
) -> Run:
    classes = tuple(filter(None, (job.job_class for job in scenario.jobs)))
    made = control(policy, options.plant, scenario.seed, PolicyOptions(classes=classes))
    sim = Simulation(world, made)
    measured = options.iterations or scenario.iterations
    ledger = Ledger(sim, scenario, grants=policy not in UNPACED) if options.budget else None
    if ledger is not None:
        sim.accounts.append(ledger.account)
    watch = Watch(sim) if recordings is not None else None
    livelock = ""
    try:
        sim.run(iterations=scenario.warmup + measured)
    except Livelock as error:  # a finding about the policy, not a failure of the run
        livelock = str(error)
    if recordings is not None and watch is not None:
        recordings[policy] = watch.end()
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
