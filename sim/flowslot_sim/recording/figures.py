# SPDX-License-Identifier: Apache-2.0
"""Figures of runs: distributions, use of links over time, slowdown by load."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flowslot.policy.base import Floats
from flowslot_scenario import drawing
from flowslot_sim.recording.record import Recording

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN = 24
"""Links of a run: those that carried most for their capacity."""


def draw(
    values: Mapping[str, Sequence[float]],
    recordings: Mapping[str, Recording],
    what: str,
    path: Path,
) -> None:
    """Runs by their names: distributions of `values`, which are `what`; below, a map for each run
    of how much of its links was used when."""
    heights = [3.4] + [1.0 + 0.12 * min(SHOWN, len(x.links)) for x in recordings.values()]
    with drawing.figure(path, heights) as rows:
        top = rows[0][0]
        _distributions(top, values, what)
        top.set_title(f"{what}, {_count(values)}", loc="left", fontsize=10)
        edges = {name: one.use.shares() for name, one in recordings.items()}
        last = max((at[-1] for at, _ in edges.values()), default=0.0)
        for (axis,), (name, (at, shares)) in zip(rows[1:], edges.items(), strict=True):
            _use(axis, recordings[name].links, at, shares)
            axis.set_title(f"{name}: use of links", loc="left", fontsize=10)
            axis.set_xlim(0, last or 1.0)
        rows[-1][0].set_xlabel("time (s)" if recordings else what)


def _count(values: Mapping[str, Sequence[float]]) -> str:
    most = max((len(some) for some in values.values()), default=0)
    return f"{most} per run"


def _distributions(axis: Axes, values: Mapping[str, Sequence[float]], what: str) -> None:
    for k, (name, some) in enumerate(values.items()):
        drawing.distribution(axis, some, name, **drawing.style(k))
    _logarithmic(axis, [x for some in values.values() for x in some])
    axis.set_xlabel(what)
    axis.set_ylabel("share")
    axis.legend(loc="lower right", fontsize=8)
    drawing.plain(axis)


def _logarithmic(axis: Axes, values: Iterable[float]) -> None:
    """If they differ by more than a factor of 20."""
    positive = [x for x in values if x > 0]
    if positive and max(positive) > 20 * min(positive):
        drawing.logarithmic(axis)


def _use(axis: Axes, links: Sequence[str], edges: Floats, shares: Floats) -> None:
    """A row for each of the most used links, by their names."""
    means = shares.mean(axis=0) if len(shares) else np.zeros(len(links))
    chosen = sorted(np.argsort(-means, kind="stable")[:SHOWN].tolist())
    rows = np.arange(len(chosen) + 1)
    if len(shares):
        mesh = axis.pcolormesh(
            edges, rows, shares[:, chosen].T, vmin=0.0, vmax=1.0, rasterized=True
        )
        axis.figure.colorbar(mesh, ax=axis, label="part used", pad=0.01)
    axis.set_yticks(rows[:-1] + 0.5, [links[k] for k in chosen], fontsize=6)
    axis.invert_yaxis()


def draw_sweep(
    lines: Sequence[Mapping[str, Any]],
    parameters: Iterable[str],
    ideal_s: Sequence[float],
    path: Path,
) -> None:
    """Runs of a sweep with these parameters, and of each the mean JCT of its jobs alone on the
    network: on the left JCT at the highest load, on the right mean and p99 of JCT by load, as
    multiples of that mean. A curve is all seeds of what else is equal, a bar their standard
    deviation."""
    curves: dict[str, list[tuple[Mapping[str, Any], float]]] = {}
    fixed = ("seed", "load")
    varied = [k for k in parameters if k not in fixed and len({x[k] for x in lines}) > 1]
    for line, ideal in zip(lines, ideal_s, strict=True):
        name = ", ".join(f"{line[k]}" for k in varied or ["policy"])
        curves.setdefault(name, []).append((line, ideal))
    highest = max(line["load"] for line in lines)
    with drawing.figure(path, [4.2], 3) as ((left, middle, right),):
        jct = {
            name: [x for line, _ in some if line["load"] == highest for x in line["jct_s"]]
            for name, some in curves.items()
        }
        _distributions(left, jct, "JCT (s)")
        left.set_title(f"jobs at load {highest:g}", loc="left", fontsize=10)
        for axis, key, title in ((middle, "mean_s", "mean JCT"), (right, "p99_s", "p99 of JCT")):
            for k, (name, some) in enumerate(curves.items()):
                _by_load(axis, [(x["load"], x[key] / ideal) for x, ideal in some], name, k)
            axis.set_title(f"{title} / mean JCT alone", loc="left", fontsize=10)
            axis.set_xlabel("load")
            axis.set_ylim(bottom=0)
            drawing.plain(axis)


def _by_load(axis: Axes, pairs: Sequence[tuple[float, float]], name: str, k: int) -> None:
    loads = sorted({load for load, _ in pairs})
    at = [[x for load, x in pairs if load == each] for each in loads]
    means, spread = [float(np.mean(x)) for x in at], [float(np.std(x)) for x in at]
    axis.errorbar(
        loads, means, spread, label=name, marker="o", markersize=3, capsize=2, **drawing.style(k)
    )
