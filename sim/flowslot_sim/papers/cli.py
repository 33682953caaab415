# SPDX-License-Identifier: Apache-2.0
"""`flowslot sim paper`: a paper's tables, and what comes out here beside them."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, cast

import typer

from flowslot_scenario.output import OutputOption, as_text
from flowslot_sim import traces
from flowslot_sim.papers import adadual, cassini, cassini_cluster, cassini_hosts
from flowslot_sim.papers.cells import Cell, as_data

app = typer.Typer(name="paper", help="What papers print, beside ours.", no_args_is_help=True)

ProcessesOption = Annotated[
    int | None, typer.Option(min=1, max=1024, help="at a time [default: one for each core]")
]
TraceOption = Annotated[
    Path | None,
    typer.Option(help=f"jobs arrive as in this file: {', '.join(traces.FORMATS)}", metavar="FILE"),
]


@app.callback()
def main() -> None:
    """What papers print, beside ours."""


@app.command(name="adadual")
def run_adadual(
    *,
    seeds: Annotated[int, typer.Option(min=1, max=10_000, help="so many, from 0 on")] = 5,
    deviations: Annotated[
        str,
        typer.Option(
            help="of the authors' simulator from the paper: none, all, or some of "
            + ", ".join(adadual.NAMES)
        ),
    ] = "none",
    processes: ProcessesOption = None,
    every: Annotated[
        bool,
        typer.Option(help="AdaDUAL asks at all servers of a job, not at the first with the most"),
    ] = False,
    ways: Annotated[
        int,
        typer.Option(
            min=1, max=64, help="transfers beside which another may begin: the k-way rule"
        ),
    ] = 1,
    output: OutputOption = "table",
) -> None:
    """AdaDUAL, Ada-SRSF and LWF-kappa: Tables IV and V, Fig. 5, and the introduction's example."""
    how = replace(adadual.setup(deviations), every=every, ways=ways)
    cases = list(adadual.CASES)
    tasks = [(case, seed, how) for seed in range(seeds) for case in cases]
    results: dict[str, list[adadual.Figures]] = {case: [] for case in cases}
    with ProcessPoolExecutor(processes or os.cpu_count() or 1) as pool:
        done = pool.map(adadual.measure, *zip(*tasks, strict=True))
        for (case, _, _), figures in zip(tasks, done, strict=True):
            results[case].append(figures)
    names = [name for name in adadual.NAMES if getattr(how, name)]
    rules = [f"at most {ways} beside", *(["every server"] if every else [])]
    about = {"deviations": names, "rules": rules, "external": ["eta"]}
    _show("adadual", adadual.cells(results, how), output, about)


@app.command(name="mlcc")
def run_mlcc(
    *,
    seeds: Annotated[int, typer.Option(min=1, max=10_000, help="so many, from 0 on")] = 5,
    servers: Annotated[
        int, typer.Option(min=10, max=10_000, help="of the simulation of Fig. 15, and as many jobs")
    ] = 1000,
    block: Annotated[
        int,
        typer.Option(
            min=0, help="a job's workers are in one block of so many servers; 0: anywhere"
        ),
    ] = 10,
    trace: TraceOption = None,
    keep: Annotated[
        Path | None,
        typer.Option(help="file of runs; those in it are not done again", metavar="FILE"),
    ] = None,
    processes: ProcessesOption = None,
    output: OutputOption = "table",
) -> None:
    """MLCC: Figs. 8, 9, 14, 15 and their prose. With 1000 servers one to two minutes a seed."""
    from flowslot_sim.journal import Journal, here  # noqa: PLC0415
    from flowslot_sim.papers import mlcc  # noqa: PLC0415

    how = mlcc.Case("fair", mlcc.LARGE, 0, servers, block, str(trace or "")).setup()
    bases = mlcc.baselines(seeds, servers, block, trace)
    total = sum(1 + len(mlcc.others(base, 0)) for base in bases) + seeds
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())
        journal = Journal(keep or Path(folder, "runs"), mlcc.Case, mlcc.Figures)
        stack.callback(journal.close)
        bar = stack.enter_context(typer.progressbar(length=total, label="runs", file=sys.stderr))

        def run(cases: list[mlcc.Case]) -> None:
            todo = [case for case in cases if case not in journal.done]
            bar.update(len(cases) - len(todo))
            for _ in journal.recorded(here(todo, processes or os.cpu_count() or 1)):
                bar.update(1)

        run(bases)
        later = {base: mlcc.others(base, journal.done[base]["slots"]) for base in bases}
        run([case for cases in later.values() for case in cases])
        decisions = []
        for seed in range(seeds):  # alone, so that nothing else is timed
            decisions.append(mlcc.decision_ms(seed, how))
            bar.update(1)
    parts: dict[str, list[dict[str, mlcc.Figures]]] = {}
    for base, cases in later.items():
        runs = {case.policy: cast(mlcc.Figures, journal.done[case]) for case in (base, *cases)}
        parts.setdefault(base.part, []).append(runs)
    cells = mlcc.cells_large(parts[mlcc.LARGE], decisions, servers)
    by_bed = {bed: parts[bed] for bed in mlcc.beds()}
    cells += mlcc.cells_testbed(by_bed, parts[mlcc.CLOUD])
    about = {"external": list(mlcc.EXTERNAL), "not run": list(mlcc.NOT_RUN)}
    _show("mlcc", cells, output, about)


