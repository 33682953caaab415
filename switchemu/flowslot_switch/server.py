# SPDX-License-Identifier: Apache-2.0
"""The gRPC server: who calls, how much of everything a caller may have, how a call ends.

Every method is served as a stream, the unary ones too: so one place reads, waits and limits.
"""

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from flowslot.model.errors import LimitExceeded, ProtocolError, SessionEnded
from flowslot.model.topology_file import split_endpoint
from flowslot_proto.endpoints import why_only_here
from flowslot_proto.grpcio import grpc
from flowslot_proto.tls import Material, TlsFiles
from flowslot_switch import limits
from flowslot_switch.caller import Caller, Denied
from flowslot_switch.guard import Guard, OnRejected

Handler = Callable[["Call"], Awaitable[None]]

OPTIONS = (
    ("grpc.so_reuseport", 0),  # a second process at the same address fails
    ("grpc.http2.bdp_probe", 0),
    # Not grpc.minimal_stack: the limit of messages is among what that leaves out.
    ("grpc.max_receive_message_length", limits.MAX_MESSAGE_BYTES),
    ("grpc.compression_enabled_algorithms_bitset", 1),  # none: nothing to unpack
    ("grpc.max_concurrent_streams", limits.MAX_STREAMS),
    ("grpc.max_metadata_size", 8192),
    ("grpc.absolute_max_metadata_size", 8192),
    ("grpc.max_allowed_incoming_connections", limits.MAX_CONNECTIONS),
    ("grpc.server_handshake_timeout_ms", limits.HELLO_TIMEOUT_S * 1000),
    ("grpc.http2.settings_timeout", limits.HELLO_TIMEOUT_S * 1000),
    ("grpc.max_connection_idle_ms", limits.IDLE_S * 1000),
    ("grpc.keepalive_time_ms", limits.KEEPALIVE_S * 1000),
    ("grpc.keepalive_timeout_ms", limits.KEEPALIVE_S * 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
)


class Closing(Exception):
    """The process stops, or starts anew with another configuration."""


class CallEnded(Exception):
    """A call ends otherwise than well."""

    def __init__(self, code: grpc.StatusCode, details: str, *, rejected: bool = True) -> None:
        """`rejected`: because the caller has broken a rule or a limit."""
        super().__init__(details)
        self.code = code
        self.rejected = rejected


STATUS = {
    ProtocolError: grpc.StatusCode.INVALID_ARGUMENT,
    Denied: grpc.StatusCode.PERMISSION_DENIED,
    LimitExceeded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    SessionEnded: grpc.StatusCode.FAILED_PRECONDITION,
    Closing: grpc.StatusCode.UNAVAILABLE,
}
"""What a call ends with whose handler raises this. The last two are not the caller's fault."""


class Call:
    """What a handler sees of a call. Ends with the handler, well unless that raises."""

    def __init__(self, context: Any, caller: Caller) -> None:
        self.caller = caller
        self._context = context
        self._writing: asyncio.Future[None] | None = None

    async def read(self) -> bytes | None:
        """The next message; None: the caller says no more."""
        message = await self._context.read()
        return message if isinstance(message, bytes) else None

    async def write(self, message: bytes) -> None:
        """Waits while the caller does not read. Whoever gives up waiting stops nothing: gRPC cannot
        end a call while a message is on its way."""
        self._writing = asyncio.ensure_future(self._context.write(message))
        self._writing.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._writing)

    async def settled(self) -> bool:
        """Whether the last message has gone out, now or soon."""
        if self._writing is not None:
            await asyncio.wait([self._writing], timeout=limits.SETTLE_S)
        return self._writing is None or self._writing.done()


def unary(answer: Callable[[Caller, bytes], bytes]) -> Handler:
    """A method with one message each way, which must not take long."""

    async def handle(call: Call) -> None:
        try:
            async with asyncio.timeout(limits.UNARY_S):
                request = await call.read()
                more = request is not None and await call.read() is not None
                if request is None or more:  # none: the caller may have gone, and is not to blame
                    problem = "must have one message"
                    raise CallEnded(grpc.StatusCode.INVALID_ARGUMENT, problem, rejected=more)
                await call.write(answer(call.caller, request))
        except TimeoutError:
            problem = f"not over within {limits.UNARY_S:g} s"
            raise CallEnded(grpc.StatusCode.DEADLINE_EXCEEDED, problem) from None

    return handle


