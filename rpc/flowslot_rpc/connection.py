# SPDX-License-Identifier: Apache-2.0
"""A connection, and the streams of messages on it: what client and server have in common."""

import asyncio
import secrets
from collections import deque
from typing import Protocol, cast

from flowslot_rpc.events import Event, Headers
from flowslot_rpc.http2 import Http2Error, Session
from flowslot_rpc.status import CANCEL, Rejected, RpcError, Status, of_reset

PREFIX_BYTES = 5  # of each message: whether it is compressed, and its length
UNREAD_BYTES = 1 << 16
"""When so much waits to be read on a stream, the other side has to wait."""
MAX_QUEUED = 4096
"""Frames that wait to be sent; who makes us queue more, and does not take them, is left."""
READS_IN_A_ROW = 64
"""... of a stream, then others have their turn."""
CLOSE_S = 1.0
"""For what is to be sent yet when a connection is closed."""


class Listener(Protocol):
    """Whom a connection tells what concerns no stream that it knows."""

    def made(self, connection: "Connection") -> None:
        """The connection stands."""

    def opened(self, connection: "Connection", stream: int, fields: Headers) -> None:
        """The other side has opened a stream."""

    def lost(self, connection: "Connection") -> None:
        """The connection is gone, and with it all its streams."""


class Connection(asyncio.Protocol):
    """Bytes between a socket and a session, and events from it to streams. One loop, no tasks."""

    def __init__(self, session: Session, listener: Listener) -> None:
        self.session = session
        self.streams: dict[int, Stream] = {}
        self.pinged: bytes | None = None
        """The ping that has not been answered yet."""
        self.greeted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the other side has shown that it speaks HTTP/2; fails if it has gone."""
        self.greeted.add_done_callback(lambda future: future.cancelled() or future.exception())
        self.host = self.peer = "?"
        """The other side's address, and the same with its port, for people."""
        self.open = True
        """New streams may be opened on it."""
        self._listener = listener
        self._transport: asyncio.Transport | None = None
        self._paused = False
        self._blocked: set[Stream] = set()
        self._waiting_since: float | None = None

    # --- asyncio's protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Our settings go first."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not derived from it
        name = transport.get_extra_info("peername")
        if name:
            self.host, self.peer = name[0], f"{name[0]}:{name[1]}"
        self._listener.made(self)
        self.flush()

    def data_received(self, data: bytes) -> None:
        """Take all in, then answer."""
        self._waiting_since = None
        try:
            self.session.receive(data)
        except Http2Error as error:
            self._fail(str(error))
            return
        self._handle()
        self.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        """Every stream ends."""
        self._fail(str(exc) if exc else "the connection was closed")
        self._listener.lost(self)

    def pause_writing(self) -> None:
        """The socket is full: what is to be sent stays in the session."""
        self._paused = True

    def resume_writing(self) -> None:
        """It has room again."""
        self._paused = False
        self.flush()

    # --- both ways

    def flush(self) -> None:
        """Send what there is, as far as socket and windows allow."""
        try:
            while self._send():
                self._handle()  # sending ends streams, too, and their end may have to be told
        except Http2Error as error:
            self._fail(str(error))
            return
        self._handle()
        for stream in [s for s in self._blocked if not self.session.unsent(s.id)]:
            self._blocked.discard(stream)
            stream.wake()
        if self.session.finished:
            self.shut()
        elif self.session.queued > MAX_QUEUED:
            self._fail(f"more than {MAX_QUEUED} frames wait to be sent")
            self.abort()

    def _send(self) -> bool:
        if self._transport is None or self._paused:
            return False
        data = self.session.output()
        if data:
            self._transport.write(data)
        return bool(data)

    def ping(self) -> None:
        """Ask whether the other side is there."""
        self.pinged = secrets.token_bytes(8)
        self.session.ping(self.pinged)
        self.flush()

    def silent_s(self) -> float:
        """How long nothing at all has come, since this was asked first, s."""
        now = asyncio.get_running_loop().time()
        if self._waiting_since is None:
            self._waiting_since = now
        return now - self._waiting_since

    def blocked(self, stream: "Stream") -> None:
        """Wake this stream when all that it has to send has gone."""
        self._blocked.add(stream)

    def close(self) -> None:
        """End all streams, say goodbye and close."""
        self.session.terminate()
        self.flush()
        self.shut()

    def shut(self) -> None:
        """Close once all is sent, or soon."""
        self.open = False
        if self._transport is not None and not self._transport.is_closing():
            self._transport.close()
            asyncio.get_running_loop().call_later(CLOSE_S, self._transport.abort)

    def abort(self) -> None:
        """Close at once: the other side does not answer."""
        if self._transport is not None:
            self._transport.abort()

    def _handle(self) -> None:
        for event in self.session.events():
            stream = self.streams.get(event[1])
            if stream is not None:
                self._of_stream(stream, event)
                continue
            match event:
                case ("request", number, fields):
                    self._listener.opened(self, number, fields)
                case ("data", number, data):  # of a stream that is over
                    self.session.consume(number, len(data))
                case ("settings", _, _):
                    if not self.greeted.done():
                        self.greeted.set_result(None)
                case ("pong", _, answered):
                    if answered == self.pinged:
                        self.pinged = None
                case ("goaway", _, _):
                    self.open = False

    def _of_stream(self, stream: "Stream", event: Event) -> None:
        match event:
            case ("data", _, data):
                stream.received(data)
            case ("headers", _, fields):
                stream.told(fields)
            case ("end", _, _):
                stream.ended()
            case ("close", _, code):
                self._forget(stream, of_reset(code))

    def _fail(self, why: str) -> None:
        self.open = False
        error = RpcError(Status.UNAVAILABLE, why)
        if not self.greeted.done():
            self.greeted.set_exception(error)
        for stream in list(self.streams.values()):
            self._forget(stream, error)
        self.shut()

    def _forget(self, stream: "Stream", error: RpcError) -> None:
        del self.streams[stream.id]
        self._blocked.discard(stream)
        stream.closed(error)


