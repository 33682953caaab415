# SPDX-License-Identifier: Apache-2.0
"""A simulated switch process: core's arbiter behind streams, as `flowslot-switch` runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from flowslot.arbiter import Arbiter, ArbiterConfig, SessionState
from flowslot.model.errors import ProtocolError
from flowslot.model.units import MILLISECOND, Nanos
from flowslot.policy.base import Allocator
from flowslot.protocol.messages import FromArbiter, FromDaemon, HeartbeatEcho, Hello
from flowslot.protocol.outbox import Outbox
from flowslot_sim.events import Event, Events
from flowslot_sim.plane.wire import Clock, Stream

REST_NS = MILLISECOND // 2
"""News are decided on at once when so much time has passed since the last decision,"""
SPACING_NS = MILLISECOND
"""and otherwise so much later."""


@dataclass(slots=True)
class _Peer:
    """A daemon's open stream."""

    stream: Stream
    session: int
    outbox: Outbox
    deliver: Callable[[Nanos, FromArbiter], None]


class SwitchNode:
    """The arbiter of `links`, numbered as in the topology. A dead one accepts no streams."""

    def __init__(
        self,
        *,
        events: Events,
        clock: Clock,
        links: Sequence[int],
        capacity: Sequence[float],
        make_allocator: Callable[[], Allocator],
        config: ArbiterConfig,
    ) -> None:
        """`capacity`: goodput of all links, payload bytes/s."""
        self.links = tuple(links)
        self.alive = False
        self.messages = 0
        """Sent, over all lives."""
        self.steps = 0
        self._events = events
        self._clock = clock
        self._index = {link: i for i, link in enumerate(links)}
        self._goodput = [capacity[link] for link in links]
        self._make_allocator = make_allocator
        self._config = config
        self._peers: dict[int, _Peer] = {}
        self._alarm: Event | None = None
        self._decided_at = Nanos(0)
        self._counts = [0, 0, 0, 0]
        self.start()

    def start(self) -> None:
        """A new process, which knows nothing of its predecessor."""
        self.alive = True
        self.arbiter = Arbiter(self._goodput, self._config, self._make_allocator())
        self._wake(self._events.now)

    def kill(self, now: Nanos) -> None:
        """The process ends: all streams do."""
        self.alive = False
        if self._alarm is not None:
            self._alarm.cancel()
        self._counts = self.counts()
        peers, self._peers = self._peers, {}
        for peer in peers.values():
            peer.stream.close(now, Stream.SWITCH)

    def time(self) -> Nanos:
        """What its clock shows."""
        return self._clock.read(self._events.now)

    def daemons_with_grants(self) -> list[str]:
        """Daemons whose sessions are honoured, or whose lease still runs."""
        return self.arbiter.daemons()

    def counts(self) -> list[int]:
        """Granted, refused, pre-empted and expired, over all lives."""
        a = self.arbiter
        own = [a.granted, a.refused, a.preempted, a.expired] if self.alive else [0] * 4
        return [x + y for x, y in zip(self._counts, own, strict=True)]

    # --- streams

    def hear(
        self,
        now: Nanos,
        stream: Stream,
        hello: Hello | None,
        message: FromDaemon,
        deliver: Callable[[Nanos, FromArbiter], None],
    ) -> None:
        """A message of a daemon has come; `hello`: it is the first of its stream. `deliver`: how
        to answer. A stream that is not honoured is closed."""
        at = self._clock.read(now)
        if not self.alive or (hello is not None and not self._join(at, stream, hello, deliver)):
            stream.close(now, Stream.SWITCH)
            return
        peer = self._peers.get(message.session)
        if peer is None or peer.stream is not stream:
            stream.close(now, Stream.SWITCH)
            return
        self._take(now, at, peer, message)

    def _join(
        self,
        at: Nanos,
        stream: Stream,
        hello: Hello,
        deliver: Callable[[Nanos, FromArbiter], None],
    ) -> bool:
        if hello.session in self._peers:  # the same message, once more
            return True
        try:
            self.arbiter.hello(at, hello)
        except ProtocolError:
            return False
        if self.arbiter.state(hello.session) is not SessionState.SYNCED:
            return False
        outbox = Outbox(self._config.max_flows_per_session)
        peer = self._peers[hello.session] = _Peer(stream, hello.session, outbox, deliver)
        stream.on_close(Stream.SWITCH, lambda now: self._leave(now, peer))
        return True

    def _take(self, now: Nanos, at: Nanos, peer: _Peer, message: FromDaemon) -> None:
        arbiter, session = self.arbiter, peer.session
        arbiter.done(at, session, message.dones)
        demands = [replace(d, links=self._mine(d.links)) for d in message.demands]
        refusals = arbiter.demand(at, session, demands) if demands else []
        arbiter.ack(at, session, message.acks)
        echo = None
        if message.heartbeat is not None:
            if not arbiter.heartbeat(at, session):
                peer.stream.close(now, Stream.SWITCH)
                return
            echo = HeartbeatEcho(message.heartbeat.n, at)
        if not peer.outbox.post(refusals=refusals, echo=echo):
            peer.stream.close(now, Stream.SWITCH)
            return
        if message.dones or demands or message.acks:
            self._changed(now)
        else:
            self._flush(peer)

    def _mine(self, links: tuple[int, ...]) -> tuple[int, ...]:
        """The part of a path that this process holds, as its arbiter numbers it."""
        return tuple(self._index[link] for link in links if link in self._index)

    def _leave(self, now: Nanos, peer: _Peer) -> None:
        if self._peers.pop(peer.session, None) is not None:
            self.arbiter.goodbye(self._clock.read(now), peer.session)
            self._changed(now)

    def _flush(self, peer: _Peer) -> None:
        if peer.outbox:
            message = peer.outbox.take(peer.session)
            self.messages += 1
            peer.stream.send(False, lambda now: peer.deliver(now, message))

    # --- deciding

    def _changed(self, now: Nanos) -> None:
        rested = now - self._decided_at >= REST_NS
        self._wake(now if rested else Nanos(self._decided_at + SPACING_NS))

    def _wake(self, at: Nanos) -> None:
        """Decide then, if not earlier."""
        if self._alarm is not None and self._alarm.action is not None and self._alarm.at <= at:
            return
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = self._events.at(at, self._decide)

    def _decide(self, now: Nanos) -> None:
        at = self._clock.read(now)
        self.steps += 1
        self._decided_at = now
        for session, grants in self.arbiter.step(at).items():
            peer = self._peers.get(session)
            if peer is not None:
                peer.outbox.post(grants=grants)
        for peer in list(self._peers.values()):
            self._flush(peer)
            if self.arbiter.state(peer.session) is not SessionState.SYNCED:
                peer.stream.close(now, Stream.SWITCH)
        self._wake(self._clock.when(self.arbiter.next_wakeup(at)))