class Server(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Serves paths ("/package.Service/Method"). All in one event loop."""

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        *,
        tls: TlsFiles | None = None,
        on_rejected: OnRejected = lambda peer, why: None,
    ) -> None:
        """`tls` None: plaintext. `on_rejected`: a caller has broken a rule or a limit."""
        self._handlers = handlers
        self._tls = tls
        self._on_rejected = on_rejected
        self.guard = Guard(on_rejected)
        self._calls = limits.Quota(limits.MAX_CALLS, limits.CALLS_PER_CALLER)
        self._rates = limits.Rates(limits.CALLS_PER_S, limits.CALL_BURST)
        self._server: grpc.aio.Server | None = None
        self.only_here = ""
        """Why nobody else can reach it, if so (`why_only_here`)."""

    async def listen(self, address: str) -> int:
        """Serve at "host:port"; returns the port. Raises OSError."""
        host, port = split_endpoint(address)
        found = _addresses(host, port)
        self.only_here = why_only_here(address, found)
        server = grpc.aio.server(handlers=(self,), options=OPTIONS)
        for one in found:  # gRPC would ask a DNS server for the name, and wait for a dead one
            target = f"[{one}]:{port}" if ":" in one else f"{one}:{port}"
            if self._tls is None:
                port = server.add_insecure_port(target)
            else:
                port = server.add_secure_port(target, self._credentials(self._tls))
        await server.start()
        self._server = server
        return int(port)

    async def stop(self, grace_s: float) -> None:
        """Take no more calls; those that run have so long to end."""
        self.guard.stop()
        if self._server is not None:
            await self._server.stop(grace_s)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """See grpc.GenericRpcHandler."""
        handler = self._handlers.get(handler_call_details.method, _unknown)
        return grpc.stream_stream_rpc_method_handler(partial(self._serve, handler))

    async def _serve(self, handler: Handler, _: Any, context: Any) -> None:
        caller = Caller.of(context)
        call = Call(context, caller)
        self.guard.called(caller.peer)
        try:
            self._admit(caller)
            try:
                await handler(call)
            except tuple(STATUS) as error:
                theirs = not isinstance(error, SessionEnded | Closing)
                raise CallEnded(STATUS[type(error)], str(error), rejected=theirs) from None
            finally:
                self._calls.give_back(caller.owner)
        except CallEnded as end:
            if end.rejected:
                self._on_rejected(str(caller), str(end))
                self.guard.bear(caller.address)
            if not await call.settled():
                self.guard.cut(caller.peer)  # it does not read: that ends the call, too
            await call.settled()
            await context.abort(end.code, str(end))

    def _admit(self, caller: Caller) -> None:
        if self.guard.bars(caller.address):
            problem = "asks too much again and again"
        elif not self._rates.take(caller.owner, time.monotonic_ns()):
            problem = f"more than {limits.CALLS_PER_S:g} calls per second"
        elif not self._calls.take(caller.owner):
            problem = f"more than {limits.CALLS_PER_CALLER} calls at once, or too many of all"
        else:
            return
        raise CallEnded(grpc.StatusCode.RESOURCE_EXHAUSTED, problem)

    def _credentials(self, tls: TlsFiles) -> grpc.ServerCredentials:
        """Asks for the files anew at each handshake."""
        used = tls.current()

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            nonlocal used
            self.guard.handshake()
            before, used = used, tls.current()
            return None if used is before else _certificates(used)

        return grpc.dynamic_ssl_server_credentials(_certificates(used), fetch, True)


def _addresses(host: str, port: int) -> list[str]:
    """Where to listen. Raises OSError where nothing can: gRPC would not tell why."""
    try:
        known = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # a name that cannot be one
        raise OSError(str(error)) from None
    found, errors = dict[str, None](), list[OSError]()
    for family, _, _, _, address in known:
        try:
            socket.create_server(address[:2], family=family).close()
            found[str(address[0])] = None
        except OSError as error:
            errors.append(error)
    if not found:
        raise errors[0]
    return list(found)


def _certificates(files: Material) -> grpc.ServerCertificateConfiguration:
    pair = (files.key, files.certificate)
    return grpc.ssl_server_certificate_configuration([pair], files.ca)


async def _unknown(call: Call) -> None:
    raise CallEnded(grpc.StatusCode.UNIMPLEMENTED, "there is no such method")
