# SPDX-License-Identifier: Apache-2.0
"""What all figures share. Nothing here imports matplotlib (extra `lab`) before something is drawn:
it is slow to import, and optional."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from flowslot.model.errors import FlowslotError
from flowslot.policy.base import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".png", ".svg", ".pdf")
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


def problem(path: Path) -> str:
    """Why no figure can be written there, and what would be right; empty: one can. To be asked
    before anything is run."""
    if path.suffix not in FORMATS:
        return f"{path}: must end in one of: {', '.join(FORMATS)}"
    if not can_be_made(path.parent, path):
        return f"{path}: must be a file in a directory that can be written to"
    if importlib.util.find_spec("matplotlib") is None:
        return "needs matplotlib: pip install 'flowslot[lab]'"
    return ""


def can_be_made(directory: Path, file: Path | None = None) -> bool:
    """It is there, or can be made, and can be written to; and so can `file`, which is in it."""
    try:
        existing = next(path for path in (directory, *directory.parents) if path.exists())
        free = file is None or not file.is_dir()
        return free and existing.is_dir() and os.access(existing, os.W_OK)
    except OSError:  # a name that is too long, a folder that may not be looked into
        return False


@contextmanager
def figure(path: Path, heights: Sequence[float], columns: int = 1) -> Iterator[list[list[Axes]]]:
    """Axes, row by row, of these heights (inches); the figure is written when the block ends,
    format by the file's ending. FlowslotError: it cannot be."""
    import matplotlib  # noqa: PLC0415

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    made, axes = plt.subplots(
        len(heights),
        columns,
        figsize=(10, sum(heights)),
        height_ratios=list(heights),
        squeeze=False,
        layout="constrained",
    )
    try:
        yield axes.tolist()
        path.parent.mkdir(parents=True, exist_ok=True)
        made.savefig(path, dpi=130)
    except OSError as error:
        raise FlowslotError(f"--figure {path}: {error.strerror or error}") from None
    finally:
        plt.close(made)


def ecdf(values: ArrayLike) -> tuple[Floats, Floats]:
    """Values, ascending, and the share of them that are at most as large."""
    ordered = np.sort(np.asarray(values, np.float64))
    return ordered, np.arange(1, ordered.size + 1) / max(ordered.size, 1)


def distribution(axis: Axes, values: ArrayLike, label: str, **style: Any) -> None:
    """Their `ecdf`, as steps."""
    axis.step(*ecdf(values), where="post", label=label, **{"linewidth": 1.4, **style})
    axis.set_ylim(0, 1.02)


def logarithmic(axis: Axes) -> None:
    """Its x axis is, with plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter  # noqa: PLC0415

    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def style(k: int) -> dict[str, Any]:
    """Of the k-th line of many: its colour, and dashes when colours are used up."""
    return {
        "color": COLOURS[k % len(COLOURS)],
        "linestyle": ("-", "--", ":", "-.")[k // len(COLOURS) % 4],
    }


def plain(axis: Axes) -> None:
    """No frame, faint lines."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", linewidth=0.4, alpha=0.5)
