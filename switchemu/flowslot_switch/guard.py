# SPDX-License-Identifier: Apache-2.0
"""Who is shut out, and how many connections may come.

gRPC tells of a connection when it makes its first call, and has a limit for all of them together
only. So connections are looked up among our open files, and those of which one address has too many
are shut down: gRPC finds them closed, as if the other side had gone. And there is room for some
more only until the next look.
"""

import asyncio
import contextlib
import os
import socket
import stat
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from flowslot_switch import limits
from flowslot_switch.caller import owner_of, peer_name
from flowslot_switch.filelimit import FileLimit

OnRejected = Callable[[str, str], None]
"""A caller's address, and what it did."""
CLOSED_S = 0.05
"""From gRPC's word that a handshake has failed until its connection is closed."""
T = TypeVar("T")


class Connection(NamedTuple):
    """`owner`: of its address, see Caller."""

    owner: str
    peer: str


class Guard:
    """Of a server's connections. In the event loop, but for `handshake`."""

    def __init__(self, on_rejected: OnRejected) -> None:
        self._on_rejected = on_rejected
        self._patience = limits.Rates(limits.REFUSALS_PER_S, limits.REFUSAL_BURST)
        self._barred: dict[str, float] = {}
        """Until when, by address."""
        self._files = FileLimit()
        self._task: asyncio.Task[None] | None = None
        self._port = 0
        self._known: dict[int, Connection | None] = {}
        """By the kernel's number of the socket; the oldest first. None: of no concern."""
        self._callers: set[str] = set()
        self._gone: deque[str] = deque(maxlen=3)
        """Peers that never made a call."""
        self._looked = 0.0
        self._looks = limits.TokenBucket(limits.LOOKS_PER_S, limits.LOOK_BURST)
        self._handshakes = 0

    def start(self, port: int) -> None:
        """Limit the connections to that port. For a process that does nothing else."""
        self._port = port

        def limit(sock: socket.socket) -> None:
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                sock.listen(limits.BACKLOG)

        for _, file, _ in self._look()[1]:
            _on_socket(file, limit)
        self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        """Let everything come."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
            self._files.set(None)

    def bars(self, address: str) -> bool:
        """Whether it is shut out."""
        return self._barred.get(address, 0.0) > time.monotonic()

    def bear(self, address: str) -> None:
        """It has broken a rule or a limit; who does so again and again is shut out."""
        if not (self._patience.take(address, time.monotonic_ns()) or self.bars(address)):
            self._barred[address] = time.monotonic() + limits.BARRED_S

    def called(self, peer: str) -> None:
        """A connection has made a call."""
        self._callers.add(peer)

    def cut(self, peer: str) -> None:
        """Shut a connection down."""
        with contextlib.suppress(OSError):  # no file is left to look with
            for number, file, connection in self._look()[1]:
                if connection is not None and connection.peer == peer:
                    self._shut(number, file)

    def handshake(self) -> None:
        """One begins. In any thread."""
        if self._port:
            self._glance()
        self._handshakes += 1
        if self._task is not None and self._handshakes > limits.NEW_CONNECTIONS:
            self._files.set(0)  # connections that end soon leave room: no more until the next look

    def handshake_failed(self, why: str) -> None:
        """gRPC says so, not whose: look who is gone when the connection is closed."""
        self._gone.clear()

        def tell() -> None:
            self._glance()
            self._on_rejected(" or ".join(self._gone) or "somebody", f"TLS: {why}")

        asyncio.get_running_loop().call_later(CLOSED_S, tell)

    async def _run(self) -> None:
        while True:
            now = time.monotonic()
            self._barred = {a: until for a, until in self._barred.items() if until > now}
            if self._barred or now - self._looked >= limits.LOOK_S or self._files.reached():
                with contextlib.suppress(OSError):
                    self._shut_all()
            await asyncio.sleep(limits.GUARD_S)

    def _shut_all(self) -> None:
        """Those that are barred, and those beyond what one address may have; let more come."""
        now = time.monotonic()
        more = limits.NEW_CONNECTIONS
        if self._barred:
            more = limits.FEW_CONNECTIONS
        elif now - self._looked >= limits.LOOK_S:
            more = limits.BURST_CONNECTIONS
        self._looked, self._handshakes = now, 0
        there, sockets = self._look()
        count: Counter[str] = Counter()
        for number, file, connection in sockets:
            if connection is None:
                continue
            count[connection.owner] += 1
            if connection.owner in self._barred:
                why = f"asks too much again and again: shut out for {limits.BARRED_S:g} s"
            elif count[connection.owner] > limits.CONNECTIONS_PER_ADDRESS:
                why = f"more than {limits.CONNECTIONS_PER_ADDRESS} connections"
            else:
                continue
            self._shut(number, file)
            there -= 1
            self._on_rejected(connection.peer, why)
        self._files.set(there + more)

    def _shut(self, number: int, file: int) -> None:
        self._known[number] = None  # once

        def shut(sock: socket.socket) -> None:
            if os.fstat(file).st_ino == number:  # gRPC closes and opens files meanwhile
                sock.shutdown(socket.SHUT_RDWR)

        _on_socket(file, shut)

    def _glance(self) -> None:
        """Look, if that was not done too often of late."""
        if self._looks.take(time.monotonic_ns()):
            with contextlib.suppress(OSError):  # no file is left to look with
                self._look()

    def _look(self) -> tuple[int, list[tuple[int, int, Connection | None]]]:
        """How many files are open; and of each socket the kernel's number, the file and what is
        known of it, the oldest first. In any thread."""
        sockets = {}
        with self._files.lifted():
            names = os.listdir("/proc/self/fd")
            for name in names:
                with contextlib.suppress(OSError):  # closed meanwhile
                    found = os.fstat(int(name))
                    if stat.S_ISSOCK(found.st_mode):
                        sockets[found.st_ino] = int(name)
            for number in self._known.keys() - sockets.keys():
                connection = self._known.pop(number)
                if connection is not None and connection.peer not in self._callers:
                    self._gone.append(connection.peer)
            for number, file in sockets.items():
                if number not in self._known:
                    self._known[number] = _on_socket(file, self._identify)
            self._callers &= {one.peer for one in self._known.values() if one}
            known = list(self._known.items())
        return len(names), [(n, sockets[n], one) for n, one in known if n in sockets]

    def _identify(self, sock: socket.socket) -> Connection | None:
        if sock.family in {socket.AF_INET, socket.AF_INET6}:
            peer, own = sock.getpeername(), sock.getsockname()
            if own[1] == self._port:
                return Connection(owner_of(peer[0]), peer_name(peer[0], peer[1]))
        return None


def _on_socket(file: int, work: Callable[[socket.socket], T]) -> T | None:
    """None: it is no open socket any more. Closes nothing."""
    with contextlib.suppress(OSError):
        sock = socket.socket(fileno=file)
        try:
            return work(sock)
        finally:
            sock.detach()
    return None
