# SPDX-License-Identifier: Apache-2.0
"""The lab's scenarios in the simulator: how well turns are taken, and at what cost in messages."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from scenariofiles import SCENARIOS
from typer.testing import CliRunner

from flowslot_scenario.budget import JobBudget
from flowslot_scenario.scenario import load
from flowslot_sim.cli import app
from flowslot_sim.plane.messages import Messages
from flowslot_sim.runner import STANDARD, Options, control, simulate
from flowslot_sim.simulation import Simulation
from flowslot_sim.world import from_scenario

RUN = CliRunner()


def slowdowns(name: str, policy: str = "stagger", **more: object) -> dict[str, float]:
    """Mean of each job."""
    loaded = load(SCENARIOS / f"{name}.toml")
    result = simulate(loaded, Options((policy,), iterations=60, **more))  # type: ignore[arg-type]
    return {job.job.name: float(job.slowdowns.mean()) for job in result.runs[0].jobs}


def plane_of(name: str) -> tuple[Simulation, Messages]:
    world = from_scenario(load(SCENARIOS / f"{name}.toml"))
    sim = Simulation(world, control("stagger", STANDARD, 1))
    return sim, sim.control


@pytest.mark.parametrize("name", ["two-equal", "three-equal", "ring4-two-jobs"])
def test_equal_jobs_take_turns(name: str) -> None:
    assert max(slowdowns(name).values()) < 1.02
    assert max(slowdowns(name, "fair").values()) > 1.3


def test_also_without_a_switch_and_with_one_for_each_rack() -> None:
    assert max(slowdowns("two-equal", use_switch=False).values()) < 1.05
    assert max(slowdowns("ring4-two-jobs", per_rack=True).values()) < 1.05


@pytest.mark.parametrize("name", ["mix-incommensurate", "ps-plus-ring"])
def test_unequal_jobs_fare_better_than_under_fair_sharing(name: str) -> None:
    ours, fair = slowdowns(name), slowdowns(name, "fair")
    assert np.mean(list(ours.values())) < np.mean(list(fair.values()))
    assert max(ours.values()) < max(fair.values())


def test_equal_shares_are_what_they_are() -> None:
    """Two jobs, half of the link each: computation + twice the transfer."""
    static = slowdowns("two-equal", "static")
    assert static["a"] == pytest.approx((0.125 + 2 * 0.1046) / (0.125 + 0.1046), rel=0.01)


def test_a_job_alone_keeps_its_grants() -> None:
    """16 push and 16 pull flows, for which nobody ever asks again."""
    sim, plane = plane_of("ps-incast")
    sim.run(until_ns=1_500_000_000)
    settled = replace(plane.evidence(), control_packets=0)
    sim.run(until_ns=6_000_000_000)
    assert replace(plane.evidence(), control_packets=0) == settled


def test_turns_cost_few_grants() -> None:
    sim, plane = plane_of("three-equal")
    sim.run(iterations=40)
    iterations = sum(len(progress.ends) for progress in sim.progress)
    said = plane.evidence()
    assert said.granted + said.refused + said.preempted + said.expired < 8 * iterations


def test_the_same_seed_gives_the_same_json() -> None:
    def run(*more: str) -> str:
        command = ["run", str(SCENARIOS / "ps-plus-ring.toml"), "--iterations", "3", "-o", "json"]
        result = RUN.invoke(app, [*command, *more])
        assert result.exit_code == 0
        return result.stdout

    every = "--policy=stagger,stagger-exact,mlcc"
    assert run(every) == run(every) != run(every, "--seed", "5")
    shown = json.loads(run("--seeds", "2", "--policy", "stagger,fair"))
    assert [(r["policy"], r["repeat"]) for r in shown["runs"]] == [
        ("stagger", 1),
        ("fair", 1),
        ("stagger", 2),
        ("fair", 2),
    ]
    assert shown["runs"][0]["evidence"]["reservations"]["granted"] > 0
    assert shown["runs"][0]["links"][0]["utilisation"] > 0.3


DELAYS = '[{from_host="h1", to_host="h2", us=100}]'


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--policy", "fare"], 'no policy is called "fare"; of: stagger'),
        (["--switches", "per-rack"], "its hosts have no `rack`"),
        (["--set", "links.rate_mbps=-1"], "field `links.rate_mbps`"),
        (["--set", f"delays={DELAYS}"], "the simulator has no long paths"),
    ],
)
def test_bad_usage_is_one_line_and_status_2(more: list[str], said: str) -> None:
    command = [sys.executable, "-m", "flowslot_cli.main", "sim", "run"]
    command += [str(SCENARIOS / "two-equal.toml"), *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1


def budget(name: str, iterations: int = 10) -> list[JobBudget]:
    loaded = load(SCENARIOS / f"{name}.toml")
    return simulate(loaded, Options(("stagger",), 1, iterations, budget=True)).runs[0].budget


def test_a_budget_of_links_with_queues_adds_up() -> None:
    """What a job's links did not carry for it is what its iterations take longer than Ideal."""
    jobs = budget("mix-incommensurate", 40)  # few begin or end in the midst of an iteration
    assert len(jobs) == 2
    for job in jobs:
        lost = sum(ms for cause, ms in job.lost.items() if cause != "dependency")
        assert lost == pytest.approx(job.iteration_ms - job.ideal_ms, rel=0.02) and lost > 20
    ring = next(job for job in budget("ps-plus-ring") if job.name == "ring")
    assert ring.lost["dependency"] > 5, "a step of a ring waits for another host's, not for a link"
