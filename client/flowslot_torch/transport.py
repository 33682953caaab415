# SPDX-License-Identifier: Apache-2.0
"""How bytes get from rank to rank; here over plain TCP sockets.

Every rank has one connection to each of the others: who has the smaller rank listens. Messages have
a header: what a peer announces must be what is expected here, to the byte, else it is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import queue
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from flowslot_torch.engines import Array

_HELLO = struct.Struct("!8sIIQ16s")  # magic, rank, members, epoch, salt; then a code of all that
_HEADER = struct.Struct("!4sQ")  # magic, bytes
_MAGIC, _MESSAGE = b"flowsdcc", b"fsdm"
_CODE_BYTES = 32
_MOST_STRANGERS = 64
"""Connections whose hello is awaited at once."""
LATER_S = 3.0
"""Members that have just agreed on another epoch are there: so long they try to connect."""
_HELLO_S = 1.0


class PeerLost(ConnectionError):
    """A rank is gone, silent for too long, or says what it should not. `ranks`: which, or those
    among which it is."""

    def __init__(self, ranks: Sequence[int], why: str) -> None:
        super().__init__(f"rank {', '.join(map(str, ranks))}: {why}")
        self.ranks, self.why = tuple(ranks), why


class Pending(Protocol):
    """A message on its way; its memory must not change until it has been waited for."""

    def wait(self) -> None:
        """Returns when its memory is free again. PeerLost."""


class Transport(Protocol):
    """Between the ranks `members`. Messages from one rank to another arrive in order. All raise
    PeerLost, after `timeout_s` at the latest."""

    rank: int
    members: tuple[int, ...]
    timeout_s: float
    native: bool
    """Has an all-reduce of its own."""

    def send(self, memory: memoryview, to: int) -> Pending:
        """Begin to send."""

    def receive(self, memory: memoryview, source: int) -> Pending:
        """Begin to receive the next message, which must be as long as `memory`. Of one source, they
        are waited for in this order."""

    def allreduce(self, array: Array, dtype: str, group: tuple[int, ...]) -> Pending:
        """Begin to sum, in place; only if `native`. Several may be under way: begun in one order
        on all ranks."""

    def close(self) -> None:
        """Let go of all connections; whoever waits gets an error."""


class TcpTransport:
    """Plain TCP sockets. Each peer has a thread that sends."""

    native = False

    def __init__(
        self,
        rank: int,
        listener: socket.socket,
        addresses: Mapping[int, tuple[str, int]],
        *,
        key: bytes,
        epoch: int = 0,
        timeout_s: float = 60.0,
        connect_s: float | None = None,
    ) -> None:
        """`addresses`: where each member listens, in the order of the members; `listener`: where we
        do, which stays open. `key`: known to all members and nobody else: a connection that does
        not know it is closed. `epoch`: of the membership. `connect_s`: all must be connected by
        then; None: `timeout_s`, but 3 s where they have just agreed on another epoch. Raises
        PeerLost."""
        self.rank, self.members, self.timeout_s = rank, tuple(addresses), timeout_s
        self._epoch, self._key = epoch, key
        self._peers: dict[int, _Peer] = {}
        if connect_s is None:
            connect_s = min(timeout_s, LATER_S) if epoch else timeout_s
        deadline = time.monotonic() + connect_s
        try:
            for other, address in addresses.items():
                if other < rank:
                    self._add(other, self._connect(other, address, deadline))
            later = {other for other in self.members if other > rank}
            self._accept(listener, later, connect_s)
        except BaseException:
            self.close()
            raise

    def send(self, memory: memoryview, to: int) -> Pending:
        """See Transport."""
        return self._peer(to).send(memory)

    def receive(self, memory: memoryview, source: int) -> Pending:
        """See Transport. Until it is waited for, the kernel keeps what comes."""
        return _Coming(self._peer(source), memory)

    def allreduce(self, array: Array, dtype: str, group: tuple[int, ...]) -> Pending:
        """There is none."""
        raise NotImplementedError

    def sockets(self) -> dict[int, socket.socket]:
        """By rank: for a daemon."""
        return {rank: peer.sock for rank, peer in self._peers.items()}

    def close(self) -> None:
        """See Transport."""
        for peer in self._peers.values():
            peer.close()

    def _peer(self, rank: int) -> _Peer:
        try:
            return self._peers[rank]
        except KeyError:
            raise ValueError(f"rank: must be another one of {self.members}, is {rank}") from None

    def _add(self, rank: int, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(self.timeout_s)
        self._peers[rank] = _Peer(rank, sock)

    def _hello(self, rank: int, salt: bytes) -> bytes:
        plain = _HELLO.pack(_MAGIC, rank, len(self.members), self._epoch, salt)
        return plain + hmac.digest(self._key, plain, hashlib.sha256)

    def _connect(self, to: int, address: tuple[str, int], deadline: float) -> socket.socket:
        """Retries until the peer listens."""
        while True:
            try:
                return self._greet(to, address, deadline)
            except OSError as error:
                if time.monotonic() > deadline:
                    raise PeerLost((to,), f"at {address}: {error}") from None
            time.sleep(0.01)

    def _greet(self, to: int, address: tuple[str, int], deadline: float) -> socket.socket:
        sock = socket.create_connection(address, max(deadline - time.monotonic(), 0.01))
        try:
            salt = os.urandom(16)
            sock.sendall(self._hello(self.rank, salt))
            if _exactly(sock, _CODE_BYTES) != self._hello(to, salt)[-_CODE_BYTES:]:
                raise OSError("it does not know the key, or is another rank")
        except BaseException:
            sock.close()
            raise
        return sock

    def _accept(self, listener: socket.socket, missing: set[int], connect_s: float) -> None:
        """Strangers are heard beside each other: none can keep the others waiting. Of too many, the
        oldest goes: members say their hello at once."""
        arrived: queue.Queue[tuple[int, socket.socket]] = queue.Queue()
        heard: deque[socket.socket] = deque()
        deadline = time.monotonic() + connect_s
        listener.settimeout(0.05)
        while missing:
            if time.monotonic() > deadline:
                raise PeerLost(sorted(missing), f"did not connect within {connect_s:g} s")
            try:
                sock, _ = listener.accept()
            except TimeoutError:
                sock = None
            if sock is not None:
                heard.append(sock)
                arguments = sock, arrived, heard
                threading.Thread(target=self._hear, args=arguments, daemon=True).start()
            if len(heard) > _MOST_STRANGERS:
                with contextlib.suppress(OSError, IndexError):  # it has just been heard
                    heard.popleft().shutdown(socket.SHUT_RDWR)
            while not arrived.empty():
                rank, known = arrived.get()
                if rank in missing:
                    missing.discard(rank)
                    self._add(rank, known)
                else:
                    known.close()

    def _hear(self, sock: socket.socket, arrived: Any, heard: deque[socket.socket]) -> None:
        try:
            said = _exactly(sock, _HELLO.size + _CODE_BYTES, time.monotonic() + _HELLO_S)
            magic, rank, _, _, salt = _HELLO.unpack_from(said)
            if magic != _MAGIC or not hmac.compare_digest(said, self._hello(rank, salt)):
                raise OSError("no member of this epoch")
            sock.sendall(self._hello(self.rank, salt)[-_CODE_BYTES:])
            heard.remove(sock)
            arrived.put((rank, sock))
        except (OSError, ValueError):  # ValueError: it had to go
            with contextlib.suppress(ValueError):
                heard.remove(sock)
            sock.close()


class _Sent:
    """A message that a peer's thread sends."""

    def __init__(self, memory: memoryview) -> None:
        self.memory, self.done = memory, threading.Event()
        self.error: PeerLost | None = None

    def wait(self) -> None:
        """See Pending."""
        self.done.wait()
        if self.error is not None:
            raise self.error


