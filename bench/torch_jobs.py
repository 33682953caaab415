# SPDX-License-Identifier: Apache-2.0
"""Two jobs that train side by side, under stagger and under TCP as a user would tune it: `python -m
bench.torch_jobs [--repeat N] [--iterations N]`. Needs root and torch.

Scenario `ddp-two-jobs`: shallow buffers. Exit status 1 when stagger's mean, or its worst job, is
above 1.02 of the best tuned TCP's, or when a job has learnt something else in any run.
"""

import argparse
import sys

from rich.console import Console

from flowslot_lab.progress import Silent
from flowslot_lab.runner import Options, measure
from flowslot_lab.state import RunState, clean_dead
from flowslot_scenario.results import TUNED, Results, best_baseline
from flowslot_scenario.scenario import load
from flowslot_scenario.table import print_result

from .policy_switches import SCENARIOS

SCENARIO = SCENARIOS / "ddp-two-jobs.toml"
RIVALS = tuple(name for name in TUNED if name != "prio")
MOST = 1.02


def broken(result: Results) -> list[str]:
    """Bounds that do not hold."""
    summaries, found = result.summaries(), []
    [ours] = [summary for summary in summaries if summary.policy == "stagger"]
    for metric in ("slowdown_mean", "worst_job"):
        best = best_baseline(summaries, metric, TUNED)
        assert best is not None
        ratio = getattr(ours, metric) / best[1]
        print(f"{metric}: stagger / {best[0]} {ratio:.3f}, bound {MOST}")
        if not ratio <= MOST:
            found.append(metric)
    apart = {job.name: result.curves_apart(job.name) for job in result.scenario.jobs}
    ran = [(run.policy, one) for run in result.runs for one in run.jobs]
    found += [
        f"{one.job.name} has no losses under {policy}" for policy, one in ran if not all(one.losses)
    ]
    return found + [f"losses of {job}" for job, runs in apart.items() if runs]


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--iterations", type=int, default=40, help="of each job, run and repeat")
    options = parser.parse_args()
    clean_dead()
    state = RunState.create()
    try:
        asked = Options(("stagger", *RIVALS), options.repeat, options.iterations, alone=False)
        result = measure(load(SCENARIO), asked, state, Silent())
    finally:
        state.clean()
    print_result(result, Console(width=120))
    bad = broken(result)
    print(f"broken: {', '.join(bad) or 'none'}")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
