# SPDX-License-Identifier: Apache-2.0
"""`flowslot lab`: several hosts on one machine.

Exit status: 0 ok, 1 a run failed, stalled or was not real, 2 bad scenario or usage.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Literal, NoReturn, TextIO

import typer
from rich.console import Console

from flowslot.model.errors import ConfigError, FlowslotError
from flowslot_lab.figure import draw
from flowslot_lab.predict import NoPrediction, predict
from flowslot_lab.progress import Bar
from flowslot_lab.runner import PACED_BY, POLICIES, Options, RunFailed, measure, planned
from flowslot_lab.state import ROOT, RunState, clean_dead
from flowslot_lab.tools import LabError
from flowslot_scenario import drawing
from flowslot_scenario import scenario as scenarios
from flowslot_scenario.output import OutputOption, as_text, chosen, show
from flowslot_scenario.results import BASELINES, Prediction, Results
from flowslot_scenario.scenario import Scenario

app = typer.Typer(
    name="lab",
    help="Several hosts on one machine, with real TCP.",
    no_args_is_help=True,
    add_completion=False,
)
_FAILURE, _BAD_INPUT = 1, 2
MIXED = "stagger,static,cubic,reno,cubic+rto5,reno+rto5,dctcp"
_TERMINATED = 128 + signal.SIGTERM
_ENDING = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
_Iterations = Annotated[
    int | None,
    typer.Option(
        min=1, max=10**6, help="measured per job and repeat [default: 100 over all repeats]"
    ),
]
_Changes = Annotated[
    list[str] | None,
    typer.Option("--set", help="a variant: links.buffer_kb=16, jobs.bytes=6e6, jobs.a.sockets=4"),
]
_Slower = Annotated[
    float | None,
    typer.Option(
        min=1,
        max=50,
        help="so many times: rates divided, computation and TCP's timeouts multiplied "
        "(`slower` of the scenario)",
    ),
]
_Predicted = Annotated[
    bool,
    typer.Option("--predict/--no-predict", help="show beside it what `flowslot sim run` says"),
]


@app.command()
def run(
    scenario: Annotated[Path, typer.Argument(help="scenario file (TOML)", metavar="SCENARIO")],
    *,
    policy: Annotated[
        str,
        typer.Option(
            help=f"comma-separated, of: {', '.join(POLICIES)}; stagger@htb: paced by that back end"
        ),
    ] = "stagger,static,cubic,reno,bbr",
    repeat: Annotated[int, typer.Option(min=1, help="interleaved repeats (A B C A B C)")] = 1,
    iterations: _Iterations = None,
    switch: Annotated[
        bool, typer.Option(help="with a flowslot-switch process, or with none at all")
    ] = True,
    switches: Annotated[
        Literal["one", "per-rack"],
        typer.Option(help="one process for all links, or one for each rack of the scenario"),
    ] = "one",
    figure: Annotated[Path | None, typer.Option(help="write a figure to this file")] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**32 - 1, help="instead of the scenario's")
    ] = None,
    change: _Changes = None,
    slower: _Slower = None,
    predicted: _Predicted = True,
    budget: Annotated[
        bool, typer.Option("--budget", help="record where the jobs' time goes, and show that too")
    ] = False,
    keep_logs: Annotated[
        Path | None, typer.Option(help="keep logs and configuration files in this directory")
    ] = None,
    output: OutputOption = "table",
) -> None:
    """Run a scenario under each policy and compare."""
    if figure is not None:
        _check_figure(figure)
    if keep_logs is not None and not drawing.can_be_made(keep_logs):
        _die(f"--keep-logs {keep_logs}: must be a directory that can be written to", _BAD_INPUT)
    changes = [*(change or []), *([f"slower={slower}"] if slower is not None else [])]
    loaded = _load(scenario, changes, seed)
    per_rack = switches == "per-rack"
    if per_rack:
        _check_per_rack(loaded, switch)
    if budget:
        _check_budget(loaded)
    options = Options(_policies(policy), repeat, iterations, switch, per_rack, budget=budget)
    if "prio" in options.policies and not any(job.protected for job in loaded.jobs):
        _die(
            "--policy prio: no job of the scenario is `protected`: say whose packets go first, or "
            "leave it out",
            _BAD_INPUT,
        )
    _need_root()
    with _run_state(keep_logs) as state, Bar(loaded.name, planned(loaded, options)) as bar:
        predictions: dict[str, Prediction] = {}
        if predicted:
            # Before the measurements, which it would disturb; and while the file is as it was read.
            bar.begin("prediction", 0)
            predictions = _predict(scenario, changes, loaded, options, state)
        try:
            result = measure(loaded, options, state, bar)
        except (LabError, RunFailed) as error:
            bar.stop()
            _die(str(error), _FAILURE)
    result.predicted = predictions
    show(result, output)
    if figure is not None and result.runs:
        # After the results, which have taken minutes to measure.
        _draw(result, figure, sys.stdout if output == "table" else sys.stderr)
    if result.stalled:
        _die(f"stalled: {', '.join(result.stalled)}", _FAILURE)


@app.command()
def mixes(
    folder: Annotated[Path, typer.Argument(help="where scenarios and results are kept")],
    *,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="of the draws")],
    count: Annotated[int, typer.Option(min=1, max=10_000, help="draws 1 to this one")] = 24,
    policy: Annotated[str, typer.Option(help="comma-separated, as of `lab run`")] = MIXED,
    iterations: Annotated[
        int, typer.Option(min=1, max=10**6, help="measured per job and repeat")
    ] = 20,
    repeat: Annotated[int, typer.Option(min=1, help="interleaved repeats")] = 1,
    slower: _Slower = None,
    budget: Annotated[
        bool, typer.Option("--budget", help="measure the losing draws again, with `--budget`")
    ] = False,
    output: OutputOption = "table",
) -> None:
    """Run random scenarios, those that FOLDER has no results of yet, and compare with TCP."""
    from flowslot_lab import mixes as drawn  # noqa: PLC0415  (only this command needs it)

    options = Options(_policies(policy), repeat, iterations, alone=False)
    if drawn.OURS not in options.policies or not set(options.policies) & set(BASELINES):
        _die(f"--policy: must have {drawn.OURS} and a TCP", _BAD_INPUT)
    if not drawing.can_be_made(folder):
        _die(f"{folder}: must be a directory that can be written to", _BAD_INPUT)
    _need_root()
    wide = Console(width=None if sys.stdout.isatty() else 150)
    try:
        with _run_state(None) as state:
            draws = drawn.run(drawn.files(seed, count, slower or 1.0), folder, options, state)
            if budget:
                explained = wide if output == "table" else Console(file=sys.stderr, width=150)
                drawn.explain(draws, folder, options, state, explained)
    except ConfigError as error:
        _die(str(error), _BAD_INPUT)
    except (LabError, RunFailed) as error:
        _die(str(error), _FAILURE)
    if output == "table":
        drawn.show(draws, wide)
    else:
        print(as_text(drawn.as_data(draws), output))


@app.command()
def clean() -> None:
    """Remove what killed runs left behind; live runs are not touched."""
    _need_root()
    removed = clean_dead()
    for item in removed:
        print(f"removed {item}")
    if not removed:
        print("nothing to remove")


@app.command("list")
def list_scenarios(
    directory: Annotated[Path, typer.Argument(help="where the scenario files are")] = Path(
        "lab/scenarios"
    ),
) -> None:
    """List scenarios, and their jobs' physical limits."""
    paths = sorted(directory.glob("*.toml"))
    if not paths:
        _die(f"{directory}: no scenario files (*.toml) there", _BAD_INPUT)
    for path in paths:
        try:
            loaded = scenarios.load(path)
        except ConfigError as error:
            _die(str(error), _BAD_INPUT)
        print(f"{path}: {loaded.description}")
        for job in loaded.jobs:
            print(f"  {loaded.explain_ideal(job)}")


