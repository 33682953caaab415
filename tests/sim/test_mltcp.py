# SPDX-License-Identifier: Apache-2.0
"""MLTCP on the fluid network: who is ahead gets more, until jobs take turns."""

import numpy as np
import pytest
from scenariofiles import SCENARIOS

from flowslot_scenario.scenario import load
from flowslot_sim.runner import Options, simulate


def later(name: str, policy: str) -> float:
    """Mean slowdown of iterations 31 to 40, two seeds."""
    loaded = load(SCENARIOS / f"{name}.toml", ["warmup=30"])
    result = simulate(loaded, Options((policy,), iterations=10, seeds=2))
    return float(np.mean([job.slowdowns for run in result.runs for job in run.jobs]))


@pytest.mark.parametrize("name", ["two-equal", "three-equal"])
def test_equal_jobs_take_turns_after_thirty_iterations(name: str) -> None:
    assert later(name, "mltcp") < 1.02
    assert later(name, "fair") > 1.2
