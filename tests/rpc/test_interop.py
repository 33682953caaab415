# SPDX-License-Identifier: Apache-2.0
"""Our gRPC and the reference implementation, each as client and as server of the other."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
from ours import DEADLINE_S, channel

from flowslot_rpc.client import Call
from flowslot_rpc.server import Server, ServerCall, unary
from flowslot_rpc.status import RpcError, Status

MAX_MESSAGE = 1 << 20
SIZES = (0, 1, 5, 16_384, 65_531, 65_536, 300_000, MAX_MESSAGE)
NASTY = "100 %, na\u00efve \u2713\nsecond line"


async def reverse(call: ServerCall) -> None:
    while (message := await call.read()) is not None:
        await call.write(message[::-1])


async def after_all(call: ServerCall) -> None:
    """Says nothing until all is said."""
    messages = []
    while (message := await call.read()) is not None:
        messages.append(message)
    await call.write(b"%d" % len(messages))


async def refuse(call: ServerCall) -> None:
    if await call.read() == b"later":
        await call.write(b"first this")
    raise RpcError(Status.FAILED_PRECONDITION, NASTY)


async def fail(call: ServerCall) -> None:
    raise KeyError("a bug")


async def endless(call: ServerCall) -> None:
    await call.write(b"here")
    await call.read()
    await call.read()


async def silent(call: ServerCall) -> None:
    await asyncio.sleep(DEADLINE_S)


HANDLERS = {
    "/t.T/Silent": silent,
    "/t.T/Reverse": reverse,
    "/t.T/AfterAll": after_all,
    "/t.T/Refuse": refuse,
    "/t.T/Fail": fail,
    "/t.T/Endless": endless,
    "/t.T/Twice": unary(lambda call, request: request * 2),
}


class Generic(grpc.GenericRpcHandler):
    """The same methods by the reference implementation."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        name = handler_call_details.method.rpartition("/")[2]
        if name == "Twice":
            return grpc.unary_unary_rpc_method_handler(self.twice)
        handler = getattr(self, name.lower(), None)
        return handler and grpc.stream_stream_rpc_method_handler(handler)

    async def twice(self, request: bytes, context: Any) -> bytes:
        return request * 2

    async def reverse(self, requests: Any, context: Any) -> AsyncIterator[bytes]:
        async for message in requests:
            yield message[::-1]

    async def refuse(self, requests: Any, context: Any) -> AsyncIterator[bytes]:
        async for message in requests:
            if message == b"later":
                yield b"first this"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, NASTY)

    async def fail(self, requests: Any, context: Any) -> AsyncIterator[bytes]:
        raise KeyError("a bug")
        yield b""

    async def silent(self, requests: Any, context: Any) -> AsyncIterator[bytes]:
        await asyncio.sleep(DEADLINE_S)
        yield b""

    async def endless(self, requests: Any, context: Any) -> AsyncIterator[bytes]:
        yield b"here"
        await asyncio.sleep(DEADLINE_S)


@contextlib.asynccontextmanager
async def ours(max_calls: int = 400) -> AsyncIterator[str]:
    server = Server(HANDLERS, max_message=MAX_MESSAGE, max_calls=max_calls)
    await server.listen("127.0.0.1:0")
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        await server.stop(1.0)


@contextlib.asynccontextmanager
async def theirs() -> AsyncIterator[str]:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Generic(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


Serving = Callable[[], contextlib.AbstractAsyncContextManager[str]]
both_servers = pytest.mark.parametrize("serving", [ours, theirs])


def run(work: Callable[[str], Awaitable[None]], serving: Serving = ours) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), serving() as address:
            await work(address)

    asyncio.run(main())


async def status_of(call: Call) -> tuple[Status, str]:
    with pytest.raises(RpcError) as error:
        while await call.read() is not None:
            pass
    return error.value.status, error.value.details


# --- our client


@both_servers
def test_messages_of_all_sizes_come_back(serving: Serving) -> None:
    async def work(address: str) -> None:
        async with channel(address) as one:
            call = one.stream("/t.T/Reverse")
            for size in SIZES:
                message = bytes(i % 251 for i in range(size))
                writing = asyncio.create_task(call.write(message))
                assert await call.read() == message[::-1]
                await writing
            call.end()
            assert await call.read() is None
            assert await one.unary("/t.T/Twice", b"ab", DEADLINE_S) == b"abab"
            assert await one.unary("/t.T/Twice", b"", DEADLINE_S) == b""

    run(work, serving)


@both_servers
def test_what_ends_a_call_arrives(serving: Serving) -> None:
    async def work(address: str) -> None:
        async with channel(address) as one:
            for said in (b"now", b"later"):
                call = one.stream("/t.T/Refuse")
                await call.write(said)
                if said == b"later":
                    assert await call.read() == b"first this"
                assert await status_of(call) == (Status.FAILED_PRECONDITION, NASTY)
            assert (await status_of(one.stream("/t.T/Nothing")))[0] == Status.UNIMPLEMENTED
            call = one.stream("/t.T/Fail")
            call.end()
            code, details = await status_of(call)
            assert code == Status.UNKNOWN and "a bug" in details

    run(work, serving)


