# SPDX-License-Identifier: Apache-2.0
"""The figure of a run: bandwidth of each job over time, best baseline above ours on the same
axes, and the distribution of iteration times (the main paper's Figs. 1 and 11)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flowslot_scenario import drawing
from flowslot_scenario.results import BASELINES, Floats, JobRun, Results, Run, best_baseline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BIN_S = 0.015
_ITERATIONS = 8
_POLICY_STYLES: dict[str, dict[str, Any]] = {
    "cubic": {"color": "#d55e00"},
    "reno": {"color": "#e69f00"},
    "bbr": {"color": "#cc79a7"},
    "cubic+rto5": {"color": "#d55e00", "linestyle": ":"},
    "reno+rto5": {"color": "#e69f00", "linestyle": ":"},
    "dctcp": {"color": "#009e73"},
    "cubic+fq": {"color": "#d55e00", "linestyle": "-."},
    "prio": {"color": "#000000", "linestyle": "-."},
    "mltcp": {"color": "#e69f00", "linestyle": "--"},
    "mltcp-cubic": {"color": "#d55e00", "linestyle": "--"},
    "static": {"color": "#7f7f7f"},
    "fair": {"color": "#56b4e9"},
    "stagger": {"color": "#0072b2", "linewidth": 2.2},
}


def draw(result: Results, path: Path) -> None:
    """Write the figure (format by the file's ending). Needs matplotlib (extra `lab`)."""
    ours, baseline = _chosen(result)
    shown = [policy for policy in (baseline, ours) if policy is not None]
    link = _busiest_link(result)
    window = min(
        _ITERATIONS * max(_mean_s(result, policy) for policy in shown),
        *(_recorded_s(_first_run(result, policy)) for policy in shown),
    )
    with drawing.figure(path, [2.4] * len(shown) + [3.4]) as rows:
        axes = [row[0] for row in rows]
        for panel, policy in zip(axes, shown, strict=False):
            _bandwidth(panel, result, policy, link, window)
        for panel in axes[1 : len(shown)]:
            panel.sharex(axes[0])
            panel.sharey(axes[0])
        axes[len(shown) - 1].set_xlabel("time (s)")
        _distribution(axes[-1], result)
        title = f"{result.scenario.title}: {result.scenario.description}"
        axes[0].figure.suptitle(title, x=0.01, ha="left", parse_math=False)


def _chosen(result: Results) -> tuple[str | None, str | None]:
    """Ours (the last paced policy that ran), and the baseline with the best mean."""
    policies = result.policies()
    best = best_baseline(result.summaries(), "slowdown_mean")
    ours = next((p for p in ("stagger", "static", "fair") if p in policies), None)
    return ours, best[0] if best else None


def _busiest_link(result: Results) -> str:
    """The link towards a host on which all jobs together need most time per second."""
    scenario = result.scenario
    load: dict[str, float] = {}
    for job in scenario.jobs:
        for link, n in scenario.link_bytes(job).items():
            need = n / scenario.capacity_bps(link) / scenario.ideal_s(job)
            load[link] = load.get(link, 0.0) + need
    return max((host.down for host in scenario.hosts), key=lambda link: load.get(link, 0.0))


def _mean_s(result: Results, policy: str) -> float:
    return max(float(result.times(policy, job.name).mean()) for job in result.scenario.jobs)


def _bandwidth(panel: Axes, result: Results, policy: str, link: str, window: float) -> None:
    run = _first_run(result, policy)
    start = _settled_s(run)
    scale = 8 * 1514 / 1448 / 1e6
    for colour, job in zip(drawing.COLOURS, run.jobs, strict=False):
        rate = received_rate(job, link, start, window)
        if rate is not None:
            at = np.arange(rate.size + 1) * _BIN_S
            panel.stairs(rate * scale, at, color=colour, linewidth=1.4, label=f"job {job.job.name}")
            panel.stairs(rate * scale, at, color=colour, alpha=0.18, fill=True)
    capacity = result.scenario.capacity_bps(link) / 1e6
    panel.axhline(capacity, color="#888888", linewidth=0.8, linestyle=":")
    panel.set_xlim(0, window)
    panel.set_ylim(0, capacity * 1.18)
    panel.set_ylabel("Mbit/s")
    panel.set_title(f"{policy}: received over {link}", loc="left", fontsize=10)
    panel.legend(
        loc="lower right", bbox_to_anchor=(1, 1), ncols=6, fontsize=8, frameon=False, borderpad=0
    )
    drawing.plain(panel)


def _first_run(result: Results, policy: str) -> Run:
    return next(run for run in result.runs if run.policy == policy)


def _end_s(run: Run) -> float:
    """When the first job has done its iterations: its trace ends there, and the others' do not."""
    return min(job.traces[0][-1][0] for job in run.jobs)


def _settled_s(run: Run) -> float:
    """A moment in the middle of the run, when the jobs have found their rhythm."""
    return 0.4 * _end_s(run)


def _recorded_s(run: Run) -> float:
    """How long from then on the traces of all jobs last."""
    return _end_s(run) - _settled_s(run)


def received_rate(job: JobRun, link: str, start_s: float, window_s: float) -> Floats | None:
    """Payload bytes/s received over the link to a host in bins of 15 ms; None: not by this job."""
    end = link.partition("->")[2]
    ranks = [rank for rank, host in enumerate(job.job.processes) if host == end]
    if not ranks:
        return None
    edges = start_s + np.arange(0.0, window_s + _BIN_S / 2, _BIN_S)
    total = np.zeros(edges.size - 1)
    for rank in ranks:
        at, received = np.array(job.traces[rank]).T
        total += np.diff(np.interp(edges, at, received))
    return total / _BIN_S


def _distribution(panel: Axes, result: Results) -> None:
    for policy in result.policies():
        dashes = "--" if policy in BASELINES else "-"
        style = {"linestyle": dashes, **_POLICY_STYLES.get(policy, {})}
        drawing.distribution(panel, result.slowdowns(policy), policy, **style)
    panel.set_xlim(left=min(0.93, panel.get_xlim()[0]))
    panel.axvline(1.0, color="#888888", linewidth=0.8, linestyle=":", label="Ideal")
    panel.set_xlabel("iteration time / Ideal")
    panel.set_ylabel("share of iterations")
    panel.legend(loc="lower right", fontsize=8)
    count = max(summary.iterations for summary in result.summaries())
    title = f"iteration times of all jobs and repeats, {count} per policy"
    panel.set_title(title, loc="left", fontsize=10)
    drawing.plain(panel)
