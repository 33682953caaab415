# SPDX-License-Identifier: Apache-2.0
"""Daemons (grant books) and one arbiter over an adversarial network, for property tests.

Every stream is FIFO in each direction, but how late anything arrives is up to the caller, and
anything that arrived may arrive again, also from streams that were given up.
"""

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np
from flowslot.protocol.grantbook import GrantBook

from flowslot.arbiter import Arbiter, ArbiterConfig
from flowslot.model.errors import ScheduleRefused
from flowslot.model.units import MILLISECOND, Nanos
from flowslot.policy.base import Floats
from flowslot.policy.stagger import StaggerAllocator
from flowslot.protocol.messages import Ack, Demand, Grant, Hello

CAPACITY = np.array([100e6, 100e6, 60e6])
PATHS = ((0,), (1,), (0, 1), (1, 2), (0, 2))
CONFIG = ArbiterConfig()
GATHERING = replace(CONFIG, coalesce_ns=Nanos(4 * MILLISECOND))
MAX_LEFT = 64  # commands kept for repetition


@dataclass
class Stream:
    """One connection. `arbiter`: the process it leads to."""

    session: int
    arbiter: int
    up: deque[Callable[[], None]] = field(default_factory=deque)
    down: deque[list[Grant] | int] = field(default_factory=deque)
    seen_up: deque[Callable[[], None]] = field(default_factory=lambda: deque(maxlen=MAX_LEFT))
    seen_down: deque[list[Grant] | int] = field(default_factory=lambda: deque(maxlen=MAX_LEFT))


@dataclass
class Host:
    """A daemon: its grant book, the demands it has made, and what its kernel enforces."""

    name: str
    book: GrantBook
    demands: dict[int, Demand] = field(default_factory=dict)
    incs: dict[int, int] = field(default_factory=dict)
    streams: list[Stream] = field(default_factory=list)
    last_beat: int = 0


