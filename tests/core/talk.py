# SPDX-License-Identifier: Apache-2.0
"""Daemons, their arbiters and outboxes; how late anything happens is up to the caller.

Streams are FIFO in each direction. A daemon's kernel is changed by `enforce`, so long after the
message came as the caller likes. Several arbiters hold different links.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from flowslot.protocol.negotiator import Negotiator, News
from flowslot.protocol.shards import Shards

from flowslot.arbiter import Arbiter, ArbiterConfig
from flowslot.model.units import MILLISECOND, Nanos
from flowslot.policy.base import Floats
from flowslot.policy.stagger import StaggerAllocator
from flowslot.protocol.messages import Demand, Done, FromArbiter, FromDaemon, HeartbeatEcho, Hello
from flowslot.protocol.outbox import Outbox

CAPACITY = np.array([100e6, 100e6, 60e6])
PATHS = ((0,), (1,), (0, 1), (1, 2), (0, 2))
CONFIG = ArbiterConfig()


class Process:
    """An arbiter of some links, which it numbers by itself."""

    def __init__(self, links: Sequence[int], *, partial: bool) -> None:
        self.links = list(links)
        self.arbiter = Arbiter(CAPACITY[self.links], CONFIG, StaggerAllocator(partial=partial))

    def path(self, links: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.links.index(link) for link in links if link in self.links)


@dataclass
class Lane:
    """A daemon's negotiation with one arbiter, and what is on its way."""

    negotiator: Negotiator
    process: Process
    news: deque[News] = field(default_factory=deque)
    up: deque[Hello | FromDaemon] = field(default_factory=deque)
    down: deque[FromArbiter] = field(default_factory=deque)
    old: deque[FromArbiter] = field(default_factory=lambda: deque(maxlen=64))
    outbox: Outbox = field(default_factory=lambda: Outbox(64))
    in_force: set[tuple[int, int, int]] = field(default_factory=set)
    """(session, flow, grant) of what was put into force"""


@dataclass
class Host:
    """A daemon: whom it negotiates with, and what its kernel enforces."""

    lanes: list[Lane]
    shards: Shards
    kernel: dict[int, float] = field(default_factory=dict)
    paths: dict[int, tuple[int, ...]] = field(default_factory=dict)
    incs: dict[int, int] = field(default_factory=dict)

    def put(self, flows: Sequence[int]) -> None:
        """Put into force what is granted now."""
        for flow in flows:
            rate = self.shards.grant(flow).rate
            self.kernel.pop(flow, None)
            if rate >= 0:
                self.kernel[flow] = rate


