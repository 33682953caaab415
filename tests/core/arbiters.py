# SPDX-License-Identifier: Apache-2.0
"""An arbiter to talk to, for tests of single rules."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from flowslot.arbiter import Arbiter, ArbiterConfig
from flowslot.model.units import MILLISECOND, Nanos
from flowslot.policy.base import AllocationState, Allocator, Floats
from flowslot.policy.stagger import StaggerAllocator
from flowslot.protocol.messages import Ack, Demand, Done, Grant, Held, Hello

MS = int(MILLISECOND)
LEASE = 120
"""ms"""


def at(milliseconds: float) -> Nanos:
    return Nanos(int(milliseconds * MS))


class Wanted(Allocator):
    """An allocator that gives each flow what the test wants."""

    def __init__(self) -> None:
        self.rates: dict[int, float] = {}

    def allocate(self, state: AllocationState, now: Nanos) -> Floats:
        return np.array([self.rates.get(int(f), 0.0) for f in state.flow])


class Counting(StaggerAllocator):
    """Counts how often it is asked; `halve` makes all targets of one run smaller."""

    calls = 0
    halve = False

    def allocate(self, state: AllocationState, now: Nanos) -> Floats:
        self.calls += 1
        rates = super().allocate(state, now)
        return rates / 2 if self.halve else rates


class Bench:
    """An arbiter of two links of 100 bytes/s or more with sessions 1 and 2, past its recovery
    unless `time`, ms, is earlier."""

    def __init__(
        self,
        flows: Mapping[int, tuple[int, ...]] | None = None,
        allocator: Allocator | None = None,
        goodput: float = 100.0,
        time: int = 200,
        **config: Any,
    ) -> None:
        """`flows`: the session and the links of those that want to send from the beginning."""
        self.want = Wanted()
        settings = ArbiterConfig(target=1.0, lease_ns=at(LEASE), **config)
        self.arbiter = Arbiter([goodput, goodput], settings, allocator or self.want)
        self.arbiter.step(at(0))
        self.time = time
        for session in (1, 2):
            self.hello(session)
        for flow, (session, *links) in (flows or {}).items():
            assert self.demand(flow, *links, session=session) == []

    def now(self) -> Nanos:
        return at(self.time)

    def hello(self, session: int, *held: Held, daemon: int | None = None, owner: str = "") -> None:
        self.arbiter.hello(self.now(), Hello(f"h{daemon or session}", session, held, owner))

    def demand(self, flow: int, /, *links: int, session: int = 1, **more: Any) -> list[str]:
        demand = replace(Demand(flow, 1, "job", links or (0,), 1000), **more)
        return [r.reason for r in self.arbiter.demand(self.now(), session, [demand])]

    def done(self, flow: int, inc: int = 1, session: int = 1) -> None:
        self.arbiter.done(self.now(), session, [Done(flow, inc)])

    def step(self, **rates: float) -> dict[tuple[int, int], Grant]:
        """Let the allocator want `f7=50.0`, and return the grants by session and flow."""
        self.want.rates.update({int(name[1:]): rate for name, rate in rates.items()})
        if rates:  # that is no news of a daemon
            self.arbiter._flows.look_at_all()
        self.time += 1
        sent = self.arbiter.step(self.now())
        return {(session, g.flow): g for session, grants in sent.items() for g in grants}

    def ack(self, grant: Grant, session: int = 1) -> None:
        self.arbiter.ack(self.now(), session, [Ack(grant.flow, grant.inc, grant.seq)])

    def keep_alive(self, until: int, *sessions: int) -> None:
        while self.time < until:
            self.time += 50
            for session in sessions:
                assert self.arbiter.heartbeat(self.now(), session)

    def committed(self) -> list[float]:
        return [float(c) for c in self.arbiter.commitments()]
