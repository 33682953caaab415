# SPDX-License-Identifier: Apache-2.0
"""Streams of slices over TCP sockets, and the one loop that a job process runs.

Each direction of a socket is an endless stream of equal slices, grouped in sections (contiguous
memory). Both ends know the order, so there are no headers. SO_RCVLOWAT makes the kernel wake the
process once per slice, not once per packet, and FIONREAD tells how many whole slices there are:
Python never sees a packet. (Part of a slice must not be taken: the kernel would wait for a whole
one more.)
"""

from __future__ import annotations

import fcntl
import select
import socket
import struct
import termios
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from flowslot_lab.flowlog import FlowLog

_SIOCOUTQ = 0x5411
_TICK_NS = 10_000_000
_TRACE_NS = 8_000_000
_GONE = select.EPOLLHUP | select.EPOLLERR | select.EPOLLRDHUP


class PeerGone(Exception):
    """The process at the other end of a socket has ended."""


class Flow(Protocol):
    """Where a sender reports its progress (flowslot_shm's FlowWriter)."""

    def begin(self, iteration: int, total: int = 0) -> None:
        """An iteration begins."""

    def advance(self, *, ready: int = 0, posted: int = 0, done: int = 0) -> None:
        """So many more bytes may be sent, are in the kernel, were acknowledged."""


def _queued(sock: socket.socket, request: int) -> int:
    return int(struct.unpack("i", fcntl.ioctl(sock, request, b"\0\0\0\0"))[0])


class Sender:
    """The sending direction of a socket: a stream of which a growing part may be sent."""

    def __init__(
        self,
        sock: socket.socket,
        section_bytes: int,
        section: Callable[[int], memoryview],
        flow: Flow | None,
    ) -> None:
        self._sock = sock
        self._section_bytes = section_bytes
        self._section = section
        self._flow = flow
        self.allowed = 0
        self.posted = 0
        self._reported = 0
        self.blocked = False
        self.log: FlowLog | None = None
        self.changed: Callable[[], None] = lambda: None  # the loop wants to know `blocked`

    def begin(self, iteration: int, total: int, ready: int) -> None:
        """Tell the daemon that `total` bytes are coming, of which `ready` may be pushed now."""
        if self.log is not None:
            self.log.begin(total)
        self.allowed += ready
        if self._flow is not None:
            self._flow.begin(iteration, total)
            self._reported = self.posted
            self._flow.advance(ready=ready)
        if self.log is not None:
            self.log.note(self.allowed, self.posted)

    def allow(self, n: int) -> None:
        """`n` more bytes have become sendable: send what the kernel takes."""
        self.allowed += n
        if not self.blocked:
            self.push(n)
            return
        if self.log is not None:
            self.log.note(self.allowed, self.posted)
        if self._flow is not None:
            self._flow.advance(ready=n)

    def push(self, newly_allowed: int = 0) -> None:
        """Hand what is allowed to the kernel, until it takes no more."""
        before, was_blocked = self.posted, self.blocked
        self.blocked = False
        while self.posted < self.allowed:
            k, at = divmod(self.posted, self._section_bytes)
            end = min(self._section_bytes, at + self.allowed - self.posted)
            try:
                self.posted += self._sock.send(self._section(k)[at:end])
            except BlockingIOError:
                self.blocked = True
                break
            except (ConnectionResetError, BrokenPipeError) as error:
                raise PeerGone(str(error)) from None
        if self.log is not None:
            self.log.note(self.allowed, self.posted)
        if self._flow is not None:
            self._flow.advance(ready=newly_allowed, posted=self.posted - before)
        if self.blocked != was_blocked:
            self.changed()

    def report(self) -> None:
        """Tell the daemon what has been acknowledged since the last time."""
        if self._flow is None or self._reported == self.posted:
            return
        done = self.posted - _queued(self._sock, _SIOCOUTQ)
        if done > self._reported:
            self._flow.advance(done=done - self._reported)
            self._reported = done

    @property
    def reporting(self) -> bool:
        """Whether a daemon is told how far this stream has come."""
        return self._flow is not None

    @property
    def unreported(self) -> bool:
        """Whether the daemon does not know yet that all posted bytes have arrived."""
        return self._flow is not None and self._reported < self.posted


def start(senders: Sequence[Sender], iteration: int, total: int, ready: int) -> None:
    """An iteration of them all: the daemon knows of every one before the first byte leaves."""
    for sender in senders:
        sender.begin(iteration, total, ready)
    for sender in senders:
        sender.push()


