# SPDX-License-Identifier: Apache-2.0
"""Finds the ps-lite processes of this host that report nothing themselves, and their data sockets.

Everything in /proc can be another user's work: sizes and numbers are bounded, what is strange is
passed over, and a process that ends meanwhile is no error. Reading the memory of another process
(its environment) can take arbitrarily long, so this runs on a thread that nobody waits for.
"""

import logging
import os
import select
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from errno import EMFILE, ENFILE
from itertools import islice
from socket import socket

from flowslot.model.topology_file import normal_ip
from flowslot_shm.writer import cookie_of
from flowslotd import sockets
from flowslotd.observe.passive.nodes import MAX_ENVIRONMENT, Node, node_of
from flowslotd.observe.passive.shadow import MAX_SOCKETS, Found
from flowslotd.privileges import lacking

_log = logging.getLogger(__name__)

DATA_BYTES = 64 * 1024
"""A connection that has sent more between two looks carries data."""
MAX_PROCESSES, MAX_PER_USER = 1024, 512
"""Nodes that are looked at; the workers' children (data loaders) have their environment, too."""
MAX_CONNECTIONS, MAX_CONNECTIONS_PER_USER = 4096, 2048
"""Of all of them."""
MAX_DESCRIPTORS = 4096
"""Of one process, the lowest ones."""
LONGEST_WAIT, LONGEST_SOCKET_WAIT = 64, 4
"""Looks until a process that is no node is looked at again (it may have become one, by exec), and a
socket through which nothing goes."""
OWN_RECORD = "/memfd:flowslot (deleted)"
"""What a process has open that speaks for itself, or has been told not to."""
_SOCKET = "socket:["
_NEEDED = "CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH"
"""For other users' processes: the second one to open what is in /proc, the first one to read it,
and to borrow sockets."""


class _Kind(Enum):
    NEW = 0  # not connected yet, say
    CONNECTED = 1  # may carry data
    DATA = 2
    OTHER = 3  # never will


@dataclass(slots=True)
class _Turns:
    """Something is looked at in every look, in every second one, ..."""

    most: int
    wait: int = 1
    left: int = 1

    def due(self) -> bool:
        """Called in every look."""
        self.left -= 1
        if self.left > 0:
            return False
        self.wait = min(2 * self.wait, self.most)
        self.left = self.wait
        return True

    def again(self) -> None:
        """It is of interest: in the next look, too."""
        self.wait = self.left = 1


@dataclass(slots=True)
class _Socket:
    fd: int
    kind: _Kind = _Kind.NEW
    cookie: int = 0
    sent: int = 0  # when it was last looked at
    turns: _Turns = field(default_factory=lambda: _Turns(LONGEST_SOCKET_WAIT))


@dataclass(slots=True)
class _Process:
    node: Node
    pidfd: int
    uid: int
    sockets: dict[str, _Socket] = field(default_factory=dict)  # by what their descriptor links to


