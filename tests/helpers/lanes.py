# SPDX-License-Identifier: Apache-2.0
"""What there is in a World (see world.py): switch processes, daemons, lanes between them."""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from wires import Wire

from flowslot.arbiter import ArbiterConfig
from flowslot.model.errors import SessionEnded
from flowslot.model.units import Nanos
from flowslot.policy.base import Floats
from flowslot.policy.stagger import StaggerAllocator
from flowslot.protocol.host import Changes, Host
from flowslot.protocol.messages import Demand, FromArbiter, FromDaemon, Opening
from flowslot.protocol.session import Session
from flowslot.protocol.switch import Switch

CAPACITY = np.array([100e6, 100e6, 60e6])
NAMES = ("a", "b", "c")
PATHS = ((0,), (1,), (0, 1), (1, 2), (0, 2))
OWN = (0, 2)
"""Links that each host takes for its own while no switch process is live."""
CONFIG = ArbiterConfig()
LIMIT = CONFIG.target * CAPACITY
STREAMS, SEEN = 3, 64
"""Streams of a lane that still deliver: the present one, and some that were given up. Messages kept
for repetition, in each direction of a stream."""


@dataclass(eq=False)
class Process:
    """A switch process. Each life of it knows nothing of the one before."""

    links: list[int]
    config: ArbiterConfig
    partial: bool
    switch: "Switch[Stream]" = field(init=False)
    life: int = 0
    load: Floats = field(init=False)
    """When it was last looked at."""
    greeted: bool = False
    """Since then a daemon has said Hello, before the arbiter had recovered."""

    def begin(self, now: Nanos) -> None:
        names, goodput = [NAMES[link] for link in self.links], CAPACITY[self.links].tolist()
        allocator = StaggerAllocator(partial=self.partial)
        self.switch = Switch(now, names, goodput, self.config, allocator)
        self.switch.decide(now)
        self.load = np.zeros(len(self.links))
        self.life += 1


class Stream:
    """One stream to one life of a process. `up`, `down`: what is on its way, a message (True) or
    the end of the stream. `seen_up`, `seen_down`: what has arrived."""

    def __init__(self, process: Process, wire: Wire) -> None:
        self.process, self.life, self.wire = process, process.life, wire
        self.up, self.down = deque[bool](), deque[bool]()
        self.seen_up = deque[tuple[FromDaemon, Opening | None]](maxlen=SEEN)
        self.seen_down = deque[FromArbiter](maxlen=SEEN)
        self.ended = False  # by the switch process

    def arrive(self, now: Nanos, message: FromDaemon, opening: Opening | None) -> None:
        """At the process, if that still is the one of the stream's beginning."""
        process = self.process
        if self.life != process.life:
            return  # nobody is there any more
        try:
            if opening is not None:
                process.switch.join(now, self, opening)
                process.greeted |= not process.switch.arbiter.recovered(now)
            process.switch.received(now, self, message, now)
        except SessionEnded:
            self.leave(now)

    def leave(self, now: Nanos) -> None:
        """The process has nothing to do with it any more."""
        if not self.ended:
            self.ended = True
            self.process.switch.leave(now, self)
            self.down.append(False)


@dataclass(eq=False)
class Lane:
    """A daemon's session with one process. `in_force`: (session, flow, grant) of what was put into
    force."""

    process: Process
    session: Session
    streams: list[Stream]
    open: bool = False
    in_force: set[tuple[int, int, int]] = field(default_factory=set)


@dataclass(eq=False)
class Daemon:
    """A host: its daemon, the demands made, and what its kernel enforces. `news`: what has come on
    which lane, and is not in force yet."""

    host: Host
    lanes: list[Lane]
    demands: dict[int, Demand] = field(default_factory=dict)
    incs: dict[int, int] = field(default_factory=dict)
    kernel: dict[int, float] = field(default_factory=dict)
    news: deque[tuple[int, Changes]] = field(default_factory=deque)
    beaten: int = 0

    def load(self, now: Nanos, lane: Lane) -> Floats:
        """What the kernel enforces of what this lane's process has a say in, float64[links]."""
        load, session = np.zeros(len(CAPACITY)), lane.session
        # It has a say from when the news that it has begun is in force.
        waiting = (changes.news for k, changes in self.news if self.lanes[k] is lane)
        begins = any(news.began for news in waiting if news is not None)
        if session.live and not begins and now < (session.lease_end or 0):
            for flow, rate in self.kernel.items():
                if session.grant(flow).rate >= 0:
                    load[list(self.demands[flow].links)] += rate
        return load

    def believes(self) -> str:
        """All grants and leases."""
        leases = [lane.session.lease_end for lane in self.lanes]
        return repr(([self.host.grant(flow) for flow in range(9)], leases))
