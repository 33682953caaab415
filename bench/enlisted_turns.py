# SPDX-License-Identifier: Apache-2.0
"""Do jobs that report nothing take turns as well as those that do? `python -m bench.enlisted_turns
[SCENARIO ..]`. Needs root.

The jobs of a lab scenario run once under CUBIC, once under stagger while they report, and once
while they do not and are enlisted instead, by process. Printed: the mean iteration over its ideal,
of each, from the 11th iteration on, and over the last ten.
"""

import sys
from pathlib import Path

import numpy as np

from flowslot_cli.client import ask
from flowslot_lab.jobset import JobSet
from flowslot_lab.processors import awake
from flowslot_lab.progress import Silent
from flowslot_lab.runner import LiveRun
from flowslot_lab.state import RunState, clean_dead
from flowslot_scenario.scenario import load

SCENARIOS = Path(__file__).parents[1] / "lab" / "scenarios"
ITERATIONS, FIRST = 50, 10
WAYS = ("nobody asked", "report", "enlisted")


def measure(name: str, way: str) -> tuple[float, float]:
    """Mean iteration of all jobs over their ideals: after the first ten, and of the last ten."""
    scenario = load(SCENARIOS / f"{name}.toml", ("warmup=1",))
    state = RunState.create()
    try:
        policy = "cubic" if way == "nobody asked" else "stagger"
        live = LiveRun(scenario, state, policy, ITERATIONS, use_switch=True)
        if way == "enlisted":
            live.jobs = JobSet(
                scenario, live.net, state, register=lambda _: "", iterations=1 + ITERATIONS
            )
        with awake(), live:
            if way == "enlisted":
                for worker in live.jobs.workers:
                    control = state.folder / worker.job.processes[worker.rank] / "control.sock"
                    ask(control, "enlist", pid=worker.process.pid, job=worker.job.name)
            jobs = live.run(1, Silent()).jobs
        ratios = np.array([job.times / job.ideal_s for job in jobs])
        return float(ratios[:, FIRST:].mean()), float(ratios[:, -10:].mean())
    finally:
        state.clean()


def main() -> int:
    """All scenarios, in all ways."""
    clean_dead()
    print("| scenario | jobs | iteration / ideal | last ten |")
    print("| --- | --- | --- | --- |")
    for name in sys.argv[1:] or ["two-equal"]:
        for way in WAYS:
            mean, last = measure(name, way)
            print(f"| {name} | {way} | {mean:.3f} | {last:.3f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
