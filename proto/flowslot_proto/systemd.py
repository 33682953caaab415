# SPDX-License-Identifier: Apache-2.0
"""What daemon and switch process tell systemd of themselves (sd_notify(3))."""

import contextlib
import os
import socket


class Notifier:
    """Sends state lines to systemd. Does nothing in a process that systemd did not start."""

    def __init__(self, address: str | None = None) -> None:
        address = os.environ.get("NOTIFY_SOCKET", "") if address is None else address
        # A leading "@" means the abstract namespace.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket: socket.socket | None = None

    def ready(self, status: str) -> None:
        """The service is up."""
        self._send("READY=1", f"STATUS={status}")

    def reloading(self, monotonic_ns: int) -> None:
        """A reload begins; `ready` ends it."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={monotonic_ns // 1000}")

    def watchdog(self) -> None:
        """The service is alive."""
        self._send("WATCHDOG=1")

    def stopping(self) -> None:
        """The service shuts down on purpose."""
        self._send("STOPPING=1")

    def _send(self, *lines: str) -> None:
        if not self._address:
            return
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)
        # Full or gone: systemd's concern. The service must neither wait nor fail for it.
        with contextlib.suppress(OSError):
            self._socket.sendto("\n".join(lines).encode(), self._address)


def watchdog_s() -> float | None:
    """How often to call `watchdog`: half of systemd's patience. None: systemd does not watch."""
    limit = os.environ.get("WATCHDOG_USEC", "")
    return int(limit) / 2e6 if limit.isdecimal() and int(limit) else None
