# SPDX-License-Identifier: Apache-2.0
"""Host schedulers: which jobs get how many GPUs. Pure; where these are, placement.py says.

`Themis` and `Pollux` are simplified. Of Themis (K. Mahajan et al., NSDI 2020) there is finish-time
fairness and leases, and no auctions: jobs do not bid, and the most unfairly treated one comes first
with all GPUs that it asks for. Of Pollux (A. Qiao et al., OSDI 2021) there is goodput, and the
harmonic mean of speedups that is maximised: greedily, not by a genetic search; batches per GPU and
learning rates do not change, the noise of gradients is a constant (external), and no job gets more
GPUs than it asks for. In both, to move a job costs nothing; it stops at the end of an iteration.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from flowslot.model.units import SECOND
from flowslot_sim.cluster.jobs import JobSpec


@dataclass(frozen=True, slots=True)
class Standing:
    """Job i, which has arrived `age_s` ago, and has `left` iterations to do (as with all of its
    workers). `service`: what it needed in all when it came, ns times GPUs."""

    i: int
    job: JobSpec
    age_s: float
    left: float
    service: int


class HostScheduler(Protocol):
    """`lease_ns`: after so long everybody's GPUs are given out anew; 0: who has some keeps them."""

    @property
    def lease_ns(self) -> int:
        """See above."""
        ...

    def shares(self, jobs: Sequence[Standing], gpus: int) -> list[tuple[int, int]]:
        """Of the GPUs of the whole cluster: jobs and how many each is to have, at least one, the
        most urgent first. Where some do not fit, less urgent ones may go first. `jobs`: all that
        are here; without leases, those that wait."""
        ...

    def worth(self, job: JobSpec, workers: int) -> float:
        """How many iterations with all of its workers an iteration with so many counts for."""
        ...


class ShortestFirst:
    """By the computation that a job needs in all; all workers that it asks for, until it ends."""

    lease_ns = 0

    def shares(self, jobs: Sequence[Standing], gpus: int) -> list[tuple[int, int]]:
        """See HostScheduler."""
        ordered = sorted(jobs, key=lambda each: (each.service, each.i))
        return [(each.i, each.job.workers) for each in ordered]

    def worth(self, job: JobSpec, workers: int) -> float:
        """See HostScheduler."""
        return 1.0


Alone = Callable[[JobSpec, int], float]
"""How long an iteration of a job lasts on so many GPUs, s, if its network is its own."""


@dataclass(frozen=True, slots=True)
class Themis:
    """By finish-time fairness: how long a job will have taken, if it has its GPUs from now on, by
    how long it would take in its share of the cluster; the largest first."""

    alone: Alone
    lease_ns: int

    def shares(self, jobs: Sequence[Standing], gpus: int) -> list[tuple[int, int]]:
        """See HostScheduler."""
        fair = gpus / max(len(jobs), 1)

        def unfairness(each: Standing) -> float:
            n = each.job.workers
            iteration = self.alone(each.job, n)
            ideal = each.job.iterations * iteration * max(n / fair, 1.0)
            return (each.age_s + each.left * iteration) / ideal

        ordered = sorted(jobs, key=lambda each: (-unfairness(each), each.i))
        return [(each.i, each.job.workers) for each in ordered]

    def worth(self, job: JobSpec, workers: int) -> float:
        """See HostScheduler."""
        return 1.0


@dataclass(frozen=True, slots=True)
class Pollux:
    """By goodput: iterations per second times how much of its samples a job learns from. `noise`:
    of gradients, as a multiple of a job's whole batch: with less of it a large batch teaches less.
    """

    alone: Alone
    lease_ns: int
    noise: float = 1.0

    def worth(self, job: JobSpec, workers: int) -> float:
        """See HostScheduler: samples, times (noise + 1) / (noise + batch)."""
        part = workers / job.workers
        return part * (self.noise + 1) / (self.noise + part)

    def goodput(self, job: JobSpec, workers: int) -> float:
        """Iterations with all workers per second."""
        return self.worth(job, workers) / self.alone(job, workers)

    def shares(self, jobs: Sequence[Standing], gpus: int) -> list[tuple[int, int]]:
        """See HostScheduler: one GPU each, those first that came first; then more where each GPU
        makes the sum of 1 / speedup smallest. A speedup is against the job's fair share."""
        order = sorted(jobs, key=lambda each: (-each.age_s, each.i))[:gpus]
        has = {each.i: 1 for each in order}
        left, steps = gpus - len(order), []
        slow = {each.i: self._slowness(each.job, gpus / max(len(jobs), 1)) for each in order}
        for each in order:
            steps += self._step(each.i, slow[each.i], 1, left)
        heapq.heapify(steps)
        while steps:
            _, i, n = heapq.heappop(steps)
            if n - has[i] <= left:  # else a smaller step may
                left -= n - has[i]
                has[i] = n
            for step in self._step(i, slow[i], has[i], left):
                heapq.heappush(steps, step)
        return [(each.i, has[each.i]) for each in order]

    def _slowness(self, job: JobSpec, fair: float) -> dict[int, float]:
        """1 / speedup by number of GPUs, for those that are looked at: powers of 2, and all."""
        sizes = sorted({2**k for k in range(job.workers.bit_length())} | {job.workers})
        share = self.goodput(job, max(min(int(fair), job.workers), 1))
        return {n: share / self.goodput(job, n) for n in sizes}

    @staticmethod
    def _step(i: int, slow: dict[int, float], n: int, left: int) -> list[tuple[float, int, int]]:
        """The best next size of job i, for which no more than `left` GPUs are needed: minus what a
        GPU brings, job, size; none: no size brings anything."""
        found = [((slow[m] - slow[n]) / (m - n), i, m) for m in slow if n < m <= n + left]
        return [step for step in (min(found, default=None),) if step is not None and step[0] < 0]


SHORTEST = ShortestFirst()


def one_server_or_line(rate: float, per_server: int) -> Alone:
    """An iteration on GPUs of one server, which sends nothing; on more, a ring at `rate` bytes/s.
    A ring of n carries (1 - 1/n) times the same. A nanosecond at least."""

    def alone(job: JobSpec, workers: int) -> float:
        compute = max(sum(phase.compute_ns for phase in job.phases), 1) / SECOND
        if workers <= per_server:
            return compute
        return compute + job.volume * ring_part(job, workers) / rate

    return alone


def ring_part(job: JobSpec, workers: int) -> float:
    """What each flow of a ring of so many workers carries, by what it does with all of them."""
    if workers == job.workers:
        return 1.0
    return (1 - 1 / workers) / (1 - 1 / job.workers)
