# SPDX-License-Identifier: Apache-2.0
"""Decision and negotiation times as empirical distributions, one figure (the main paper's Fig. 12).

Decisions, for 100 flows: a daemon's whole pass at a slot (bench.daemon_cost, traffic kept apart),
what the policy alone takes of it, and an arbiter's step (bench.decision_time). Negotiations: 5
daemons on one switch process and 8 on two, 100 flows each (bench.negotiation, `phases`), where
each flow counts. A dotted line is the bound of bench/bounds.toml for the 90th percentile. Needs
root and matplotlib (extra `lab`).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bench import daemon_cost, decision_time, negotiation
from bench.run import BOUNDS
from flowslot_lab.processors import awake
from flowslot_scenario import drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Samples = dict[str, list[int]]
"""Label -> nanoseconds."""

PANELS = {
    "decision": ("Decisions, 100 flows", "decision_time.step_p90_ms"),
    "negotiation": ("Negotiations, 100 flows per daemon", ""),
}
"""Title, and the metric whose bound is drawn; "": there is none."""


def collect() -> dict[str, Samples]:
    """Panel -> its curves, all measured anew: a minute."""
    with awake():
        negotiations = {
            "1 switch process, 5 daemons": negotiation.run(negotiation.ONE)[1],
            "2 switch processes, 8 daemons": negotiation.run(negotiation.TWO)[1],
        }
    decisions = {
        "daemon's pass": _passes(),
        "arbiter's step": decision_time.step_ns()[0],
        "policy alone": decision_time.decide_ns(),
    }
    return {"decision": decisions, "negotiation": negotiations}


def _passes() -> list[int]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "passes.json"
        daemon_cost.run_once(keep=file)
        passes: list[int] = json.loads(file.read_text())
    return passes


def draw(panels: Mapping[str, Samples], path: Path) -> None:
    """Write the figure (format by the file's ending)."""
    must = {b["metric"]: b["must"] for b in tomllib.loads(BOUNDS.read_text())["bound"]}
    with drawing.figure(path, [4.6], len(panels)) as (axes,):
        for axis, (panel, samples) in zip(axes, panels.items(), strict=True):
            title, bound = PANELS[panel]
            _panel(axis, samples, must[bound] if bound else None)
            axis.set_title(title, loc="left", fontsize=11, pad=20)
        axes[0].set_ylabel("share of samples")


def _panel(axis: Axes, samples: Samples, bound_ms: float | None) -> None:
    for colour, (label, values) in zip(drawing.COLOURS, samples.items(), strict=False):
        ms = np.asarray(values, np.float64) / 1e6
        p90 = float(np.percentile(ms, 90))
        text = f"{label}: p90 {p90:.2g} ms, {ms.size:,} samples"
        drawing.distribution(axis, ms, text, color=colour, linewidth=1.8)
    drawing.logarithmic(axis)
    axis.set_yticks(np.arange(0, 1.01, 0.1), minor=True)
    axis.axhline(0.9, color="#888888", linewidth=0.8, linestyle=":")
    if bound_ms is not None:
        axis.axvline(bound_ms, color="#888888", linewidth=0.8, linestyle=":")
        axis.annotate(
            f"p90 at most {bound_ms:g} ms",
            (bound_ms, 1.02),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            color="#666666",
        )
    axis.set_xlabel("time (ms, logarithmic)")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(linewidth=0.4, alpha=0.5)
    axis.legend(loc="upper left", bbox_to_anchor=(-0.02, -0.16), fontsize=9, frameon=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("figure", type=Path, metavar="FILE.png")
    parser.add_argument("--keep", type=Path, metavar="FILE.json", help="write the samples, too")
    parser.add_argument("--samples", type=Path, metavar="FILE.json", help="draw these instead")
    args = parser.parse_args()
    if problem := drawing.problem(args.figure):
        parser.error(problem)
    panels = json.loads(args.samples.read_text()) if args.samples else collect()
    if args.keep:
        args.keep.write_text(json.dumps(panels))
    draw(panels, args.figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
