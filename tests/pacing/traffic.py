# SPDX-License-Identifier: Apache-2.0
"""Hosts that are network namespaces, and real flows between them."""

import contextlib
import ctypes
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from waiting import settle

from flowslot_shm.writer import cookie_of

BYTES_RECEIVED = 128  # offset in struct tcp_info
CLONE_NEWNET = 0x40000000
HERE, THERE, THERE_6 = "10.79.0.1", "10.79.0.2", "fd79::2"
DATA = memoryview(bytes(1 << 17))


def names() -> list[str]:
    """Congestion controls that the kernel has."""
    path = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
    return path.read_text().split()


class Meter:
    """Keeps a sender below `most` bytes/s, so that flows which nobody paces leave some of a
    processor that is emulated to others."""

    def __init__(self, most: float) -> None:
        self._most = most
        self._free_at = time.monotonic()

    def sent(self, size: int) -> None:
        now = time.monotonic()
        self._free_at = max(self._free_at, now - 0.01) + size / self._most
        if self._free_at > now + 0.002:
            time.sleep(self._free_at - now)


class Flow:
    """A TCP connection whose sender is kept busy by a thread, until `stop`."""

    size = len(DATA)
    """Bytes that are sent at once."""

    def __init__(
        self,
        net: "Net",
        *,
        busy: bool = True,
        address: str = THERE,
        most: float = float("inf"),
    ) -> None:
        self._meter = Meter(most)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with inside(net.there):
            server = socket.create_server((address, 0), family=family)
        with server, inside(net.here):
            self.sock = socket.socket(family)
            # From the start: it must never have seen bbr, which turns pacing on for good.
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
            self.sock.connect(server.getsockname())
            self.peer, _ = server.accept()
        self._start(busy)

    def _start(self, busy: bool = True) -> None:
        self.sock.settimeout(0.1)
        self.peer.settimeout(0.1)
        self.cookie = cookie_of(self.sock)
        self._running = True
        work = (self._drain, self._fill) if busy else (self._drain,)
        self._threads = [
            threading.Thread(target=self._repeat, args=(one,), daemon=True) for one in work
        ]
        for thread in self._threads:
            thread.start()

    def _repeat(self, work: Callable[[], object]) -> None:
        """Until `stop`; with a pause where there is nothing to do, or an error."""
        while self._running:
            with contextlib.suppress(OSError):
                if work():
                    continue
            time.sleep(0.01)

    def enlist(self, congestion_control: str) -> None:
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion_control.encode())

    def received(self) -> int:
        info = self.peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_RECEIVED + 8)
        return int.from_bytes(info[BYTES_RECEIVED:], sys.byteorder)

    def rate(self, seconds: float = 0.3) -> float:
        """Bytes/s that arrive."""
        before, start = self.received(), time.monotonic()
        time.sleep(seconds)
        return (self.received() - before) / (time.monotonic() - start)

    def comes_to(self, rate: float, tolerance: float = 0.15) -> bool:
        """Whether it settles at `rate`. A busy machine gets several attempts."""
        return settle(lambda: abs(self.rate() / rate - 1) <= tolerance)

    def exceeds(self, rate: float) -> bool:
        """Whether it is faster than `rate`, likewise."""
        return settle(lambda: self.rate() > rate)

    def stop(self) -> None:
        self._running = False
        self.sock.close()
        self.peer.close()
        for thread in self._threads:
            thread.join(5)

    def _fill(self) -> int:
        sent = self.sock.send(DATA[: self.size])
        self._meter.sent(sent)
        return sent

    def _drain(self) -> bytes:
        return self.peer.recv(1 << 20, socket.MSG_TRUNC)


class UdpFlow(Flow):
    """Datagrams, as fast as the socket takes them."""

    size = 1400

    def __init__(self, net: "Net", most: float) -> None:
        with inside(net.there):
            self.peer = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            self.peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
            self.peer.bind((THERE, 0))
        with inside(net.here):
            self.sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            self.sock.connect(self.peer.getsockname())
        self._meter = Meter(most)
        self._received = 0
        self._start()

    def received(self) -> int:
        return self._received

    def _drain(self) -> bytes:
        data = self.peer.recv(1 << 16)
        self._received += len(data)
        return data


@dataclass
class Net:
    """Two hosts, and a switch between them where packets are lost: a queue of the sender's own
    would push back instead of losing them."""

    here: str
    switch: str
    there: str

    def shape(self, mbit: int, buffer: int, port: str = "there") -> None:
        """Make the switch's port to a host a bottleneck."""
        change(
            f"tc -n {self.switch}",
            f"qdisc add dev {port} root handle 1: htb default 1",
            f"class add dev {port} parent 1: classid 1:1 htb rate {mbit}mbit"
            " burst 16kb cburst 16kb",
            f"qdisc add dev {port} parent 1:1 handle 2: bfifo limit {buffer}",
        )
        for space, device in (
            (self.here, "eth0"),
            (self.there, "eth0"),
            (self.switch, "here"),
            (self.switch, "there"),
        ):
            off = f"ethtool -K {device} tso off gso off gro off"
            command = ["nsenter", f"--net=/run/netns/{space}", *off.split()]
            subprocess.run(command, check=True, capture_output=True)


@contextlib.contextmanager
def inside(space: str) -> Iterator[None]:
    """This thread in a namespace; what it opens there stays there."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net") as home, open(f"/run/netns/{space}") as away:
        assert libc.setns(away.fileno(), CLONE_NEWNET) == 0
        try:
            yield
        finally:
            assert libc.setns(home.fileno(), CLONE_NEWNET) == 0


def change(program: str, *lines: str) -> None:
    """Commands of `ip` or `tc`, by one process: under emulation a process takes a tenth of a
    second."""
    command, text = [*program.split(), "-batch", "-"], "\n".join(lines) + "\n"
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert not done.returncode, (lines, done.stderr)
