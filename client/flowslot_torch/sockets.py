# SPDX-License-Identifier: Apache-2.0
"""This process's TCP connections, which a communication library owns and never shows.

A library may close a descriptor at any moment, and the kernel may give its number to another file.
So each look takes a duplicate, makes sure by the socket's cookie that it is the same one, and lets
go of it at once: a duplicate that we kept would keep a closed connection open.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from contextlib import closing
from dataclasses import dataclass
from ipaddress import ip_address

from flowslot_shm.writer import cookie_of

_TCP_INFO_BYTES = 256
_ACKED = struct.Struct("=Q")
_ACKED_AT = 120  # tcpi_bytes_acked
_ESTABLISHED = 1
End = tuple[str, int]
"""Address (IPv4 also where a dual-stack socket shows ::ffff:a.b.c.d) and port."""


class Gone(OSError):
    """The library has closed the socket."""


@dataclass(frozen=True, slots=True)
class Borrowed:
    """A connected TCP socket of somebody else in this process; as much of `socket.socket` as
    `JobClient.flow` needs. Every call raises Gone once its owner has closed it."""

    fd: int
    cookie: int
    family: int
    local: End
    remote: End
    type: int = socket.SOCK_STREAM

    def fileno(self) -> int:
        """Its number, while it is open."""
        return self.fd

    def getsockname(self) -> End:
        """Of this end."""
        return self.local

    def getpeername(self) -> End:
        """Of the other end."""
        return self.remote

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        """As of a socket."""
        with closing(self._duplicate()) as sock:
            return sock.getsockopt(level, option, size)

    def setsockopt(self, level: int, option: int, value: bytes) -> None:
        """As of a socket."""
        with closing(self._duplicate()) as sock:
            sock.setsockopt(level, option, value)

    def acked(self) -> int:
        """Bytes that the peer has acknowledged since the connection was made."""
        with closing(self._duplicate()) as sock:
            return acked_of(sock)

    def _duplicate(self) -> socket.socket:
        sock = _duplicate(self.fd)
        if sock is not None:
            if cookie_of(sock) == self.cookie:
                return sock
            sock.close()
        raise Gone(f"descriptor {self.fd} is another file now")


def acked_of(sock: socket.socket) -> int:
    """Bytes acknowledged. OSError where the kernel does not tell."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    if len(info) < _ACKED_AT + _ACKED.size:
        raise OSError("this kernel's TCP_INFO has no tcpi_bytes_acked")
    return int(_ACKED.unpack_from(info, _ACKED_AT)[0])


def connections() -> dict[int, tuple[Borrowed, int]]:
    """All established TCP connections of this process, by cookie, and what each has sent so far
    (acknowledged bytes)."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        sock = _duplicate(int(name))
        if sock is not None:
            with closing(sock):
                seen = _look(int(name), sock)
            if seen is not None:
                found[seen[0].cookie] = seen
    return found


def _look(fd: int, sock: socket.socket) -> tuple[Borrowed, int] | None:
    try:
        state = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
        if state != _ESTABLISHED:
            return None
        ends = end(sock.getsockname()), end(sock.getpeername())
        return Borrowed(fd, cookie_of(sock), sock.family, *ends), acked_of(sock)
    except (OSError, ValueError):
        return None  # closed meanwhile


def _duplicate(fd: int) -> socket.socket | None:
    """A socket of TCP, else None. (`socket.socket(fileno=...)` takes over what it is given.)"""
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):  # closing a file's copy drops its POSIX locks
            return None
        copy = os.dup(fd)
    except OSError:
        return None
    try:
        sock = socket.socket(fileno=copy)
    except OSError:  # no socket
        os.close(copy)
        return None
    if sock.type == socket.SOCK_STREAM and sock.family in (socket.AF_INET, socket.AF_INET6):
        return sock
    sock.close()
    return None


def end(name: tuple[object, ...]) -> End:
    """One end of a connection, as both of its hosts write it."""
    ip = ip_address(str(name[0]).partition("%")[0])
    if ip.version == 6 and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    return str(ip), int(str(name[1]))
