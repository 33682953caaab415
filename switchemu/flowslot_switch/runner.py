# SPDX-License-Identifier: Apache-2.0
"""Runs core's Switch on real clocks: what streams say goes in, grants go out to them."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

from flowslot.arbiter import Arbiter
from flowslot.model.units import MILLISECOND, Nanos
from flowslot.protocol.messages import FromDaemon, Opening
from flowslot.protocol.switch import SPACING_NS, Switch
from flowslot_switch.config import SwitchConfig

log = logging.getLogger(__name__)


class Listener(Protocol):
    """A stream that has joined."""

    def wake(self) -> None:
        """Something waits to be taken and sent."""

    def end(self, error: Exception) -> None:
        """Close the stream with that error."""


class Runner:
    """A Switch, its clock and its timer. Lives in one event loop."""

    def __init__(self, config: SwitchConfig, on_failure: Callable[[], None]) -> None:
        """`on_failure` is called when deciding fails: a bug of ours, so the state is lost."""
        self.config = config
        self._on_failure = on_failure
        # Slots are numbered as on the wall clock, as all hosts number them.
        self._origin = Nanos(time.monotonic_ns() - time.time_ns())
        self.switch: Switch[Listener] = Switch(
            self.now(),
            [link.name for link in config.links],
            [link.goodput for link in config.links],
            config.arbiter(self._origin),
            config.allocator(config.settings.policy),
            config.settings.policy,
        )
        self.step_ns = 0
        """Time spent deciding."""
        self._alarm: asyncio.Handle | None = None
        self._alarm_at: Nanos | None = None
        self._loop = asyncio.get_running_loop()
        self._streams: set[Listener] = set()
        self._closed: Exception | None = None
        self._step()

    @property
    def arbiter(self) -> Arbiter:
        """The arbiter inside."""
        return self.switch.arbiter

    def now(self) -> Nanos:
        """The arbiter's clock."""
        return Nanos(time.monotonic_ns())

    def slot(self, now: Nanos) -> int:
        """Number of the current slot."""
        return (now - self._origin) // self.config.slot_ns

    # --- streams

    def join(self, stream: Listener, opening: Opening) -> None:
        """See Switch.join. Raises what the runner was closed with once it is."""
        self._check_open()
        self.switch.join(self.now(), stream, opening)
        self._streams.add(stream)
        self._flush()

    def take(self, stream: Listener, message: FromDaemon) -> None:
        """See Switch.received. Raises what the runner was closed with once it is."""
        self._check_open()
        self.switch.received(self.now(), stream, message, time.time_ns())
        self._flush()

    def leave(self, stream: Listener) -> None:
        """See Switch.leave."""
        self._streams.discard(stream)
        self.switch.leave(self.now(), stream)
        self._flush()

    def changed(self) -> None:
        """An explicit schedule was taken in."""
        self.switch.changed(self.now())
        self._flush()

    def use(self, config: SwitchConfig, policy: str) -> None:
        """Decide by this policy, and the configuration's classes, from now on; all streams and what
        is granted stay. Raises FlowslotError before anything has changed."""
        allocator = config.allocator(policy)
        self.config = config
        self.switch.use(self.now(), allocator, policy)
        self._flush()

    def _check_open(self) -> None:
        if self._closed is not None:
            raise self._closed

    def close(self, error: Exception) -> None:
        """Decide nothing any more, and end all streams."""
        if self._alarm:
            self._alarm.cancel()
        self._closed = error
        for stream in list(self._streams):
            stream.end(error)

    # --- deciding

    def _flush(self) -> None:
        for stream in self.switch.take_ready():
            stream.wake()
        for stream, error in self.switch.take_ended():
            stream.end(error)
        self._rearm()

    def _rearm(self) -> None:
        """At once: after all that has come is read."""
        at = self.switch.next_wakeup
        if self._closed is not None or at == self._alarm_at:
            return
        if self._alarm:
            self._alarm.cancel()
        self._alarm_at, left = at, at - self.now()
        if left <= 0:
            self._alarm = self._loop.call_soon(self._step)
        else:
            # uvloop counts in ms, and its timers may be early by almost one. News may be decided
            # on so early, but not at once.
            delay = SPACING_NS if left <= SPACING_NS else left + MILLISECOND
            self._alarm = self._loop.call_later(delay / 1e9, self._step)

    def _step(self) -> None:
        self._alarm_at = None
        now = self.now()
        try:
            self.switch.decide(now)
        except Exception:
            log.exception("deciding failed")
            self._on_failure()
            return
        self.switch.decided(self.now())
        self.step_ns += self.now() - now
        self._flush()