@app.command(name="mltcp")
def run_mltcp(
    *,
    seeds: Annotated[int, typer.Option(min=1, max=10_000, help="so many, from 0 on")] = 5,
    processes: ProcessesOption = None,
    output: OutputOption = "table",
) -> None:
    """MLTCP: iterations until jobs take turns, gains over Reno, marks; Shift(D) of two jobs."""
    from flowslot_sim.papers import mltcp  # noqa: PLC0415

    pairs = [(name, policy) for name in mltcp.PAIRS for policy in ("mltcp", "fair")]
    tasks = [(*pair, seed) for pair in pairs for seed in range(seeds)]
    with ProcessPoolExecutor(processes or os.cpu_count() or 1) as pool:
        done = list(pool.map(mltcp.measure, *zip(*tasks, strict=True)))
    runs = {pair: done[k * seeds : (k + 1) * seeds] for k, pair in enumerate(pairs)}
    _show("mltcp", mltcp.cells(runs), output, {"external": list(mltcp.EXTERNAL)})


@app.command(name="cassini")
def run_cassini(
    *,
    seeds: Annotated[
        int, typer.Option(min=1, max=10_000, help="so many draws of profiles, from 0 on")
    ] = 20,
    clusters: Annotated[
        int, typer.Option(min=0, max=10_000, help="so many drawn clusters; 0: none")
    ] = 5,
    processes: ProcessesOption = None,
    output: OutputOption = "table",
) -> None:
    """CASSINI: Tables 3.1 and 4.3, Figs. 4.3, 4.5, and 4.11 and 4.13 on a wiring of ours."""
    with ProcessPoolExecutor(processes or os.cpu_count() or 1) as pool:
        tables = pool.submit(cassini.cells, seeds)
        ratios = list(pool.map(cassini_cluster.ratios, range(clusters)))
        gains = {
            host: list(pool.map(cassini_hosts.gain, [host] * clusters, range(clusters)))
            for host in (cassini_hosts.HOSTS if clusters else ())
        }
        found = [*tables.result(), *cassini_cluster.cells(ratios), *cassini_hosts.cells(gains)]
    _show("cassini", found, output, {"external": list(cassini.EXTERNAL)})


def _show(paper: str, cells: list[Cell], output: str, about: dict[str, list[str]]) -> None:
    if output != "table":
        print(as_text(as_data(paper, cells, **about), output))
        return
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    title = "; ".join(f"{key}: {', '.join(names) or 'none'}" for key, names in about.items())
    table = Table(
        "table", "cell", "published", "ours", "sd", "agrees", "why", title=f"{paper}, {title}"
    )
    for cell in cells:
        agrees = "" if cell.agrees is None else ("yes" if cell.agrees else "no")
        published = "" if cell.published is None else f"{cell.published:g}"
        ours = "" if cell.ours_mean is None else f"{cell.ours_mean:.4g}"
        sd = f"{cell.ours_sd:.3g}"
        table.add_row(cell.table, cell.cell, published, ours, sd, agrees, cell.why)
    Console(width=None if sys.stdout.isatty() else 140).print(table)