@both_servers
def test_an_answer_that_does_not_come_is_not_waited_for(serving: Serving) -> None:
    async def work(address: str) -> None:
        async with channel(address) as one:
            with pytest.raises(RpcError) as error:
                await one.unary("/t.T/Silent", b"", 0.05)
            assert error.value.status == Status.DEADLINE_EXCEEDED
            assert await one.unary("/t.T/Twice", b"ab", DEADLINE_S) == b"abab"

    run(work, serving)


@both_servers
def test_calls_do_not_wait_for_each_other(serving: Serving) -> None:
    async def work(address: str) -> None:
        async with channel(address) as one:
            unread = one.stream("/t.T/Reverse")
            stuck = asyncio.create_task(unread.write(bytes(MAX_MESSAGE)))
            calls = (one.unary("/t.T/Twice", b"%d" % n, DEADLINE_S) for n in range(200))
            assert await asyncio.gather(*calls) == [b"%d" % n * 2 for n in range(200)]
            unread.cancel()
            with contextlib.suppress(RpcError):
                await stuck

    run(work, serving)


def test_a_server_that_goes_ends_all_calls() -> None:
    async def work(address: str) -> None:
        async with channel(address) as one:
            call = one.stream("/t.T/Endless")
            assert await call.read() == b"here"
            assert one._connection is not None
            one._connection.abort()
            assert (await status_of(call))[0] == Status.UNAVAILABLE
            with pytest.raises(RpcError):
                await call.write(b"x")
            assert not one.connected
            assert await one.unary("/t.T/Twice", b"ab", DEADLINE_S) == b"abab"

    run(work)


# --- the reference implementation's client


def test_the_reference_client_gets_all_of_it() -> None:
    async def work(address: str) -> None:
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(address, options=options) as one:
            call: Any = one.stream_stream("/t.T/Reverse")()
            for size in SIZES:
                message = bytes(i % 251 for i in range(size))
                await call.write(message)
                assert await call.read() == message[::-1]
            await call.write(bytes(MAX_MESSAGE + 1))
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call.read()
            assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            call = one.stream_stream("/t.T/AfterAll")()
            for n in range(500):
                await call.write(b"x" * n)
            await call.done_writing()
            assert await call.read() == b"500" and await call.read() == grpc.aio.EOF
            assert await call.code() == grpc.StatusCode.OK

    run(work)


def test_the_reference_client_gets_every_status() -> None:
    async def work(address: str) -> None:
        async with grpc.aio.insecure_channel(address) as one:
            for said in (b"now", b"later"):
                call: Any = one.stream_stream("/t.T/Refuse")()
                await call.write(said)
                if said == b"later":
                    assert await call.read() == b"first this"
                assert await call.code() == grpc.StatusCode.FAILED_PRECONDITION
                assert await call.details() == NASTY
            call = one.stream_stream("/t.T/Nothing")()
            assert await call.code() == grpc.StatusCode.UNIMPLEMENTED
            call = one.stream_stream("/t.T/Fail")()
            assert await call.code() == grpc.StatusCode.UNKNOWN
            squeezed: Any = one.stream_stream("/t.T/Reverse")(compression=grpc.Compression.Gzip)
            await squeezed.write(b"x" * 10_000)
            assert await squeezed.code() == grpc.StatusCode.UNIMPLEMENTED
            await squeezed.details()

    run(work)


def test_the_reference_client_that_cancels_ends_the_handler() -> None:
    ended = asyncio.Event()

    async def wait(call: ServerCall) -> None:
        try:
            await call.write(b"here")
            await call.read()
        finally:
            ended.set()

    async def main() -> None:
        server = Server({"/t.T/Wait": wait}, max_message=100, max_calls=1)
        await server.listen("127.0.0.1:0")
        async with (
            asyncio.timeout(DEADLINE_S),
            grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as one,
        ):
            call: Any = one.stream_stream("/t.T/Wait")()
            assert await call.read() == b"here"
            more: Any = one.stream_stream("/t.T/Wait")()
            assert await more.code() == grpc.StatusCode.RESOURCE_EXHAUSTED, "one call at once"
            call.cancel()
            await ended.wait()
        await server.stop(1.0)

    asyncio.run(main())


def test_a_server_that_stops_waits_for_calls_so_long() -> None:
    async def main() -> None:
        server = Server(HANDLERS, max_message=100, max_calls=10)
        await server.listen("127.0.0.1:0")
        async with channel(f"127.0.0.1:{server.port}") as one:
            short, long = one.stream("/t.T/Endless"), one.stream("/t.T/Endless")
            assert await short.read() == await long.read() == b"here"
            stopping = asyncio.create_task(server.stop(0.3))
            await asyncio.sleep(0.05)
            assert not one.connected, "it takes no more calls"
            with pytest.raises(RpcError):
                await one.unary("/t.T/Twice", b"ab", DEADLINE_S)
            await short.write(b"x")
            await short.write(b"x")
            assert await short.read() is None, "this one ends well"
            await stopping
            assert (await status_of(long))[0] == Status.UNAVAILABLE

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))
