# SPDX-License-Identifier: Apache-2.0
"""Commands that the daemon's package adds to the `flowslot` CLI: `doctor`, `preflight` and
`check-config`. What a FlowslotError says, the CLI prints."""

import dataclasses
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

import typer

from flowslot.model.errors import ConfigError, FlowslotError
from flowslot.model.settings import read_toml
from flowslot.model.topology import parse_topology
from flowslot_proto.files import read_text
from flowslot_scenario.output import OutputOption, as_text
from flowslotd.config import load
from flowslotd.pace.pacer import PacingError

FAILURE = 1
CONFIGURATIONS = "flowslot.configurations"
"""Entry points: how to load the configuration of a process that is not the daemon."""


def check_config(
    file: Annotated[Path, typer.Argument(help="a daemon, switch or topology file")],
    print_effective: Annotated[
        bool, typer.Option("--print-effective", help="print it with all defaults filled in")
    ] = False,
    output: OutputOption = "table",
) -> None:
    """Check a configuration file, and what it refers to."""
    kind, effective, remarks = _check(file)
    text = f"{file}: {kind} configuration, no problem found"
    text += "".join(f"\nremark: {remark}" for remark in remarks)
    result: dict[str, Any] = {"file": str(file), "kind": kind, "remarks": remarks}
    if print_effective:
        text += f"\n{as_text(effective, 'yaml')}"
        result["effective"] = effective
    _print(output, text, result)


def _check(file: Path) -> tuple[str, dict[str, Any], list[str]]:
    """A file's kind, its effective settings, and remarks on its topology. Raises ConfigError."""
    text = read_text(file)
    keys = read_toml(text, str(file)).keys()
    if "jobs" in keys:  # first: scenarios have hosts and links too
        raise ConfigError(str(file), "jobs", "looks like a scenario; `flowslot lab` runs those")
    if keys & {"hosts", "links", "switches"}:
        topology = parse_topology(text, str(file))
        return "topology", topology.settings.model_dump(mode="json"), topology.remarks
    if "name" in keys and "host" not in keys:
        for switch in entry_points(group=CONFIGURATIONS, name="switch"):
            checked = switch.load()(file)
            return "switch", checked.settings.model_dump(mode="json"), checked.topology.remarks
        raise ConfigError(str(file), "", "cannot be checked: flowslot-switch is not installed")
    loaded = load(file)
    return "daemon", loaded.settings.model_dump(mode="json"), loaded.topology.remarks


def doctor(
    config: Annotated[
        Path | None, typer.Option(help="a daemon's configuration: what it would pace with here")
    ] = None,
    output: OutputOption = "table",
) -> None:
    """What this kernel supports, what to do about what it lacks, and which back end is chosen."""
    from flowslotd.diagnose import diagnosis  # noqa: PLC0415  (loads the back ends)
    from flowslotd.diagnose.preflight import doubts  # noqa: PLC0415
    from flowslotd.diagnose.probe import Finding  # noqa: PLC0415

    loaded = load(config) if config is not None else None
    found = diagnosis.diagnose(loaded.settings.pacing.backend if loaded else "auto")
    if loaded:
        found.findings.append(diagnosis.tls(loaded.settings.tls, loaded.tls))
        found.findings.extend(Finding("machine", "warn", text) for text in doubts(loaded))
    _print(output, diagnosis.table(found), diagnosis.as_data(found))
    if found.backend == "none":
        raise typer.Exit(FAILURE)


def preflight(
    config: Annotated[Path, typer.Argument(help="the daemon's configuration")] = Path(
        "/etc/flowslot/flowslotd.toml"
    ),
    output: OutputOption = "table",
) -> None:
    """Every change that enforcement would make to this host, and what would stay as it is."""
    from flowslotd.diagnose import diagnosis  # noqa: PLC0415  (loads the back ends)
    from flowslotd.diagnose import preflight as flight  # noqa: PLC0415

    loaded = load(config)
    found = diagnosis.diagnose(loaded.settings.pacing.backend)
    try:
        changes = flight.changes(loaded, found.backend)
        wrong = flight.doubts(loaded)
    except (PacingError, OSError) as error:
        raise FlowslotError(f"{config}: section [pacing]: {error}") from None
    rows = [dataclasses.asdict(change) for change in changes]
    data = {"backend": found.backend, "why": found.why, "doubts": wrong, "changes": rows}
    _print(output, flight.table(loaded, found, changes, wrong), data)
    if found.backend == "none" != found.wanted:
        raise typer.Exit(FAILURE)


def _print(output: str, text: str, data: dict[str, Any]) -> None:
    """`text` is for people."""
    typer.echo(text if output == "table" else as_text(data, output))
