# SPDX-License-Identifier: Apache-2.0
"""Negotiators, an arbiter and its outboxes; how late anything happens is up to the caller.

Streams are FIFO in each direction. A daemon's kernel is changed by `enforce`, so long after the
message came as the caller likes.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from flowslot.arbiter import Arbiter, ArbiterConfig
from flowslot.arbiter.outbox import Outbox
from flowslot.messages import Demand, Done, FromArbiter, FromDaemon, HeartbeatEcho, Hello
from flowslot.negotiator import Negotiator, News
from flowslot.policy.base import Floats
from flowslot.policy.stagger import StaggerAllocator
from flowslot.units import MILLISECOND, Nanos

CAPACITY = np.array([100e6, 100e6, 60e6])
PATHS = ((0,), (1,), (0, 1), (1, 2), (0, 2))
CONFIG = ArbiterConfig()


@dataclass
class Host:
    """A daemon: what it negotiates, what its kernel enforces, and what is on its way."""

    negotiator: Negotiator
    kernel: dict[int, float] = field(default_factory=dict)
    paths: dict[int, tuple[int, ...]] = field(default_factory=dict)
    inc: int = 0
    news: deque[News] = field(default_factory=deque)
    up: deque[Hello | FromDaemon] = field(default_factory=deque)
    down: deque[FromArbiter] = field(default_factory=deque)
    old: deque[FromArbiter] = field(default_factory=lambda: deque(maxlen=64))
    outbox: Outbox = field(default_factory=lambda: Outbox(64))
    in_force: set[tuple[int, int, int]] = field(default_factory=set)
    """(session, flow, grant) of what was put into force"""


class Talk:
    """The whole. All methods take effect at `now`; only `advance` moves it."""

    def __init__(self, hosts: int = 2) -> None:
        self.now = Nanos(1_000_000_000)
        self.arbiter = Arbiter(CAPACITY, CONFIG, StaggerAllocator())
        self.hosts = [
            Host(
                Negotiator(
                    f"h{i}",
                    range(len(CAPACITY)),
                    slot_ns=CONFIG.slot_ns,
                    lease_ns=CONFIG.lease_ns,
                    first_session=1000 * (i + 1),
                )
            )
            for i in range(hosts)
        ]
        self.arbiter.step(self.now)
        self.advance(300)  # recovered
        for host in self.hosts:
            self.reconnect(host)

    def advance(self, milliseconds: float) -> None:
        self.now = Nanos(self.now + int(milliseconds * MILLISECOND))
        for host in self.hosts:
            if host.negotiator.check(self.now):
                host.kernel.clear()

    # --- the daemon

    def demand(self, host: Host, flow: int, remaining: int) -> None:
        if flow not in host.paths:
            host.inc += 1
            host.paths[flow] = PATHS[(flow + len(host.up)) % len(PATHS)]
        job = f"job{flow % 2}"
        host.negotiator.demand(self.now, [Demand(flow, host.inc, job, host.paths[flow], remaining)])

    def done(self, host: Host, flow: int) -> None:
        if host.paths.pop(flow, None):
            host.kernel.pop(flow, None)
            host.negotiator.done([Done(flow, host.inc)])

    def give_back(self, host: Host, flow: int) -> None:
        for grant in host.negotiator.give_back([flow]):
            if flow in host.kernel:
                host.kernel[flow] = grant.rate

    def reconnect(self, host: Host) -> None:
        while host.news:
            self.enforce(host)
        if host.negotiator.session is not None:
            host.negotiator.closed(self.now)
            self.arbiter.goodbye(self.now, host.negotiator.session)
        host.up.clear()
        host.old.extend(host.down)
        host.down.clear()
        host.outbox = Outbox(64)
        if host.negotiator.check(self.now):
            host.kernel.clear()
        host.up.append(host.negotiator.connect(self.now))

    def speak(self, host: Host) -> None:
        """The stream takes the next message."""
        message = host.negotiator.take_message(self.now, self.now)
        if message is None:
            return
        for ack in message.acks:
            assert (message.session, ack.flow, ack.seq) in host.in_force, "not in force yet"
        host.up.append(message)

    def hear(self, host: Host) -> None:
        """The next message of the arbiter arrives; its grants wait to be put into force."""
        if host.down:
            message = host.down.popleft()
            host.old.append(message)
            host.news.append(host.negotiator.received(self.now, message))

    def hear_again(self, host: Host, which: int) -> None:
        """A message of this stream or an older one comes (once more): it has no effect."""
        if host.old and not host.news:
            before = {flow: host.negotiator.grant(flow) for flow in host.paths}
            lease = host.negotiator.lease_end
            message = host.old[which % len(host.old)]
            if message.session == host.negotiator.session:
                return
            news = host.negotiator.received(self.now, message)
            assert not (news.changes.acks or news.changes.raised or news.changes.lowered)
            assert str(before) == str({f: host.negotiator.grant(f) for f in host.paths})
            assert host.negotiator.lease_end == lease
            host.negotiator.enforced(news)

    def enforce(self, host: Host) -> None:
        if not host.news:
            return
        news, negotiator = host.news.popleft(), host.negotiator
        if negotiator.live:
            changed = [*news.changes.lowered, *news.changes.raised]
            flows = negotiator.flows() if news.began else [grant.flow for grant in changed]
            host.kernel |= {f: negotiator.grant(f).rate for f in flows if f in host.paths}
        host.in_force |= {(news.session, ack.flow, ack.seq) for ack in news.changes.acks}
        negotiator.enforced(news)

    # --- the arbiter

    def arrive(self, host: Host) -> None:
        """The next message of the daemon arrives."""
        if not host.up:
            return
        message, arbiter = host.up.popleft(), self.arbiter
        if isinstance(message, Hello):
            arbiter.hello(self.now, message)
            return
        arbiter.done(self.now, message.session, message.dones)
        refusals = arbiter.demand(self.now, message.session, message.demands)
        arbiter.ack(self.now, message.session, message.acks)
        echo = None
        if message.heartbeat and arbiter.heartbeat(self.now, message.session):
            echo = HeartbeatEcho(message.heartbeat.n, self.now)
        assert host.outbox.post(refusals=refusals, echo=echo)

    def step(self) -> None:
        sessions = {host.negotiator.session: host for host in self.hosts}
        for session, grants in self.arbiter.step(self.now).items():
            if session in sessions:
                sessions[session].outbox.post(grants)

    def send(self, host: Host) -> None:
        """The arbiter's stream takes what waits."""
        if host.outbox and host.negotiator.session is not None:
            host.down.append(host.outbox.take(host.negotiator.session))

    # --- all

    def exchange(self, rounds: int = 20, milliseconds: float = 1.0) -> None:
        """Everything happens promptly for a while."""
        works: tuple[Callable[[Host], None], ...] = (self.speak, self.arrive)
        answers: tuple[Callable[[Host], None], ...] = (self.send, self.hear, self.enforce)
        for _ in range(rounds):
            self.advance(milliseconds)
            for host in self.hosts:
                if host.negotiator.session is None:
                    self.reconnect(host)
                for work in (*works, self.arrive):
                    work(host)
            self.step()
            for host in self.hosts:
                for work in answers:
                    work(host)
            self.check()

    def enforced(self) -> Floats:
        """What all kernels enforce, on each link."""
        load = np.zeros(len(CAPACITY))
        for host in self.hosts:
            end = host.negotiator.lease_end
            if host.negotiator.live and end is not None and self.now < end:
                for flow, rate in host.kernel.items():
                    load[list(host.paths[flow])] += rate
        return load

    def check(self) -> None:
        """What is enforced is committed: so leases end at the daemon first, and lowers count
        until they are in force; and it fits."""
        load = self.enforced()
        self.arbiter.heartbeat(self.now, -1)  # ends leases that are over, nothing else
        assert np.all(load <= self.arbiter.commitments() * (1 + 1e-9) + 1e-3)
        assert np.all(load <= CONFIG.target * CAPACITY * (1 + 1e-9))
