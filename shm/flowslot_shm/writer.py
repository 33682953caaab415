# SPDX-License-Identifier: Apache-2.0
"""Writes progress records: the Python twin of `flowslot_shm.h`."""

import errno
import fcntl
import mmap
import os
import socket
import struct
import time
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Protocol

import numpy as np

from flowslot_shm.layout import (
    HEADER,
    JOB_BYTES,
    MAGIC,
    SLOT,
    VERSION,
    Message,
    Quiet,
    Role,
    State,
    Transport,
    fence,
    offset,
    record_bytes,
)

SO_COOKIE = 57  # not in Python's socket module
_NOEXEC_SEAL = 0x8  # MFD_NOEXEC_SEAL: kernels from 6.3 on; some are set to insist on it
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_QUIET = offset("quiet", HEADER) // 4
_SEQ, _STATE = offset("seq") // 4, offset("state") // 2
_COOKIE, _ITERATION, _READY, _POSTED, _DONE, _TOTAL, _START, _UPDATE, _PHASES, _PERIOD = (
    offset(name) // 8
    for name in (
        "sock_cookie", "iteration", "ready", "posted", "done",
        "iteration_total", "t_iteration_start_ns", "t_update_ns", "phases", "period_ns",
    )
)  # fmt: skip

_FAMILY = {4: socket.AF_INET, 6: socket.AF_INET6}


class Owner(Protocol):
    """What a flow needs of its job."""

    def poll(self) -> bool:
        """Look for the daemon; called when an iteration begins."""

    def ring(self, kind: Message, slot: int) -> None:
        """Send a doorbell."""

    def release(self, slot: int) -> None:
        """The slot is free again."""


