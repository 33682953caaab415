# SPDX-License-Identifier: Apache-2.0
"""Runs core's arbiter on real clocks: what streams say goes in, grants go out to them."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from flowslot.arbiter import Arbiter, SessionState
from flowslot.model.errors import ProtocolError
from flowslot.model.units import Nanos
from flowslot.policy import registry
from flowslot.protocol.messages import FromDaemon, Grant, HeartbeatEcho, Opening, Refusal
from flowslot_switch.config import SwitchConfig

REST_S = 0.0005
"""News are decided on at once when so much time has passed since the last decision: whatever
daemons say, there is time for other things."""
SPACING_S = 0.001
"""... and otherwise so much later, or with the next news. uvloop rounds to milliseconds: half a
millisecond would be none at all."""

log = logging.getLogger(__name__)


class SessionEnded(Exception):
    """The session is not honoured; its daemon must begin a new stream."""


class Listener(Protocol):
    """A stream that has said Hello."""

    session: int

    def post(
        self,
        grants: Sequence[Grant] = (),
        refusals: Sequence[Refusal] = (),
        echo: HeartbeatEcho | None = None,
    ) -> None:
        """Keep this for sending; never waits."""
        ...

    def flush(self) -> None:
        """Send what was posted, in one message, as soon as the stream takes it."""
        ...

    def end(self, error: Exception) -> None:
        """Close the stream with that error."""
        ...


class Engine:
    """One arbiter, its clock, and the streams that it answers to. Lives in one event loop."""

    def __init__(self, config: SwitchConfig, on_failure: Callable[[Exception], None]) -> None:
        """`on_failure` is called when deciding fails: a bug of ours, so the state is lost."""
        self.config = config
        self.link_index = {link.name: i for i, link in enumerate(config.links)}
        self._on_failure = on_failure
        # Slots are numbered as on the wall clock, as all hosts number them.
        self._origin = Nanos(time.monotonic_ns() - time.time_ns())
        options = registry.PolicyOptions(floor_share=config.settings.floor_share)
        if config.partial:
            options = registry.beside_others(options)
        allocator = registry.get("stagger").allocator
        assert allocator is not None
        self.arbiter = Arbiter(
            [link.goodput for link in config.links],
            config.arbiter(self._origin),
            allocator(options),
        )
        self.steps = 0
        self.step_ns = 0
        self._streams: dict[int, Listener] = {}
        self._due = False
        self._now_due = False
        self._decided_at = 0
        self._alarm: asyncio.Handle | None = None
        self._loop = asyncio.get_running_loop()
        self._closed: Exception | None = None
        self._decide()

    def now(self) -> Nanos:
        """The arbiter's clock."""
        return Nanos(time.monotonic_ns())

    def slot(self, now: Nanos) -> int:
        """Number of the current slot."""
        return (now - self._origin) // self.config.slot_ns

    # --- streams

    def join(self, stream: Listener, opening: Opening) -> tuple[int, ...]:
        """A stream has said Hello; returns what its link indices mean here.

        Raises ProtocolError when it cannot be accepted, SessionEnded when its session is over, and
        what the engine was closed with once it is.
        """
        if self._closed is not None:
            raise self._closed
        config = self.arbiter.config
        if opening.lease_ns > config.lease_ns:
            raise ProtocolError(
                f"field `hello.lease_ns`: is {opening.lease_ns / 1e6:g} ms, but must be at most "
                f"{config.lease_ns / 1e6:g} ms; set the same slot_ms for daemons and switches"
            )
        links = []
        for i, name in enumerate(opening.links):
            if name not in self.link_index:
                problem = f'no link "{name[:64]}" is held by switch {self.config.name}'
                raise ProtocolError(f"field `hello.links[{i}]`: {problem}; compare the topologies")
            links.append(self.link_index[name])
        session = opening.hello.session
        if session in self._streams:
            raise SessionEnded(f"session {session} is already in use")
        self.arbiter.hello(self.now(), opening.hello)
        if self.arbiter.state(session) is not SessionState.SYNCED:
            raise SessionEnded("an outdated Hello: the daemon has a newer session")
        self._streams[session] = stream
        self.changed()
        return tuple(links)

    def take(self, stream: Listener, message: FromDaemon) -> None:
        """A message of a stream that has joined. Raises SessionEnded when it is not honoured."""
        now, session, arbiter = self.now(), stream.session, self.arbiter
        if message.dones:
            arbiter.done(now, session, message.dones)
        refusals = arbiter.demand(now, session, message.demands) if message.demands else []
        if message.acks:
            arbiter.ack(now, session, message.acks)
        echo = None
        if message.heartbeat is not None:
            if not arbiter.heartbeat(now, session):
                raise SessionEnded("the session's lease has ended; say Hello again")
            echo = HeartbeatEcho(message.heartbeat.n, time.time_ns())
        if refusals or echo:
            stream.post(refusals=refusals, echo=echo)
        if message.dones or message.demands or message.acks:
            self.changed()
        if not self._due:
            stream.flush()  # else it travels with the decision

    def leave(self, stream: Listener) -> None:
        """A stream has closed; what its daemon holds stays committed until the lease ends."""
        if self._streams.get(stream.session) is stream:
            del self._streams[stream.session]
            self.arbiter.goodbye(self.now(), stream.session)
            self.changed()

    def close(self, error: Exception) -> None:
        """Decide nothing any more, and end all streams."""
        if self._alarm:
            self._alarm.cancel()
        self._due = self._now_due = True
        self._closed = error
        for stream in list(self._streams.values()):
            stream.end(error)

    # --- deciding

    def changed(self) -> None:
        """Something was reported: decide as soon as all that has come is read, or soon."""
        rested = self.now() - self._decided_at >= REST_S * 1e9
        if rested and not self._now_due:
            self._due = self._now_due = True
            self._arm(0.0)
        elif not self._due:
            self._due = True
            self._arm(SPACING_S)

    def _arm(self, delay_s: float) -> None:
        if self._alarm:
            self._alarm.cancel()
        if delay_s:
            self._alarm = self._loop.call_later(delay_s, self._step)
        else:
            self._alarm = self._loop.call_soon(self._step)

    def _step(self) -> None:
        try:
            self._decide()
        except Exception as error:
            log.exception("deciding failed")
            self._on_failure(error)

    def _decide(self) -> None:
        self._due = self._now_due = False
        now = self.now()
        for session, grants in self.arbiter.step(now).items():
            stream = self._streams.get(session)
            if stream is not None:
                stream.post(grants=grants)
        for stream in list(self._streams.values()):
            stream.flush()
            if self.arbiter.state(stream.session) is not SessionState.SYNCED:
                stream.end(SessionEnded("the session's lease has ended; say Hello again"))
        self.steps += 1
        self._decided_at = self.now()
        self.step_ns += self._decided_at - now
        # Timers of the loop may be early by almost a millisecond.
        self._arm(max(0.0, (self.arbiter.next_wakeup(now) - self._decided_at) / 1e9) + 0.001)