class Stream:
    """A call: messages, as bytes, both ways. To be read and written by one task each."""

    def __init__(self, connection: Connection, number: int, max_message: int) -> None:
        """`max_message`: bytes of a message that is received; more ends the call."""
        self.id = number
        self._connection = connection
        self._max_message = max_message
        self._messages: deque[bytes] = deque()
        self._partial = bytearray()
        self._unread = 0  # bytes of the messages, with their prefixes
        self._withheld = 0  # bytes of data that the other side's window lacks
        self._reads = 0  # in a row, without having waited
        self._no_more = False
        self._finished = False  # nobody reads what comes
        self._gone = False
        self._error: RpcError | None = None
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        connection.streams[number] = self

    async def read(self) -> bytes | None:
        """The next message; None after the last one. Raises RpcError when the call has failed."""
        self._reads += 1
        if self._reads % READS_IN_A_ROW == 0:
            await asyncio.sleep(0)
        while not self._messages:
            if self._error is not None:
                raise self._error
            if self._no_more:
                return None
            self._reads = 0
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        message = self._messages.popleft()
        self._unread -= PREFIX_BYTES + len(message)
        if self._withheld and self._unread < UNREAD_BYTES:
            self._consume(0)
            self._connection.flush()
        return message

    async def write(self, message: bytes) -> None:
        """Send; waits while the other side takes no more. Raises RpcError when the call is over."""
        self._send(message)
        while self._connection.session.unsent(self.id) and not self._gone:
            self._connection.blocked(self)
            self._writer = asyncio.get_running_loop().create_future()
            await self._writer
        if self._gone:
            raise self._error or RpcError(Status.UNAVAILABLE, "the call is over")

    def cancel(self) -> None:
        """End the call, now; nothing happens when it has ended."""
        if not self._gone:
            self._connection.session.reset(self.id, CANCEL)
            self._connection.flush()

    def _send(self, message: bytes) -> None:
        if self._gone:
            raise self._error or RpcError(Status.UNAVAILABLE, "the call is over")
        session = self._connection.session
        try:
            session.send(self.id, b"\0" + len(message).to_bytes(4) + message)
        except Http2Error as error:
            raise RpcError(Status.UNAVAILABLE, str(error)) from None
        self._connection.flush()

    def drop(self) -> None:
        """Nobody reads what has come, or comes."""
        self._finished = True
        self._messages.clear()
        self._partial.clear()
        self._unread = 0
        self._consume(0)

    # --- the connection says

    def received(self, data: bytes) -> None:
        """Data has come: whole messages wait to be read."""
        if self._error is not None or self._finished:
            self._consume(len(data))
            return
        buffer = self._partial
        buffer += data
        while len(buffer) >= PREFIX_BYTES and self._error is None:
            end = PREFIX_BYTES + int.from_bytes(buffer[1:PREFIX_BYTES])
            if buffer[0]:
                self.refuse(Status.UNIMPLEMENTED, "compressed messages are not understood")
            elif end > PREFIX_BYTES + self._max_message:
                size = f"{end - PREFIX_BYTES} bytes, more than {self._max_message}"
                self.refuse(Status.RESOURCE_EXHAUSTED, f"a message of {size}")
            elif len(buffer) < end:
                break
            else:
                self._messages.append(bytes(buffer[PREFIX_BYTES:end]))
                self._unread += end
                del buffer[:end]
        if self._unread < UNREAD_BYTES:
            self._consume(len(data))
        else:
            self._withheld += len(data)
        self.wake()

    def _consume(self, more: int) -> None:
        self._connection.session.consume(self.id, self._withheld + more)
        self._withheld = 0

    def refuse(self, status: Status, details: str) -> None:
        """What came cannot be taken: the call fails."""
        self._partial.clear()
        self._error = self._error or Rejected(status, details)

    def told(self, fields: Headers) -> None:
        """Fields have come: of a response, or trailing."""

    def ended(self) -> None:
        """The other side sends nothing more."""
        self._no_more = True
        if self._partial and self._error is None:
            self._error = Rejected(Status.INTERNAL, "the last message was cut off")
        self.wake()

    def closed(self, error: RpcError) -> None:
        """The stream is over both ways; `error` is why, if nothing else has said so."""
        self._gone = True
        if not self._no_more:
            self._error = self._error or error
        # What a stream leaves unread must not clog the connection.
        self._consume(0)
        self.wake()

    def wake(self) -> None:
        """Reader and writer look again."""
        for future in (self._reader, self._writer):
            if future is not None and not future.done():
                future.set_result(None)
