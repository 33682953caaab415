# SPDX-License-Identifier: Apache-2.0
"""A server's side: listens, and runs a handler for every call."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from flowslot_rpc import status
from flowslot_rpc.address import split
from flowslot_rpc.connection import Connection, Stream
from flowslot_rpc.events import Headers
from flowslot_rpc.http2 import Http2Error, Session
from flowslot_rpc.quota import Quota
from flowslot_rpc.status import REFUSED_STREAM, Rejected, RpcError, Status

MAX_CONNECTIONS = 1024
MAX_STREAMS = 64
"""Of one connection, at once."""
UNARY_S = 5.0
"""A call of one message each way that is not over by then is ended."""
KEEPALIVE_S = 5.0
"""So often every client is asked whether it is there; who has not answered by the next time is
taken to be gone."""
READ_FIRST_S = 0.05
"""Answers may have come while this process stood still."""

_log = logging.getLogger(__name__)


class ServerCall(Stream):
    """A call that a client has begun. Raise RpcError in its handler to end it with that status."""

    def __init__(self, connection: Connection, number: int, max_message: int) -> None:
        super().__init__(connection, number, max_message)
        self.peer = connection.peer
        self.task: asyncio.Task[None] | None = None
        self.responded = False

    def finish(self, end: Status, details: str) -> None:
        """The call is over."""
        if self._gone or self._finished:
            return
        if end == Status.OK:
            self._respond()
        self.drop()
        session, trailers = self._connection.session, status.write(end, details)
        with contextlib.suppress(Http2Error):  # the client has gone already
            if self.responded:
                session.end(self.id, trailers)
            else:
                session.respond(self.id, _response() + trailers, ended=True)
        self._connection.flush()

    def _send(self, message: bytes) -> None:
        self._respond()
        super()._send(message)

    def _respond(self) -> None:
        if self.responded or self._gone:
            return
        self.responded = True
        with contextlib.suppress(Http2Error):  # it has ended: so does what follows
            self._connection.session.respond(self.id, _response())

    def closed(self, error: RpcError) -> None:
        """The client has cancelled, or the connection is lost, or all is said."""
        super().closed(error)
        if self.task is not None and not self._finished:
            self.task.cancel()


Handler = Callable[[ServerCall], Awaitable[None]]
OnRejected = Callable[[str, str], None]
"""A client's address, and what it did."""


def _response() -> Headers:
    return [(b":status", b"200"), (b"content-type", b"application/grpc")]


class Server:
    """Serves paths ("/package.Service/Method"). All in one event loop."""

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        *,
        max_message: int,
        max_calls: int,
        on_rejected: OnRejected = lambda peer, why: None,
    ) -> None:
        """`max_message`: bytes of one that is received. `max_calls`: at once, of all clients; see
        Quota for what one of them may have of that, and of connections. `on_rejected`: a client
        has broken a rule or a limit, its connection or call is refused."""
        self._handlers = handlers
        self._on_rejected = on_rejected
        self._max_message = max_message
        self._places = Quota("connections", MAX_CONNECTIONS)
        self._room = Quota("calls", max_calls)
        self._connections: set[Connection] = set()
        self._calls: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._keepalive: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """Where it listens."""
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def listen(self, address: str) -> None:
        """Serve at "host:port". Raises OSError."""
        host, port = split(address)
        loop = asyncio.get_running_loop()
        if host == "::":  # both families, as everywhere
            both = socket.create_server(
                (host, port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=MAX_CONNECTIONS
            )
            self._server = await loop.create_server(
                self._accept, sock=both, backlog=MAX_CONNECTIONS
            )
        else:
            self._server = await loop.create_server(
                self._accept, host, port, backlog=MAX_CONNECTIONS
            )
        self._keepalive = asyncio.create_task(self._ask())

    async def stop(self, grace_s: float) -> None:
        """Take no more calls; those that run have so long to end."""
        if self._server is None or self._keepalive is None:
            return
        self._server.close()
        self._keepalive.cancel()
        for connection in self._connections:
            connection.session.refuse_more()
            connection.flush()
        if self._calls:
            await asyncio.wait(self._calls, timeout=grace_s)
        for connection in list(self._connections):
            connection.close()

    def _accept(self) -> Connection:
        return Connection(Session(server=True, max_streams=MAX_STREAMS), self)

    async def _ask(self) -> None:
        while True:
            await asyncio.sleep(KEEPALIVE_S)
            await asyncio.sleep(READ_FIRST_S)
            for connection in list(self._connections):
                if connection.pinged is not None:
                    connection.abort()
                else:
                    connection.ping()

    # --- Listener

    def made(self, connection: Connection) -> None:
        """One more, unless there are too many."""
        if self._places.take(connection.host):
            self._connections.add(connection)
        else:
            self._on_rejected(connection.peer, f"more than {self._places}")
            connection.close()

    def opened(self, connection: Connection, stream: int, fields: Headers) -> None:
        """A client begins a call."""
        if not self._server or not self._server.is_serving():
            connection.session.reset(stream, REFUSED_STREAM)
            return
        call = ServerCall(connection, stream, self._max_message)
        found = dict(fields)
        handler = self._handlers.get(found.get(b":path", b"").decode(errors="replace"))
        if found.get(b":method") != b"POST" or not found.get(b"content-type", b"").startswith(
            b"application/grpc"
        ):
            self._turn_away(call, Status.INVALID_ARGUMENT, "not a gRPC call")
        elif handler is None:
            self._turn_away(call, Status.UNIMPLEMENTED, "there is no such method")
        elif not self._room.take(connection.host):
            self._turn_away(call, Status.RESOURCE_EXHAUSTED, f"more than {self._room}")
        else:
            call.task = asyncio.create_task(self._serve(handler, call))
            self._calls.add(call.task)
            call.task.add_done_callback(partial(self._over, connection.host))

    def lost(self, connection: Connection) -> None:
        """Its calls have been told."""
        if connection in self._connections:  # it was not refused
            self._connections.remove(connection)
            self._places.give_back(connection.host)

    def _turn_away(self, call: ServerCall, status: Status, why: str) -> None:
        self._on_rejected(call.peer, why)
        call.finish(status, why)

    def _over(self, host: str, task: asyncio.Task[None]) -> None:
        self._calls.remove(task)
        self._room.give_back(host)

    async def _serve(self, handler: Handler, call: ServerCall) -> None:
        try:
            await handler(call)
            call.finish(Status.OK, "")
        except Rejected as error:
            self._turn_away(call, error.status, error.details)
        except RpcError as error:
            call.finish(error.status, error.details)
        except asyncio.CancelledError:
            call.finish(Status.CANCELLED, "")
            raise
        except Exception as error:  # a bug must not end the server
            _log.exception("a handler failed")
            call.finish(Status.UNKNOWN, repr(error))


def unary(answer: Callable[[ServerCall, bytes], bytes]) -> Handler:
    """A handler of calls of one message each way."""

    async def handle(call: ServerCall) -> None:
        try:
            async with asyncio.timeout(UNARY_S):
                request = await call.read()
                if request is None or await call.read() is not None:
                    raise Rejected(Status.INVALID_ARGUMENT, "must be one message")
                await call.write(answer(call, request))
        except TimeoutError:
            if call.responded:  # who does not take the answer does not take a status, either
                call.cancel()
            # Perhaps it was this process that stood still: nobody is to blame.
            raise RpcError(Status.DEADLINE_EXCEEDED, f"not over in {UNARY_S:g} s") from None

    return handle
