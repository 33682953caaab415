# SPDX-License-Identifier: Apache-2.0
"""What is simulated: jobs, and the tables that the loops work on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from flowslot.policy.base import Floats, Ints, Rows

LONGEST_NS = 1 << 60
DRAWN = 256
"""Iterations after which the lengths of computations repeat."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of an iteration: all workers compute (the network is down), then they send (it is
    up). `compute_ns` on a GPU of its own. `volume`: bytes of the transfer; 0: workers go on to
    the next phase by themselves."""

    compute_ns: int
    volume: float = 0.0


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A job: `workers`, each on a GPU of its own with `memory_mb` of it, do `iterations` of
    `phases`. `stretch(k)`: factor of the computations of iteration k, up to DRAWN."""

    name: str
    workers: int
    iterations: int
    phases: tuple[Phase, ...]
    arrival_ns: int = 0
    memory_mb: float = 0.0
    stretch: Callable[[int], float] | None = field(default=None, compare=False)

    @property
    def compute_ns(self) -> int:
        """Of one worker, in the whole job."""
        return self.iterations * sum(phase.compute_ns for phase in self.phases)

    @property
    def volume(self) -> float:
        """Bytes per iteration."""
        return sum(phase.volume for phase in self.phases)


class Table:
    """Jobs by arrival, then name: J jobs with W workers in all, P phases at most. Times in ns.

    ValueError: two jobs of the same name; a job without workers, iterations or phases.
    """

    def __init__(self, jobs: Sequence[JobSpec]) -> None:
        self.jobs = sorted(jobs, key=lambda job: (job.arrival_ns, job.name))
        for job in self.jobs:
            name = job.name
            if job.workers < 1 or job.iterations < 1 or not job.phases:
                raise ValueError(f"job {name}: needs workers, iterations and phases")
            sizes = [job.arrival_ns, job.memory_mb, job.compute_ns, job.volume]
            sizes += [size for x in job.phases for size in (x.compute_ns, x.volume)]
            if not all(0 <= size < math.inf for size in sizes):
                raise ValueError(f"job {name}: sizes and times must be finite, and at least 0")
            if not job.compute_ns and not job.volume:
                raise ValueError(f"job {name}: must compute or send")
            if job.compute_ns * job.workers >= LONGEST_NS:
                raise ValueError(f"job {name}: computes for more than {LONGEST_NS:.1e} ns in all")
        if len({job.name for job in self.jobs}) < len(self.jobs):
            raise ValueError("jobs: each needs a name of its own")
        longest = max((len(job.phases) for job in self.jobs), default=1)
        shape = len(self.jobs), longest
        self.compute: Ints = np.zeros(shape, np.int64)
        self.volume: Floats = np.zeros(shape)
        for i, job in enumerate(self.jobs):
            self.compute[i, : len(job.phases)] = [phase.compute_ns for phase in job.phases]
            self.volume[i, : len(job.phases)] = [phase.volume for phase in job.phases]
        self.phases: Rows = np.array([len(job.phases) for job in self.jobs], np.intp)
        self.iterations: Ints = np.array([job.iterations for job in self.jobs], np.int64)
        counts = [job.workers for job in self.jobs]
        self.first: Rows = np.concatenate(([0], np.cumsum(counts))).astype(np.intp)
        self.job_of: Rows = np.repeat(np.arange(len(counts)), counts).astype(np.intp)
        self.service: Ints = np.array([job.compute_ns * job.workers for job in self.jobs], np.int64)

    @cached_property
    def stretch(self) -> Floats:
        """float64[J, DRAWN], or [J, 1] where nothing varies."""
        if all(job.stretch is None for job in self.jobs):
            return np.ones((len(self.jobs), 1))
        return np.array(
            [
                [job.stretch(k) for k in range(min(DRAWN, job.iterations))]
                + [1.0] * max(0, DRAWN - job.iterations)
                if job.stretch
                else [1.0] * DRAWN
                for job in self.jobs
            ]
        )
