# SPDX-License-Identifier: Apache-2.0
"""Whose figures the benchmark of live policies takes."""

from pathlib import Path

import numpy as np
import pytest
from bench.live_policies import beside_protected

from flowslot_scenario.results import Evidence, JobRun, Results, Run
from flowslot_scenario.scenario import load

PROTECTED = load(Path(__file__).parents[2] / "lab" / "scenarios" / "protected.toml")


def test_starvation_is_of_jobs_beside_the_protected_one_and_against_strict_priority() -> None:
    late = [1.0] * 10 + [2.0] * 10
    slowdowns = {
        "stagger": {"first": [1.0] * 10 + [3.0] * 10, "a": late, "b": [4.0] * 20, "c": [1.0] * 20},
        "prio": {"first": [1.25] * 20, "a": [1.0] * 10 + [9.0] * 10, "b": late, "c": [1.0] * 20},
    }
    runs = []
    for policy, factors in slowdowns.items():
        jobs = [(job, PROTECTED.ideal_s(job)) for job in PROTECTED.jobs]
        ran = [JobRun(job, ideal, np.array(factors[job.name]) * ideal, {}) for job, ideal in jobs]
        runs.append(Run(policy, 1, Evidence(), ran, 0, {}))
    assert beside_protected(Results(PROTECTED, runs, {})) == pytest.approx(
        {"protected": 2.0, "protected_prio": 1.25, "starvation": 4.0 / 1.5}
    )
