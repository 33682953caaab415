# SPDX-License-Identifier: Apache-2.0
"""Cells of a table in a file, checked: errors name file, line and column."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from flowslot.model.errors import FlowslotError

LONGEST_S = 1e10
"""More seconds are no time of a trace."""


class TraceError(FlowslotError):
    """A file that cannot be read as a trace."""


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a table; `cells` by column."""

    path: Path
    line: int
    cells: dict[str, str]

    def error(self, column: str, problem: str) -> TraceError:
        """Says where, and what is wrong."""
        return TraceError(f"{self.path}:{self.line}: {column}: {problem}")

    def text(self, column: str) -> str:
        """Not empty."""
        text = self.cells[column].strip()
        if not text:
            raise self.error(column, "is empty")
        return text

    def number(self, column: str, *, least: float = 0.0, most: float = LONGEST_S) -> float:
        """Finite, and within bounds."""
        text = self.cells[column].strip()
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not least <= number <= most:
            raise self.error(column, f'"{text[:40]}" is no number from {least:g} to {most:g}')
        return number

    def moment(self, column: str) -> float:
        """A date and time, s since 1970; without a zone it is UTC."""
        return moment(self.cells[column].strip(), lambda problem: self.error(column, problem))


def moment(text: str, error: object) -> float:
    """See Row.moment. `error`: makes what is raised."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        assert callable(error)
        problem = f'"{text[:40]}" is no date and time like 2023-03-01 00:18:22+08:00'
        raise error(problem) from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def table(path: Path, wanted: Sequence[str], columns: Sequence[str] | None = None) -> Iterator[Row]:
    """Rows of a CSV file that has the `wanted` columns; `columns`: all of a file without a header.
    TraceError: a column is missing, or a line has another number of cells."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        lines = csv.reader(file)
        try:
            names = list(columns) if columns is not None else next(lines, [])
            missing = [name for name in wanted if name not in names]
            if missing:
                raise TraceError(f"{path}:1: {missing[0]}: there is no such column")
            for cells in lines:
                if cells and not (columns is not None and cells == list(columns)):
                    if len(cells) != len(names):
                        problem = f"{len(cells)} cells, {len(names)} are needed"
                        raise TraceError(f"{path}:{lines.line_num}: {problem}")
                    yield Row(path, lines.line_num, dict(zip(names, cells, strict=True)))
        except (csv.Error, UnicodeDecodeError) as error:
            raise TraceError(f"{path}:{lines.line_num + 1}: is no CSV: {error}") from None
