# SPDX-License-Identifier: Apache-2.0
"""The result as a table for people."""

from __future__ import annotations

import math

from rich.console import Console
from rich.table import Table

from flowslot_scenario.budget import print_budgets
from flowslot_scenario.results import STOCK, TUNED, Prediction, Results, Summary, best_baseline

BUSY = 0.8
"""Processors are idle while jobs compute: those that are busier than this were too slow."""
STOLEN = 0.01
"""A machine that stood still for more of the time decides how long the slowest iterations take."""


def print_result(result: Results, console: Console) -> None:
    """Summary by policy, each job's iteration times, and what Ideal means."""
    for policy, what in result.stalled.items():
        console.print(f"{policy} stalled: {what}", highlight=False, markup=False)
    if not result.runs:
        return
    scenario = result.scenario
    summaries = result.summaries()
    console.print(_summary_table(result, summaries))
    console.print(_job_table(result))
    _explain_predictions(result, console)
    console.print("Slowdown = iteration time / Ideal. Ideal, the physical limit of a job alone:")
    for job in scenario.jobs:
        console.print(f"  {scenario.explain_ideal(job)}", highlight=False)
    if budgets := result.budgets():
        print_budgets(scenario.title, budgets, console)
    _tell_of_training(result, console)
    _tell_of_losses(result, console)
    _tell_of_delays(result, console)
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


def _explain_predictions(result: Results, console: Console) -> None:
    """What was predicted, and how far off it was where the simulator models the policy."""
    if not result.predicted:
        return
    ideal = ", ".join(name for name, it in result.predicted.items() if it.of_ideal_tcp)
    note = f" * {ideal}: max-min sharing; no loss, no timeouts." if ideal else ""
    console.print(f"predicted: simulated on ideal links.{note}", highlight=False)
    spans = [
        f"{policy} {_span(list(ratios.values()))}"
        for policy, ratios in result.predicted_over_measured().items()
    ]
    if spans:
        line = f"predicted / measured mean iteration of a job: {', '.join(spans)}"
        console.print(line, highlight=False)


def _span(values: list[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def _predicted(prediction: Prediction | None, value: float | None, digits: int) -> str:
    """A cell. The star is for those that must not take it for a model of, say, cubic."""
    if prediction is None or value is None:
        return ""
    return f"{value:.{digits}f}{'*' if prediction.of_ideal_tcp else ''}"


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


def _tell_of_training(result: Results, console: Console) -> None:
    """Whether jobs that train have learnt the same in all runs."""
    for trained in result.runs[0].jobs:
        if any(trained.losses):
            apart = result.curves_apart(trained.job.name)
            differ = ", ".join(f"{run} from iteration {at}" for run, at in apart.items())
            console.print(
                f"Losses of {trained.job.name}, {len(trained.losses[0])} iterations, in all runs: "
                f"{f'differ: {differ}' if apart else 'the same, bit by bit'}",
                highlight=False,
            )


def _tell_of_losses(result: Results, console: Console) -> None:
    """How many packets the lossy paths have lost."""
    for loss in result.scenario.losses:
        lost = ", ".join(
            f"{policy} {_share_lost(result, policy, loss.name):.2%}" for policy in result.policies()
        )
        console.print(f"Lost of the packets on {loss.name}, by intent: {lost}", highlight=False)


def _tell_of_delays(result: Results, console: Console) -> None:
    """How long the long paths were, and whether their relays kept up."""
    for delay in result.scenario.delays:
        runs = [run.evidence.delays[delay.name] for run in result.runs if run.evidence.delays]
        if not runs:
            continue
        frames = sum(one.frames for one in runs)
        late = sum(one.late_us * one.frames for one in runs) / max(frames, 1)
        tardy = sum(one.tardy for one in runs) / max(frames, 1)
        console.print(
            f"Round trip of {delay.name}, measured at the start: "
            f"{_span([one.round_trip_us / 1000 for one in runs])} ms. Its relay was late by "
            f"{late:.0f} us, {max(one.most_late_us for one in runs) / 1000:.1f} ms at most; "
            f"{tardy:.2%} of {frames} super-packets by more than 1 ms.",
            highlight=False,
        )
        if dropped := sum(one.dropped for one in runs):
            text = f"warning: that relay dropped {dropped} frames, which is no intended loss"
            console.print(text, style="red", highlight=False)


def _share_lost(result: Results, policy: str, path: str) -> float:
    runs = [run.evidence.losses.get(path, (0, 0)) for run in result.runs if run.policy == policy]
    return sum(lost for _, lost in runs) / max(sum(came for came, _ in runs), 1)


def _number(value: float, digits: int = 3) -> str:
    return "none" if math.isnan(value) else f"{value:.{digits}f}"


def _warn_of_busy_processors(result: Results, console: Console) -> None:
    """Where processors are the bottleneck, the links are not."""
    network = _above(BUSY, [(run.policy, run.evidence.network_busy) for run in result.runs])
    programs = _above(BUSY, [(run.policy, run.evidence.programs_busy) for run in result.runs])
    slow = [
        f"{which}: {those}"
        for which, those in (("network", network), ("others", programs))
        if those
    ]
    if slow:
        console.print(
            "Processors, those that emulate the network or the others, were busy most of the time "
            f"({'; '.join(slow)}): this machine, not the links, may be what limits these.",
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
        title=f"{scenario.title}: slowdown over {count} iterations in {repeats} repeats",
        title_justify="left",
    )
    table.add_column("policy")
    # Two lines, so that all of it fits into 120 columns.
    titles = ["mean", "p50", "p99", "worst job", "spread\nmean", "spread\np99", "retransmits"]
    if result.predicted:
        titles.insert(1, "predicted")
    for title in titles:
        table.add_column(title, justify="right")
    for s in summaries:
        numbers = (s.slowdown_mean, s.slowdown_p50, s.slowdown_p99, s.worst_job)
        cells = list(map(_number, (*numbers, s.spread_mean, s.spread_p99)))
        cells.append(str(s.retransmits))
        if result.predicted:
            prediction = result.predicted.get(s.policy)
            slowdown = prediction.slowdown_mean if prediction else None
            cells.insert(1, _predicted(prediction, slowdown, 3))
        table.add_row(s.policy, *cells)
    metrics = ("slowdown_mean", "slowdown_p50", "slowdown_p99", "worst_job")
    table.add_section()
    for title, among in (("best stock TCP", STOCK), ("best tuned TCP", TUNED)):
        best = [best_baseline(summaries, metric, among) for metric in metrics]
        cells = [f"{pair[1]:.3f} {pair[0]}" for pair in best if pair]
        if cells:
            cells[1:1] = [""] * bool(result.predicted)
            table.add_row(title, *cells)
    return table


def _job_table(result: Results) -> Table:
    title = f"{result.scenario.title}: iteration times, s (repeats pooled)"
    table = Table(title=title, title_justify="left")
    table.add_column("policy")
    table.add_column("job")
    # Two lines, as above.
    titles = ["mean", "p50", "p99", "Ideal", "slowdown", "p99\nslowdown", "worst 10\nin a row"]
    if result.predicted:
        titles.insert(1, "predicted")
    for title in titles:
        table.add_column(title, justify="right")
    for row in result.by_job():
        cells = [_number(value, 4) for value in row.numbers]
        if result.predicted:
            cells.insert(1, _predicted(result.predicted.get(row.policy), row.predicted_s, 4))
        table.add_row(row.policy, row.job, *cells)
    return table
