# SPDX-License-Identifier: Apache-2.0
"""`flowslot sim trace`: the jobs of a public trace on a cluster, under each policy."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from flowslot.model.units import goodput
from flowslot_scenario.output import OutputOption, as_text, chosen
from flowslot_sim.cluster.placement import first_fit
from flowslot_sim.cluster.policies import POLICIES, UNSTAGED
from flowslot_sim.cluster.run import Cluster
from flowslot_sim.cluster.slotted import Slotted
from flowslot_sim.cluster.tiers import Tiers
from flowslot_sim.papers import mlcc
from flowslot_sim.recording.clusters import Watch
from flowslot_sim.recording.figures import draw
from flowslot_sim.recording.options import FigureOption, TimelineOption, keep
from flowslot_sim.recording.record import Recording
from flowslot_sim.traces import FORMATS, read, to_jobs

MODELS = {
    name: (size, mlcc.COMPUTE_MS[name]) for name, size in {**mlcc.RING, **mlcc.SERVERS}.items()
}
FOR_EVER_S = 1e9


def run_trace(
    trace: Annotated[Path, typer.Argument(help=f"a file of {', '.join(FORMATS)}", metavar="FILE")],
    *,
    policy: Annotated[
        str, typer.Option(help=f"comma-separated, of: {', '.join(UNSTAGED)}")
    ] = "fair,srpt",
    servers: Annotated[int, typer.Option(min=1, max=100_000, help="in racks of 10")] = 100,
    gpus: Annotated[int, typer.Option(min=1, max=64, help="of each server")] = 8,
    jobs: Annotated[int, typer.Option(min=1, help="so many of the trace's first")] = 1000,
    faster: Annotated[
        float, typer.Option(min=1e-3, max=1e9, help="jobs arrive, and are shorter, by this factor")
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="of models")] = 0,
    figure: FigureOption = None,
    timeline: TimelineOption = None,
    output: OutputOption = "table",
) -> None:
    """Simulate the jobs of a public trace: JCT under each policy.

    The trace says when a job comes, its GPUs and how long it ran; its model is drawn.
    Jobs get the first GPUs that are free."""
    network = Tiers(servers)
    traced = [
        replace(job, arrival_s=job.arrival_s / faster, duration_s=job.duration_s / faster)
        for job in read(trace)[:jobs]
    ]
    rate = goodput(network.gbps[0] * 1e9)
    specs = to_jobs(traced, MODELS, rate, gpus=servers * gpus, per_server=gpus, seed=seed)
    cut = sum(job.gpus > servers * gpus for job in traced)
    runs = []
    recordings: dict[str, Recording] = {}
    jct: dict[str, list[float]] = {}
    for name in chosen(policy, UNSTAGED):
        tiers = replace(network, top_up=POLICIES[name].top_up)
        sharing = POLICIES[name].sharing()
        run = Slotted(specs, Cluster(servers, gpus, 1.0), tiers, first_fit, sharing)
        watch = Watch(run, tiers.names, network.capacity[:-1]) if figure or timeline else None
        found = run.go_on(FOR_EVER_S)
        if watch is not None:
            recordings[name], jct[name] = watch.end(), found.jct_s.tolist()
        runs.append(
            {
                "policy": name,
                "jct_mean_s": float(found.jct_s.mean()),
                "jct_p50_s": float(np.median(found.jct_s)),
                "jct_p99_s": float(np.percentile(found.jct_s, 99)),
                "utilisation": found.utilisation,
                "stalled": found.stalled,
            }
        )
    keep(recordings, timeline)
    if figure is not None:
        draw(jct, recordings, "JCT (s)", figure)
    found_all = {"trace": str(trace), "jobs": len(specs), "cut": cut, "servers": servers}
    _show({**found_all, "runs": runs}, output)


def _show(data: dict[str, object], output: str) -> None:
    if output != "table":
        print(as_text(data, output))
        return
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    runs = data["runs"]
    assert isinstance(runs, list)
    title = f"{data['trace']}, {data['jobs']} jobs, {data['servers']} servers"
    if data["cut"]:
        title += f"; {data['cut']} jobs wanted more GPUs than there are, and have all"
    table = Table(*runs[0], title=title)
    for run in runs:
        table.add_row(*(f"{x:.4g}" if isinstance(x, float) else x for x in run.values()))
    Console(width=None if sys.stdout.isatty() else 140).print(table)
