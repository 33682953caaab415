# SPDX-License-Identifier: Apache-2.0
"""Keeps TCP's bursts small where our own congestion control does not bound them.

TCP hands down at once what its pacing rate carries in a millisecond. Since Linux 5.18 it adds 64 kB
on paths shorter than half a millisecond, whatever the rate: at 40 Mbit/s these take 13 ms. The
sysctl net.ipv4.tcp_tso_rtt_log, one for each network namespace, turns that off when it is 0.
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
    """Keeps the sysctl at 0. One daemon of a network namespace holds the lock for that, and
    restores the sysctl at its end. Then another daemon takes the lock."""

    def __init__(self, allowed: bool) -> None:
        """`allowed`: whether the sysctl may be set."""
        self._allowed = allowed
        self._lock: socket | None = None
        self._before = 0

    def filenos(self) -> tuple[int, ...]:
        """Take the lock if it is free. Returns the descriptors that the guardian is to hold."""
        if self._allowed and self._lock is None:
            self._lock = lock("tso-rtt-log")
        return () if self._lock is None else (self._lock.fileno(),)

    def hold(self, undo: UndoTable) -> None:
        """Set the sysctl to 0, if this daemon has or gets the lock. To be called now and then: the
        daemon that had it may have ended, and its guardian restores the sysctl after that."""
        with suppress(OSError):
            self.filenos()
        if self._lock is None or self._before or not self._allowed:
            return
        try:
            self._before = int(Path(guardian.SYSCTL).read_text())
            if self._before:
                undo.list(guardian.Row(guardian.TSO_RTT_LOG, 0, self._before))
                Path(guardian.SYSCTL).write_text("0")
        except (OSError, ValueError, PacingError) as error:
            self._allowed = False  # not tried again
            log.warning(
                "%s stays: flows below 0.5 Gbit/s send in bursts: %s", guardian.SYSCTL, error
            )

    def close(self, undo: UndoTable) -> None:
        """Restore the sysctl. It is not set again."""
        self._allowed = False
        undo.undo(guardian.TSO_RTT_LOG, 0)
        if self._lock is not None:
            self._lock.close()
            self._lock = None
