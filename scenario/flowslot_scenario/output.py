# SPDX-License-Identifier: Apache-2.0
"""What commands have in common: the form of what they print; and which policies, of those that run
scenarios. Loads nothing heavy that is not needed."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flowslot.model.errors import ConfigError

if TYPE_CHECKING:
    from flowslot_scenario.results import Results

OutputOption = Annotated[Literal["table", "json", "yaml"], typer.Option("-o", "--output")]


def as_text(data: object, output: str) -> str:
    """As `json` or `yaml`."""
    text = json.dumps(data, indent=2)
    if output == "json":
        return text
    import yaml  # noqa: PLC0415

    # By way of JSON, which knows plain types only.
    return yaml.safe_dump(json.loads(text), sort_keys=False, default_flow_style=None).rstrip()


def chosen(text: str, known: Sequence[str]) -> tuple[str, ...]:
    """Names out of a list with commas, each once. ConfigError: none, or one that is not known."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in known:
            problem = f'no policy is called "{name}"; of: {", ".join(known)}'
            raise ConfigError("--policy", "", problem)
    if not names:
        raise ConfigError("--policy", "", f"name at least one of: {', '.join(known)}")
    return names


def show(result: Results, output: str) -> None:
    """As a table for people, or as `json` or `yaml`."""
    if output != "table":
        print(as_text(result.to_json(), output))
        return
    from rich.console import Console  # noqa: PLC0415

    from flowslot_scenario.table import print_result  # noqa: PLC0415

    print_result(result, Console(width=None if sys.stdout.isatty() else 120))
