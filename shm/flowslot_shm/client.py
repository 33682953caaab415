# SPDX-License-Identifier: Apache-2.0
"""What a Python job uses to report progress; the twin of `flowslot_shm.h`.

    job = JobClient(None, "resnet50", rank=0)
    flow = job.flow(sock, peer=1, channel=0, role=Role.RING)
    for iteration in range(n):
        flow.begin(iteration, total)
        flow.ready(n); flow.posted(n); flow.done(n)      # as the bytes move
    flow.close(); job.close()

Nothing here blocks, and without a daemon nothing here fails: the job just goes on unscheduled.
"""

import os
import socket
import struct
import time
from contextlib import suppress
from threading import Lock

import numpy as np

from flowslot_shm.layout import (
    JOB_BYTES,
    MAGIC,
    PACKED_DOORBELL,
    REGISTER,
    REPLY,
    VERSION,
    Message,
    Quiet,
    Role,
    default_path,
    plain_text,
)
from flowslot_shm.writer import FlowWriter, Record, describe

RETRY_NS = 100_000_000  # after an absent daemon
REFUSED_NS = 5_000_000_000  # after a daemon that said no
_TCP_CONGESTION = 13
_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


class JobClient:
    """One job process (rank) towards the daemon of its host.

    `congestion_control`: the name that the daemon told, "" for none. `reason`: why the daemon
    refused, "" if it did not. `poll` may be called from any thread.
    """

    def __init__(self, path: str | None, job: str, rank: int, slots: int = 64) -> None:
        """`path` None: $FLOWSLOT_SOCKET, else the system's. At most `slots` flows at a time."""
        self.path = path or default_path()
        self.job = plain_text(job, JOB_BYTES) or b"_"
        self.rank = rank
        self.congestion_control = ""
        self.reason = ""
        self._connected = self._registered = False
        self._retry_ns = 0
        self._busy = Lock()
        self._enlisted: dict[int, socket.socket] = {}  # by slot: sockets to be paced
        self._free = list(reversed(range(slots)))
        self._record: Record | None = None
        try:
            self._sock = _seqpacket()
            self._record = Record(slots)
        except OSError as error:
            self.reason = f"no shared memory or socket: {error}"
        self.poll()

    @property
    def registered(self) -> bool:
        """Whether a daemon has accepted this job and was there at the last poll."""
        return self._registered

    def flow(
        self, sock: socket.socket | None, peer: int, channel: int, role: Role = Role.UNKNOWN
    ) -> FlowWriter:
        """Report the connected socket `sock` (None: not a socket, as with RDMA) to rank `peer`.

        Selects the daemon's congestion control on it, now or when a daemon appears. When all
        slots are taken the flow goes unreported.
        """
        with self._busy:
            if self._record is None or not self._free:
                return FlowWriter(None, -1, self)
            index = self._free.pop()
            content = describe(sock, self.job, self.rank, (peer, channel), role)
            if sock is not None and role != Role.RECEIVE:  # a receiver sends only ACKs
                self._enlisted[index] = sock
                self._enlist(sock)
            flow = FlowWriter(self._record.slot(index), index, self)
            flow.open(content)
            return flow

    def release(self, slot: int) -> None:
        """A flow has closed (called by FlowWriter)."""
        with self._busy:
            self._enlisted.pop(slot, None)
            self._free.append(slot)

    def ring(self, kind: Message, slot: int) -> None:
        """Send a doorbell (called by FlowWriter) unless the daemon has no use for it.

        Lost when the daemon's queue is full.
        """
        record = self._record  # another thread may close
        if not self._registered or record is None:
            return
        quiet = record.quiet
        if quiet == Quiet.NONE or (quiet == Quiet.ENDS and kind != Message.END):
            with suppress(OSError):  # the daemon looks at every slot boundary anyway
                self._sock.send(PACKED_DOORBELL.pack(MAGIC, VERSION, kind, slot), _FLAGS)

    def poll(self) -> bool:
        """Connect, register or hear the daemon, whatever is next; returns `registered`.

        Costs one or two system calls. `FlowWriter.begin` calls it, so that a daemon that comes
        (back) is found at the next iteration and the live sockets are enlisted with it.
        """
        if self._record is not None and self._busy.acquire(blocking=False):
            try:
                now = time.monotonic_ns()
                if not self._connected and now >= self._retry_ns:
                    self._retry_ns = now + RETRY_NS
                    self._connect(self._record)
                if self._connected:
                    self._hear(now)
            finally:
                self._busy.release()
        return self._registered

    def close(self) -> None:
        """Leave the daemon, which forgets all of this job's flows."""
        with self._busy:
            if self._record is not None:
                self._connected = self._registered = False
                self._sock.close()
                self._record.close()
                self._record = None

    def _connect(self, record: Record) -> None:
        record.clear_quiet()  # a dead daemon's wish must not outlive it
        with suppress(OSError), _seqpacket() as fresh:  # nobody there: at a later iteration
            fresh.connect(self.path)
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("=i", record.fd))]
            fresh.sendmsg([_register(self.job, self.rank, record.slots)], rights, _FLAGS)
            # The descriptor keeps its number for life: a doorbell that another thread rings at
            # this moment must never end up in a socket of the job's own.
            os.dup2(fresh.fileno(), self._sock.fileno(), inheritable=False)
            self._connected = True

    def _hear(self, now: int) -> None:
        while True:
            try:
                raw = self._sock.recv(REPLY.itemsize + 1, _FLAGS)
            except BlockingIOError:
                return
            except OSError:
                raw = b""
            if not raw:
                return self._leave(now + RETRY_NS)
            if len(raw) != REPLY.itemsize:
                return self._leave(now + REFUSED_NS, "reply of an unknown length")
            reply = np.frombuffer(raw, REPLY)[0]
            kind = (bytes(reply["magic"]), int(reply["version"]), int(reply["type"]))
            if kind != (MAGIC, VERSION, Message.REPLY):
                return self._leave(now + REFUSED_NS, "reply of an unknown version")
            if reply["status"] != 0:
                return self._leave(
                    now + REFUSED_NS, bytes(reply["reason"]).decode("ascii", "replace")
                )
            self.congestion_control = bytes(reply["cc"]).decode("ascii", "replace")
            self.reason = ""
            self._registered = True
            for sock in self._enlisted.values():
                self._enlist(sock)

    def _leave(self, retry_ns: int, reason: str = "") -> None:
        self._connected = self._registered = False
        if self._record is not None:
            self._record.clear_quiet()
        self.congestion_control = ""
        self.reason = reason
        self._retry_ns = retry_ns

    def _enlist(self, sock: socket.socket) -> None:
        """Select the congestion control; refused or not TCP: the socket stays as it is."""
        if self.congestion_control:
            with suppress(OSError):
                name = self.congestion_control.encode()
                sock.setsockopt(socket.IPPROTO_TCP, _TCP_CONGESTION, name)


def _seqpacket() -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.setblocking(False)
    return sock


def _register(job: bytes, rank: int, slots: int) -> bytes:
    message = np.zeros(1, REGISTER)
    message["magic"], message["version"], message["type"] = MAGIC, VERSION, Message.REGISTER
    message["job"], message["rank"], message["slots"] = job, rank, slots
    return message.tobytes()
