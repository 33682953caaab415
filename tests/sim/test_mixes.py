# SPDX-License-Identifier: Apache-2.0
"""The default policy with exact information, on some of the mixes: short runs of few seeds."""

import numpy as np
import pytest
from bench.worlds import WORLDS

from flowslot.policy.registry import PolicyOptions, get
from flowslot_sim.plane.simple import Exact, Free
from flowslot_sim.simulation import Control, Simulation


def stagger(sim: Simulation) -> Control:
    allocator = get("stagger").allocator
    assert allocator is not None
    return Exact(sim, allocator(PolicyOptions()))


def slowdowns(name: str, seed: int, policy: str, seconds: float) -> list[float]:
    """Mean slowdown of each job, over the last three quarters of the time."""
    sim = Simulation(WORLDS[name](seed), stagger if policy == "stagger" else lambda _: Free())
    sim.run(until_ns=round(seconds * 1e9))
    means = []
    for job, progress in zip(sim.world.jobs, sim.progress, strict=True):
        done = [
            (end - began) / 1e9 / job.ideal_s
            for began, end in zip(progress.began, progress.ends, strict=False)
            if began > 0.25e9 * seconds
        ]
        means.append(float(np.mean(done)))
    return means


@pytest.mark.parametrize("name", ["mix-a", "mix-b"])
def test_equal_and_harmonic_jobs_take_turns(name: str) -> None:
    assert max(slowdowns(name, 1, "stagger", 40)) < 1.03
    assert np.mean(slowdowns(name, 1, "fair", 40)) > 1.1


@pytest.mark.parametrize("name", ["mix-c", "mix-d", "mix-e", "mix-f", "mix-g", "mix-h"])
def test_nobody_is_worse_off_than_without_us(name: str) -> None:
    ours, fair = slowdowns(name, 1, "stagger", 60), slowdowns(name, 1, "fair", 60)
    assert np.mean(ours) < np.mean(fair)
    assert max(a / b for a, b in zip(ours, fair, strict=True)) < 1.05


def test_two_tiers() -> None:
    name, seconds = "two-tier-mid", 60
    ours, fair = (slowdowns(name, 1, policy, seconds) for policy in ("stagger", "fair"))
    assert np.mean(ours) < np.mean(fair)
    assert max(a / b for a, b in zip(ours, fair, strict=True)) < 1.15


def test_is_reproducible() -> None:
    assert slowdowns("mix-h", 3, "stagger", 20) == slowdowns("mix-h", 3, "stagger", 20)
    assert slowdowns("mix-h", 3, "stagger", 20) != slowdowns("mix-h", 4, "stagger", 20)