class _Coming:
    """A message that is read when it is waited for."""

    def __init__(self, peer: _Peer, memory: memoryview) -> None:
        self._peer, self._memory = peer, memory

    def wait(self) -> None:
        """See Pending."""
        self._peer.receive(self._memory)


class _Peer:
    """The connection to a rank."""

    def __init__(self, rank: int, sock: socket.socket) -> None:
        self.rank, self.sock = rank, sock
        self._queue: queue.SimpleQueue[_Sent | None] = queue.SimpleQueue()
        self._lost: PeerLost | None = None
        self._open = threading.Lock()
        threading.Thread(target=self._run, name=f"flowslot-to-{rank}", daemon=True).start()

    def send(self, memory: memoryview) -> _Sent:
        """See Transport."""
        sent = _Sent(memory)
        with self._open:
            if self._lost is not None:
                raise self._lost
            self._queue.put(sent)
        return sent

    def receive(self, memory: memoryview) -> None:
        """See Transport."""
        try:
            magic, size = _HEADER.unpack(_exactly(self.sock, _HEADER.size))
            if magic != _MESSAGE or size != memory.nbytes:
                raise OSError(f"sends {size} bytes where {memory.nbytes} are right")
            _fill(self.sock, memory)
        except OSError as error:
            raise self._lose(error) from None

    def close(self) -> None:
        """Nothing more comes or goes."""
        with self._open:
            self._lose(OSError("the connection was closed here"))
            self._queue.put(None)

    def _run(self) -> None:
        while (sent := self._queue.get()) is not None:
            try:
                if self._lost is not None:
                    raise self._lost
                self.sock.sendall(_HEADER.pack(_MESSAGE, sent.memory.nbytes))
                left = sent.memory
                while left.nbytes:  # `sendall` has its timeout for all of it: this, for each piece
                    left = left[self.sock.send(left) :]
            except OSError as error:
                sent.error = self._lose(error)
            sent.done.set()

    def _lose(self, error: OSError) -> PeerLost:
        if self._lost is None:
            why = "is silent" if isinstance(error, TimeoutError) else str(error)
            self._lost = PeerLost((self.rank,), why)
            with contextlib.suppress(OSError):  # not connected any more
                self.sock.shutdown(socket.SHUT_RDWR)
            self.sock.close()
        return self._lost


def _exactly(sock: socket.socket, size: int, deadline: float | None = None) -> bytes:
    data = bytearray(size)
    _fill(sock, memoryview(data), deadline)
    return bytes(data)


def _fill(sock: socket.socket, memory: memoryview, deadline: float | None = None) -> None:
    """The socket's timeout is for each piece, `deadline` for all of it."""
    while memory.nbytes:
        if deadline is not None:
            sock.settimeout(max(deadline - time.monotonic(), 0.001))
        received = sock.recv_into(memory)
        if not received:
            raise ConnectionResetError("has closed the connection")
        memory = memory[received:]
