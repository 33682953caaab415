# SPDX-License-Identifier: Apache-2.0
"""Control planes without messages: fixed shares, and an arbiter that knows everything."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from flowslot.arbiter import ArbiterConfig
from flowslot.model.slot import DEFAULT_SLOT
from flowslot.model.units import Nanos
from flowslot.policy.base import AllocationState, Allocator, HostPolicy, Keys
from flowslot_sim.fluid import FIRST_WINDOW, TAKEN_BYTES
from flowslot_sim.observed import NEVER, Observer
from flowslot_sim.simulation import Control, Simulation


class Fixed(Control):
    """What a host policy decides once, without grants, holds for ever, and not a byte more."""

    def __init__(self, sim: Simulation, policy: HostPolicy) -> None:
        self._sim = sim
        self._policy = policy

    def start(self) -> None:
        """See Control."""
        pace = self._policy.decide(Nanos(0), self._sim.view(np.arange(len(self._sim.flows))))
        if pace is not None:
            self._sim.network.rows["holds"] = FIRST_WINDOW * TAKEN_BYTES
            self._sim.network.pace(pace.flows.astype(np.intp), pace.schedule.at(0), pace.ceilings)


class Exact(Control):
    """An allocator that sees everything at once, and whose rates are in force at once."""

    def __init__(self, sim: Simulation, allocator: Allocator) -> None:
        self._sim = sim
        self._allocator = allocator
        self._observer = Observer(sim)
        self._due = False
        bunches = self._observer.bunches
        n = len(bunches)
        self._capacity = np.append(np.array(sim.world.capacity) * ArbiterConfig().target, np.inf)
        self._paths = sim.network.paths[[bunch.rows[0] for bunch in bunches]]
        self._names = [job.name for job in sim.world.jobs]
        self._job = np.array([self._names.index(bunch.job) for bunch in bunches], np.int64)
        self._flow = np.arange(n, dtype=np.uint64)
        self._sockets = np.array([len(bunch.rows) for bunch in bunches], np.float64)
        self._goal = np.zeros(n)
        self._all = np.arange(len(sim.flows))
        self._unbounded = np.full(len(sim.flows), math.inf)

    def start(self) -> None:
        """See Control."""
        self._tick(self._sim.now)

    def began(self, now: Nanos, job: int, flows: Sequence[int]) -> None:
        """See Control."""
        self._observer.began(now, flows)
        self._ask(now)

    def ended(self, now: Nanos, flows: Sequence[int]) -> None:
        """See Control."""
        self._observer.ended(now, flows)
        self._ask(now)

    def _tick(self, now: Nanos) -> None:
        self._ask(now)
        self._sim.events.after(DEFAULT_SLOT, self._tick)

    def _ask(self, now: Nanos) -> None:
        """Decide, once all that happens now has happened."""
        if not self._due:
            self._due = True
            self._sim.events.at(now, self._decide)

    def _decide(self, now: Nanos) -> None:
        self._due = False
        state = self._state(now)
        self._goal = self._allocator.allocate(state, now)
        parts = self._observer.split(self._goal)
        self._sim.network.pace(self._all, parts, self._unbounded)
        changes = self._allocator.next_change(state)
        change = float(changes[changes > 0].min(initial=np.inf))
        if change < np.inf:
            self._sim.events.at(Nanos(now + int(change) + 1), self._ask)

    def _state(self, now: Nanos) -> AllocationState:
        seen = self._observer
        active, n = seen.active > 0, len(seen.bunches)
        idle = np.where(seen.idle_since != NEVER, now - seen.idle_since, np.inf)
        return AllocationState(
            paths=self._paths,
            capacity=self._capacity,
            goodput=self._sim.network.capacity,
            job=self._job,
            job_names=self._names,
            jobs=Keys.lasting(len(self._names)),
            flow=self._flow,
            aggregate=np.arange(n),
            aggregates=Keys.lasting(n),
            remaining=seen.remaining(),
            cap=np.full(n, np.inf),
            sockets=self._sockets,
            wait_ns=np.where(active, now - seen.onset, 0).astype(np.float64),
            period_ns=seen.period.astype(np.float64),
            due_ns=(seen.due(now) - now).astype(np.float64),
            next_bytes=seen.expected.copy(),
            idle_ns=np.where(active, 0.0, idle),
            goal=self._goal,
        )
