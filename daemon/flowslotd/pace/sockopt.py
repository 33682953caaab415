# SPDX-License-Identifier: Apache-2.0
"""Pacing by SO_MAX_PACING_RATE, set on the jobs' sockets through pidfd_getfd.

For kernels where our congestion control does not load. The rate is a ceiling over the congestion
control that the job uses.
"""

import logging
import struct
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from socket import SOL_SOCKET, socket

from flowslotd.pace import guardian
from flowslotd.pace.attached import GUARDED, AttachedPacer
from flowslotd.pace.egress import Change
from flowslotd.pace.instance_lock import lock
from flowslotd.pace.pacer import PacingError, Traits
from flowslotd.pace.undo import UndoTable
from flowslotd.sockets import is_tcp

log = logging.getLogger(__name__)

MARK = 0xF5
"""The last byte of rates that flowslot has set. So a rate that a killed daemon and guardian have
left behind is not taken for the application's own."""
_LONG = struct.calcsize("@L")


class SmallBursts:
    """Keeps TCP's bursts small.

    TCP hands down at once what its pacing rate carries in a millisecond. Since Linux 5.18 it adds
    64 kB on paths shorter than half a millisecond, whatever the rate: at 40 Mbit/s these take
    13 ms. The sysctl net.ipv4.tcp_tso_rtt_log, one for each network namespace, turns that off when
    it is 0. One daemon of a network namespace holds the lock for that, and restores the sysctl at
    its end. Then another daemon takes the lock.
    """

    def __init__(self, allowed: bool) -> None:
        """`allowed`: whether the sysctl may be set. Kernels before 5.18 have none."""
        self._allowed = allowed and Path(guardian.SYSCTL).exists()
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
        if self._lock is None or self._before:
            return
        try:
            self._before = int(Path(guardian.SYSCTL).read_text())
            if self._before:
                undo.list(guardian.Row(guardian.TSO_RTT_LOG, 0, self._before))
                Path(guardian.SYSCTL).write_text("0")
        except (OSError, ValueError, PacingError) as error:
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


class SocketPacer(AttachedPacer):
    """See `Pacer`."""

    name = "socket"
    traits = Traits(
        how="SO_MAX_PACING_RATE of each flow's socket: TCP's own pacing",
        protocols=("tcp",),
        granularity="1 ms of the rate, at least two packets (and 64 kB below 0.5 ms of RTT, where "
        "the sysctl is left alone and in other network namespaces)",
        resume="what one burst takes at the old rate",
        changes=(
            ("sockets", "SO_MAX_PACING_RATE of the flows' sockets, from outside"),
            ("sysctl", "net.ipv4.tcp_tso_rtt_log = 0, unless pacing.sysctls is off"),
            GUARDED,
        ),
    )

    def __init__(
        self, devices: Sequence[str] = (), sysctls: bool = True, change: Change | None = None
    ) -> None:
        super().__init__(devices, change)
        self._bursts = SmallBursts(sysctls)
        self._rates: dict[int, int] = {}  # of paced flows
        self._own: dict[int, int] = {}  # rates that the applications had set

    # -- life ---------------------------------------------------------------------------------

    def open(self) -> None:
        """See `AttachedPacer`."""
        super().open()
        self._bursts.hold(self._undo)

    def _keep(self) -> tuple[int, ...]:
        return (*super()._keep(), *self._bursts.filenos())

    def close(self) -> None:
        """See `AttachedPacer`."""
        self._bursts.close(self._undo)
        super().close()

    # -- rates --------------------------------------------------------------------------------

    def _set(self, wanted: list[tuple[int, int]], deadline_ns: int) -> int:
        return sum(
            self._pace(cookie, rate) for cookie, rate in wanted if self._rates.get(cookie) != rate
        )

    def _pace(self, cookie: int, rate: int) -> bool:
        """Eight system calls, and one more at first."""
        own = self._touch(cookie, lambda sock: self._limit(sock, cookie, rate))
        if own is None:
            return False
        self._own[cookie], self._rates[cookie] = own, rate
        return True

    def _limit(self, sock: socket, cookie: int, rate: int) -> int:
        """Returns the rate that the application had set. Raises PacingError and OSError."""
        if not is_tcp(sock):
            # The kernel lowers the rate of a UDP socket for good. TCP computes it anew.
            raise PacingError("its socket is not TCP")
        own = self._own.get(cookie)
        if own is None:
            option = sock.getsockopt(SOL_SOCKET, guardian.SO_MAX_PACING_RATE, _LONG)
            own = int.from_bytes(option, sys.byteorder)
            own = guardian.UNLIMITED if own & 0xFF == MARK else own
        self._list(cookie, guardian.SO_MAX_PACING_RATE, _LONG, own)
        guardian.set_option(sock, guardian.SO_MAX_PACING_RATE, _LONG, min(_marked(rate), own))
        return own

    def refresh(self, deadline_ns: int) -> bool:
        """See `Pacer`."""
        self._bursts.hold(self._undo)
        return super().refresh(deadline_ns)

    def _gone(self, cookie: int, *, undone: bool = False) -> None:
        self._rates.pop(cookie, None)
        self._own.pop(cookie, None)
        super()._gone(cookie, undone=undone)

    def _udp_sent(self) -> Mapping[int, int]:
        return {}


def _marked(rate: int) -> int:
    return rate & ~0xFF | MARK
