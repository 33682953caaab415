# SPDX-License-Identifier: Apache-2.0
"""Does a process really hold the socket that its progress record claims?

A record is written by the job, so a hostile one could claim another job's socket and have that
socket slowed down. So the socket is borrowed for a look at its cookie.
"""

import os
from errno import ENOTSOCK

from flowslot_shm.writer import cookie_of
from flowslotd import sockets


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
        with sockets.borrow(pidfd, fd) as sock:
            return cookie_of(sock) == cookie != 0
    except OSError as error:
        return False if error.errno == ENOTSOCK else None
    finally:
        os.close(pidfd)
