# SPDX-License-Identifier: Apache-2.0
"""Jobs register here: they hand over their progress record and learn the congestion control.

A SOCK_SEQPACKET Unix socket whose path can be bind-mounted into containers. Who a job is comes from
SO_PEERCRED, never from what it says. All that it sends is untrusted: a bad registration gets one
answer that names the field, and costs nobody else anything.
"""

import asyncio
import itertools
import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flowslot_proto.unix_socket import Listener, peer_of
from flowslot_shm.layout import (
    JOB_BYTES,
    MAGIC,
    MAX_SLOTS,
    PACKED_DOORBELL,
    REASON_BYTES,
    REGISTER,
    REPLY,
    VERSION,
    Message,
    plain_text,
)
from flowslot_shm.reader import RecordError, RecordReader

_log = logging.getLogger(__name__)
_DOORBELLS = {int(kind): kind for kind in (Message.BEGIN, Message.END)}
_MAX_FDS = 4  # taken per message, so that the surplus can be closed; the kernel closes the rest
_MUTE_S = 0.003  # who rings again within that time is heard after as long, of all at once
_BURST = 64  # messages of one job at once: the rest waits in its socket, or is lost


@dataclass(frozen=True, slots=True)
class Limits:
    """What jobs may take. Each connection is one process, and costs up to four descriptors."""

    connections: int = 1024
    connections_per_uid: int = 256
    slots: int = MAX_SLOTS
    seconds_to_register: float = 5.0


@dataclass(eq=False, slots=True)
class Record:
    """A registered job process. `pid` and `uid` are the kernel's word (pid 0: not visible here)."""

    id: int
    job: str
    rank: int
    pid: int
    uid: int
    reader: RecordReader
    bad_messages: int = 0


@dataclass(eq=False, slots=True)
class _Connection:
    sock: socket.socket
    pid: int
    uid: int
    timer: asyncio.TimerHandle | None = None
    heard: float = 0.0
    """When it was last listened to (monotonic, s)."""
    record: Record | None = None
    pidfd: int = -1


