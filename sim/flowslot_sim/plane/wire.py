# SPDX-License-Identifier: Apache-2.0
"""Clocks and streams between simulated processes. In a stream, messages keep their order;
second copies of them do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from flowslot.model.units import MILLISECOND, Nanos
from flowslot_sim.events import Events


@dataclass(frozen=True, slots=True)
class Delays:
    """How long a message takes, one way. Times in ns.

    Uniform from `low` to `high`; the share `rare` of the messages takes `slow` instead, and the
    share `twice` comes a second time.
    """

    low: int = MILLISECOND
    high: int = MILLISECOND
    slow: int = 10 * MILLISECOND
    rare: float = 0.0
    twice: float = 0.0

    def draw(self, random: np.random.Generator) -> int:
        """The delay of one message."""
        if self.rare and random.random() < self.rare:
            return self.slow
        return int(random.integers(self.low, self.high, endpoint=True))


@dataclass(frozen=True, slots=True)
class Clock:
    """A host's monotonic clock: ns since some moment of its own, `ppm` too fast."""

    offset: int = 0
    ppm: float = 0.0

    def read(self, now: Nanos) -> Nanos:
        """What it shows at a time of the simulation."""
        return Nanos(self.offset + now + int(now * self.ppm / 1e6))

    def when(self, shown: int) -> Nanos:
        """When it shows that, or a moment later."""
        return Nanos(int((shown - self.offset) / (1 + self.ppm / 1e6)) + 2)


class Stream:
    """A connection between a daemon and a switch process; each end is open, or not.

    `hold` makes everything wait that is sent in either direction until a time: a network that
    stands still, or a machine that does.
    """

    DAEMON, SWITCH = 0, 1
    """The ends."""

    def __init__(self, events: Events, random: np.random.Generator, delays: Delays) -> None:
        self._events = events
        self._random = random
        self._delays = delays
        self._open = [True, True]
        self._last = [0, 0]
        self._held_until = 0
        self._on_close: list[Callable[[Nanos], None]] = [lambda now: None] * 2

    def send(self, up: bool, deliver: Callable[[Nanos], None]) -> None:
        """`deliver` is called when the message arrives, if its end is still open then. A message
        that comes twice has its second time whenever it may be, out of order."""
        if not self._open[not up]:
            return
        at = self._arrival(up)
        times = [at]
        if self._delays.twice and self._random.random() < self._delays.twice:
            times.append(Nanos(at + self._delays.draw(self._random)))
        for time in times:
            self._events.at(time, lambda now: deliver(now) if self._open[up] else None)

    def hold(self, until: Nanos) -> None:
        """What is sent from now on arrives no earlier."""
        self._held_until = max(self._held_until, until)

    def on_close(self, end: int, action: Callable[[Nanos], None]) -> None:
        """To be called once when that end has closed."""
        self._on_close[end] = action

    def close(self, now: Nanos, end: int) -> None:
        """One end is closed. The other one learns of it after all that was sent to it before; what
        is on its way from there is lost."""
        if self._open[end]:
            other = 1 - end
            self._events.at(self._arrival(bool(other)), lambda then: self._shut(then, other))
            self._shut(now, end)

    def _arrival(self, up: bool) -> Nanos:
        delay = self._delays.draw(self._random)
        at = Nanos(max(self._events.now + delay, self._last[up], self._held_until))
        self._last[up] = at
        return at

    def _shut(self, now: Nanos, end: int) -> None:
        if self._open[end]:
            self._open[end] = False
            self._on_close[end](now)
