# SPDX-License-Identifier: Apache-2.0
"""Sockets of other processes, as jobs have told of them: reached through pidfd_getfd, each for a
moment, so that no descriptor is kept."""

import os
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from errno import EBADF, ENOPROTOOPT, EOPNOTSUPP, ESRCH, ESTALE
from socket import IPPROTO_TCP, TCP_INFO, socket

import numpy as np

from flowslotd.pacing import guardian
from flowslotd.pacing.base import FlowCounters, KernelEvent, PacingError

_INFO = struct.Struct("=120xQ")  # tcpi_bytes_acked
_NO_TCP = ENOPROTOOPT, EOPNOTSUPP
_CLOSED = EBADF, ESRCH, ESTALE


@dataclass(slots=True)
class _Socket:
    pid: int
    fd: int
    target: int | None = None


class AttachedSockets:
    """By cookie. There are no kernel events: `closed` and `drained` are noticed when a socket is
    touched. Whether it still is the same socket is checked each time."""

    def __init__(
        self, gone: Callable[[int], None], udp_sent: Callable[[], Mapping[int, int]] | None = None
    ) -> None:
        """`gone` is called with the cookie of a socket that could not be had any more; `udp_sent`
        tells the bytes that sockets without acknowledgements have sent, by cookie."""
        self._gone = gone
        self._udp_sent = udp_sent
        self._sockets: dict[int, _Socket] = {}
        self._happened: list[KernelEvent] = []

    @staticmethod
    def probe() -> None:
        """Try the system call. Raises PacingError."""
        try:
            with socket() as own:
                cookie = int.from_bytes(own.getsockopt(1, 57, 8), sys.byteorder)
                with guardian.borrow(os.getpid(), own.fileno(), cookie):
                    pass
        except OSError as error:
            raise PacingError(f"pidfd_getfd does not work here: {error}") from error

    def __contains__(self, cookie: int) -> bool:
        return cookie in self._sockets

    def where(self, cookie: int) -> tuple[int, int] | None:
        """Process and descriptor; None: not attached."""
        at = self._sockets.get(cookie)
        return None if at is None else (at.pid, at.fd)

    def attach(self, cookie: int, pid: int, fd: int) -> None:
        """See `Pacer`."""
        self._sockets[cookie] = _Socket(pid, fd)

    def clear(self) -> None:
        """Forget all."""
        self._sockets.clear()

    @contextmanager
    def borrow(self, cookie: int) -> Iterator[socket]:
        """The socket, for a moment. Raises KeyError when it is not attached, and OSError when it is
        not to be had any more."""
        at = self._sockets[cookie]
        with guardian.borrow(at.pid, at.fd, cookie) as sock:
            yield sock

    def lost(self, cookie: int, error: OSError) -> str:
        """It could not be had: it is closed, or somebody else's by now. Any other error is this
        moment's (too many open files, say): then it stays, with what is to be undone, and the
        sentence says so."""
        if error.errno not in _CLOSED:
            return f"its socket cannot be had: {error}"
        if self._sockets.pop(cookie, None) is not None:
            self._gone(cookie)
            self._happened.append(KernelEvent("closed", cookie))
        return ""

    def counters(self) -> FlowCounters:
        """See `Pacer`. Some five system calls per flow."""
        udp = self._udp_sent() if self._udp_sent is not None else {}
        read = sorted(self._read(udp))
        cookies = np.array([cookie for cookie, _ in read], np.uint64)
        return FlowCounters(cookies, np.array([acked for _, acked in read], np.int64))

    def _read(self, udp: Mapping[int, int]) -> Iterator[tuple[int, int]]:
        for cookie, at in list(self._sockets.items()):
            try:
                with self.borrow(cookie) as sock:
                    acked = _acknowledged(sock)
            except OSError as error:
                self.lost(cookie, error)
                continue
            if acked is None:
                acked = udp.get(cookie)
                if acked is None:
                    continue
            yield cookie, acked
            if at.target is not None and acked >= at.target:
                at.target = None
                self._happened.append(KernelEvent("drained", cookie, acked))

    def events(self) -> list[KernelEvent]:
        """What was noticed since the last call."""
        happened, self._happened = self._happened, []
        return happened

    def watch(self, cookie: int, acked_target: int | None) -> None:
        """See `Pacer`; None: no longer."""
        if cookie in self._sockets:
            self._sockets[cookie].target = acked_target


def _acknowledged(sock: socket) -> int | None:
    """Bytes; None: this protocol knows none. Raises OSError."""
    try:
        (acked,) = _INFO.unpack(sock.getsockopt(IPPROTO_TCP, TCP_INFO, _INFO.size))
    except OSError as error:
        if error.errno in _NO_TCP:
            return None
        raise
    return int(acked)
