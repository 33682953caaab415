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

from flowslotd.pacing import guardian
from flowslotd.pacing.base import PacingError
from flowslotd.pacing.berth import lock
from flowslotd.pacing.undo import UndoTable

log = logging.getLogger(__name__)


class SmallBursts:
    """Keeps the sysctl at 0. The first daemon of a network namespace does so, and restores it;
    others rely on that."""

    def __init__(self, allowed: bool) -> None:
        """`allowed`: False: leave it alone."""
        self._allowed = allowed
        self._lock: socket | None = None
        self._before = 0

    def open(self) -> None:
        """See who it is that does so."""
        if self._allowed:
            self._lock = lock("tso-rtt-log")

    def filenos(self) -> tuple[int, ...]:
        """Descriptors that the guardian is to hold until it is restored."""
        return () if self._lock is None else (self._lock.fileno(),)

    def hold(self, undo: UndoTable) -> None:
        """Set it, after `open`, and again after everything was undone."""
        if self._lock is None:
            return
        try:
            self._before = int(Path(guardian.SYSCTL).read_text())
            if self._before:
                undo.list_change(guardian.TSO_RTT_LOG, 0, self._before)
                guardian.write_sysctl(0)
        except (OSError, ValueError, PacingError) as error:
            log.warning(
                "%s stays: flows below 0.5 Gbit/s send in bursts: %s", guardian.SYSCTL, error
            )

    def close(self, undo: UndoTable) -> None:
        """Restore it."""
        if self._lock is None:
            return
        if self._before:
            with suppress(OSError):
                guardian.write_sysctl(self._before)
            undo.strike_change(guardian.TSO_RTT_LOG, 0)
        self._lock.close()
        self._lock = None