class Finder:
    """`look` once a second. Not thread-safe."""

    def __init__(
        self, addresses: Collection[str], alive: Callable[[], object] = lambda: None
    ) -> None:
        """`addresses`: this host's. Connections that do not leave from one of them to another
        host are somebody else's business. `alive` is called now and then in a look."""
        self._alive = alive
        self._addresses = frozenset(normal_ip(address) for address in addresses)
        self._processes: dict[int, _Process] = {}
        self._others: dict[int, _Turns] = {}
        self._per_user: Counter[int] = Counter()
        self._said: set[str] = set()
        self._denied = False
        self._absent = _absent()
        if self._absent:
            absent = f"{' and '.join(self._absent)} {'is' if len(self._absent) == 1 else 'are'}"
            self._say(f"other users' processes cannot be seen: {absent} missing")

    def look(self) -> list[Found]:
        """All nodes with data connections, and these."""
        try:
            pids = _pids()
        except OSError as error:  # too many open files, say: those that are known will do
            self._say(f"no further processes can be found: {error}")
        else:
            self._update(pids)
        taken: set[int] = set()
        per_user: Counter[int] = Counter()
        found = []
        for pid, process in list(self._processes.items()):
            self._alive()
            data = self._data(pid, process)
            # A child has its parent's descriptors: the parent was found before.
            own = tuple((d.fd, d.cookie) for d in data if d.cookie not in taken)[:MAX_SOCKETS]
            room = min(
                MAX_CONNECTIONS - len(taken), MAX_CONNECTIONS_PER_USER - per_user[process.uid]
            )
            if len(own) > room:  # somebody else's may have room
                self._say("there are more ps-lite connections than are looked at")
                continue
            taken.update(cookie for _, cookie in own)
            per_user[process.uid] += len(own)
            if own:
                found.append(Found(pid, process.node.job, process.node.role, own))
        return found

    def close(self) -> None:
        """Forget all."""
        for pid in list(self._processes):
            self._forget(pid)

    # -- processes ----------------------------------------------------------------------------

    def _update(self, pids: set[int]) -> None:
        for pid in [p for p, process in self._processes.items() if _ended(process.pidfd)]:
            self._forget(pid)
        for pid in self._others.keys() - pids:
            del self._others[pid]
        for pid in sorted(pids - self._processes.keys() - {os.getpid()}):
            if self._others.setdefault(pid, _Turns(LONGEST_WAIT)).due():
                self._alive()
                self._examine(pid)

    def _examine(self, pid: int) -> None:
        """If it is a node it is one of ours from now on."""
        try:
            if _node(pid) is None:
                return
            uid = os.stat(f"/proc/{pid}").st_uid
            if len(self._processes) >= MAX_PROCESSES or self._per_user[uid] >= MAX_PER_USER:
                self._say("there are more ps-lite processes than are looked at")
                return
            self._take(pid, uid)
        except PermissionError:
            self._deny(pid)
        except OSError as error:  # ended just now, mostly
            if error.errno in {EMFILE, ENFILE}:
                self._others[pid].again()
                self._say(f"no further processes can be looked at: {error.strerror}")

    def _take(self, pid: int, uid: int) -> None:
        """Raises OSError."""
        pidfd = os.pidfd_open(pid)
        kept = False
        try:
            node = _node(pid)  # once more: now it cannot have been another process
            if node is not None and not _ended(pidfd):
                self._processes[pid] = _Process(node, pidfd, uid)
                kept = True
        finally:
            if not kept:
                os.close(pidfd)
        if kept:
            del self._others[pid]
            self._per_user[uid] += 1

    def _forget(self, pid: int) -> None:
        process = self._processes.pop(pid)
        os.close(process.pidfd)
        self._per_user[process.uid] -= 1

    # -- sockets ------------------------------------------------------------------------------

    def _data(self, pid: int, process: _Process) -> list[_Socket]:
        """Its data connections, as of now."""
        try:
            links = _links(pid)
        except PermissionError:
            self._deny(pid)
            links = {}
        known = process.sockets
        for link in known.keys() - links.keys():
            del known[link]
        if OWN_RECORD in links:
            return []
        for link, fd in links.items():
            if link.startswith(_SOCKET):
                one = known.setdefault(link, _Socket(fd))
                one.fd = fd
                if one.kind in {_Kind.NEW, _Kind.CONNECTED} and one.turns.due():
                    self._look_at(pid, process, one)
        return [one for one in known.values() if one.kind == _Kind.DATA]

    def _look_at(self, pid: int, process: _Process, one: _Socket) -> None:
        try:
            with sockets.borrow(process.pidfd, one.fd) as sock:
                if one.kind == _Kind.NEW:
                    one.kind = self._kind(sock, process.node.scheduler_port)
                    if one.kind == _Kind.CONNECTED:
                        one.cookie, one.sent = cookie_of(sock), sockets.look(sock).sent
                        one.turns.again()
                elif cookie_of(sock) == one.cookie:
                    sent = sockets.look(sock).sent
                    if sent > one.sent:
                        one.turns.again()
                    if sent - one.sent > DATA_BYTES:
                        one.kind = _Kind.DATA
                    one.sent = sent
        except PermissionError:
            self._deny(pid)
        except OSError:  # closed just now: in the next look it is not there
            pass

    def _kind(self, sock: socket, scheduler_port: int) -> _Kind:
        """Of a socket that was not connected when it was last looked at. Raises OSError."""
        if not sockets.is_tcp(sock):
            return _Kind.OTHER
        state = sockets.look(sock).state
        if state not in sockets.SENDING:
            return _Kind.OTHER if state == sockets.LISTEN else _Kind.NEW
        (here, port), (there, peer_port) = sock.getsockname()[:2], sock.getpeername()[:2]
        leaves = _plain(here) in self._addresses and _plain(there) not in self._addresses
        data = leaves and scheduler_port not in {port, peer_port}
        return _Kind.CONNECTED if data else _Kind.OTHER

    def _deny(self, pid: int) -> None:
        """It is not to be looked at; where a capability is missing that was said. Said once; and
        not of init, which is no job's, and out of reach in some containers."""
        if pid != 1 and not self._absent and not self._denied:
            self._denied = True
            self._say(f"process {pid} must not be looked at, and perhaps others: permission denied")

    def _say(self, text: str) -> None:
        """Once."""
        if text not in self._said:
            self._said.add(text)
            _log.warning("unpatched ps-lite: %s", text)


def _absent() -> list[str]:
    """Capabilities that this process would need, and does not have."""
    with suppress(OSError):
        return lacking(_NEEDED)
    return []


def _pids() -> set[int]:
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}


def _node(pid: int) -> Node | None:
    """Raises OSError: it has ended, or belongs to somebody else."""
    with open(f"/proc/{pid}/environ", "rb", buffering=0) as file:
        return node_of(file.read(MAX_ENVIRONMENT) or b"")


def _ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _links(pid: int) -> dict[str, int]:
    """What the descriptors of a process refer to, and the first one that does. Raises
    PermissionError."""
    found: dict[str, int] = {}
    try:
        with os.scandir(f"/proc/{pid}/fd") as entries:
            for entry in islice(entries, MAX_DESCRIPTORS):
                with suppress(FileNotFoundError, ValueError):  # closed meanwhile
                    found.setdefault(os.readlink(entry.path), int(entry.name))
    except PermissionError:
        raise
    except OSError:  # it has ended meanwhile; or too many open files
        pass
    return found


def _plain(address: str) -> str:
    """As it stands in a topology: IPv4 also when a socket for both shows it as ::ffff:a.b.c.d."""
    return normal_ip(address.partition("%")[0])
