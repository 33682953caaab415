# SPDX-License-Identifier: Apache-2.0
"""Bursts of TCP, where our own congestion control does not bound them.

TCP hands down what its pacing rate carries in a millisecond at once; but since Linux 5.18 a path
of less than half a millisecond adds 64 kB, whatever the rate: at 40 Mbit/s, 13 ms. That is the
sysctl net.ipv4.tcp_tso_rtt_log, of a network namespace; 0 turns it off.
"""

import logging
from contextlib import suppress
from pathlib import Path
from socket import socket

from flowslotd.pace import guardian
from flowslotd.pace.instance_lock import lock
from flowslotd.pace.pacer import PacingError
from flowslotd.pace.undo import UndoTable

log = logging.getLogger(__name__)


class SmallBursts:
    """Keeps the sysctl at 0. One daemon of a network namespace does so, and restores it; others
    rely on that, and one of them follows."""

    def __init__(self, allowed: bool) -> None:
        """`allowed`: False: leave it alone."""
        self._allowed = allowed
        self._lock: socket | None = None
        self._before = 0

    def filenos(self) -> tuple[int, ...]:
        """See who it is that does so. Descriptors that the guardian is to hold meanwhile."""
        self._seize()
        return () if self._lock is None else (self._lock.fileno(),)

    def _seize(self) -> None:
        if self._allowed and self._lock is None:
            self._lock = lock("tso-rtt-log")

    def follow(self, undo: UndoTable) -> None:
        """From time to time: whoever did so may have ended."""
        with suppress(OSError):
            self._seize()
        # Its guardian may have restored the sysctl only after we had looked.
        if self._lock is not None and not self._before:
            self.hold(undo)

    def hold(self, undo: UndoTable) -> None:
        """Set it."""
        if self._lock is None:
            return
        try:
            self._before = int(Path(guardian.SYSCTL).read_text())
            if self._before:
                undo.list_change(guardian.TSO_RTT_LOG, 0, self._before)
                Path(guardian.SYSCTL).write_text("0")
        except (OSError, ValueError, PacingError) as error:
            log.warning(
                "%s stays: flows below 0.5 Gbit/s send in bursts: %s", guardian.SYSCTL, error
            )

    def close(self, undo: UndoTable) -> None:
        """Restore it. From now on it is left alone."""
        self._allowed = False
        if self._lock is None:
            return
        if self._before:
            with suppress(OSError, ValueError):
                guardian.restore_sysctl(self._before)
            undo.strike_change(guardian.TSO_RTT_LOG, 0)
        self._lock.close()
        self._lock = None
