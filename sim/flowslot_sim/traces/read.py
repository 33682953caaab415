# SPDX-License-Identifier: Apache-2.0
"""The public traces' schemas."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flowslot_sim.traces.rows import TraceError, moment, table

FORMATS = ("google", "pai", "philly", "acme")
MOST_GPUS = 1e5
PAI = ("job_name", "task_name", "inst_num", "status", "start_time", "end_time", "plan_cpu",
       "plan_mem", "plan_gpu", "gpu_type")  # fmt: skip
"""Columns of pai_task_table.csv, which has no header."""
ACME = "job_id", "gpu_num", "submit_time", "duration"
GOOGLE = "time", "type", "collection_id"


@dataclass(frozen=True, slots=True)
class TracedJob:
    """`arrival_s`: after the first of the file. `gpus` and `duration_s` (on GPUs): 0 where the
    trace does not say."""

    name: str
    arrival_s: float
    gpus: int = 0
    duration_s: float = 0.0


def read(path: Path) -> list[TracedJob]:
    """Jobs by arrival, then name. TraceError: the file is none of FORMATS, or a row is bad, or it
    has no jobs."""
    try:
        jobs = _reader(path)(path)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from None
    if not jobs:
        raise TraceError(f"{path}: has no jobs with GPUs that ran")
    first = min(job.arrival_s for job in jobs)
    moved = [replace(job, arrival_s=job.arrival_s - first) for job in jobs]
    return sorted(moved, key=lambda job: (job.arrival_s, job.name))


def _reader(path: Path) -> Callable[[Path], list[TracedJob]]:
    with path.open("rb") as file:
        start = file.readline(1 << 16).decode("utf-8-sig", "replace").strip()
    names = [name.strip().strip('"') for name in start.split(",")]
    if start.startswith(("[", "{")):
        return philly
    for wanted, reader in ((GOOGLE, google), (ACME, acme)):
        if set(wanted) <= set(names):
            return reader
    if len(names) == len(PAI):
        return pai
    columns = f"{', '.join(GOOGLE)}; {', '.join(ACME)}; or the {len(PAI)} of pai_task_table.csv"
    raise TraceError(
        f"{path}:1: no trace that is known: a JSON list (philly), or columns {columns}"
    )


def google(path: Path) -> list[TracedJob]:
    """collection_events: rows of type SUBMIT (0), times in us. Before the trace began is time 0."""
    found: dict[str, TracedJob] = {}
    for row in table(path, GOOGLE):
        if row.text("type") in ("0", "SUBMIT"):
            at = row.number("time", most=2.0**63) / 1e6
            if 0 < at < 2e12:
                name = row.text("collection_id")
                found.setdefault(name, TracedJob(name, at))
    return list(found.values())


def pai(path: Path) -> list[TracedJob]:
    """pai_task_table: a job's tasks together; GPUs are a percentage of each instance's."""
    found: dict[str, tuple[float, float, float]] = {}
    for row in table(path, PAI, PAI):
        cells = (row.cells[name].strip() for name in ("start_time", "end_time", "plan_gpu"))
        if row.text("status") != "Terminated" or not all(cells):
            continue
        begun, ended = row.number("start_time"), row.number("end_time")
        if ended < begun:
            raise row.error("end_time", f"{ended:g} is before start_time, {begun:g}")
        gpus = row.number("inst_num", most=MOST_GPUS) * row.number("plan_gpu", most=MOST_GPUS) / 100
        name = row.text("job_name")
        first, last, so_far = found.get(name, (math.inf, 0.0, 0.0))
        found[name] = min(first, begun), max(last, ended), so_far + gpus
    return [
        TracedJob(name, begun, math.ceil(gpus), ended - begun)
        for name, (begun, ended, gpus) in found.items()
        if gpus > 0 and ended > begun
    ]


def acme(path: Path) -> list[TracedJob]:
    """trace_seren and trace_kalos."""
    found = []
    for row in table(path, ACME):
        gpus = row.number("gpu_num", most=MOST_GPUS)
        if gpus and row.cells["duration"].strip():
            lasts = row.number("duration")
            if lasts > 0:
                at = row.moment("submit_time")
                found.append(TracedJob(row.text("job_id"), at, math.ceil(gpus), lasts))
    return found


def philly(path: Path) -> list[TracedJob]:
    """cluster_job_log. A job's attempts count together; its GPUs are those of the last one."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:  # also an integer that is too long
        at = getattr(error, "lineno", 1), getattr(error, "colno", 1)
        raise TraceError(f"{path}:{at[0]}:{at[1]}: is no JSON") from None
    if not isinstance(entries, list):
        raise TraceError(f"{path}:1: must be a list of jobs")
    found = []
    for k, entry in enumerate(entries):
        job = _philly_job(entry, f"{path}: job {k + 1}")
        found += [job] if job else []
    return found


def _philly_job(entry: Any, where: str) -> TracedJob | None:
    def field(of: Any, name: str, kind: type, inside: str = "") -> Any:
        if not isinstance(of, dict) or not isinstance(of.get(name), kind):
            raise TraceError(f"{where}: {inside}{name}: must be a {kind.__name__}")
        return of[name]

    def at(text: str, name: str) -> float:
        return moment(text, lambda problem: TraceError(f"{where}: {name}: {problem}"))

    lasts, gpus = 0.0, 0
    for attempt in field(entry, "attempts", list):
        times = [
            attempt.get(x) if isinstance(attempt, dict) else 0 for x in ("start_time", "end_time")
        ]
        if None in times or "None" in times:
            continue  # it was still running, or nobody noted it
        begun, ended = (
            at(field(attempt, name, str, "attempts."), f"attempts.{name}")
            for name in ("start_time", "end_time")
        )
        if ended < begun:
            raise TraceError(f"{where}: attempts.end_time: is before start_time")
        lasts += ended - begun
        servers = field(attempt, "detail", list, "attempts.")
        gpus = sum(len(field(server, "gpus", list, "detail.")) for server in servers)
    if not gpus or lasts <= 0:
        return None
    name, submitted = field(entry, "jobid", str), field(entry, "submitted_time", str)
    if not name.isprintable():  # lone surrogates are not text
        raise TraceError(f"{where}: jobid: must be of printable characters")
    return TracedJob(name, at(submitted, "submitted_time"), gpus, lasts)
