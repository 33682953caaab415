# SPDX-License-Identifier: Apache-2.0
"""Finds processes of this host that report nothing themselves, and their data sockets: those of
ps-lite, by their environment, and those that an operator has enlisted.

Everything in /proc can be another user's work: sizes and numbers are bounded, what is strange is
passed over, and a process that ends meanwhile is no error. Reading the memory of another process
(its environment) can take arbitrarily long, so this runs on a thread that nobody waits for.
"""

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from errno import EMFILE, ENFILE
from itertools import islice
from socket import socket

from flowslot.model.topology_file import normal_ip
from flowslot_shm.writer import cookie_of
from flowslotd import sockets
from flowslotd.observe.passive.nodes import Node, node_of
from flowslotd.observe.passive.shadow import DATA_BYTES, MAX_SOCKETS, Found, warnings
from flowslotd.observe.passive.targets import Target, ended, environment
from flowslotd.privileges import lacking

MAX_UNDECIDED = 32
"""Connections of an enlisted process that have sent less than DATA_BYTES between two looks, and are
looked at all the same: they may begin at any time, and iterations are short."""
MAX_PROCESSES, MAX_PER_USER = 1024, 512
"""Nodes that are looked at; the workers' children (data loaders) have their environment, too."""
MAX_CONNECTIONS, MAX_CONNECTIONS_PER_USER = 4096, 2048
"""Of all of them."""
MAX_DESCRIPTORS = 4096
"""Of one process, the lowest ones."""
LONGEST_WAIT, LONGEST_SOCKET_WAIT = 64, 4
"""In the 1st, 2nd, 4th, ... look at all, and from this on in every such one, a process that is no
node is looked at again (it may have become one, by exec), and a socket through which nothing
goes."""
OWN_RECORD = "/memfd:flowslot (deleted)"
"""What a process has open that speaks for itself, or has been told not to."""
UNPLACED = (
    "where a job's scheduler is cannot be told: set FLOWSLOT_JOB, or hosts that spell "
    "DMLC_PS_ROOT_URI otherwise take it for another job"
)
_SOCKET = "socket:["
_NEEDED = "CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH"
"""For other users' processes: the second one to open what is in /proc, the first one to read it,
and to borrow sockets."""


@dataclass(slots=True)
class _Socket:
    """`cookie`: 0 while it is not connected. `data`: whether it carries any; None: not known yet.
    `scheduler`: the address at its other end, if that may be the scheduler. `sent`: bytes when it
    was last looked at. `looks`: since something was last sent."""

    fd: int
    cookie: int = 0
    data: bool | None = None
    scheduler: str = ""
    sent: int = 0
    looks: int = 0


@dataclass(slots=True)
class _Process:
    """`target`: as part of what it has been enlisted; None: it is a node of ps-lite."""

    node: Node
    target: Target | None
    pidfd: int
    uid: int
    sockets: dict[str, _Socket] = field(default_factory=dict)  # by what their descriptor links to


