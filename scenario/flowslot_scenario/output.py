# SPDX-License-Identifier: Apache-2.0
"""What commands that run scenarios have in common: which policies, and results as asked for."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import yaml
from rich.console import Console

from flowslot_scenario.results import Results
from flowslot_scenario.table import print_result


def chosen(text: str, known: Sequence[str]) -> tuple[str, ...]:
    """Names out of a list with commas, each once. ValueError: none, or one that is not known."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in known:
            raise ValueError(f'no policy is called "{name}"; of: {", ".join(known)}')
    if not names:
        raise ValueError(f"name at least one of: {', '.join(known)}")
    return names


def show(result: Results, output: str) -> None:
    """As a table for people, or as `json` or `yaml`."""
    match output:
        case "json":
            print(json.dumps(result.to_json(), indent=1))
        case "yaml":
            # By way of JSON, which knows plain types only.
            plain = json.loads(json.dumps(result.to_json()))
            print(yaml.safe_dump(plain, sort_keys=False), end="")
        case _:
            print_result(result, Console(width=None if sys.stdout.isatty() else 120))
