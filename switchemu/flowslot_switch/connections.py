# SPDX-License-Identifier: Apache-2.0
"""This process's TCP connections, as the kernel lists them, and how many more may come.

gRPC tells of a connection when it makes its first call, has a limit for all of them together only,
and accepts as fast as they come, whatever else waits. So connections are looked up among our open
files, and those of which one address has too many are shut down: gRPC finds them closed, as if the
other side had gone. And there is room for some new files only until the next look: what else wants
to be accepted waits in the kernel, which costs nothing. What Python opens itself (a module that it
imports late, say) never lacks room.
"""

import contextlib
import os
import resource
import socket
import sys
from collections import Counter
from collections.abc import Callable, Collection
from typing import NamedTuple

from flowslot_switch.caller import owner_of, peer_name

_FILES = "/proc/self/fd"


class Connection(NamedTuple):
    """`owner`: of its address, see Caller."""

    owner: str
    peer: str


class Connections:
    """Those to one port. For one thread."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._limits = False
        self._known: dict[str, Connection | None] = {}
        """By the kernel's number of the socket; the oldest first."""

    def shut(
        self, each: int, barred: Collection[str], more: int, on_shut: Callable[[Connection], None]
    ) -> None:
        """Shut down those of barred owners, and what others have beyond `each`. Until the next time
        `more` may come."""
        if not self._limits:
            self._limits = True
            sys.addaudithook(_make_room)
        unlimited()  # to look takes files, too
        files = self._look()
        count: Counter[str] = Counter()
        for number, connection in self._known.items():
            if connection is not None:
                count[connection.owner] += 1
                if connection.owner in barred or count[connection.owner] > each:
                    self._shut(number, files[number])
                    on_shut(connection)
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(len(files) + more, hard), hard))

    def queue(self, most: int) -> None:
        """So many may wait in the kernel to be accepted. Those beyond try again by themselves."""
        for number, file in self._look().items():
            if number.startswith("socket:"):
                with contextlib.suppress(OSError), _socket(file) as sock:
                    if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        sock.listen(most)

    def cut(self, peer: str) -> None:
        """Shut one down."""
        files = self._look()
        for number, connection in self._known.items():
            if connection is not None and connection.peer == peer:
                self._shut(number, files[number])

    def _shut(self, number: str, file: int) -> None:
        self._known[number] = None  # once
        with contextlib.suppress(OSError), _socket(file) as sock:
            sock.shutdown(socket.SHUT_RDWR)

    def full(self) -> bool:
        """No more may come."""
        try:
            os.close(os.dup(2))
        except OSError:
            return True
        return False

    def peers(self) -> list[str]:
        """The addresses and ports of all that are open."""
        self._look()
        return [connection.peer for connection in self._known.values() if connection]

    def _look(self) -> dict[str, int]:
        """Our open files by what they are. A socket keeps its number as long as it is open."""
        files = {}
        for name in os.listdir(_FILES):
            with contextlib.suppress(OSError):  # closed meanwhile
                files[os.readlink(f"{_FILES}/{name}")] = int(name)
        self._known = {number: one for number, one in self._known.items() if number in files}
        for number, file in files.items():
            if number.startswith("socket:") and number not in self._known:
                self._known[number] = self._identify(file)
        return files

    def _identify(self, file: int) -> Connection | None:
        with contextlib.suppress(OSError), _socket(file) as sock:
            if sock.family in {socket.AF_INET, socket.AF_INET6}:
                peer, own = sock.getpeername(), sock.getsockname()
                if own[1] == self._port:
                    return Connection(owner_of(peer[0]), peer_name(peer[0], peer[1]))
        return None


def unlimited() -> None:
    """As many files as there may be."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _make_room(event: str, _: object) -> None:
    """Python is about to open something (see its table of audit events)."""
    if event in {"open", "socket.__new__", "socket.getaddrinfo"}:
        unlimited()


def _socket(file: int) -> socket.socket:
    """Another descriptor of it, so that closing ours closes nothing. Raises OSError."""
    copy = os.dup(file)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
