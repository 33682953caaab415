# SPDX-License-Identifier: Apache-2.0
"""`flowslot sim sweep`: many runs of `cluster/contest.py`, on all processors or a Ray cluster.

A file keeps the runs (journal.py): a sweep that is begun again does what is not there yet.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

from flowslot.model.errors import ConfigError, FlowslotError
from flowslot.model.settings import one_of
from flowslot_sim.cluster.contest import Contest, Figures
from flowslot_sim.journal import Journal, Line, here, on_ray
from flowslot_sim.recording.figures import draw_sweep
from flowslot_sim.recording.options import FigureOption, TimelineOption, keep

MOST = 1_000_000
"""Runs of a sweep."""
KINDS: dict[str, type[Any]] = get_type_hints(Contest)


def points(given: dict[str, list[Any]]) -> list[Contest]:
    """A run for each combination. FlowslotError: a name is unknown; a value is of the wrong type,
    or out of range; there are too many."""
    many = 1
    for name, values in given.items():
        if name not in KINDS:
            raise FlowslotError(f'"{name}" is unknown: {one_of(name, KINDS)}')
        if not values:
            raise FlowslotError(f"{name}: needs at least one value")
        for k, value in enumerate(values):
            if KINDS[name] is float and type(value) is int:
                values[k] = float(value) if abs(value) < 2**63 else math.inf
            elif type(value) is not KINDS[name]:
                raise FlowslotError(f"{name}: must be of type {KINDS[name].__name__}, not {value}")
        many *= len(values)
    if many > MOST:
        raise FlowslotError(f"{many} runs: at most {MOST}")
    made = [Contest(**dict(zip(given, x, strict=True))) for x in itertools.product(*given.values())]
    return list(dict.fromkeys(made))


def parsed(setting: str) -> tuple[str, list[Any]]:
    """`name=value,value`. FlowslotError: it is not that."""
    name, sign, text = setting.partition("=")
    if not sign:
        raise FlowslotError(f'--set: must be NAME=VALUE[,VALUE ...], not "{setting}"')
    kind = KINDS.get(name, str)
    try:
        return name, [kind(value.strip()) for value in text.split(",")]
    except ValueError:
        raise FlowslotError(f"{name}: must be of type {kind.__name__}, not {text}") from None


def given_by(file: Path | None, settings: Sequence[str]) -> dict[str, list[Any]]:
    """From a TOML file, where `name = value` or a list; `--set` goes before it. ConfigError."""
    given: dict[str, list[Any]] = {}
    try:
        if file is not None:
            for name, value in tomllib.loads(file.read_text()).items():
                given[name] = value if isinstance(value, list) else [value]
        twice = Counter(name for name, _ in map(parsed, settings)).most_common(1)
        if twice and twice[0][1] > 1:
            raise FlowslotError(f"{twice[0][0]}: is set twice: name all of its values in one")
        given |= dict(map(parsed, settings))
        points(given)
    except (OSError, ValueError, RecursionError, FlowslotError) as error:
        where = str(file) if file is not None else "--set"
        raise ConfigError(where, "", str(error)) from None
    return given


def sweep(
    out: Annotated[Path, typer.Argument(help="file of runs; those in it are not done again")],
    *,
    file: Annotated[
        Path | None, typer.Option("--file", help="TOML: NAME = VALUE, or a list of them")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help=f"NAME=VALUE[,VALUE ...], of: {', '.join(KINDS)}"),
    ] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, max=1024, help="at a time [default: the processors]")
    ] = None,
    ray: Annotated[
        str | None, typer.Option(help="address of a Ray cluster; local: one of this machine")
    ] = None,
    figure: FigureOption = None,
    timeline: TimelineOption = None,
    output: Annotated[Literal["table", "csv", "json"], typer.Option("-o", "--output")] = "table",
) -> None:
    """Simulate jobs on a cluster with every combination of parameters, and go on where an earlier
    sweep with the same file was interrupted. `--timeline` is for one run, which is done again."""
    wanted = points(given_by(file, settings or []))
    if timeline is not None and len(wanted) > 1:
        raise ConfigError("--timeline", "", f"is of one run, not of {len(wanted)}: name one value")
    journal = Journal(out, Contest, Figures)
    todo = [point for point in wanted if point not in journal.done]
    count = processes or os.cpu_count() or 1
    runs = (on_ray(todo, ray) if ray else here(todo, count)) if todo else iter(())
    with typer.progressbar(length=len(wanted), label="runs", file=sys.stderr) as bar:
        bar.update(len(wanted) - len(todo))
        for _ in journal.recorded(runs):
            bar.update(1)
    journal.close()
    if timeline is not None:
        keep({f"{wanted[0].policy}, {wanted[0].placement}": wanted[0].recorded()}, timeline)
    if figure is not None:
        ideal = [point.ideal_s() for point in wanted]
        draw_sweep([journal.done[point] for point in wanted], KINDS, ideal, figure)
    print(_as_text([journal.done[point] for point in wanted], output), end="")


def _as_text(lines: list[Line], output: str) -> str:
    if output == "json":
        return json.dumps(lines, indent=2) + "\n"
    import csv  # noqa: PLC0415
    import io  # noqa: PLC0415

    lines = [{k: v for k, v in x.items() if k != "jct_s"} for x in lines]

    if output == "csv":
        text = io.StringIO()
        writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
        return text.getvalue()
    rows = [[f"{x:.4g}" if isinstance(x, float) else str(x) for x in y.values()] for y in lines]
    table = [list(lines[0]), *rows]
    widths = [max(len(row[k]) for row in table) for k in range(len(table[0]))]
    return "".join(
        "  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)).rstrip() + "\n"
        for row in table
    )
