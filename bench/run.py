# SPDX-License-Identifier: Apache-2.0
"""All benchmarks against their recorded bounds: `make bench`.

bounds.toml records for each metric the bound that must hold, the target, and what was measured
when the bound was last looked at (mean, spread over repeats): the margin between the two says how
much a change may cost before this fails. Exit status 1 when a bound is broken. Some metrics have no
bound, but another metric of the same run beside them.
"""

import argparse
import importlib
import json
import math
import statistics
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from flowslot_lab.processors import read_ticks
from flowslot_scenario.table import STOLEN

BOUNDS = Path(__file__).with_name("bounds.toml")


def measure(metrics: Iterable[str], repeat: int) -> dict[str, list[float]]:
    """Metric -> one value per repeat; benchmarks take turns, so that a slow minute hits all."""
    values: dict[str, list[float]] = {metric: [] for metric in metrics}
    modules = list(dict.fromkeys(metric.split(".")[0] for metric in values))
    for turn in range(repeat):
        for name in modules:
            print(f"bench: {name} ({turn + 1}/{repeat})", file=sys.stderr, flush=True)
            result = importlib.import_module(f"bench.{name}").measure()
            for metric, got in values.items():
                module, key = metric.split(".", 1)
                if module == name:
                    got.append(float(result[key]))
    return values


def report(bounds: list[dict[str, Any]], values: dict[str, list[float]]) -> list[dict[str, Any]]:
    """One row per metric, the bound applied to the mean over repeats."""
    rows = []
    for bound in bounds:
        got = values[bound["metric"]]
        mean = statistics.fmean(got)
        rows.append(
            {
                "metric": bound["metric"],
                "unit": bound["unit"],
                "mean": mean,
                "min": min(got),
                "max": max(got),
                "must": bound["must"],
                "target": bound.get("target"),
                "recorded_mean": bound["recorded_mean"],
                "recorded_spread": bound["recorded_spread"],
                "margin": bound["must"] / mean if mean else float("inf"),
                "holds": mean <= bound["must"],
                "meets_target": bound.get("target") is None or mean <= bound["target"],
            }
        )
    return rows


def spread(values: list[float]) -> str:
    """Mean, least and most."""
    return f"{statistics.fmean(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", help="modules, separated by commas")
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    args = parser.parse_args()
    wanted = args.only.split(",") if args.only else None
    bounds, reported = (
        [one for one in some if wanted is None or one["metric"].split(".")[0] in wanted]
        for some in tomllib.loads(BOUNDS.read_text()).values()
    )
    before = read_ticks()
    besides = [one[name] for one in reported for name in ("metric", "beside")]
    values = measure([*(bound["metric"] for bound in bounds), *besides], args.repeat)
    rows = report(bounds, values)
    stolen = read_ticks().since(before).stolen
    print(
        f"bench: the hypervisor gave {stolen:.1%} of these processors' time to other machines"
        + (", which is in these figures" if stolen > STOLEN else ""),
        file=sys.stderr,
    )
    if args.output == "json":
        # JSON has no infinity: null where something was never reached.
        plain = [{k: None if v == math.inf else v for k, v in row.items()} for row in rows]
        more = {metric: values[metric] for metric in besides}
        print(json.dumps({"bounds": plain, "reported": more}, indent=2))
    else:
        titles = "unit", "measured (min to max)", "must", "target", "margin", "recorded"
        table = Table(Column("metric", no_wrap=True), *titles, "")
        for row in rows:
            target = "" if row["target"] is None else f"{row['target']:g}"
            verdict = "ok" if row["meets_target"] else "ok, target missed"
            table.add_row(
                row["metric"],
                row["unit"],
                spread(values[row["metric"]]),
                f"{row['must']:g}",
                target,
                f"{row['margin']:.2g}",
                "{:g} ({:g} to {:g})".format(row["recorded_mean"], *row["recorded_spread"]),
                verdict if row["holds"] else "BROKEN",
            )
        without = Table(
            Column("without a bound", no_wrap=True), "unit", "measured", "beside it", ""
        )
        for one in reported:
            both = spread(values[one["metric"]]), spread(values[one["beside"]])
            without.add_row(one["metric"], one["unit"], *both, one["beside"].split(".")[1])
        console = Console(width=None if sys.stdout.isatty() else 150)
        for shown in (table, without):
            if shown.row_count:
                console.print(shown)
    return 0 if all(row["holds"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
