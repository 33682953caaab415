# SPDX-License-Identifier: Apache-2.0
"""Processes that report nothing (training.py), where they send to, and what watches them."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from unittest import mock

from waiting import Background, settle

from flowslot_shm.layout import Message, State
from flowslotd import sockets
from flowslotd.flows.flow_info import Source
from flowslotd.observe.passive.finder import Finder
from flowslotd.observe.passive.service import PassiveSources
from flowslotd.observe.passive.shadow import Found

PROGRAM = Path(__file__).with_name("training.py")
HERE, THERE = (f"127.{os.getpid() % 250 + 1}.{os.getpid() // 250 % 250}.{n}" for n in (1, 2))
"""This host, and another one: both on loopback, and apart from those of other test runs."""
SCHEDULER_PORT = 9
SIZE = 300_000


def node(role: str = "worker", port: int = SCHEDULER_PORT, **more: str) -> dict[str, str]:
    """The environment of a node of ps-lite."""
    root = {"DMLC_PS_ROOT_URI": "10.0.0.9", "DMLC_PS_ROOT_PORT": str(port)}
    return os.environ | root | {"DMLC_ROLE": role, "FROM": HERE} | more


class Sink:
    """Accepts connections and reads them to their ends, while `reading`. `ended`: how many have."""

    def __init__(self, stack: ExitStack, address: str = THERE, port: int = 0) -> None:
        self.ended = 0
        self.reading = threading.Event()
        self.reading.set()
        self._listener = socket.create_server((address, port))
        self.port = self._listener.getsockname()[1]
        stack.callback(self._listener.shutdown, socket.SHUT_RDWR)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with self._listener, suppress(OSError):
            while True:
                peer, _ = self._listener.accept()
                threading.Thread(target=self._drain, args=(peer,), daemon=True).start()

    def _drain(self, peer: socket.socket) -> None:
        with peer, suppress(OSError):
            while peer.recv(1 << 16):  # less than what a connection's buffers hold
                self.reading.wait()
        self.ended += 1


class Unpatched:
    """A process of training.py."""

    def __init__(self, stack: ExitStack, flows: int, *ends: object, **options: Any) -> None:
        command = [*options.pop("prefix", ()), sys.executable, PROGRAM, flows, *ends]
        self.process = subprocess.Popen(
            list(map(str, command)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            **{"env": node(), **options},
        )
        stack.callback(self.end)
        self.pid = int(self._hear().removeprefix("ready "))

    def do(self, line: str) -> int:
        """Let it do something; returns when it began (monotonic ns)."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return int(self._hear().removeprefix("done "))

    def train(self, size: int, iterations: int, compute_s: float = 0.06) -> None:
        """Iterations of so many bytes on each connection."""
        for _ in range(iterations):
            self.do(f"send {size}")
            time.sleep(compute_s)

    def _hear(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the process has ended"
        return line

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for file in (self.process.stdin, self.process.stdout):
            assert file is not None
            with suppress(OSError):
                file.close()


class Watching(Background):
    """The component, on an event loop of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.joined: list[Source] = []
        self.rung: list[tuple[int, int, Message]] = []
        self.left: list[Source] = []
        self.bugs: list[BaseException] = []
        self.registered: dict[int, Any] = {}
        self.passive = PassiveSources(
            self.joined.append,
            lambda source, slot, message: self.rung.append((source.id, slot, message)),
            self.left.append,
            self.registered,
            lambda _, error: self.bugs.append(error),
        )
        self.use()

    def use(self, congestion_control: str = "", *, pslite: bool = True) -> None:
        self.call(self.passive.use, pslite, [HERE], congestion_control)

    def slots(self) -> list[Any]:
        """Of all shadow records, those in use."""

        def read() -> list[Any]:
            snapshots = [source.reader.snapshot() for source in self.passive.records.values()]
            return [slot for snap in snapshots for slot in snap if slot["state"] != State.FREE]

        found: list[Any] = self.call(read)
        return found

    def close(self) -> None:
        self.call(self.passive.close)
        super().close()


def until_found(watching: Watching, *processes: Unpatched, connections: int) -> list[Any]:
    def look() -> list[Any] | None:
        for process in processes:
            process.do(f"send {SIZE}")
        slots = watching.slots()
        return slots if len(slots) == connections else None

    found: list[Any] = settle(look)
    return found


def asked(
    pid: int, ends: Iterable[tuple[int, int | None]], ask: Callable[[socket.socket], Any]
) -> list[Any]:
    """What sockets of a process, (descriptor, cookie) each, say."""
    pidfd = os.pidfd_open(pid)
    try:
        answers = []
        for fd, cookie in ends:
            with sockets.borrow(pidfd, fd, cookie) as sock:
                answers.append(ask(sock))
        return answers
    finally:
        os.close(pidfd)


def congestion_control(sock: socket.socket) -> str:
    return sock.getsockopt(6, 13, 16).split(b"\0")[0].decode()


def congestion_controls(pid: int, slots: list[Any]) -> set[str]:
    ends = [(int(slot["fd"]), int(slot["sock_cookie"])) for slot in slots]
    return set(asked(pid, ends, congestion_control))


def stays(watching: Watching, *processes: Unpatched, connections: int) -> None:
    """While these go on, several looks find these connections and no further ones."""
    with mock.patch.object(Finder, "look", autospec=True, side_effect=Finder.look) as looks:
        while looks.call_count < 8:
            for process in processes:
                process.do(f"send {SIZE}")
            assert len(watching.slots()) == connections


def make_finder(stack: ExitStack, address: str = HERE) -> Finder:
    made = Finder([address])
    stack.callback(made.close)
    return made


def found(one: Finder, *processes: Unpatched) -> dict[int, Found]:
    """What one more look finds of these and others, by process; they have sent something before."""
    for process in processes:
        process.do(f"send {SIZE}")
    return {each.pid: each for each in one.look()}
