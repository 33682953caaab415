# SPDX-License-Identifier: Apache-2.0
"""How far a scenario's runs are, on standard error: a bar on a terminal, else a line per run."""

from __future__ import annotations

import sys

from rich import progress
from rich.console import Console


class Silent:
    """A Watch that shows nothing."""

    def begin(self, label: str, total: int) -> None:
        """See Watch."""

    def advance(self, done: int) -> None:
        """See Watch."""


class Bar:
    """A Watch (see runner), over all runs of a scenario."""

    def __init__(self, title: str, total: int, console: Console | None = None) -> None:
        """`total`: iterations of all runs together, as `planned` says."""
        self._title = title
        self._console = console or Console(file=sys.stderr)
        self._before, self._run = 0, 0
        self._bar = progress.Progress(
            progress.TextColumn(title),
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.TaskProgressColumn(),
            progress.TimeRemainingColumn(),
            progress.TextColumn("left"),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
            speed_estimate_period=600,  # runs of different policies are not equally fast
        )
        self._task = self._bar.add_task("", total=total)
        self._label = ""
        self.prefix = ""
        """Before what `begin` says of a run."""

    def __enter__(self) -> Bar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Take the bar off the terminal."""
        self._bar.stop()

    def begin(self, label: str, total: int) -> None:
        """A run of so many iterations begins."""
        self._before += self._run
        label = f"{self.prefix}, {label}" if self.prefix else label
        self._label, self._run = label, total
        if not self._console.is_terminal:
            print(f"{self._title}: {label}", file=self._console.file, flush=True)
        self.advance(0)

    def advance(self, done: int) -> None:
        """So many iterations of this run are done."""
        text = f"{self._label}, iteration {done}/{self._run}" if self._run else self._label
        self._bar.update(self._task, completed=self._before + done, description=text)
