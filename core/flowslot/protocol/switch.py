# SPDX-License-Identifier: Apache-2.0
"""An arbiter's end of all its streams: who may join, what waits to be sent, when to decide.

A `Switch` does no I/O and reads no clock. Streams are named by any hashable key. The transport
passes in what arrives (`join` with the first message of a stream, `received`, `leave`), calls
`decide` at `next_wakeup`, and after each of these writes what `take` returns for each stream of
`take_ready`, and ends those of `take_ended`. What waits for a stream is bounded (see Peer),
however slowly the stream takes it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from flowslot.arbiter import Arbiter, ArbiterConfig
from flowslot.model.errors import LimitExceeded, ProtocolError, SessionEnded
from flowslot.model.units import MILLISECOND, Nanos
from flowslot.policy.base import Allocator
from flowslot.protocol.messages import (
    Demand,
    FromArbiter,
    FromDaemon,
    Grant,
    HeartbeatEcho,
    Opening,
    Refusal,
)

S = TypeVar("S")
"""What names a stream; hashable."""
REST_NS = MILLISECOND // 2
"""News are decided on at once when so much time has passed since the last decision: whatever
daemons say, there is time for other things,"""
SPACING_NS = MILLISECOND
"""and otherwise so long after it."""


@dataclass(slots=True)
class Peer:
    """A stream that has joined, and what waits to be sent on it: per flow only the newest grant and
    refusal, and the newest echo.

    `links[i]`: what its link index i means here. `most_refusals`: of so many flows at once; a
    daemon has no more flows that it may ask for, so one that provokes more is hostile.
    """

    session: int
    links: tuple[int, ...]
    most_refusals: int
    grants: dict[int, Grant] = field(default_factory=dict)
    refusals: dict[int, Refusal] = field(default_factory=dict)
    echo: HeartbeatEcho | None = None
    policy: str = ""

    @property
    def waits(self) -> bool:
        """Something is to be sent."""
        return bool(self.grants or self.refusals or self.echo or self.policy)

    def grant(self, grants: Sequence[Grant]) -> None:
        """Keep these for sending."""
        for grant in grants:
            waiting = self.grants.get(grant.flow)
            # The acknowledgement of a later grant covers the lower that was never sent.
            covers = waiting is not None and waiting.must_ack
            self.grants[grant.flow] = replace(grant, must_ack=True) if covers else grant

    def refuse(self, refusals: Sequence[Refusal]) -> None:
        """Keep these for sending. Raises LimitExceeded when there are more than may wait."""
        self.refusals.update((refusal.flow, refusal) for refusal in refusals)
        if len(self.refusals) > self.most_refusals:
            raise LimitExceeded("too many demands that were refused")

    def take(self) -> FromArbiter:
        """All that waits, as one message; nothing waits any more."""
        grants, refusals = list(self.grants.values()), list(self.refusals.values())
        message = FromArbiter(self.session, grants, refusals, self.echo, self.policy)
        self.grants, self.refusals, self.echo, self.policy = {}, {}, None, ""
        return message


class Switch(Generic[S]):
    """An arbiter and the streams that it answers to. `now`: monotonic ns, never going back."""

    def __init__(  # noqa: PLR0917
        self,
        now: Nanos,
        names: Sequence[str],
        goodput: Sequence[float],
        config: ArbiterConfig,
        allocator: Allocator,
        policy: str = "",
    ) -> None:
        """`names`, `goodput`: of each link; payload bytes/s. `policy`: what daemons are told of the
        allocator; "": nothing."""
        self.arbiter = Arbiter(goodput, config, allocator)
        self.link_index = {name: i for i, name in enumerate(names)}
        self.steps = 0
        """Decisions so far."""
        self.policy = policy
        self._config = config
        self._peers: dict[S, Peer] = {}
        self._streams: dict[int, S] = {}
        self._ready: dict[S, None] = {}
        self._with_decision: dict[S, None] = {}
        """What waits for these travels with the next decision."""
        self._ended: dict[S, Exception] = {}
        self.next_wakeup = now
        """When to `decide` next, if nothing is said before. If that is not later than now: as soon
        as all that has arrived was passed in."""
        self._decided_at = now
        self._due = True
        """Something waits to be decided on."""

    # --- streams

    def join(self, now: Nanos, stream: S, opening: Opening) -> None:
        """A stream has said Hello; once more of the same has no effect.

        Raises ProtocolError when the Hello makes no sense, SessionEnded when its session is over.
        """
        session = opening.hello.session
        if stream in self._peers:
            if self._peers[stream].session == session:
                return
            raise ProtocolError("field `hello`: only the first message of a stream has one")
        if opening.lease_ns > self._config.lease_ns:
            raise ProtocolError(
                f"field `hello.lease_ns`: is {opening.lease_ns / 1e6:g} ms, but must be at most "
                f"{self._config.lease_ns / 1e6:g} ms; set the same slot_ms for daemons and switches"
            )
        links = []
        for i, name in enumerate(opening.links):
            if name not in self.link_index:
                problem = f'no link "{name[:64]}" is held by this switch process'
                raise ProtocolError(f"field `hello.links[{i}]`: {problem}; compare the topologies")
            links.append(self.link_index[name])
        if session in self._streams:
            raise SessionEnded(f"session {session} is already in use")
        self.arbiter.hello(now, opening.hello)
        if not self.arbiter.honours(session):
            raise SessionEnded("an outdated Hello: the daemon has a newer session")
        self._peers[stream] = Peer(session, tuple(links), self._config.max_flows_per_session)
        self._peers[stream].policy = self.policy
        self._streams[session] = stream
        self.changed(now)

    def received(self, now: Nanos, stream: S, message: FromDaemon, wall_ns: int = 0) -> None:
        """A message of a stream that has joined. `wall_ns`: our wall clock, for display.

        Raises ProtocolError, SessionEnded or LimitExceeded: end the stream with that.
        """
        peer, arbiter = self._peers.get(stream), self.arbiter
        if peer is None:
            raise SessionEnded("the stream has not said Hello, or has ended")
        session = peer.session
        if message.session != session:
            raise ProtocolError(f"field `session`: is {message.session}, not {session}")
        demands = [self._own(peer, demand) for demand in message.demands]
        if message.dones:
            arbiter.done(now, session, message.dones)
        if message.acks:  # first: a grant that is given back is free if no lower of it is open
            arbiter.ack(now, session, message.acks)
        refusals = arbiter.demand(now, session, demands) if demands else []
        if message.heartbeat is not None:
            if not arbiter.heartbeat(now, session):
                raise SessionEnded("the session's lease has ended; say Hello again")
            peer.echo = HeartbeatEcho(message.heartbeat.n, wall_ns)
        peer.refuse(refusals)
        if message.dones or demands or message.acks:
            self.changed(now)
        if peer.waits:
            (self._with_decision if self._due else self._ready)[stream] = None

    def leave(self, now: Nanos, stream: S) -> None:
        """A stream has closed. What its daemon holds stays committed until the lease ends."""
        peer = self._peers.pop(stream, None)
        self._ready.pop(stream, None)
        self._with_decision.pop(stream, None)
        self._ended.pop(stream, None)
        if peer is not None:
            del self._streams[peer.session]
            self.arbiter.goodbye(now, peer.session)
            self.changed(now)

    def take_ready(self) -> list[S]:
        """Streams for which something waits: `take` it as soon as the stream can take it."""
        ready, self._ready = list(self._ready), {}
        return ready

    def take(self, stream: S) -> FromArbiter | None:
        """All that waits for a stream, as one message. None: nothing does."""
        peer = self._peers.get(stream)
        return peer.take() if peer is not None and peer.waits else None

    def take_ended(self) -> list[tuple[S, Exception]]:
        """Streams that are not honoured any more, and what to end them with."""
        ended, self._ended = list(self._ended.items()), {}
        return ended

    def _own(self, peer: Peer, demand: Demand) -> Demand:
        """The demand with its path as the arbiter numbers links."""
        links = peer.links
        if links and demand.links and max(demand.links) >= len(links):
            raise ProtocolError(f"field `demands.path`: link index must be below {len(links)}")
        path = tuple(links[i] for i in demand.links)
        return demand if path == demand.links else replace(demand, links=path)

    # --- deciding

    def use(self, now: Nanos, allocator: Allocator, policy: str) -> None:
        """Decide by another policy from now on; see Arbiter.use."""
        self.arbiter.use(allocator)
        self.policy = policy
        for stream, peer in self._peers.items():
            peer.policy = policy
            self._with_decision[stream] = None
        self.changed(now)

    def changed(self, now: Nanos) -> None:
        """Something was reported: decide at once, or soon."""
        rested = now >= self._decided_at + REST_NS
        due = now if rested else Nanos(self._decided_at + SPACING_NS)
        self._due, self.next_wakeup = True, min(due, self.next_wakeup)

    def decided(self, now: Nanos) -> None:
        """Deciding took until now: the rest after it counts from here."""
        self._decided_at = now

    def decide(self, now: Nanos) -> None:
        """Let the arbiter decide. What it grants waits to be taken."""
        self._due, self._decided_at = False, now
        self.steps += 1
        for session, grants in self.arbiter.step(now).items():
            stream = self._streams.get(session)
            if stream is not None:
                self._peers[stream].grant(grants)
                self._ready[stream] = None
        waiting, self._with_decision = self._with_decision, {}
        self._ready |= {stream: None for stream in waiting if self._peers[stream].waits}
        for session in self.arbiter.take_over():
            stream = self._streams.get(session)
            if stream is not None and not self.arbiter.honours(session):
                self._ended[stream] = SessionEnded("the session's lease has ended; say Hello again")
        self.next_wakeup = self.arbiter.next_wakeup(now)
