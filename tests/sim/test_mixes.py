# SPDX-License-Identifier: Apache-2.0
"""The default policy with exact information, on some of the mixes: short runs of few seeds."""

import numpy as np
import pytest
from bench.worlds import WORLDS
from bench.worlds import slowdowns as of_job

from flowslot.policy.registry import PolicyOptions, get
from flowslot_sim.plane.simple import Exact
from flowslot_sim.simulation import Control, Simulation


def stagger(sim: Simulation) -> Control:
    allocator = get("stagger").allocator
    return Exact(sim, allocator(PolicyOptions()))


def slowdowns(name: str, policy: str, seconds: float) -> list[float]:
    """Mean slowdown of each job, over the last three quarters of the time."""
    sim = Simulation(WORLDS[name](1), stagger if policy == "stagger" else lambda _: Control())
    sim.run(until_ns=round(seconds * 1e9))
    return [
        float(np.mean(of_job(job, progress, 0.25e9 * seconds, sim.now)))
        for job, progress in zip(sim.world.jobs, sim.progress, strict=True)
    ]


@pytest.mark.parametrize("name", ["mix-a", "mix-b"])
def test_equal_and_harmonic_jobs_take_turns(name: str) -> None:
    assert max(slowdowns(name, "stagger", 40)) < 1.03
    assert np.mean(slowdowns(name, "fair", 40)) > 1.1


@pytest.mark.parametrize(
    ("name", "worst"),
    [*((f"mix-{name}", 1.05) for name in "cdefgh"), ("two-tier-mid", 1.15)],
)
def test_nobody_is_worse_off_than_without_us(name: str, worst: float) -> None:
    ours, fair = slowdowns(name, "stagger", 60), slowdowns(name, "fair", 60)
    assert np.mean(ours) < np.mean(fair)
    assert max(a / b for a, b in zip(ours, fair, strict=True)) < worst
