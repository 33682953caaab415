# SPDX-License-Identifier: Apache-2.0
"""Options of commands that can record what they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flowslot.model.errors import ConfigError, FlowslotError
from flowslot_scenario import drawing
from flowslot_sim.recording import chrome
from flowslot_sim.recording.record import Recording


def _figure(path: Path | None) -> Path | None:
    if path is not None and (problem := drawing.problem(path)):
        raise ConfigError("--figure", "", problem)
    return path


def _timeline(path: Path | None) -> Path | None:
    if path is not None and not drawing.can_be_made(path.parent, path):
        problem = f"{path}: must be a file in a directory that can be written to"
        raise ConfigError("--timeline", "", problem)
    return path


FigureOption = Annotated[
    Path | None,
    typer.Option(
        "--figure",
        callback=_figure,
        help=f"draw what came out: {', '.join(drawing.FORMATS)}",
        metavar="FILE",
    ),
]
TimelineOption = Annotated[
    Path | None,
    typer.Option(
        "--timeline",
        callback=_timeline,
        help="write what happened when, for chrome://tracing or ui.perfetto.dev (JSON)",
        metavar="FILE",
    ),
]


def keep(recordings: dict[str, Recording], timeline: Path | None) -> None:
    """Write a timeline, if one is wanted. FlowslotError: it cannot be written."""
    if timeline is not None:
        try:
            chrome.write(recordings, timeline)
        except OSError as error:
            raise FlowslotError(f"--timeline {timeline}: {error.strerror or error}") from None
