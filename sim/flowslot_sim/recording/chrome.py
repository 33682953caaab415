# SPDX-License-Identifier: Apache-2.0
"""A trace for chrome://tracing and ui.perfetto.dev: the Trace Event Format, as JSON.

Each group of a run is a process there, each track a thread, each link a counter (its use, in per
cent). Times are microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flowslot_sim.recording.record import Recording

Event = dict[str, Any]


def write(runs: Mapping[str, Recording], path: Path) -> None:
    """All runs in one file, by their names. An event is a line. OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        before = ""
        for event in _all(runs):
            file.write(before + json.dumps(event))
            before = ",\n"
        file.write("\n]}\n")


def _all(runs: Mapping[str, Recording]) -> Iterator[Event]:
    first = 1
    for name, recording in runs.items():
        groups = {"links": first}
        for span in recording.spans:
            groups.setdefault(span.group, first + len(groups))
        yield from _named(name, groups)
        yield from _spans(recording, groups)
        yield from _links(recording, first)
        first += len(groups)


def _named(run: str, groups: Mapping[str, int]) -> Iterator[Event]:
    for group, pid in groups.items():
        said: tuple[tuple[str, Event], ...] = (
            ("process_name", {"name": f"{run}: {group}"}),
            ("process_sort_index", {"sort_index": pid}),
        )
        for name, args in said:
            yield {"ph": "M", "pid": pid, "tid": 0, "name": name, "args": args}


def _spans(recording: Recording, groups: Mapping[str, int]) -> Iterator[Event]:
    tracks: dict[tuple[str, str], int] = {}
    for span in recording.spans:
        pid, key = groups[span.group], (span.group, span.track)
        if key not in tracks:
            tracks[key] = len(tracks) + 1
            args = {"name": span.track}
            yield {"ph": "M", "pid": pid, "tid": tracks[key], "name": "thread_name", "args": args}
        yield {
            "ph": "X",
            "pid": pid,
            "tid": tracks[key],
            "name": span.name,
            "ts": span.begins / 1e3,
            "dur": (span.ends - span.begins) / 1e3,
        }


def _links(recording: Recording, pid: int) -> Iterator[Event]:
    """Where they change by as much as can be seen."""
    edges, shares = recording.use.shares()
    for link, name in enumerate(recording.links):
        percent = np.round(shares[:, link] * 100)
        for k in np.flatnonzero(np.diff(percent, prepend=0.0)).tolist():
            args = {"%": percent[k]}
            yield {"ph": "C", "pid": pid, "name": name, "ts": edges[k] * 1e6, "args": args}
