# SPDX-License-Identifier: Apache-2.0
"""One published figure beside ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

NEAR = 2.0
"""Standard deviations of ours within which a published figure agrees."""


@dataclass(frozen=True, slots=True)
class Cell:
    """`published` None: the paper's text does not say. `ours_mean` None: not run.
    `agrees` None: there is nothing to compare.
    `why`: what the comparison rests on."""

    table: str
    cell: str
    published: float | None
    ours_mean: float | None
    ours_sd: float
    seeds: int
    agrees: bool | None
    why: str


def compare(
    table: str, cell: str, published: float | None, ours: Sequence[float], why: str = ""
) -> Cell:
    """`ours`: one figure for each seed. `why`: instead of how far apart they are."""
    mean = float(np.mean(ours))
    sd = float(np.std(ours, ddof=1)) if len(ours) > 1 else 0.0
    if published is None:
        return Cell(table, cell, None, mean, sd, len(ours), None, why or "not in the paper's text")
    off = abs(mean - published)
    if len(ours) < 2:
        agrees = off <= 0.005 * abs(published)
        told = f"{off / abs(published):.1%} off; one run, no spread"
    else:
        agrees = off <= NEAR * sd
        told = f"{off / sd:.1f} sd off" if sd > 0 else f"{off:g} off, no spread"
    return Cell(table, cell, published, mean, sd, len(ours), agrees, why or told)


T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""Student's t for a 95 % confidence interval of 2, 3, ... values."""


def half_width(ours: Sequence[float]) -> float:
    """Of the mean's 95 % confidence interval; 0 of one figure."""
    if len(ours) < 2:
        return 0.0
    t = T95[len(ours) - 2] if len(ours) < len(T95) + 2 else 2.23
    return t * float(np.std(ours, ddof=1)) / float(np.sqrt(len(ours)))


def interval(ours: Sequence[float]) -> tuple[float, float, str]:
    """Mean, standard deviation, and the mean's 95 % confidence interval in words."""
    mean = float(np.mean(ours))
    if len(ours) < 2:
        return mean, 0.0, "one run, no spread"
    half = half_width(ours)
    told = f"95 % interval {mean - half:.4g} to {mean + half:.4g}"
    return mean, float(np.std(ours, ddof=1)), told


def as_data(paper: str, cells: Sequence[Cell], **about: object) -> dict[str, object]:
    """Plain data, for JSON."""
    return {"paper": paper, **about, "cells": [asdict(cell) for cell in cells]}
