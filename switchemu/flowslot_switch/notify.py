# SPDX-License-Identifier: Apache-2.0
"""Tells systemd how the process is (sd_notify(3)); nothing happens when it did not start us."""

import contextlib
import os
import socket
from functools import cache


def notify(*lines: str) -> None:
    """Send state lines such as READY=1. Never waits, never fails."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]  # the abstract namespace
    with contextlib.suppress(OSError):
        _link().sendto("\n".join(lines).encode(), address)


@cache
def _link() -> socket.socket:
    """Kept: somebody may use up all files that we may open."""
    kind = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
    return socket.socket(socket.AF_UNIX, kind)


def watchdog_s() -> float | None:
    """How often systemd wants to hear from us, half of its patience; None: it does not care."""
    limit = os.environ.get("WATCHDOG_USEC", "")
    return int(limit) / 2e6 if limit.isdecimal() and int(limit) else None
