# SPDX-License-Identifier: Apache-2.0
"""Processes that report nothing (unpatched.py), and where they send to."""

import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).with_name("unpatched.py")
HERE, THERE = "127.0.0.1", "127.0.0.2"
"""This host, and another one: both on loopback."""
SCHEDULER_PORT = 9


def node(role: str = "worker", port: int = SCHEDULER_PORT, **more: str) -> dict[str, str]:
    """The environment of a node of ps-lite."""
    root = {"DMLC_PS_ROOT_URI": "10.0.0.9", "DMLC_PS_ROOT_PORT": str(port)}
    return os.environ | root | {"DMLC_ROLE": role} | more


class Sink:
    """Accepts connections on THERE and reads them to their ends. `ended`: how many have. `reset`
    ends all connections at once."""

    def __init__(self, stack: ExitStack, port: int = 0) -> None:
        self.ended = 0
        self._reading, self._resting = threading.Event(), threading.Event()
        self._reading.set()
        self._peers: list[socket.socket] = []
        self._listener = socket.create_server((THERE, port))
        self.port = self._listener.getsockname()[1]
        stack.callback(self._listener.shutdown, socket.SHUT_RDWR)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with self._listener, suppress(OSError):
            while True:
                peer, _ = self._listener.accept()
                self._peers.append(peer)
                threading.Thread(target=self._drain, args=(peer,), daemon=True).start()

    def _drain(self, peer: socket.socket) -> None:
        with peer, suppress(OSError):
            while peer.recv(1 << 20):
                if not self._reading.is_set():
                    self._resting.set()
                    self._reading.wait()
        self.ended += 1

    def rest(self, only: "Outsider") -> None:
        """Read nothing more from this one, whose single connection is all there is. What is read
        after its buffers were filled could be all that it had left to send."""
        self._reading.clear()
        only.do("send 1")
        assert self._resting.wait(20)

    def reset(self) -> None:
        for peer in self._peers:
            with suppress(OSError):
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("=ii", 1, 0))
                peer.close()
        self._reading.set()


class Outsider:
    """A process of unpatched.py."""

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


def settle(check: Callable[[], Any], seconds: float = 20.0) -> Any:
    """What `check` returns, once it is true."""
    end = time.monotonic() + seconds
    while not (result := check()):
        assert time.monotonic() < end, "it never came about"
        time.sleep(0.005)
    return result
