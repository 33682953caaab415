# SPDX-License-Identifier: Apache-2.0
"""Undoes in the kernel what would outlive a dead daemon.

Run as a script of its own, standard library only, so that it stays small:

    python -I -S guardian.py PIPE TABLE STRUCT_OPS

PIPE is the reading end of a pipe whose other end only the daemon holds: its end is the daemon's.
TABLE is a memfd that lists the sockets that are paced (`HEADER`, then `ROW`s), or -1. They are
unpaced when the daemon is gone, or when it lets the deadline pass; then `freed` counts up, so that
a daemon that was only asleep knows. STRUCT_OPS is a map whose registration to remove, or -1.
It is started deaf to signals that a service manager sends to daemon and guardian alike.
"""

import contextlib
import ctypes
import mmap
import os
import platform
import select
import socket
import struct
import sys
import time
from collections.abc import Iterator

HEADER = struct.Struct("=QQ")  # deadline (CLOCK_MONOTONIC, ns), freed
ROW = struct.Struct("=Qii")  # cookie (0: empty), pid, fd
UNLIMITED = 2**64 - 1

_PIDFD_GETFD = 438  # the same on every architecture
_BPF = {"x86_64": 321, "aarch64": 280}
_MAP_DELETE_ELEM = 3
_SO_MAX_PACING_RATE = 47
_SO_COOKIE = 57
_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def borrow(pid: int, fd: int, cookie: int) -> Iterator[socket.socket]:
    """Socket `fd` of another process, for a moment.

    Raises OSError where it is not to be had: no such process or descriptor, no permission
    (CAP_SYS_PTRACE), or another socket by now (ESTALE).
    """
    pidfd = os.pidfd_open(pid)
    try:
        copy = _libc.syscall(_PIDFD_GETFD, pidfd, fd, 0)
        if copy < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
    finally:
        os.close(pidfd)
    try:
        # Family and type are given so that Python asks the kernel nothing; they do not matter.
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with sock:
        if (
            int.from_bytes(sock.getsockopt(socket.SOL_SOCKET, _SO_COOKIE, 8), sys.byteorder)
            != cookie
        ):
            raise OSError(116, "another socket by now")  # ESTALE
        yield sock


def set_rate(sock: socket.socket, rate: int) -> None:
    """Pace a socket at `rate` payload bytes/s."""
    sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("@L", rate))


def free_all(table: mmap.mmap) -> None:
    """Unpace every socket in the table."""
    for offset in range(HEADER.size, len(table) - ROW.size + 1, ROW.size):
        cookie, pid, fd = ROW.unpack_from(table, offset)
        if cookie:
            with contextlib.suppress(OSError), borrow(pid, fd, cookie) as sock:
                set_rate(sock, UNLIMITED)
    _, freed = HEADER.unpack_from(table)
    struct.pack_into("=Q", table, 8, freed + 1)


def unregister(struct_ops: int) -> None:
    """Remove the registration of a struct_ops map."""
    number = _BPF.get(platform.machine())
    key = ctypes.c_uint32(0)
    attributes = struct.pack("=I4xQQQ", struct_ops, ctypes.addressof(key), 0, 0)
    if number is not None:
        _libc.syscall(number, _MAP_DELETE_ELEM, attributes, len(attributes))


def wait(pipe: int, table: mmap.mmap | None) -> None:
    """Return when the daemon is gone; free the sockets each time it lets the deadline pass."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    late = 0
    while True:
        timeout = None
        if table is not None:
            deadline = HEADER.unpack_from(table)[0]
            left = deadline - time.monotonic_ns()
            if left <= 0 and deadline != late:
                free_all(table)
                late = deadline
            timeout = 20 if deadline in (0, late) else left // 1_000_000 + 1
        if poll.poll(timeout):
            return


def main() -> None:
    """Guard until the daemon is gone, then clean up."""
    pipe, table_fd, struct_ops = map(int, sys.argv[1:4])
    table = mmap.mmap(table_fd, 0) if table_fd >= 0 else None
    wait(pipe, table)
    if table is not None:
        free_all(table)
    if struct_ops >= 0:
        unregister(struct_ops)


if __name__ == "__main__":
    main()