class RegistrationServer:
    """Accepts jobs on a Unix socket; runs on the event loop that called `start`.

    `records`: those registered now, by id. `refused`: bad registrations so far.
    """

    def __init__(
        self,
        path: str,
        congestion_control: str,
        on_register: Callable[[Record], object],
        on_doorbell: Callable[[Record, int, Message], object],
        on_leave: Callable[[Record], object],
        *,
        limits: Limits | None = None,
    ) -> None:
        """Tells jobs to select `congestion_control`; "": to leave their sockets alone.

        `on_doorbell` gets the record, the slot, and Message.BEGIN or Message.END. After `on_leave`
        the record's reader shows all slots free.
        """
        self.path = path
        self.congestion_control = congestion_control
        self.records: dict[int, Record] = {}
        self.refused = 0
        self._on_register, self._on_doorbell, self._on_leave = on_register, on_doorbell, on_leave
        self._limits = limits or Limits()
        self._connections: set[_Connection] = set()
        self._ids = itertools.count(1)
        self._listener: Listener | None = None

    async def start(self) -> None:
        """Listen. Raises AlreadyRunning; OSError when the path is not to be had."""
        self._loop = asyncio.get_running_loop()
        self._listener = Listener(Path(self.path), socket.SOCK_SEQPACKET)
        self._loop.add_reader(self._listener.socket, self._accept, self._listener.socket)

    async def close(self) -> None:
        """Let go of all jobs, which go on unscheduled; removes the socket if it is still ours.

        Does nothing before `start`, nor a second time.
        """
        listener, self._listener = self._listener, None
        if listener is None:
            return
        self._loop.remove_reader(listener.socket)
        listener.close()
        for connection in list(self._connections):
            self._drop(connection)

    def set_congestion_control(self, name: str) -> None:
        """Tell all jobs, also those that are here: they switch at their next iteration."""
        self.congestion_control = name
        for connection in self._connections:
            if connection.record is not None:
                _answer(connection.sock, 0, cc=name)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(64):
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # out of descriptors: they keep waiting
                _log.warning("%s: cannot accept: %s", self.path, error.strerror)
                self._pause(1.0, listener, self._accept, listener)
                return
            sock.setblocking(False)
            pid, uid, _ = peer_of(sock)
            connection = _Connection(sock, pid, uid)
            self._connections.add(connection)
            most = self._limits.connections_per_uid
            if len(self._connections) > self._limits.connections:
                self._refuse(connection, "connections: this host has too many")
            elif sum(one.uid == uid for one in self._connections) > most:
                self._refuse(connection, f"connections: at most {most} for one user")
            else:
                wait = self._limits.seconds_to_register
                late = f"message: must be sent within {wait:g} s"
                connection.timer = self._loop.call_later(wait, self._refuse, connection, late)
                self._loop.add_reader(sock, self._readable, connection)

    def _readable(self, connection: _Connection) -> None:
        before, connection.heard = connection.heard, time.monotonic()
        for _ in range(_BURST):
            fds: list[int] = []
            try:
                if connection.record is None:
                    data, fds, _, _ = socket.recv_fds(connection.sock, 256, _MAX_FDS)
                else:  # what a doorbell brings along is dropped by the kernel
                    data = connection.sock.recv(256)
            except BlockingIOError:
                if connection.heard - before > _MUTE_S:
                    return  # a single one: no timer for what does not come
                break
            except OSError:
                data = b""
            try:
                if not data:
                    self._drop(connection)
                elif connection.record is None:
                    self._register(connection, data, fds)
                else:
                    self._doorbell(connection.record, data)
            finally:
                for fd in fds:
                    os.close(fd)
            if connection not in self._connections:
                return
        self._pause(_MUTE_S, connection.sock, self._readable, connection)

    def _pause(
        self, wait_s: float, sock: socket.socket, reader: Callable[..., object], *args: object
    ) -> None:
        """Leave a busy socket alone for a while, so that it takes a bounded part of our time."""

        def resume() -> None:
            if sock.fileno() >= 0:
                self._loop.add_reader(sock, reader, *args)

        self._loop.remove_reader(sock)
        self._loop.call_later(wait_s, resume)

    def _register(self, connection: _Connection, data: bytes, fds: list[int]) -> None:
        try:
            job, rank, slots = _parse_register(data, self._limits.slots)
            if len(fds) != 1:
                raise RecordError("memfd", f"exactly one must come along, got {len(fds)}")
            reader = RecordReader(fds[0], self._limits.slots)
        except RecordError as error:
            return self._refuse(connection, str(error))
        except OSError as error:
            return self._refuse(connection, f"the daemon could not map the record: {error}")
        if reader.slots != slots:
            text = f"must be the same in message and record, got {slots} and {reader.slots}"
            return self._refuse(connection, str(RecordError("slots", text)))
        assert connection.timer is not None
        connection.timer.cancel()
        record = Record(next(self._ids), job, rank, connection.pid, connection.uid, reader)
        connection.record = self.records[record.id] = record
        self._watch(connection)
        self._on_register(record)
        _answer(connection.sock, 0, cc=self.congestion_control)

    def _watch(self, connection: _Connection) -> None:
        """Notice the process's end also where a forked child keeps the connection open."""
        with suppress(OSError):  # pid 0, or gone already: the connection tells
            connection.pidfd = os.pidfd_open(connection.pid)
            self._loop.add_reader(connection.pidfd, self._drop, connection)

    def _doorbell(self, record: Record, data: bytes) -> None:
        if len(data) == PACKED_DOORBELL.size:
            magic, version, kind, slot = PACKED_DOORBELL.unpack(data)
            known = magic == MAGIC and version == VERSION and kind in _DOORBELLS
            if known and slot < record.reader.slots:
                self._on_doorbell(record, slot, _DOORBELLS[kind])
                return
        record.bad_messages += 1

    def _refuse(self, connection: _Connection, reason: str) -> None:
        self.refused += 1
        _log.warning("pid %d, uid %d: refused: %s", connection.pid, connection.uid, reason)
        with suppress(OSError):  # what lies unread would turn our answer into a reset
            for fd in socket.recv_fds(connection.sock, 256, _MAX_FDS)[1]:
                os.close(fd)
        _answer(connection.sock, 1, reason=reason)
        self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        if connection not in self._connections:
            return
        self._connections.discard(connection)
        if connection.timer is not None:
            connection.timer.cancel()
        if connection.pidfd >= 0:
            self._loop.remove_reader(connection.pidfd)
            os.close(connection.pidfd)
        self._loop.remove_reader(connection.sock)
        connection.sock.close()
        record = connection.record
        if record is not None:
            del self.records[record.id]
            record.reader.close()
            self._on_leave(record)


def _parse_register(data: bytes, max_slots: int) -> tuple[str, int, int]:
    """Job, rank and slots of a REGISTER message; RecordError names the first wrong field."""
    padded = np.frombuffer(data.ljust(REGISTER.itemsize, b"\0"), REGISTER, 1)[0]
    expected = (("magic", MAGIC), ("version", VERSION), ("type", int(Message.REGISTER)))
    for name, right in expected:
        if padded[name] != right:
            raise RecordError(name, f"must be {right!r}, got {padded[name].item()!r}")
    if len(data) != REGISTER.itemsize:
        raise RecordError("message", f"must be {REGISTER.itemsize} bytes, got {len(data)}")
    job, rank, slots = bytes(padded["job"]), int(padded["rank"]), int(padded["slots"])
    if not job or plain_text(job, JOB_BYTES) != job:
        text = f"must be 1 to {JOB_BYTES - 1} visible ASCII characters, got {job!r}"
        raise RecordError("job", text)
    if rank < 0:
        raise RecordError("rank", f"must be 0 or more, got {rank}")
    if not 1 <= slots <= max_slots:
        raise RecordError("slots", f"must be 1 to {max_slots}, got {slots}")
    return job.decode(), rank, slots


def _answer(sock: socket.socket, status: int, cc: str = "", reason: str = "") -> None:
    reply = np.zeros(1, REPLY)
    reply["magic"], reply["version"], reply["type"] = MAGIC, VERSION, Message.REPLY
    reply["status"], reply["cc"] = status, cc.encode()
    reply["reason"] = reason.encode("ascii", "replace")[: REASON_BYTES - 1]
    with suppress(OSError):  # a job that does not listen
        sock.send(reply.tobytes(), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
