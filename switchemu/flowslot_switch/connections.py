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
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from flowslot_switch.caller import owner_of, peer_name

_FILES = "/proc/self/fd"


class FileLimit:
    """How many files this process may have open (RLIMIT_NOFILE). In any thread."""

    def __init__(self) -> None:
        self.most: int | None = None
        """None: as many as there may be."""
        self._lock = threading.RLock()
        self._thread = threading.local()
        self._looking = 0
        self._hooked = False

    def set(self, most: int | None) -> None:
        """From now on, until Python itself opens something."""
        with self._lock:
            if most is not None and not self._hooked:
                self._hooked = True
                sys.addaudithook(self._on_event)
            self.most = most
            self._apply()

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """For a moment there is room for what looking takes."""
        self._enter(1)
        try:
            yield
        finally:
            self._enter(-1)

    def _enter(self, n: int) -> None:
        with self._lock:
            self._looking += n
            self._thread.looking = getattr(self._thread, "looking", 0) + n
            self._apply()

    def _apply(self) -> None:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        most = hard if self.most is None or self._looking else min(self.most, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))

    def _on_event(self, event: str, _: object) -> None:
        """See Python's table of audit events: something is about to be opened."""
        if (
            event in {"open", "socket.__new__", "socket.getaddrinfo"}
            and self.most is not None
            and not getattr(self._thread, "looking", 0)
        ):
            self.set(None)


FILES = FileLimit()


class Connection(NamedTuple):
    """`owner`: of its address, see Caller."""

    owner: str
    peer: str


class Connections:
    """Those to one port. For one thread."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._known: dict[str, Connection | None] = {}
        """By the kernel's number of the socket; the oldest first."""

    def shut(
        self, each: int, barred: Collection[str], more: int, on_shut: Callable[[Connection], None]
    ) -> None:
        """Shut down those of barred owners, and what others have beyond `each`. Until the next time
        `more` may come."""
        files = self._look()
        count: Counter[str] = Counter()
        for number, connection in self._known.items():
            if connection is not None:
                count[connection.owner] += 1
                if connection.owner in barred or count[connection.owner] > each:
                    self._shut(number, files[number])
                    on_shut(connection)
        FILES.set(len(files) + more)

    def queue(self, most: int) -> None:
        """So many may wait in the kernel to be accepted. Those beyond try again by themselves."""
        for number, file in self._look().items():
            if number.startswith("socket:"):
                with contextlib.suppress(OSError), FILES.lifted(), _socket(file) as sock:
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
        with contextlib.suppress(OSError), FILES.lifted(), _socket(file) as sock:
            sock.shutdown(socket.SHUT_RDWR)

    def full(self) -> bool:
        """No more may come, or there is no limit any more."""
        if FILES.most is None:
            return True
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
        with FILES.lifted():
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


def _socket(file: int) -> socket.socket:
    """Another descriptor of it, so that closing ours closes nothing. Raises OSError."""
    copy = os.dup(file)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
