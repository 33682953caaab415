# SPDX-License-Identifier: Apache-2.0
"""Pacing by SO_MAX_PACING_RATE, set on the jobs' sockets through pidfd_getfd.

For kernels where our congestion control does not load. The rate is a ceiling over the congestion
control that the job uses.
"""

import struct
import sys
from collections.abc import Mapping, Sequence
from socket import SOL_SOCKET, socket

from flowslotd.pace import guardian
from flowslotd.pace.attached import GUARDED, AttachedPacer
from flowslotd.pace.bursts import SmallBursts
from flowslotd.pace.pacer import PacingError, Traits
from flowslotd.sockets import is_tcp

MARK = 0xF5
"""The last byte of rates that flowslot has set. So a rate that a killed daemon and guardian have
left behind is not taken for the application's own."""
_LONG = struct.calcsize("@L")


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

    def __init__(self, devices: Sequence[str] = (), sysctls: bool = True) -> None:
        super().__init__(devices)
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
        """Some five system calls."""
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

    def _gone(self, cookie: int) -> None:
        self._rates.pop(cookie, None)
        self._own.pop(cookie, None)
        super()._gone(cookie)

    def _udp_sent(self) -> Mapping[int, int]:
        return {}


def _marked(rate: int) -> int:
    return rate & ~0xFF | MARK
