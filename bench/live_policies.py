# SPDX-License-Identifier: Apache-2.0
"""What policies that are not the default do for jobs in the lab, and whether anybody starves.

    python -m bench.run --only live_policies --repeat 1

Slowdowns over ITERATIONS after the scenario's warm-up. `protected`: of the protected job under
`stagger`, and under `prio`. `starvation`: of its other jobs the largest ratio of ten iterations in
a row under `stagger` to the job's mean under `prio`. cassini and mltcp: mean of all of two and
three equal jobs. Needs root; two minutes a repeat.
"""

from __future__ import annotations

import flowslot_lab.runner as lab
from bench.policy_switches import SCENARIOS
from flowslot_lab.progress import Silent
from flowslot_lab.state import RunState, clean_dead
from flowslot_scenario.results import Results
from flowslot_scenario.scenario import load

ITERATIONS = 40
EQUAL = "two-equal", "three-equal"


def run(name: str, policies: tuple[str, ...], iterations: int, state: RunState) -> Results:
    """A scenario under each policy, once."""
    options = lab.Options(policies, iterations=iterations, alone=False)
    return lab.measure(load(SCENARIOS / f"{name}.toml"), options, state, Silent())


def beside_protected(results: Results) -> dict[str, float]:
    """The figures of one protected job and those beside it."""
    first = next(job.name for job in results.scenario.jobs if job.protected)
    rows = {(row.policy, row.job): row.numbers[4:] for row in results.by_job()}
    return {
        "protected": rows["stagger", first][0],
        "protected_prio": rows["prio", first][0],
        "starvation": max(
            worst / rows["prio", job][0]
            for (policy, job), (*_, worst) in rows.items()
            if policy == "stagger" and job != first
        ),
    }


def measure(iterations: int = ITERATIONS) -> dict[str, float]:
    """All runs, one after the other."""
    clean_dead()
    state = RunState.create()
    try:
        figures = beside_protected(run("protected", ("stagger", "prio"), iterations, state))
        for name in EQUAL:
            ran = run(name, ("cassini", "mltcp"), iterations, state).summaries()
            short = name.replace("-", "_")
            figures |= {f"{one.policy}_{short}": one.slowdown_mean for one in ran}
        return figures
    finally:
        state.clean()
