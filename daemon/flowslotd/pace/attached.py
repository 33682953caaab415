# SPDX-License-Identifier: Apache-2.0
"""Sockets of other processes, and what the back ends that pace such sockets have in common.

Jobs have reported the sockets. Each is reached through pidfd_getfd, for a moment: no descriptor is
kept.
"""

import os
import struct
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from errno import ENOPROTOOPT, EOPNOTSUPP
from socket import IPPROTO_TCP, TCP_INFO, socket
from typing import TypeVar

import numpy as np

from flowslotd.clock import monotonic
from flowslotd.flows.counters import FlowCounters
from flowslotd.pace import guardian
from flowslotd.pace.egress import Egress
from flowslotd.pace.pacer import Entries, KernelEvent, Pacer, PacingError, Where
from flowslotd.pace.undo import UndoTable
from flowslotd.sockets import GONE

MIN_RATE = 256_000
"""Bytes/s, as in bpf/consts.h: a slower flow would notice a raised rate too late."""
GUARDED: tuple[Where, str] = ("kernel", "a guardian process, which undoes the rest")
"""A change to the host that all of them make."""
T = TypeVar("T")
_INFO = struct.Struct("=120xQ")  # tcpi_bytes_acked
_NO_TCP = ENOPROTOOPT, EOPNOTSUPP


@dataclass(slots=True)
class _Socket:
    pid: int
    fd: int
    target: int | None = None


class AttachedSockets:
    """Sockets by cookie. Each access checks that the descriptor still is the same socket. The
    kernel sends no events: an access notices that a socket is `closed` or `drained`."""

    def __init__(
        self, gone: Callable[[int], None], udp_sent: Callable[[], Mapping[int, int]]
    ) -> None:
        """`gone` is called with the cookie of a socket that is closed. `udp_sent` returns the bytes
        that sockets without acknowledgements have sent, by cookie."""
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

    def where(self, cookie: int) -> tuple[int, int]:
        """Process and descriptor of a socket. Raises KeyError when it is not attached."""
        at = self._sockets[cookie]
        return at.pid, at.fd

    def attach(self, cookie: int, pid: int, fd: int) -> None:
        """See `Pacer`."""
        self._sockets[cookie] = _Socket(pid, fd)

    def clear(self) -> None:
        """Forget all sockets."""
        self._sockets.clear()

    @contextmanager
    def borrow(self, cookie: int) -> Iterator[socket]:
        """The socket, for a moment. Raises KeyError when it is not attached, and OSError when it
        cannot be reached."""
        at = self._sockets[cookie]
        with guardian.borrow(at.pid, at.fd, cookie) as sock:
            yield sock

    def lost(self, cookie: int, error: OSError) -> str:
        """A socket could not be reached. If it is closed, or another one by now, it is forgotten,
        and the answer is empty. Any other error may pass (too many open files, say): then the
        socket stays attached, and the answer says in one sentence what is wrong."""
        if error.errno not in GONE:
            hidden = self._sockets[cookie].pid == 0
            why = "its process is in another pid namespace" if hidden else str(error)
            return f"its socket cannot be had: {why}"
        if self._sockets.pop(cookie, None) is not None:
            self._gone(cookie)
            self._happened.append(KernelEvent("closed", cookie))
        return ""

    def counters(self) -> FlowCounters:
        """See `Pacer`. Some five system calls per flow."""
        read = sorted(self._read(self._udp_sent()))
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