class Talk:
    """The whole. All methods take effect at `now`; only `advance` moves it."""

    def __init__(self, hosts: int = 2, held: Sequence[Sequence[int]] = ((0, 1, 2),)) -> None:
        """`held`: the links of each arbiter."""
        self.now = Nanos(1_000_000_000)
        self.processes = [Process(links, partial=len(held) > 1) for links in held]
        self.hosts = [self._host(i) for i in range(hosts)]
        self.step()
        self.advance(300)  # recovered
        for lane in self.lanes:
            self.reconnect(lane)

    def _host(self, i: int) -> Host:
        lanes = [
            Lane(
                Negotiator(
                    f"h{i}",
                    process.links,
                    slot_ns=CONFIG.slot_ns,
                    lease_ns=CONFIG.lease_ns,
                    first_session=1000 * (i + 1),
                ),
                process,
            )
            for process in self.processes
        ]
        return Host(lanes, Shards([lane.negotiator for lane in lanes]))

    @property
    def lanes(self) -> list[Lane]:
        return [lane for host in self.hosts for lane in host.lanes]

    def advance(self, milliseconds: float) -> None:
        self.now = Nanos(self.now + int(milliseconds * MILLISECOND))
        for lane in self.lanes:
            self.look(lane)

    def look(self, lane: Lane) -> None:
        """The daemon notices the end of a lease in time."""
        if lane.negotiator.check(self.now):
            self._host_of(lane).put(lane.negotiator.flows())

    def _host_of(self, lane: Lane) -> Host:
        return next(host for host in self.hosts if any(lane is own for own in host.lanes))

    # --- the daemon

    def demand(self, host: Host, flow: int, remaining: int) -> None:
        if flow not in host.paths:
            host.incs[flow] = host.incs.get(flow, 0) + 1
            host.paths[flow] = PATHS[(flow + host.incs[flow]) % len(PATHS)]
        job = f"job{flow % 2}"
        demand = Demand(flow, host.incs[flow], job, host.paths[flow], remaining)
        host.shards.demand(self.now, [demand])

    def done(self, host: Host, flow: int) -> None:
        if host.paths.pop(flow, None):
            host.kernel.pop(flow, None)
            host.shards.done([Done(flow, host.incs[flow])])

    def give_back(self, host: Host, flow: int) -> None:
        for grant in host.shards.give_back([flow]):
            host.kernel[flow] = grant.rate

    def reconnect(self, lane: Lane) -> None:
        while lane.news:
            self.enforce(lane)
        if lane.negotiator.session is not None:
            lane.negotiator.closed(self.now)
            lane.process.arbiter.goodbye(self.now, lane.negotiator.session)
        lane.up.clear()
        lane.old.extend(lane.down)
        lane.down.clear()
        lane.outbox = Outbox(64)
        self.look(lane)
        lane.up.append(lane.negotiator.connect(self.now))

    def speak(self, lane: Lane) -> None:
        """The stream takes the next message."""
        message = lane.negotiator.take_message(self.now, self.now)
        if message is None:
            return
        for ack in message.acks:
            assert (message.session, ack.flow, ack.seq) in lane.in_force, "not in force yet"
        lane.up.append(message)

    def hear(self, lane: Lane) -> None:
        """The next message of the arbiter arrives; its grants wait to be put into force."""
        if lane.down:
            message = lane.down.popleft()
            lane.old.append(message)
            lane.news.append(lane.negotiator.received(self.now, message))

    def hear_again(self, lane: Lane, which: int) -> None:
        """A message of an older stream comes (once more): it has no effect."""
        old = [m for m in lane.old if m.session != lane.negotiator.session]
        if not old:
            return
        before = str([lane.negotiator.grant(flow) for flow in range(9)])
        lease = lane.negotiator.lease_end
        news = lane.negotiator.received(self.now, old[which % len(old)])
        assert news == News(news.session)
        assert before == str([lane.negotiator.grant(flow) for flow in range(9)])
        assert lane.negotiator.lease_end == lease
        lane.negotiator.enforced(news)

    def enforce(self, lane: Lane) -> None:
        if not lane.news:
            return
        news, negotiator = lane.news.popleft(), lane.negotiator
        if negotiator.live:
            changed = [*news.changes.lowered, *news.changes.raised]
            began = negotiator.flows() if news.began else []
            host = self._host_of(lane)
            host.put([*began, *(grant.flow for grant in changed if grant.flow in host.paths)])
        lane.in_force |= {(news.session, ack.flow, ack.seq) for ack in news.changes.acks}
        negotiator.enforced(news)

    # --- the arbiters

    def arrive(self, lane: Lane) -> None:
        """The next message of the daemon arrives."""
        if not lane.up:
            return
        message, process = lane.up.popleft(), lane.process
        arbiter = process.arbiter
        if isinstance(message, Hello):
            arbiter.hello(self.now, message)
            return
        arbiter.done(self.now, message.session, message.dones)
        demands = [replace(d, links=process.path(d.links)) for d in message.demands]
        refusals = arbiter.demand(self.now, message.session, demands)
        arbiter.ack(self.now, message.session, message.acks)
        echo = None
        if message.heartbeat and arbiter.heartbeat(self.now, message.session):
            echo = HeartbeatEcho(message.heartbeat.n, self.now)
        assert lane.outbox.post(refusals=refusals, echo=echo)

    def step(self) -> None:
        for process in self.processes:
            lanes = {x.negotiator.session: x for x in self.lanes if x.process is process}
            for session, grants in process.arbiter.step(self.now).items():
                if session in lanes:
                    lanes[session].outbox.post(grants)

    def send(self, lane: Lane) -> None:
        """The arbiter's stream takes what waits."""
        if lane.outbox and lane.negotiator.session is not None:
            lane.down.append(lane.outbox.take(lane.negotiator.session))

    # --- all

    def exchange(self, rounds: int = 20, milliseconds: float = 1.0) -> None:
        """Everything happens promptly for a while."""
        for _ in range(rounds):
            self.advance(milliseconds)
            for lane in self.lanes:
                if lane.negotiator.session is None:
                    self.reconnect(lane)
                for work in (self.speak, self.arrive, self.arrive):
                    work(lane)
            self.step()
            for lane in self.lanes:
                for work in (self.send, self.hear, self.enforce):
                    work(lane)
            self.check()

    def enforced(self, process: Process) -> Floats:
        """What all kernels enforce of what this arbiter has a say in, on each of its links."""
        load = np.zeros(len(CAPACITY))
        for lane in self.lanes:
            one, host = lane.negotiator, self._host_of(lane)
            # It has a say from when the news that it has begun is in force.
            begins = any(news.began for news in lane.news)
            live = one.live and not begins and self.now < (one.lease_end or 0)
            if lane.process is process and live:
                for flow, rate in host.kernel.items():
                    if one.grant(flow).rate >= 0:
                        load[list(host.paths[flow])] += rate
        return load[process.links]

    def check(self) -> None:
        """What is enforced is committed: so leases end at the daemon first, and lowers count
        until they are in force; and it fits."""
        for process in self.processes:
            load = self.enforced(process)
            process.arbiter.heartbeat(self.now, -1)  # ends leases that are over, nothing else
            assert np.all(load <= process.arbiter.commitments() * (1 + 1e-9) + 1e-3)
            assert np.all(load <= CONFIG.target * CAPACITY[process.links] * (1 + 1e-9))
