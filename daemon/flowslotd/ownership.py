# SPDX-License-Identifier: Apache-2.0
"""Does a process really hold the socket that its progress record claims?

A record is written by the job, so a hostile one could claim another job's socket and have that
socket slowed down. `pidfd_getfd` borrows the socket for a look at its cookie.
"""

import contextlib
import ctypes
import os
import socket
import struct

_PIDFD_GETFD = 438  # the same number on every architecture
_SO_COOKIE = 57
_libc = ctypes.CDLL(None, use_errno=True)


def holds_socket(pid: int, fd: int, cookie: int) -> bool | None:
    """Whether descriptor `fd` of process `pid` is the socket with this SO_COOKIE.

    None: it cannot be told (no descriptor reported, no CAP_SYS_PTRACE, the process is gone).
    """
    if pid <= 0 or fd < 0:
        return None
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return None
    try:
        borrowed = _libc.syscall(_PIDFD_GETFD, pidfd, fd, 0)
    finally:
        os.close(pidfd)
    if borrowed < 0:
        return None
    try:
        with socket.socket(fileno=borrowed) as sock:
            borrowed = -1
            raw = sock.getsockopt(socket.SOL_SOCKET, _SO_COOKIE, 8)
            return bool(struct.unpack("=Q", raw)[0] == cookie)
    except OSError:
        return False  # no socket at all
    finally:
        if borrowed >= 0:
            with contextlib.suppress(OSError):
                os.close(borrowed)
