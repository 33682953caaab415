# SPDX-License-Identifier: Apache-2.0
"""A client's side: a channel to one server, and calls on it."""

import asyncio
import contextlib

from flowslot_rpc import status
from flowslot_rpc.address import split
from flowslot_rpc.connection import Connection, Stream
from flowslot_rpc.events import Headers
from flowslot_rpc.http2 import Http2Error, Session
from flowslot_rpc.status import RpcError, Status

MAX_MESSAGE_BYTES = 4 << 20
CONNECT_S = 5.0
SILENT_S = 15.0
"""A server that says nothing at all for so long, while calls wait in vain, is left. Ours pings."""


class Call(Stream):
    """A call to the server."""

    _answered = _trailed = False

    def told(self, fields: Headers) -> None:
        """The response begins, or a call ends (both in one when it fails at once)."""
        found = dict(fields)
        if not self._answered:
            self._answered = True
            code = found.get(b":status")
            if code != b"200":
                self.refuse(Status.UNAVAILABLE, f"no gRPC server: HTTP status {code!r}")
                return
        if b"grpc-status" in found:
            self._trailed = True
            self._error = self._error or status.read(found)
            self.wake()

    def ended(self) -> None:
        """A call that ends has said how."""
        if not self._trailed and self._error is None:
            self._error = status.read({})
        super().ended()

    def refuse(self, status: Status, details: str) -> None:
        """The server must not go on with it."""
        super().refuse(status, details)
        self.cancel()
        self.wake()

    def unanswered(self) -> None:
        """It was waited for in vain: not for the first time, perhaps."""
        if self._connection.silent_s() > SILENT_S:
            self._connection.abort()

    def end(self) -> None:
        """Say that no more messages come."""
        with contextlib.suppress(Http2Error):
            self._connection.session.end(self.id)
            self._connection.flush()


class Channel:
    """A connection to a server, made again for the next call when it was lost."""

    def __init__(self, address: str) -> None:
        """`address`: "host:port"; of IPv6 "[host]:port" or "host:port"."""
        self._address = address
        self._connection: Connection | None = None  # the one that takes calls
        self._connections: set[Connection] = set()  # with those whose calls only come to an end
        self._connecting: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def connected(self) -> bool:
        """A connection stands, and takes calls."""
        return self._connection is not None and self._connection.open

    async def connect(self, timeout_s: float) -> None:
        """Nothing when connected. Raises RpcError: UNAVAILABLE, when no server is there.

        Who gives up waiting does not stop it: the next one finds it further on, or done.
        """
        if self.connected:
            return
        if self._closed:
            raise RpcError(Status.UNAVAILABLE, "the channel is closed")
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.create_task(self._connect())
            # Taken note of, though nobody may wait for it any more.
            self._connecting.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(self._connecting)
        except TimeoutError:
            raise RpcError(Status.UNAVAILABLE, "cannot be reached in time") from None
        except asyncio.CancelledError:
            if self._closed:  # meanwhile: it is not the caller who is cancelled
                raise RpcError(Status.UNAVAILABLE, "the channel is closed") from None
            raise

    async def _connect(self) -> None:
        host, port = split(self._address)
        connection: Connection | None = None
        try:
            async with asyncio.timeout(CONNECT_S):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: Connection(Session(server=False), self), host, port
                )
                await connection.greeted
        except BaseException as error:
            if connection is not None:
                connection.abort()
            # TimeoutError is an OSError; a name that cannot be one is a UnicodeError.
            if isinstance(error, OSError | UnicodeError):
                problem = f"cannot be reached: {str(error) or 'no answer in time'}"
                raise RpcError(Status.UNAVAILABLE, problem) from None
            raise
        self._connection = connection

    def stream(self, path: str) -> Call:
        """Begin a call on the connection that stands. Raises RpcError: UNAVAILABLE."""
        connection = self._connection
        if connection is None or not connection.open:
            raise RpcError(Status.UNAVAILABLE, "not connected")
        fields = [
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", path.encode()),
            (b":authority", self._address.encode()),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
            (b"user-agent", b"flowslot"),
        ]
        try:
            number = connection.session.request(fields)
        except Http2Error as error:
            connection.open = False
            raise RpcError(Status.UNAVAILABLE, str(error)) from None
        call = Call(connection, number, MAX_MESSAGE_BYTES)
        connection.flush()
        return call

    async def unary(self, path: str, request: bytes, timeout_s: float) -> bytes:
        """One message there, one back; connects first. Raises RpcError."""
        call: Call | None = None
        try:
            async with asyncio.timeout(timeout_s):
                await self.connect(timeout_s)
                call = self.stream(path)
                await call.write(request)
                call.end()
                reply = await call.read()
                if reply is None or await call.read() is not None:
                    raise RpcError(Status.INTERNAL, "not one message was answered")
                return reply
        except TimeoutError:
            if call is None:
                raise RpcError(Status.UNAVAILABLE, "cannot be reached in time") from None
            call.unanswered()
            problem = f"no answer within {timeout_s:g} s"
            raise RpcError(Status.DEADLINE_EXCEEDED, problem) from None
        finally:
            if call is not None:
                call.cancel()

    def close(self) -> None:
        """End all calls and the connection, for good."""
        self._closed = True
        if self._connecting is not None:
            self._connecting.cancel()
        for connection in list(self._connections):
            connection.close()
        self._connection = None

    # --- Listener

    def made(self, connection: Connection) -> None:
        """It takes calls once the server has greeted."""
        self._connections.add(connection)

    def opened(self, connection: Connection, stream: int, fields: Headers) -> None:
        """Servers do not open streams: push is switched off."""

    def lost(self, connection: Connection) -> None:
        """The next call begins a new one."""
        self._connections.discard(connection)
        if connection is self._connection:
            self._connection = None
