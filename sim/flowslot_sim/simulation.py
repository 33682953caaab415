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
    `ends`."""

    began: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    left: int = 0
    """Flows that still send in this iteration."""
    sends_since: int = 0
    """When they have begun, ns."""
    phases: int = 0
    """So often they have."""


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
        self._wanted = self._short = 0  # iterations, and jobs that have done fewer
        self.accounts: list[Callable[[Nanos, Nanos], None]] = []
        """Told of each stretch of time, before it passes: now, and ns until rates may change."""
        self.control = make(self)

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
            for j, job in enumerate(self.world.jobs):
                self.events.at(job.start_ns, partial(self._compute, j))
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
        phases = np.array([progress.phases for progress in self.progress])[job]
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
            sent=np.maximum(phases - 1, 0) * rows["total"] + rows["sent"],
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
        ended = network.advance(elapsed)
        for account in self.accounts if network.queued else ():
            account(now, elapsed)  # only now it is known what has moved
        network.stale |= then == by_itself
        events.now = then
        if ended:
            self._end(then, ended)
        events.run_until(then)

    def _background(self, now: Nanos) -> None:
        self.network.set_background(self.world.background_at(now))

    def _compute(self, j: int, now: Nanos) -> None:
        """An iteration of job j begins."""
        progress = self.progress[j]
        progress.began.append(now)
        length = self.world.jobs[j].compute_ns(len(progress.ends))
        self.events.at(now + length, partial(self._communicate, j))

    def _communicate(self, j: int, now: Nanos) -> None:
        until = self.control.hold(now, j)
        if until > now:
            self.events.at(until, partial(self._communicate, j))
            return
        rows = self.rows_of[j]
        progress = self.progress[j]
        progress.left, progress.sends_since = len(rows), now
        progress.phases += 1
        self.network.begin(rows)
        self.control.began(now, j, rows)

    def _end(self, now: Nanos, ended: list[int]) -> None:
        self.control.ended(now, ended)
        for row in ended:
            j = self.job_of[row]
            self.progress[j].left -= 1
            if not self.progress[j].left:
                self.events.after(self.world.jobs[j].latency_ns, partial(self._finish, j))

    def _finish(self, j: int, now: Nanos) -> None:
        ends = self.progress[j].ends
        ends.append(now)
        self._short -= len(ends) == self._wanted
        self._compute(j, now)