class AttachedPacer(Pacer, ABC):
    """See `Pacer`. There are no kernel events and no top-up: `closed` and `drained` are noticed
    when counters are read. When the daemon dies, the kernel keeps what was set, and a guardian
    process undoes it (guardian.py)."""

    def __init__(self) -> None:
        self._sockets = AttachedSockets(self._gone, self._udp_sent)
        self._undo = UndoTable()
        self._why: dict[int, str] = {}  # reasons why flows are not paced
        self._in_force = True
        self._egress: Egress | None = None  # of back ends that set devices up
        self._addresses: Collection[str] = ()

    def leave_by(self, addresses: Collection[str]) -> None:
        """See `Pacer`."""
        self._addresses = addresses
        if self._egress is not None:
            self._egress.leave_by(addresses)

    # -- rates --------------------------------------------------------------------------------

    def attach(self, cookie: int, pid: int, fd: int) -> None:
        """See `Pacer`. Each access to the socket checks that it still is this one."""
        if cookie not in self._sockets or self._sockets.where(cookie) != (pid, fd):
            self.release(cookie)
            self._sockets.attach(cookie, pid, fd)

    def apply(self, entries: Entries, deadline_ns: int) -> int:
        """See `Pacer`. All flows have one deadline."""
        self._extend(deadline_ns)
        rates = np.minimum(entries["reserved"], entries["ceiling"])
        wanted = zip(entries["cookie"].tolist(), rates.tolist(), strict=True)
        known = [
            (cookie, max(round(rate), MIN_RATE))
            for cookie, rate in wanted
            if cookie in self._sockets
        ]
        try:
            return self._set(known, deadline_ns)
        finally:
            if monotonic() >= deadline_ns:  # the guardian may have looked too early
                self._undo.look_again()

    @abstractmethod
    def _set(self, wanted: list[tuple[int, int]], deadline_ns: int) -> int:
        """Rates (payload bytes/s) of attached flows, by cookie. Returns how many changed."""

    def refresh(self, deadline_ns: int) -> bool:
        """See `Pacer`."""
        self._extend(deadline_ns)
        in_force, self._in_force = self._in_force, True
        return in_force and not (self._egress is not None and self._egress.retry_due())

    def _extend(self, deadline_ns: int) -> None:
        if self._undo.refresh(deadline_ns):
            self._in_force = False
            self._undone()

    @abstractmethod
    def _undone(self) -> None:
        """The daemon was late, and the guardian has let all flows go."""

    def _touch(self, cookie: int, do: Callable[[socket], T]) -> T | None:
        """What `do` returns for this flow's socket. None: that was not possible, and `refusal` says
        why. `do` may raise PacingError."""
        try:
            with self._sockets.borrow(cookie) as sock:
                done = do(sock)
        except PacingError as error:
            self._why[cookie] = str(error)
            return None
        except OSError as error:
            why = self._sockets.lost(cookie, error)
            if why:  # it may work the next time
                self._why[cookie] = why
                self._in_force = False
            return None
        self._why.pop(cookie, None)
        return done

    def release(self, cookie: int) -> None:
        """See `Pacer`. The flow stays attached."""
        self._sockets.watch(cookie, None)
        self._gone(cookie)

    def _gone(self, cookie: int) -> None:
        """A flow was released, or its socket is closed."""
        self._why.pop(cookie, None)
        self._undo.free_socket(cookie)

    def refusal(self, cookie: int) -> str:
        """See `Pacer`."""
        return self._why.get(cookie, "")

    # -- what the kernel tells ------------------------------------------------------------------

    def counters(self) -> FlowCounters:
        """See `Pacer`. Some five system calls per flow."""
        return self._sockets.counters()

    @abstractmethod
    def _udp_sent(self) -> Mapping[int, int]:
        """Payload bytes of UDP flows, by cookie."""

    def events(self) -> list[KernelEvent]:
        """`closed` and `drained`, as noticed by `counters()` and `apply()`; no addresses."""
        return self._sockets.events()

    def watch(self, cookie: int, acked_target: int) -> None:
        """See `Pacer`; noticed by `counters()`."""
        self._sockets.watch(cookie, acked_target)


def _acknowledged(sock: socket) -> int | None:
    """Acknowledged bytes. None: this protocol has no acknowledgements. Raises OSError."""
    try:
        (acked,) = _INFO.unpack(sock.getsockopt(IPPROTO_TCP, TCP_INFO, _INFO.size))
    except OSError as error:
        if error.errno in _NO_TCP:
            return None
        raise
    return int(acked)