class Receiver:
    """The receiving direction of a socket: whole slices, up to a limit that the job raises."""

    def __init__(
        self,
        sock: socket.socket,
        slice_bytes: int,
        section_slices: int,
        target: Callable[[int], memoryview],
        arrived: Callable[[int, int, int], None],
    ) -> None:
        """`target(section)`: its memory; `arrived(section, first, n)`: n slices more."""
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, slice_bytes)
        self._sock = sock
        self._slice_bytes = slice_bytes
        self._section_slices = section_slices
        self._target = target
        self._arrived = arrived
        self._got = 0  # slices
        self._limit = 0  # slices
        self.changed: Callable[[], None] = lambda: None

    def raise_limit(self, n: int) -> None:
        """Accept `n` more slices."""
        self._limit += n
        self.changed()

    @property
    def wanting(self) -> bool:
        """Whether more may be received."""
        return self._got < self._limit

    def pull(self) -> int:
        """Take the whole slices that have arrived, of one section; returns their bytes."""
        section, first = divmod(self._got, self._section_slices)
        waiting = _queued(self._sock, termios.FIONREAD) // self._slice_bytes
        n = min(waiting, self._section_slices - first, self._limit - self._got)
        if n == 0:
            return 0
        size = self._slice_bytes
        got = self._sock.recv_into(self._target(section)[first * size : (first + n) * size])
        assert got == n * size, "the kernel gave less than FIONREAD told"
        self._got += n
        self._arrived(section, first, n)
        if not self.wanting:
            self.changed()
        return got


class _Endpoint:
    """One socket in the loop."""

    def __init__(
        self,
        poll: select.epoll,
        sock: socket.socket,
        sender: Sender | None,
        receiver: Receiver | None,
    ) -> None:
        self.fd = sock.fileno()
        self.sender = sender
        self.receiver = receiver
        self._poll = poll
        self._mask = 0
        poll.register(self.fd, 0)
        for side in (sender, receiver):
            if side is not None:
                side.changed = self.update

    def update(self) -> None:
        mask = 0
        if self.sender is not None and self.sender.blocked:
            mask |= select.EPOLLOUT
        if self.receiver is not None and self.receiver.wanting:
            mask |= select.EPOLLIN | select.EPOLLRDHUP
        if mask != self._mask:
            self._mask = mask
            self._poll.modify(self.fd, mask)

    def handle(self, events: int) -> int:
        taken = 0
        if events & select.EPOLLIN and self.receiver is not None:
            taken = self.receiver.pull()
        if events & select.EPOLLOUT and self.sender is not None:
            self.sender.push()
        if events & _GONE and taken == 0:
            raise PeerGone("connection closed")
        return taken


class Loop:
    """The event loop of a job process. `trace` collects (monotonic ns, bytes received)."""

    def __init__(self, log: str = "") -> None:
        """`log`: what the files of senders are called, which write down what they do; "": none."""
        self._log = log
        self._poll = select.epoll()
        self._endpoints: dict[int, _Endpoint] = {}
        self._senders: list[Sender] = []
        self._reporting = False  # whether anybody wants to know what was acknowledged
        self._next_tick = 0
        self.received = 0
        self.trace: list[tuple[int, int]] = []
        self.tracing = True

    @property
    def posted(self) -> int:
        """Bytes handed to the kernel, over all sockets and all time."""
        return sum(sender.posted for sender in self._senders)

    def add(self, sock: socket.socket, sender: Sender | None, receiver: Receiver | None) -> None:
        """Serve a connected, non-blocking socket."""
        endpoint = _Endpoint(self._poll, sock, sender, receiver)
        self._endpoints[endpoint.fd] = endpoint
        if sender is not None:
            if self._log:
                sender.log = FlowLog(Path(f"{self._log}.{len(self._senders)}"), sock)
            self._senders.append(sender)
            self._reporting |= sender.reporting
        endpoint.update()

    def run(self, finished: Callable[[], bool], idle: Callable[[], None] | None = None) -> None:
        """Serve all sockets until `finished`, which is asked after every batch of events.

        `idle` is called when nothing has happened for a while.
        """
        often = self._reporting or idle is not None
        while not finished():
            ready = self._poll.poll(_TICK_NS / 1e9 if often else 0.2)
            if not ready and idle is not None:
                idle()
            # Before and after: what comes after a silence did not come during it.
            self._trace(time.monotonic_ns())
            for fd, events in ready:
                self.received += self._endpoints[fd].handle(events)
            self._tick(time.monotonic_ns())
        self.mark()

    def sleep_until(self, at_ns: int) -> None:
        """Compute: touch no socket, but report what the kernel has delivered meanwhile."""
        while (left := at_ns - time.monotonic_ns()) > 0:
            busy = any(sender.unreported for sender in self._senders)
            time.sleep((min(left, _TICK_NS) if busy else left) / 1e9)
            self._tick(time.monotonic_ns())
        self.mark()

    def mark(self) -> None:
        """A point of the trace here and now."""
        if self.tracing:
            self.trace.append((time.monotonic_ns(), self.received))

    def _tick(self, now: int) -> None:
        if now >= self._next_tick:
            self._next_tick = now + _TICK_NS
            for sender in self._senders:
                sender.report()
        self._trace(now)

    def _trace(self, now: int) -> None:
        if self.tracing and self.trace and now >= self.trace[-1][0] + _TRACE_NS:
            self.trace.append((now, self.received))