def _load(path: Path, changes: list[str], seed: int | None) -> Scenario:
    try:
        loaded = scenarios.load(path, changes)
    except ConfigError as error:
        _die(str(error), _BAD_INPUT)
    return loaded if seed is None else loaded.model_copy(update={"seed": seed})


def _predict(
    path: Path, changes: list[str], scenario: Scenario, options: Options, state: RunState
) -> dict[str, Prediction]:
    """Empty, and a line that says why, where there is none: the measurements matter more."""
    try:
        return predict(path, changes, scenario, options, state)
    except NoPrediction as error:
        print(f"flowslot lab: no predictions: {error}", file=sys.stderr)
        return {}


def _draw(result: Results, path: Path, out: TextIO) -> None:
    try:
        draw(result, path)
    except FlowslotError as error:
        _die(str(error), _FAILURE)
    print(f"figure: {path}", file=out)


def _check_per_rack(scenario: Scenario, switch: bool) -> None:
    if not switch:
        _die("--switches per-rack: has no meaning with --no-switch; leave one out", _BAD_INPUT)
    if not scenario.racks:
        problem = f"{scenario.name} has no racks: give every host a `rack`, or use --switches one"
        _die(f"--switches per-rack: {problem}", _BAD_INPUT)


def _check_budget(scenario: Scenario) -> None:
    if scenario.losses:
        _die("--budget: counts packets that `losses` drop as well; leave one out", _BAD_INPUT)
    for job in scenario.jobs:
        if job.kind in ("pslite", "nccl", "ddp"):
            _die(f'--budget: cannot look into jobs of kind "{job.kind}"; leave it out', _BAD_INPUT)


def _check_figure(path: Path) -> None:
    """Before anything is measured."""
    if problem := drawing.problem(path):
        _die(f"--figure {problem}", _BAD_INPUT)


def _policies(text: str) -> tuple[str, ...]:
    try:
        return chosen(text, (*POLICIES, *PACED_BY))
    except ConfigError as error:
        _die(str(error), _BAD_INPUT)


def _need_root() -> None:
    if os.geteuid() != 0:
        _die("needs root for its network namespaces: run it as root or with sudo", _FAILURE)


def _die(text: str, status: int) -> NoReturn:
    print(f"flowslot lab: {text}", file=sys.stderr)
    raise typer.Exit(status)


@contextmanager
def _run_state(keep_logs: Path | None) -> Iterator[RunState]:
    """A run's state, cleaned up whatever ends it: the end, an error, Ctrl-C, SIGTERM, SIGHUP."""

    def terminate(_number: int, _frame: FrameType | None) -> None:
        raise SystemExit(_TERMINATED)

    before = {number: signal.getsignal(number) for number in _ENDING}
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, terminate)
    for item in clean_dead():
        print(f"flowslot lab: removed {item}", file=sys.stderr)
    state = RunState.create(ROOT)
    try:
        yield state
    finally:
        # A second Ctrl-C must not stop the cleaning.
        for number in _ENDING:
            signal.signal(number, signal.SIG_IGN)
        if keep_logs is not None:
            _keep(state.path, keep_logs)
        state.clean()
        for number, handler in before.items():
            signal.signal(number, handler)


def _keep(logs: Path, at: Path) -> None:
    """Copy what the run's processes have written. A full disk must not stop the cleaning."""
    try:
        shutil.copytree(logs, at, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.sock"))
    except OSError as error:  # shutil.Error is one
        print(f"flowslot lab: --keep-logs {at}: {error}", file=sys.stderr)
