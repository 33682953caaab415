# SPDX-License-Identifier: Apache-2.0
"""Jobs of a trace as jobs to be simulated."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from flowslot.model.units import SECOND
from flowslot_sim.cluster.jobs import LONGEST_NS, JobSpec, Phase
from flowslot_sim.traces.read import TracedJob, read
from flowslot_sim.traces.rows import TraceError

Models = Mapping[str, tuple[float, float]]
"""By name: bytes that are all-reduced in an iteration, and ms of its computation."""


def to_jobs(
    traced: Sequence[TracedJob],
    models: Models,
    rate: float,
    *,
    gpus: int,
    per_server: int,
    seed: int = 0,
) -> list[JobSpec]:
    """Each with a model of its own draw, and with as many iterations as fit into its duration on an
    empty cluster; at least one. There the GPUs of a job are side by side: its ring crosses each
    server's link once, at `rate` (bytes/s); one that fits into a server sends nothing. Jobs of more
    than `gpus` GPUs have so many. TraceError: the trace does not say how long jobs are, or one is
    too long."""
    names, jobs = sorted(models), []
    for k, job in enumerate(traced):
        if not job.gpus or not job.duration_s:
            raise TraceError(
                f"job {job.name}: the trace has arrivals only: GPUs and duration are needed"
            )
        draw = np.random.default_rng([seed, zlib.crc32(job.name.encode())])
        size, compute_ms = models[names[draw.integers(len(names))]]
        workers = min(job.gpus, gpus)
        volume = 2 * (workers - 1) / workers * size
        compute = round(compute_ms * 1e6)
        each_s = compute / SECOND + (volume / rate if workers > per_server else 0.0)
        iterations = max(round(job.duration_s / each_s), 1)
        arrival = round(job.arrival_s * SECOND)
        if max(arrival, iterations * compute * workers) >= LONGEST_NS:
            raise TraceError(f"job {job.name}: lasts longer than can be simulated")
        phase = Phase(compute, volume)
        jobs.append(JobSpec(f"{job.name}-{k}", workers, iterations, (phase,), arrival, 1.0))
    return jobs


def arrivals(path: Path, jobs: int, span_s: float) -> tuple[int, ...]:
    """When the first so many jobs of a trace arrive, ns, stretched so that they do within `span_s`.
    TraceError: it has fewer."""
    found = [job.arrival_s for job in read(path)]
    if len(found) < jobs:
        raise TraceError(f"{path}: has {len(found)} jobs, {jobs} are needed")
    factor = span_s / max(found[jobs - 1], 1e-9)
    return tuple(round(at * factor * SECOND) for at in found[:jobs])