class World:
    """The whole. All methods take effect at `now`; only `advance` moves it."""

    def __init__(self, hosts: int = 3, *, gathers: bool = False) -> None:
        self.config = GATHERING if gathers else CONFIG
        self.now = Nanos(1_000_000_000)
        self.generation = 0
        self.sessions = 0
        self.beats = 0
        self.restarts = 0
        self.load = np.zeros(len(CAPACITY))
        self.greeted = False
        self.ghosts: list[tuple[int, Floats]] = []  # (until, load): kernels of dead daemons
        self.arbiter = self._new_arbiter()
        self.hosts = [self._new_host(f"h{i}") for i in range(hosts)]
        for i in range(hosts):
            self.reconnect(i)

    def _new_arbiter(self) -> Arbiter:
        return Arbiter(CAPACITY, self.config, StaggerAllocator())

    def _new_host(self, name: str) -> Host:
        self.restarts += 1
        return Host(name, GrantBook(f"{name}#{self.restarts}", CONFIG.lease_ns))

    # --- what can happen

    def advance(self, milliseconds: float) -> None:
        self.now = Nanos(self.now + int(milliseconds * MILLISECOND))

    def reconnect(self, i: int) -> None:
        host = self.hosts[i]
        if host.streams:
            old = host.streams[-1].session
            host.streams[-1].up.append(lambda: self.arbiter.goodbye(self.now, old))
        self.sessions += 1
        stream = Stream(self.sessions, self.generation)
        host.streams = [*host.streams[-2:], stream]
        host.book.cut(Nanos(self.now + 2 * CONFIG.slot_ns))
        hello = host.book.connect(self.now, stream.session)
        stream.up.append(lambda: self._greet(hello))
        if host.demands:
            self._send_demands(stream, list(host.demands.values()))

    def _greet(self, hello: Hello) -> None:
        self.greeted = True
        self.arbiter.hello(self.now, hello)

    def crash(self, i: int) -> None:
        """The daemon dies: its kernel enforces what it had until the lease ends."""
        book = self.hosts[i].book
        if not book.expired(self.now):
            self.ghosts.append((int(book.lease_end or 0), self._load(self.hosts[i])))
        old = self.hosts[i].streams[-1]
        old.up.append(lambda s=old.session: self.arbiter.goodbye(self.now, s))  # type: ignore[misc]
        streams = self.hosts[i].streams
        self.hosts[i] = self._new_host(f"h{i}")
        self.hosts[i].streams = streams
        self.reconnect(i)

    def amnesia(self) -> None:
        """The arbiter restarts without any memory; all streams to the old one break."""
        self.generation += 1
        self.arbiter = self._new_arbiter()
        self.load = np.zeros(len(CAPACITY))
        self.arbiter.step(self.now)

    def demand(self, i: int, flow: int, remaining: int, idle: bool, cap: float) -> None:
        """One of a few flows per host; two jobs span all hosts."""
        host = self.hosts[i]
        inc = host.incs[flow] = host.incs.get(flow, 0) + (0 if flow in host.demands else 1)
        host.demands[flow] = Demand(
            flow=flow,
            inc=inc,
            job=f"job{(flow + i) % 2}",
            links=PATHS[(flow + i) % len(PATHS)],
            remaining=0 if idle else remaining,
            cap=cap,
            period_ns=300 * MILLISECOND,
            next_in_ns=50 * MILLISECOND,
            next_bytes=remaining if idle else 0,
        )
        self._send_demands(host.streams[-1], [host.demands[flow]])

    def _send_demands(self, stream: Stream, demands: list[Demand]) -> None:
        session = stream.session
        stream.up.append(lambda: void(self.arbiter.demand(self.now, session, demands)))

    def give_back(self, i: int, flow: int) -> None:
        """The flow's phase ends: its daemon stops using the grant, and then says so."""
        host = self.hosts[i]
        if flow in host.demands:
            host.book.give_back(flow)
            idle = replace(host.demands[flow], remaining=0, gave_back=host.book.given_back(flow))
            self._send_demands(host.streams[-1], [idle])
            host.demands[flow] = replace(idle, gave_back=0)

    def end(self, i: int, flow: int) -> None:
        host = self.hosts[i]
        if flow in host.demands:
            del host.demands[flow]
            done = [host.book.drop(flow, host.incs[flow])]
            session = host.streams[-1].session
            host.streams[-1].up.append(lambda: self.arbiter.done(self.now, session, done))

    def beat(self, i: int) -> None:
        host, stream = self.hosts[i], self.hosts[i].streams[-1]
        self.beats += 1
        n = self.beats
        host.last_beat = self.now
        host.book.sent_heartbeat(self.now, n)

        def arrive() -> None:
            if self.arbiter.heartbeat(self.now, stream.session):
                stream.down.append(n)

        stream.up.append(arrive)

    def schedule(self, key: int, rate: float, offset: int) -> None:
        with suppress(ScheduleRefused):
            self.arbiter.update_schedule(self.now, key, [key % 3], [rate] * 2, offset)

    # --- delivery

    def deliver_up(self, i: int, which: int = -1, again: int | None = None) -> bool:
        """The next message of one of the host's streams, or an earlier one once more."""
        streams = self.hosts[i].streams
        stream = streams[which % len(streams)]
        if again is not None:
            if not stream.seen_up:
                return False
            message = stream.seen_up[again % len(stream.seen_up)]
        elif stream.up:
            message = stream.up.popleft()
            stream.seen_up.append(message)
        else:
            return False
        if stream.arbiter == self.generation:
            message()
        return True

    def step(self) -> int:
        """The arbiter decides; returns the number of grants."""
        sent = 0
        for session, grants in self.arbiter.step(self.now).items():
            stream = self._stream(session)
            if stream is not None:
                stream.down.append(grants)
                sent += len(grants)
        return sent

    def deliver_down(self, i: int, which: int = -1, again: int | None = None) -> bool:
        host = self.hosts[i]
        stream = host.streams[which % len(host.streams)]
        if again is not None:
            if not stream.seen_down:
                return False
            message = stream.seen_down[again % len(stream.seen_down)]
        elif stream.down:
            message = stream.down.popleft()
            stream.seen_down.append(message)
        else:
            return False
        if isinstance(message, int):
            host.book.echoed(self.now, message)
        else:
            changes = host.book.receive(self.now, stream.session, message)
            if changes.acks:
                self._send_acks(stream, changes.acks)
        return True

    def _send_acks(self, stream: Stream, acks: list[Ack]) -> None:
        stream.up.append(lambda: self.arbiter.ack(self.now, stream.session, acks))

    def _stream(self, session: int) -> Stream | None:
        for host in self.hosts:
            for stream in host.streams:
                if stream.session == session and stream.arbiter == self.generation:
                    return stream
        return None

    def report(self) -> None:
        """All hosts report all flows, as at every slot: puts right a repeated old demand."""
        for host in self.hosts:
            if host.demands:
                self._send_demands(host.streams[-1], list(host.demands.values()))

    def exchange(self, rounds: int, milliseconds: float = 1.0) -> int:
        """Everything arrives promptly for a while; returns the grants of the last third."""
        late = 0
        for r in range(rounds):
            self.advance(milliseconds)
            for i, host in enumerate(self.hosts):
                stale = host.streams[-1].arbiter != self.generation
                if host.book.expired(self.now) or host.book.session is None or stale:
                    self.reconnect(i)
                if self.now - host.last_beat >= CONFIG.lease_ns // 4:
                    self.beat(i)
                for which in range(len(host.streams)):
                    while self.deliver_up(i, which):
                        pass
            grants = self.step()
            late += grants if r >= 2 * rounds // 3 else 0
            for i, host in enumerate(self.hosts):
                for which in range(len(host.streams)):
                    while self.deliver_down(i, which):
                        pass
            self.check()
        return late

    # --- what must always hold

    def _load(self, host: Host) -> Floats:
        load = np.zeros(len(CAPACITY))
        for flow, demand in host.demands.items():
            load[list(demand.links)] += host.book.grant(flow).rate
        return load

    def enforced(self) -> Floats:
        """What all kernels enforce at this moment, on each link."""
        total = np.zeros(len(CAPACITY))
        for host in self.hosts:
            if not host.book.expired(self.now):
                total += self._load(host)
        self.ghosts = [ghost for ghost in self.ghosts if ghost[0] > self.now]
        return total + sum((load for _, load in self.ghosts), np.zeros(len(CAPACITY)))

    def check(self) -> None:
        limit = CONFIG.target * CAPACITY * (1 + 1e-12)
        assert np.all(self.enforced() <= limit), (self.enforced(), limit)
        # Nothing that the arbiter decides takes the load above the limit. A Hello may: it can tell
        # of grants of an earlier arbiter that are void by the time it arrives.
        load = self.arbiter.load_table(self.now).max(axis=1)
        assert self.greeted or np.all(load <= np.maximum(limit, self.load))
        self.load, self.greeted = load, False


def void(value: object) -> None:
    """Drop a result."""
