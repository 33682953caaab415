# SPDX-License-Identifier: Apache-2.0
"""A Unix socket at a path that anyone on the host may connect to, and who has connected."""

import errno
import os
import socket
import stat
import struct
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from flowslot.model.errors import FlowslotError


class AlreadyRunning(FlowslotError):
    """Another process answers on the socket that we were told to use."""


class Peer(NamedTuple):
    """Who has connected, as the kernel says. `pid` 0: not visible here."""

    pid: int
    uid: int
    gid: int


def peer_of(sock: socket.socket) -> Peer:
    """SO_PEERCRED."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("=iII"))
    return Peer(*struct.unpack("=iII", raw))


class Listener:
    """`socket` listens at `path` from the beginning, non-blocking."""

    def __init__(self, path: Path, kind: socket.SocketKind) -> None:
        """Raises AlreadyRunning; OSError, with the path, when the path is not to be had."""
        claim(path, kind)
        self.path = path
        self.socket = socket.socket(socket.AF_UNIX, kind)
        self.socket.setblocking(False)
        try:
            self.socket.bind(os.fspath(path))
            path.chmod(0o666)
            self.socket.listen(128)
            self._inode = path.stat().st_ino
        except OSError as error:
            self.socket.close()
            raise OSError(error.errno, error.strerror, os.fspath(path)) from None

    def close(self) -> None:
        """Close the socket, and remove it if it is still ours (a successor may have come)."""
        with suppress(OSError):
            if self.path.stat().st_ino == self._inode:
                self.path.unlink()
        self.socket.close()


def claim(path: Path, kind: socket.SocketKind) -> None:
    """Remove the socket of a dead predecessor. Raises AlreadyRunning when one answers there;
    OSError when it is no socket."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise OSError(errno.EEXIST, "exists and is not a socket", os.fspath(path))
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, kind) as probe:
        probe.setblocking(False)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except OSError:
            pass  # full, or another kind of socket: it is alive
    raise AlreadyRunning(
        f"another process answers on {path}; stop it, or give this one its own `runtime_dir`"
    )
