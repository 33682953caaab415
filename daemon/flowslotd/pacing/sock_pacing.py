# SPDX-License-Identifier: Apache-2.0
"""Pacing by SO_MAX_PACING_RATE, set from outside on the jobs' sockets (pidfd_getfd).

For kernels where our congestion control does not load. The rate is a ceiling over whatever
congestion control the job uses, without top-up, and there are no kernel events: `closed` and
`drained` are noticed when counters are read. The kernel keeps a socket's rate when the daemon
dies, so a guardian process undoes it (guardian.py).
"""

import struct
import sys
from collections.abc import Mapping
from socket import IPPROTO_TCP, SO_PROTOCOL, SOL_SOCKET, socket

import numpy as np

from flowslotd.pacing import guardian
from flowslotd.pacing.attached import AttachedSockets
from flowslotd.pacing.base import Entries, FlowCounters, KernelEvent, Traits
from flowslotd.pacing.bursts import SmallBursts
from flowslotd.pacing.undo import SOCKETS, UndoTable

MIN_RATE = 256_000
"""As in bpf/consts.h: a held flow must notice a raised rate soon."""
MARK = 0xF5
"""The last byte of rates that are ours: one that a killed daemon has left behind, together with its
guardian, is not taken for the application's own."""
_LONG = struct.calcsize("@L")


class SocketPacer:
    """See `Pacer`."""

    name = "socket"
    lends = False
    congestion_control = ""
    traits = Traits(
        how="SO_MAX_PACING_RATE of each flow's socket: TCP's own pacing",
        protocols=("tcp",),
        granularity="1 ms of the rate, at least two packets",
        resume="what one burst takes at the old rate",
        changes=(
            "SO_MAX_PACING_RATE of the flows' sockets",
            "sysctl net.ipv4.tcp_tso_rtt_log = 0, unless pacing.sysctls is off",
        ),
    )

    def __init__(self, instance: str, sysctls: bool = True) -> None:
        self._bursts = SmallBursts(sysctls)
        self._sockets = AttachedSockets(self._gone, self._udp_sent)
        self._undo = UndoTable()
        self._rates: dict[int, int] = {}  # of those that are paced
        self._own: dict[int, int] = {}  # what the application had set itself
        self._why: dict[int, str] = {}  # flows are not paced
        self._in_force = True

    # -- life ---------------------------------------------------------------------------------

    def open(self) -> None:
        """Try the system call, start the guardian. Raises PacingError."""
        self._sockets.probe()
        self._bursts.open()
        self._undo.open(keep=self._keep())
        self._bursts.hold(self._undo)

    def _keep(self) -> tuple[int, ...]:
        """Descriptors for the guardian."""
        return self._bursts.filenos()

    def close(self) -> None:
        """Unpace all flows."""
        for cookie in list(self._rates):
            self.release(cookie)
        self._sockets.clear()
        self._bursts.close(self._undo)
        self._undo.close()

    # -- rates --------------------------------------------------------------------------------

    def attach(self, cookie: int, pid: int, fd: int) -> None:
        """See `Pacer`. Whether it is so is checked each time the socket is touched."""
        if self._sockets.where(cookie) != (pid, fd):
            self.release(cookie)
            self._sockets.attach(cookie, pid, fd)

    def apply(self, entries: Entries, deadline_ns: int) -> int:
        """See `Pacer`. Some five system calls per changed flow; the deadline is one for all."""
        self._extend(deadline_ns)
        written = 0
        rates = np.minimum(entries["reserved"], entries["ceiling"])
        for cookie, wanted in zip(entries["cookie"].tolist(), rates.tolist(), strict=True):
            rate = max(round(wanted), MIN_RATE)
            if cookie in self._sockets and self._rates.get(cookie) != rate:
                written += self._pace(cookie, rate)
        return written

    def refresh(self, deadline_ns: int) -> bool:
        """See `Pacer`."""
        self._extend(deadline_ns)
        in_force, self._in_force = self._in_force, True
        return in_force

    def _extend(self, deadline_ns: int) -> None:
        if self._undo.refresh(deadline_ns):
            self._in_force = False
            self._undone()

    def _undone(self) -> None:
        """We were late, and all sockets are unpaced."""
        self._rates.clear()
        self._bursts.hold(self._undo)

    def release(self, cookie: int) -> None:
        """See `Pacer`. The flow stays attached."""
        self._sockets.watch(cookie, None)
        self._why.pop(cookie, None)
        self._rates.pop(cookie, None)
        self._own.pop(cookie, None)
        self._undo.free_socket(cookie)

    def _pace(self, cookie: int, rate: int) -> bool:
        at = self._sockets.where(cookie)
        if at is None:
            return False
        try:
            with self._sockets.borrow(cookie) as sock:
                if not self._is_tcp(cookie, sock):
                    return False
                if cookie not in self._own:
                    option = sock.getsockopt(SOL_SOCKET, guardian.SO_MAX_PACING_RATE, _LONG)
                    own = int.from_bytes(option, sys.byteorder)
                    self._own[cookie] = guardian.UNLIMITED if own & 0xFF == MARK else own
                own = self._own[cookie]
                # The guardian must know before there is something to undo.
                if not self._undo.list_socket(
                    cookie, *at, (guardian.SO_MAX_PACING_RATE, _LONG, own)
                ):
                    self._why[cookie] = f"{SOCKETS} flows are paced already"
                    return False
                guardian.set_option(
                    sock, guardian.SO_MAX_PACING_RATE, _LONG, min(_marked(rate), own)
                )
        except OSError as error:
            self._put_off(cookie, self._sockets.lost(cookie, error))
            return False
        self._why.pop(cookie, None)
        self._rates[cookie] = rate
        return True

    def _put_off(self, cookie: int, why: str) -> None:
        """Not now; `why` is empty when not at all."""
        if why:
            self._why[cookie] = why
            self._in_force = False

    def _is_tcp(self, cookie: int, sock: socket) -> bool:
        """The kernel lowers the rate of a UDP socket for good: TCP's is reckoned anew."""
        if sock.getsockopt(SOL_SOCKET, SO_PROTOCOL) == IPPROTO_TCP:
            return True
        self._why[cookie] = "its socket is not TCP"
        return False

    def _gone(self, cookie: int) -> None:
        self._rates.pop(cookie, None)
        self._own.pop(cookie, None)
        self._why.pop(cookie, None)
        self._undo.strike_socket(cookie)

    # -- what the kernel tells ------------------------------------------------------------------

    def refusal(self, cookie: int) -> str:
        """See `Pacer`."""
        return self._why.get(cookie, "")

    def counters(self) -> FlowCounters:
        """See `Pacer`. Some five system calls per flow."""
        return self._sockets.counters()

    def _udp_sent(self) -> dict[int, int]:
        return {}

    def event_fd(self) -> int | None:
        """There is none: poll."""
        return None

    def events(self) -> list[KernelEvent]:
        """`closed` and `drained`, as noticed by `counters()` and `apply()`; no addresses."""
        return self._sockets.events()

    def lend(self, donors: Mapping[int, int]) -> None:
        """See `Pacer`: flows are told of a change by the daemon alone."""

    def watch(self, cookie: int, acked_target: int) -> None:
        """See `Pacer`; noticed by `counters()`."""
        self._sockets.watch(cookie, acked_target)


def _marked(rate: int) -> int:
    return rate & ~0xFF | MARK
