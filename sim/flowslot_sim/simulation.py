# SPDX-License-Identifier: Apache-2.0
"""One run: jobs compute and communicate over the fluid network, under some control plane."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate

import numpy as np

from flowslot.model.errors import FlowslotError
from flowslot.model.units import SECOND, Nanos
from flowslot.policy.base import Rows, View
from flowslot_scenario.results import Evidence
from flowslot_sim.events import Events
from flowslot_sim.network import Network
from flowslot_sim.world import World


class Control:
    """Who decides about rates: writes them with `Network.pace`, whenever it likes. This one is
    nobody: all active flows share the links max-min."""

    def start(self) -> None:
        """The run begins."""

    def hold(self, now: Nanos, job: int) -> Nanos:
        """When a job that is ready to send may begin; a time that is past: now."""
        return now

    def began(self, now: Nanos, job: int, flows: Sequence[int]) -> None:
        """These flows of a job have begun an iteration."""

    def ended(self, now: Nanos, flows: Sequence[int]) -> None:
        """These flows have sent everything."""

    def evidence(self) -> Evidence:
        """What the control plane has done."""
        return Evidence()


@dataclass(slots=True)
class Progress:
    """What a job has done. Times in ns: `began`, of each iteration (its computation first), and
    `ends`: when its last worker has ended it."""

    began: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    left: int = 0
    """Workers that communicate."""
    sends_since: int = 0
    """When the first one began to, in the latest iteration, ns."""
    phases: int = 0
    """So often they have."""


@dataclass(slots=True)
class _Rank:
    """A worker of job `job`: `begins` these flows, and has to wait for what these bring
    (`awaits`), if it `waits`. So many iterations `begun`, and `ended`."""

    job: int
    begins: list[int]
    awaits: list[int]
    begun: int = 0
    ended: int = 0
    waits: bool = False


class Stalled(FlowslotError):
    """Nothing can ever happen any more, although jobs have bytes to send."""


class Simulation:
    """`world` under the control plane that `make` returns for it."""

    def __init__(self, world: World, make: Callable[[Simulation], Control]) -> None:
        self.world = world
        self.events = Events()
        first = [0, *accumulate(len(job.flows) for job in world.jobs)]
        self.flows = [
            replace(flow, preds=tuple(p + first[j] for p in flow.preds))
            for j, job in enumerate(world.jobs)
            for flow in job.flows
        ]
        self.rows_of = [range(first[j], first[j + 1]) for j in range(len(world.jobs))]
        self.job_of = [j for j, job in enumerate(world.jobs) for _ in job.flows]
        self.network = Network(self.flows, world.capacity)
        self.progress = [Progress() for _ in world.jobs]
        self._ranks = [self._workers(j, first[j]) for j in range(len(world.jobs))]
        begun = {row for ranks in self._ranks for rank in ranks for row in rank.begins}
        self._served = [[row for row in rows if row not in begun] for rows in self.rows_of]
        """By job: the flows that begin once all workers have."""
        self._awaiting: list[list[_Rank]] = [[] for _ in self.flows]
        for rank in (rank for ranks in self._ranks for rank in ranks):
            for row in rank.awaits:
                self._awaiting[row].append(rank)
        self._arrived = [0] * len(self.flows)  # iterations
        self._posting: list[_Rank] = []  # workers that wait for nothing but their own sockets
        self._wanted = self._short = 0  # iterations, and jobs that have done fewer
        self.accounts: list[Callable[[Nanos, Nanos], None]] = []
        """Told of each stretch of time, before it passes: now, and ns until rates may change."""
        self.control = make(self)

    def _workers(self, j: int, first: int) -> list[_Rank]:
        rows = self.rows_of[j]
        if not self.world.jobs[j].workers:
            return [_Rank(j, list(rows), list(rows))]
        return [
            _Rank(j, [first + k for k in one.begins], [first + k for k in one.awaits])
            for one in self.world.jobs[j].workers
        ]

    @property
    def now(self) -> Nanos:
        """Time since the run began, ns."""
        return self.events.now

    def run(self, until_ns: int = 1 << 62, iterations: int = 1 << 62) -> None:
        """Until a time, or until every job has done so many iterations; then jobs stop in mid-air.

        Raises Stalled.
        """
        if not self.now and not self.progress[0].began:
            self.control.start()
            for job, ranks in zip(self.world.jobs, self._ranks, strict=True):
                self.events.at(job.start_ns, partial(self._start, ranks))
            for one in self.world.background:
                self.events.at(one.begins_ns, self._background)
                self.events.at(one.ends_ns, self._background)
        self._wanted = iterations
        self._short = sum(len(progress.ends) < iterations for progress in self.progress)
        while self.now < until_ns and self._short:
            self._step(until_ns)

    def view(self, at: Rows, slot: int = 0, horizon: int = 1) -> View:
        """What a daemon shows its policy of these flows."""
        rows, network = self.network.rows[at], self.network
        job = np.array(self.job_of, np.int64)[at]
        return View(
            slot=slot,
            horizon=horizon,
            capacity=network.capacity[:-1],
            flow=at.astype(np.uint64),
            paths=network.paths[at],
            job=job,
            job_names=[each.name for each in self.world.jobs],
            remaining=network.left(at),
            guaranteed=np.zeros(len(at), np.bool_),
            sent=rows["sent"],
        )

    def _step(self, until_ns: int) -> None:
        """On to the next moment at which anything happens."""
        network, events, now = self.network, self.events, self.events.now
        network.share()
        by_itself, due = now + network.next_event(), events.next_at()
        if min(by_itself, due) >= 1 << 62:
            raise Stalled(f"at {now / SECOND:.3f} s nothing is left to happen")
        then = Nanos(min(by_itself, due, until_ns))
        elapsed = Nanos(then - now)
        for account in () if network.queued else self.accounts:
            account(now, elapsed)
        arrived = network.advance(elapsed)
        for account in self.accounts if network.queued else ():
            account(now, elapsed)  # only now it is known what has moved
        network.stale |= then == by_itself
        events.now = then
        if arrived:
            self._arrive(then, arrived)
        for rank in self._posting:
            self._look(rank)
        events.run_until(then)

    def _background(self, now: Nanos) -> None:
        self.network.set_background(self.world.background_at(now))

    def _start(self, ranks: list[_Rank], now: Nanos) -> None:
        """A job begins."""
        self.progress[ranks[0].job].began.append(now)
        for rank in ranks:
            self._compute(rank, now)

    def _compute(self, rank: _Rank, now: Nanos) -> None:
        """An iteration of a worker begins."""
        length = self.world.jobs[rank.job].compute_ns(rank.ended)
        self.events.at(now + length, partial(self._communicate, rank))

    def _communicate(self, rank: _Rank, now: Nanos) -> None:
        j = rank.job
        until = self.control.hold(now, j)
        if until > now:
            self.events.at(until, partial(self._communicate, rank))
            return
        progress = self.progress[j]
        rank.begun, rank.waits = rank.begun + 1, True
        progress.left += 1
        if rank.begun > progress.phases:
            progress.sends_since, progress.phases = now, rank.begun
        self._begin(now, j, rank.begins)
        if all(other.begun >= rank.begun for other in self._ranks[j]):
            self._begin(now, j, self._served[j])
        self._look(rank)

    def _begin(self, now: Nanos, j: int, rows: Sequence[int]) -> None:
        if rows:
            self.network.begin(rows)
            self.control.began(now, j, rows)

    def _arrive(self, now: Nanos, arrived: list[int]) -> None:
        """All of an iteration of these flows has arrived."""
        ended = [row for row in arrived if not self.network.rows["active"][row]]
        if ended:
            self.control.ended(now, ended)
        for row in arrived:
            self._arrived[row] += 1
        for row in arrived:
            for rank in self._awaiting[row]:
                self._look(rank)

    def _look(self, rank: _Rank) -> None:
        """Is there anything left that the worker waits for?"""
        if not rank.waits or any(self._arrived[row] < rank.begun for row in rank.awaits):
            return
        if all(map(self.network.posted, rank.begins)):
            rank.waits = False
            self.events.after(self.world.jobs[rank.job].latency_ns, partial(self._finish, rank))
        self._posting = [*(one for one in self._posting if one is not rank)] + [rank] * rank.waits

    def _finish(self, rank: _Rank, now: Nanos) -> None:
        """A worker has ended an iteration."""
        progress = self.progress[rank.job]
        rank.ended += 1
        progress.left -= 1
        if min(other.ended for other in self._ranks[rank.job]) > len(progress.ends):
            progress.ends.append(now)
            progress.began.append(now)
            self._short -= len(progress.ends) == self._wanted
        self._compute(rank, now)