class Record:
    """A record of our own: a memfd that can neither shrink nor grow, mapped for writing.

    Raises OSError where the kernel refuses a memfd, or memory.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.fd = _memfd()
        try:
            self._fill(record_bytes(slots))
        except BaseException:
            os.close(self.fd)
            raise

    def _fill(self, size: int) -> None:
        os.ftruncate(self.fd, size)
        self._map = mmap.mmap(self.fd, size)
        header = np.zeros(1, HEADER)
        header["magic"], header["version"], header["slots"] = MAGIC, VERSION, self.slots
        header["pid"], header["start_ns"] = os.getpid(), time.time_ns()
        self._map[: HEADER.itemsize] = header.tobytes()
        self._header = memoryview(self._map)[: HEADER.itemsize].cast("I")
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)

    def slot(self, index: int) -> memoryview:
        """The 256 bytes of one slot, writable."""
        start = HEADER.itemsize + index * SLOT.itemsize
        return memoryview(self._map)[start : start + SLOT.itemsize]

    @property
    def quiet(self) -> int:
        """Which doorbells the daemon has no use for, see Quiet."""
        return self._header[_QUIET]

    def clear_quiet(self) -> None:
        """Forget what a daemon that has gone wanted: the next one may need the doorbells."""
        self._header[_QUIET] = Quiet.NONE

    def close(self) -> None:
        """Drop the descriptor; the memory goes with the last slot still in use."""
        os.close(self.fd)


class FlowWriter:
    """The progress of one flow (one socket). Calls on one flow must not overlap.

    All amounts are payload bytes. Nothing here blocks or raises.
    """

    def __init__(self, slot: memoryview | None, index: int, owner: Owner) -> None:
        """A writer on the 256 bytes of `slot`; None: there is none, and every call does nothing."""
        self.index = index
        self._open = slot is not None
        self._slot = slot or memoryview(bytearray(SLOT.itemsize))
        self._u16, self._u32, self._u64 = (self._slot.cast(c) for c in ("H", "I", "Q"))
        self._owner = owner

    def open(self, content: bytes) -> None:
        """Publish the flow; `content` is what the slot holds from `state` on."""
        self._write({}, content)

    def begin(
        self, iteration: int, total: int = 0, start_ns: int | None = None, period_ns: int = 0
    ) -> None:
        """A new iteration begins, in which `total` bytes are expected (0: unknown).

        For the iteration that is already running it only corrects the total. `start_ns`: when it
        began (CLOCK_MONOTONIC; None: now; 0: that is not known). `period_ns`: from one to the next,
        if this end knows better than who sees them begin.
        """
        self._owner.poll()
        if not self._open:
            return
        u64 = self._u64
        if iteration == u64[_ITERATION] and u64[_START]:
            self._write({_TOTAL: max(total, u64[_READY]) if total > 0 else 0})
            return
        fresh = {_ITERATION: iteration, _READY: 0, _POSTED: 0, _DONE: 0, _TOTAL: max(total, 0)}
        fresh[_PERIOD] = period_ns
        start = time.monotonic_ns() if start_ns is None else start_ns
        self._write({**fresh, _START: start}, state=State.IDLE)

    def ready(self, n: int) -> None:
        """`n` more bytes may be sent."""
        self.advance(ready=n)

    def posted(self, n: int) -> None:
        """`n` more bytes were handed to the transport."""
        self.advance(posted=n)

    def done(self, n: int) -> None:
        """`n` more bytes were completed by the transport."""
        self.advance(done=n)

    def advance(self, *, ready: int = 0, posted: int = 0, done: int = 0) -> None:
        """Several of them at once, in one write: bytes that may be sent, were posted, were done."""
        if not self._open or ready + posted + done <= 0:
            return
        u64 = self._u64
        # A library may report less than all three: what is done was posted, what is posted ready.
        done += u64[_DONE]
        posted = max(posted + u64[_POSTED], done)
        ready = max(ready + u64[_READY], posted)
        total = max(u64[_TOTAL], ready) if u64[_TOTAL] else 0
        was = self._u16[_STATE]
        state = State.ACTIVE if ready > 0 and done < (total or ready) else State.IDLE
        words = {_READY: ready, _POSTED: posted, _DONE: done, _TOTAL: total}
        if not u64[_READY]:
            words[_PHASES] = u64[_PHASES] + 1
        self._write(words, state=state)
        if state != was:
            self._owner.ring(Message.BEGIN if state == State.ACTIVE else Message.END, self.index)

    def close(self) -> None:
        """The flow ends; call it before its socket is closed."""
        if self._open:
            self._open = False
            self._write({}, bytes(SLOT.itemsize - 4))
            self._owner.ring(Message.END, self.index)
            self._owner.release(self.index)

    def _write(
        self, words: dict[int, int], content: bytes = b"", state: State | None = None
    ) -> None:
        """One seqlock write: readers see all of it or nothing."""
        seq = self._u32[_SEQ] | 1
        self._u32[_SEQ] = seq
        fence()
        if content:
            self._slot[4 : 4 + len(content)] = content
        for word, value in words.items():
            self._u64[word] = value & 0xFFFF_FFFF_FFFF_FFFF
        if state is not None:
            self._u16[_STATE] = state
        if words:
            self._u64[_UPDATE] = time.monotonic_ns()
        fence()
        self._u32[_SEQ] = (seq + 1) & 0xFFFF_FFFF


_TRANSPORTS = {socket.SOCK_STREAM: Transport.TCP, socket.SOCK_DGRAM: Transport.UDP}


def describe(
    sock: socket.socket | None, job: bytes, rank: int, to: tuple[int, int], role: Role
) -> bytes:
    """A slot's content from `state` on, for a flow `to` (peer, channel); what is unknown is 0."""
    slot = np.zeros(1, SLOT)
    slot["state"], slot["role"], slot["job"] = State.IDLE, role, job[: JOB_BYTES - 1]
    slot["rank"], (slot["peer"], slot["channel"]), slot["fd"] = rank, to, -1
    if sock is None:
        slot["transport"] = Transport.RDMA
    else:
        slot["fd"] = sock.fileno()
        slot["sock_cookie"] = cookie_of(sock)
        if sock.type in _TRANSPORTS and sock.family in (socket.AF_INET, socket.AF_INET6):
            slot["transport"] = _TRANSPORTS[sock.type]
            ends = (("src", "sport", sock.getsockname), ("dst", "dport", sock.getpeername))
            for end, port, name in ends:
                with suppress(OSError):  # not connected: no address
                    host, slot[port] = name()[:2]
                    ip = _ip(host)
                    slot[end], slot["family"] = ip.packed.ljust(16, b"\0"), _FAMILY[ip.version]
    return slot.tobytes()[4:]


def _ip(host: str) -> IPv4Address | IPv6Address:
    """An address, IPv4 also when a dual-stack socket shows it as ::ffff:a.b.c.d."""
    ip = ip_address(host.partition("%")[0])
    return (ip.ipv4_mapped or ip) if ip.version == 6 else ip


def _memfd() -> int:
    """A memfd that can be sealed."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create("flowslot", flags | _NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create("flowslot", flags)


def cookie_of(sock: socket.socket) -> int:
    """SO_COOKIE, or 0 when the kernel does not tell."""
    try:
        return int(struct.unpack("=Q", sock.getsockopt(socket.SOL_SOCKET, SO_COOKIE, 8))[0])
    except OSError:
        return 0
