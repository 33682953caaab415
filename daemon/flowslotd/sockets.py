# SPDX-License-Identifier: Apache-2.0
"""TCP sockets of other processes, each borrowed for a moment with pidfd_getfd.

No descriptor is kept: a connection is closed when its last descriptor is, so one of ours would hide
from the peer that the process has closed its own, or has died.
"""

import ctypes
import os
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EBADF, ENOTSOCK, ESRCH, ESTALE
from pathlib import Path
from typing import NamedTuple

from flowslot_shm.writer import cookie_of

GONE = EBADF, ENOTSOCK, ESRCH, ESTALE
"""Errors that say that it is closed, or that its process has ended."""
ESTABLISHED, CLOSE_WAIT, LISTEN = 1, 8, 10
SENDING = ESTABLISHED, CLOSE_WAIT
"""States in which an application may send (CLOSE_WAIT: the other end does so no more)."""
SYSCALL = 438
"""pidfd_getfd: the same number on every architecture."""
TIMESTAMPS = 1
"""Of `Info.options`."""
_SO_NETNS_COOKIE = 71
_TCP_RTO_MIN_US = 45
_DEFAULT = Path("/proc/sys/net/ipv4/tcp_congestion_control")
# Of struct tcp_info: state, options, snd_mss, unacked (segments), last_data_sent, bytes_acked,
# notsent_bytes, busy_time, bytes_sent, bytes_retrans.
_INFO = struct.Struct("=B4xB10xI4xI16xI72xQ16xI20xQ24xQQ")
_libc = ctypes.CDLL(None, use_errno=True)


class Info(NamedTuple):
    """Of one socket at one moment; sizes in bytes."""

    state: int
    options: int
    mss: int
    """Of what this end sends."""
    in_flight: int
    """Segments that were sent and are not acknowledged."""
    quiet_ms: int
    """So long ago the last one was sent; in steps of the kernel's ticks."""
    acked: int
    """SYN and FIN count one each."""
    unsent: int
    busy_us: int
    """For so long there were bytes that were not acknowledged; in steps of the kernel's ticks."""
    sent: int
    """More than once what was sent more than once,"""
    resent: int
    """which is so much."""


@contextmanager
def borrow(pidfd: int, fd: int, cookie: int | None = None) -> Iterator[socket.socket]:
    """Socket `fd` of another process, for a moment.

    Raises OSError where it is not to be had: no such descriptor, the process has ended (EBADF,
    ESRCH), no permission (EPERM: CAP_SYS_PTRACE), no socket at all (ENOTSOCK), or one with another
    cookie (ESTALE).
    """
    with _socket(_copy(pidfd, fd)) as sock:
        if cookie is not None and cookie_of(sock) != cookie:
            raise OSError(ESTALE, "another socket by now")
        yield sock


def peek(pidfd: int, fd: int, cookie: int) -> Info:
    """What `look` tells of socket `fd`, known to be TCP, of another process, if its cookie is
    right: five system calls, some 6 us. Raises OSError as `borrow` does."""
    with _socket(_copy(pidfd, fd), socket.AF_INET, socket.SOCK_STREAM, 0) as sock:
        if cookie_of(sock) != cookie:
            raise OSError(ESTALE, "another socket by now")
        return look(sock)


def _copy(pidfd: int, fd: int) -> int:
    copy: int = _libc.syscall(SYSCALL, pidfd, fd, 0)
    if copy < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return copy


def _socket(copy: int, family: int = -1, kind: int = -1, protocol: int = -1) -> socket.socket:
    """Takes over the descriptor. What is not said of it is found out. Raises OSError."""
    try:
        return socket.socket(family, kind, protocol, copy)
    except OSError:  # the number is something else's by now
        os.close(copy)
        raise


def namespace(sock: socket.socket) -> int:
    """Tells a socket's network namespace. 0 where the kernel does not say (before Linux 5.14)."""
    try:
        cookie = sock.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, 8)
    except OSError:
        return 0
    return int.from_bytes(cookie, sys.byteorder)


def is_tcp(sock: socket.socket) -> bool:
    """TCP over IPv4 or IPv6."""
    known = sock.family in {socket.AF_INET, socket.AF_INET6}
    return known and sock.getsockopt(socket.SOL_SOCKET, socket.SO_PROTOCOL) == socket.IPPROTO_TCP


def look(sock: socket.socket) -> Info:
    """What the kernel tells of a TCP socket. Raises OSError."""
    raw = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    return Info._make(_INFO.unpack(raw))


def enlist(sock: socket.socket, congestion_control: str) -> None:
    """Select a congestion control. Raises OSError."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion_control.encode())


class Tuning(NamedTuple):
    """What enlisting a socket changes. `rto_min_us`: the shortest retransmission timeout, us; 0
    where the kernel does not say (before Linux 6.15)."""

    congestion_control: bytes
    rto_min_us: int


def tuning(sock: socket.socket) -> Tuning:
    """As the socket is now. Raises OSError."""
    name = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")
    try:
        return Tuning(name, sock.getsockopt(socket.IPPROTO_TCP, _TCP_RTO_MIN_US))
    except OSError:
        return Tuning(name, 0)


def tune(sock: socket.socket, to: Tuning) -> None:
    """Give a socket back what it had; the default, if that congestion control is gone. Raises
    OSError."""
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, to.congestion_control)
    except FileNotFoundError:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _DEFAULT.read_bytes().strip())
    if to.rto_min_us:
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MIN_US, to.rto_min_us)


class Odometer:
    """How many bytes an application has given to the kernel, from what the kernel tells."""

    def __init__(self) -> None:
        self._skew = 0

    def read(self, info: Info) -> tuple[int, int]:
        """Bytes posted and acknowledged since the connection was made.

        The kernel counts both in ways that differ a little (SYN and FIN; a retransmission that it
        had no memory for). Whenever all is acknowledged they must be the same, and are made so.
        """
        posted = info.sent - info.resent + info.unsent
        if not (info.in_flight or info.unsent):
            self._skew = info.acked - posted
        return max(posted + self._skew, info.acked), info.acked