class Finder:
    """`look` now and then. Not thread-safe."""

    def __init__(
        self, addresses: Collection[str], alive: Callable[[], object] = lambda: None
    ) -> None:
        """`addresses`: this host's. Connections that do not leave from one of them to another
        host are somebody else's business. `alive` is called now and then in a look."""
        self._alive = alive
        self._addresses = frozenset(normal_ip(address) for address in addresses)
        self._processes: dict[int, _Process] = {}
        self._others: Counter[int] = Counter()  # looks at all since it was found
        self._warn = warnings()
        self._absent = _absent()
        if self._absent:
            absent = f"{' and '.join(self._absent)} {'is' if len(self._absent) == 1 else 'are'}"
            self._warn(f"other users' processes cannot be seen: {absent} missing")

    def look(self, targets: Iterable[Target] = (), *, pslite: bool = True) -> list[Found]:
        """All processes with data connections, and these: of `targets`, and nodes of ps-lite,
        further ones of which are looked for with `pslite`."""
        enlisted: dict[int, Target] = {}
        for target in targets:
            for pid in target.pids():
                enlisted.setdefault(pid, target)
        for pid, process in list(self._processes.items()):
            if ended(process.pidfd) or process.target is not enlisted.get(pid):
                self._forget(pid)
        for pid in enlisted.keys() - self._processes.keys() - {os.getpid()}:
            self._alive()
            self._examine(pid, enlisted[pid])
        if pslite:
            self._search()
        return self._connections()

    def _connections(self) -> list[Found]:
        taken: set[int] = set()
        per_user: Counter[int] = Counter()
        found = []
        for pid, process in list(self._processes.items()):
            self._alive()
            data = self._data(pid, process)
            # A child has its parent's descriptors: the parent was found before.
            own = [d for d in data if d.cookie not in taken][:MAX_SOCKETS]
            room = min(
                MAX_CONNECTIONS - len(taken), MAX_CONNECTIONS_PER_USER - per_user[process.uid]
            )
            if len(own) > room:  # somebody else's may have room
                self._warn("there are more connections than are looked at")
                continue
            taken.update(d.cookie for d in own)
            per_user[process.uid] += len(own)
            if own:
                peers = {one.scheduler for one in process.sockets.values() if one.scheduler}
                if process.node.spelled and len(peers) != 1:
                    self._warn(UNPLACED)
                sure = tuple((d.fd, d.cookie) for d in own if d.data)
                maybe = tuple((d.fd, d.cookie) for d in own if not d.data)
                job, role = process.node.named(peers), process.node.role
                found.append(Found(pid, job, role, sure, maybe))
        return found

    def close(self) -> None:
        """Forget all."""
        for pid in list(self._processes):
            self._forget(pid)

    # -- processes ----------------------------------------------------------------------------

    def _search(self) -> None:
        """Find nodes of ps-lite."""
        try:
            pids = _pids()
        except OSError as error:  # too many open files, say: those that are known will do
            self._warn(f"no further processes can be found: {error}")
            return
        for pid in self._others.keys() - pids:
            del self._others[pid]
        for pid in sorted(pids - self._processes.keys() - {os.getpid()}):
            self._others[pid] += 1
            if _due(self._others[pid], LONGEST_WAIT):
                self._alive()
                self._examine(pid, None)

    def _examine(self, pid: int, target: Target | None) -> None:
        """If it is enlisted, or a node, it is one of ours from now on."""
        try:
            if target is None and _node(pid) is None:  # nearly all
                return
            with ExitStack() as undo:
                pidfd = os.pidfd_open(pid)
                undo.callback(os.close, pidfd)
                node = _node(pid) if target is None else target.node(pid)
                uid = os.stat(f"/proc/{pid}").st_uid
                if node is None or ended(pidfd):  # it lives: the number has been its own so far
                    return
                theirs = sum(process.uid == uid for process in self._processes.values())
                if len(self._processes) >= MAX_PROCESSES or theirs >= MAX_PER_USER:
                    self._warn("there are more processes than are looked at")
                    return
                self._processes[pid] = _Process(node, target, pidfd, uid)
                self._others.pop(pid, None)
                undo.pop_all()
        except PermissionError:
            self._deny(pid)
        except OSError as error:  # ended just now, mostly
            if error.errno in {EMFILE, ENFILE}:
                self._others[pid] = 0
                self._warn(f"no further processes can be looked at: {error.strerror}")

    def _forget(self, pid: int) -> None:
        os.close(self._processes.pop(pid).pidfd)

    # -- sockets ------------------------------------------------------------------------------

    def _data(self, pid: int, process: _Process) -> list[_Socket]:
        """Its data connections, as of now."""
        links: dict[str, int] = {}
        try:
            links = _links(pid)
        except PermissionError:
            self._deny(pid)
        except OSError:  # it has ended meanwhile; or too many open files
            pass
        known = process.sockets
        for link in known.keys() - links.keys():
            del known[link]
        if OWN_RECORD in links:
            return []
        for link, fd in links.items():
            if link.startswith(_SOCKET):
                one = known.setdefault(link, _Socket(fd))
                one.fd, one.looks = fd, one.looks + 1
                if one.data is None and _due(one.looks, LONGEST_SOCKET_WAIT):
                    self._look_at(pid, process, one)
        may = [one for one in known.values() if one.data is None and one.cookie]
        data = [one for one in known.values() if one.data]
        return data + may[:MAX_UNDECIDED] if process.target is not None else data

    def _look_at(self, pid: int, process: _Process, one: _Socket) -> None:
        try:
            with sockets.borrow(process.pidfd, one.fd) as sock:
                if not one.cookie:
                    self._connect(sock, process, one)
                elif cookie_of(sock) == one.cookie:
                    sent = sockets.look(sock).sent
                    if sent > one.sent:
                        one.looks = 0
                    if sent - one.sent > DATA_BYTES:
                        one.data = True
                    one.sent = sent
        except PermissionError:
            self._deny(pid)
        except OSError:  # closed just now: in the next look it is not there
            pass

    def _connect(self, sock: socket, process: _Process, one: _Socket) -> None:
        """It was not connected when it was last looked at. Raises OSError."""
        scheduler_port = process.node.scheduler_port
        info = sockets.look(sock) if sockets.is_tcp(sock) else None
        if info is None or info.state == sockets.LISTEN:
            one.data = False
        elif info.state in sockets.SENDING:
            (here, port), (there, peer_port) = sock.getsockname()[:2], sock.getpeername()[:2]
            if peer_port == scheduler_port:
                one.scheduler = _plain(there)
            leaves = _plain(here) in self._addresses and _plain(there) not in self._addresses
            if leaves and scheduler_port not in {port, peer_port}:
                one.cookie, one.sent, one.looks = cookie_of(sock), info.sent, 0
                # An enlisted process may long be at work, and has no connection to a scheduler.
                one.data = True if process.target is not None and info.sent > DATA_BYTES else None
            else:
                one.data = False

    def _deny(self, pid: int) -> None:
        """It is not to be looked at; where a capability is missing that was said. Not said of init,
        which is no job's, and out of reach in some containers."""
        if pid != 1 and not self._absent:
            self._warn("some processes must not be looked at: permission denied")


def _due(looks: int, most: int) -> bool:
    """Ever more seldom, but in every `most`-th look. The first look is 1; `most`: a power of 2."""
    return looks & (looks - 1) == 0 or looks % most == 0


def _absent() -> list[str]:
    """Capabilities that this process would need, and does not have."""
    with suppress(OSError):
        return lacking(_NEEDED)
    return []


def _pids() -> set[int]:
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}


def _node(pid: int) -> Node | None:
    """Raises OSError: it has ended, or belongs to somebody else."""
    return node_of(environment(pid))


def _links(pid: int) -> dict[str, int]:
    """What the descriptors of a process refer to, and the first one that does. Raises OSError."""
    found: dict[str, int] = {}
    with os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in islice(entries, MAX_DESCRIPTORS):
            with suppress(FileNotFoundError, ValueError):  # closed meanwhile
                found.setdefault(os.readlink(entry.path), int(entry.name))
    return found


def _plain(address: str) -> str:
    """As it stands in a topology: IPv4 also when a socket for both shows it as ::ffff:a.b.c.d."""
    return normal_ip(address.partition("%")[0])
