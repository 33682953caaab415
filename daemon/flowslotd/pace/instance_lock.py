# SPDX-License-Identifier: Apache-2.0
"""Locks that end with their holder and leave no file: abstract unix sockets, whose names are each
network namespace's own, as its devices are."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from errno import EADDRINUSE
from socket import AF_UNIX, SOCK_DGRAM, socket

from flowslotd.pace.pacer import PacingError

BERTHS = 15
PATIENCE_S = 1.0
"""A daemon that sets a device up holds all free numbers for a moment (`deserted`)."""


def lock(name: str) -> socket | None:
    """None: somebody has it. Raises OSError."""
    held = socket(AF_UNIX, SOCK_DGRAM)
    try:
        held.bind(f"\0flowslot-{name}")
    except OSError as error:
        held.close()
        if error.errno != EADDRINUSE:
            raise
        return None
    return held


class Berth:
    """A number that no other daemon in this network namespace has: of its classes and filters."""

    def __init__(self) -> None:
        """Raises PacingError when all are taken."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            for number in range(BERTHS):
                held = lock(f"berth-{number}")
                if held is not None:
                    self.number = number
                    self._held = held
                    return
            time.sleep(0.05)
        raise PacingError(f"{BERTHS} other daemons pace with queueing disciplines here already")

    def fileno(self) -> int:
        """Whoever holds this descriptor keeps the number."""
        return self._held.fileno()

    def close(self) -> None:
        """Give it back."""
        self._held.close()

    @contextmanager
    def deserted(self) -> Iterator[list[int]]:
        """Numbers that nobody else has, and nobody can take meanwhile: what bears them was left
        behind by a daemon that was killed together with its guardian."""
        with ExitStack() as stack:
            numbers = [self.number]
            for number in range(BERTHS):
                held = lock(f"berth-{number}")
                if held is not None:
                    stack.enter_context(held)
                    numbers.append(number)
            yield numbers
