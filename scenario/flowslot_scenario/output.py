# SPDX-License-Identifier: Apache-2.0
"""Results on standard output, as asked for."""

from __future__ import annotations

import json
import sys

import yaml
from rich.console import Console

from flowslot_scenario.results import Results
from flowslot_scenario.table import print_result


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
