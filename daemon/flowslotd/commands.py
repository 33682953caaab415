# SPDX-License-Identifier: Apache-2.0
"""Commands that the daemon's package adds to the `flowslot` CLI: `doctor` and `check-config`."""

import json
import shutil
import subprocess
import sys
import tomllib
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from flowslot.errors import ConfigError
from flowslot.settings import Settings
from flowslot.topology import parse_topology

from flowslotd.config import load, read

FAILURE, BAD_INPUT = 1, 2


class Output(StrEnum):
    """How to print."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


OutputOption = Annotated[Output, typer.Option("-o", "--output", help="table, json or yaml")]


def check_config(
    file: Annotated[Path, typer.Argument(help="a daemon, switch or topology file")],
    effective: Annotated[
        bool, typer.Option("--print-effective", help="print it with all defaults filled in")
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Check a configuration file, and what it refers to."""
    try:
        kind, settings = _check(file)
    except ConfigError as error:
        typer.echo(f"flowslot: {error}", err=True)
        raise typer.Exit(BAD_INPUT) from None
    values = settings.model_dump(mode="json") if settings else {}
    if output is Output.TABLE:
        typer.echo(f"{file}: {kind} configuration, no problem found")
        if effective and settings:
            typer.echo(yaml.safe_dump(values, sort_keys=False), nl=False)
        return
    result = {"file": str(file), "kind": kind} | ({"effective": values} if effective else {})
    _print(result, output)


def _check(file: Path) -> tuple[str, Settings | None]:
    """The kind of a file and its settings. Raises ConfigError."""
    text = read(file)
    try:
        keys = tomllib.loads(text).keys()
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(str(file), "", f"not valid TOML: {error}") from None
    if keys & {"hosts", "links", "switches"}:
        return "topology", parse_topology(text, str(file)).settings
    if "name" in keys and "host" not in keys:
        _check_switch(file)
        return "switch", None
    if "jobs" in keys:
        raise ConfigError(str(file), "jobs", "looks like a scenario; `flowslot lab` runs those")
    return "daemon", load(file).settings


def _check_switch(file: Path) -> None:
    """The switch knows its own configuration; packages of one level do not import each other."""
    beside = Path(sys.executable).with_name("flowslot-switch")
    program = str(beside) if beside.exists() else shutil.which("flowslot-switch")
    if program is None:
        raise ConfigError(str(file), "", "is for a switch, but flowslot-switch is not installed")
    run = subprocess.run(
        [program, "--config", str(file), "--check"], capture_output=True, text=True, check=False
    )
    if run.returncode:
        text = run.stderr.strip().removeprefix("flowslot-switch: ")
        typer.echo(f"flowslot: {text}", err=True)
        raise typer.Exit(BAD_INPUT)


def doctor(output: OutputOption = Output.TABLE) -> None:
    """What this kernel supports, and what to do about what it lacks."""
    raise NotImplementedError


def _print(data: dict[str, Any], output: Output) -> None:
    if output is Output.JSON:
        typer.echo(json.dumps(data, indent=2))
    else:
        typer.echo(yaml.safe_dump(data, sort_keys=False), nl=False)
