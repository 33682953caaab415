# SPDX-License-Identifier: Apache-2.0
"""Locks between the daemons of one network namespace.

A lock is an abstract unix socket. It ends with its holder and leaves no file, and its name belongs
to the network namespace, as devices do.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from errno import EADDRINUSE
from socket import AF_UNIX, SOCK_DGRAM, socket

from flowslotd.pace.pacer import PacingError

INSTANCES = 15
PATIENCE_S = 1.0
"""A daemon that sets a device up holds all free numbers for a moment (`abandoned`)."""


def lock(name: str) -> socket | None:
    """The lock of this name. None: another process has it. Raises OSError."""
    held = socket(AF_UNIX, SOCK_DGRAM)
    try:
        held.bind(f"\0flowslot-{name}")
    except OSError as error:
        held.close()
        if error.errno != EADDRINUSE:
            raise
        return None
    return held


class InstanceLock:
    """A number that no other daemon in this network namespace has, as long as a process has the
    socket `held` open. It marks the daemon's classes and filters on devices."""

    def __init__(self) -> None:
        """Raises PacingError when all numbers are taken."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            for number, held in _free():
                self.number, self.held = number, held
                return
            time.sleep(0.05)
        raise PacingError(f"{INSTANCES} other daemons pace with queueing disciplines here already")

    @contextmanager
    def abandoned(self) -> Iterator[list[int]]:
        """This daemon's number and all that are free, which nobody can take meanwhile. What bears
        one of them was left behind by a daemon that was killed together with its guardian."""
        with ExitStack() as stack:
            numbers = [self.number]
            for number, held in _free():
                stack.enter_context(held)
                numbers.append(number)
            yield numbers


def _free() -> Iterator[tuple[int, socket]]:
    """Numbers that were free, each with its lock."""
    for number in range(INSTANCES):
        held = lock(f"instance-{number}")
        if held is not None:
            yield number, held
