# SPDX-License-Identifier: Apache-2.0
"""Ways for messages between a Host and a Switch: one Wire is one stream.

A script (see world.py) decides when each message is delivered, so a wire needs no clock: `said` and
`answered` are called only for what was written before, and wait until it has come through. A wire
over another transport is one more class with these five methods, and one more entry of a test's
list.
"""

from collections import deque
from typing import Protocol

from flowslot.protocol.messages import FromArbiter, FromDaemon, Opening


class Wire(Protocol):
    """One stream. In each direction, what is written is read in the same order."""

    def say(self, message: FromDaemon, opening: Opening | None) -> None:
        """The daemon's end writes. `opening`: with the first message, and only with that."""

    def said(self) -> tuple[FromDaemon, Opening | None]:
        """The switch's end reads the next message."""

    def answer(self, message: FromArbiter) -> None:
        """The switch's end writes."""

    def answered(self) -> FromArbiter:
        """The daemon's end reads the next message."""

    def close(self) -> None:
        """Neither end writes or reads any more."""


class Memory:
    """Hands the objects over as they are."""

    def __init__(self) -> None:
        self._up: deque[tuple[FromDaemon, Opening | None]] = deque()
        self._down: deque[FromArbiter] = deque()

    def say(self, message: FromDaemon, opening: Opening | None) -> None:
        self._up.append((message, opening))

    def said(self) -> tuple[FromDaemon, Opening | None]:
        return self._up.popleft()

    def answer(self, message: FromArbiter) -> None:
        self._down.append(message)

    def answered(self) -> FromArbiter:
        return self._down.popleft()

    def close(self) -> None:
        self._up.clear()
        self._down.clear()
