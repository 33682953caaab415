# SPDX-License-Identifier: Apache-2.0
"""The result as a table for people."""

from __future__ import annotations

import math

from rich.console import Console
from rich.table import Table

from flowslot_scenario.results import Results, Summary, best_baseline

BUSY = 0.8
"""The network's processors are idle while jobs compute: busier than this, they were too slow."""
STOLEN = 0.01
"""A machine that stood still for more of the time decides how long the slowest iterations take."""


def print_result(result: Results, console: Console) -> None:
    """Summary by policy, each job's iteration times, and what Ideal means."""
    scenario = result.scenario
    summaries = result.summaries()
    console.print(_summary_table(result, summaries))
    console.print(_job_table(result))
    console.print("Slowdown = iteration time / Ideal. Ideal, the physical limit of a job alone:")
    for job in scenario.jobs:
        console.print(f"  {scenario.explain_ideal(job)}", highlight=False)
    _tell_of_livelocks(result, console)
    _warn_of_busy_processors(result, console)
    _warn_of_stolen_time(result, console)
    for job in scenario.jobs:
        if job.name in result.alone:
            ratio = result.alone[job.name] / scenario.ideal_s(job)
            console.print(
                f"  {job.name} alone, measured, best baseline: "
                f"{result.alone[job.name]:.4f} s ({ratio:.3f} x Ideal)",
                highlight=False,
            )


def _tell_of_livelocks(result: Results, console: Console) -> None:
    """A run that was given up has numbers of what it had done by then, which say little."""
    for run in result.runs:
        if run.livelock:
            done = sum(job.times.size for job in run.jobs)
            console.print(
                f"{run.policy}, repeat {run.repeat}: {run.livelock}. "
                f"Its numbers are of {done} iterations done by then.",
                highlight=False,
            )


def _number(value: float, digits: int = 3) -> str:
    return "none" if math.isnan(value) else f"{value:.{digits}f}"


def _warn_of_busy_processors(result: Results, console: Console) -> None:
    """Where processors are the bottleneck, the links are not."""
    slow = _above(BUSY, [(run.policy, run.evidence.network_busy) for run in result.runs])
    if slow:
        console.print(
            "The processors that emulate the network were busy most of the time "
            f"({slow}): this machine, not the links, may be what limits these.",
            highlight=False,
        )


def _warn_of_stolen_time(result: Results, console: Console) -> None:
    """Where the hypervisor took the machine away, the slowest iterations are of its making."""
    stolen = _above(STOLEN, [(run.policy, run.evidence.stolen) for run in result.runs])
    if stolen:
        console.print(
            "The hypervisor gave these processors to other machines for a part of the time "
            f"({stolen} in the worst run): their p99 says more about that than about the policy.",
            highlight=False,
        )


def _above(bound: float, shares: list[tuple[str, float]]) -> str:
    """Policies with the largest of their shares, if that is above the bound."""
    worst: dict[str, float] = {}
    for policy, share in shares:
        worst[policy] = max(worst.get(policy, 0.0), share)
    return ", ".join(f"{policy} {share:.0%}" for policy, share in worst.items() if share > bound)


def _summary_table(result: Results, summaries: list[Summary]) -> Table:
    scenario = result.scenario
    repeats = max(run.repeat for run in result.runs)
    count = max(summary.iterations for summary in summaries)
    table = Table(
        title=f"{scenario.name}: slowdown over {count} iterations in {repeats} repeats",
        title_justify="left",
    )
    table.add_column("policy")
    for title in ("mean", "p50", "p99", "worst job", "spread mean", "spread p99", "retransmits"):
        table.add_column(title, justify="right")
    for s in summaries:
        numbers = (s.slowdown_mean, s.slowdown_p50, s.slowdown_p99, s.worst_job)
        table.add_row(
            s.policy,
            *map(_number, (*numbers, s.spread_mean, s.spread_p99)),
            str(s.retransmits),
        )
    metrics = ("slowdown_mean", "slowdown_p50", "slowdown_p99", "worst_job")
    best = [best_baseline(summaries, metric) for metric in metrics]
    if all(best):
        table.add_section()
        cells = (f"{pair[1]:.3f} {pair[0]}" for pair in best if pair)
        table.add_row("best baseline", *cells, "", "", "")
    return table


def _job_table(result: Results) -> Table:
    table = Table(title="iteration times, s (repeats pooled)", title_justify="left")
    table.add_column("policy")
    table.add_column("job")
    for title in ("mean", "p50", "p99", "Ideal", "slowdown", "p99 slowdown"):
        table.add_column(title, justify="right")
    for row in result.by_job():
        table.add_row(row.policy, row.job, *(_number(value, 4) for value in row.numbers))
    return table
