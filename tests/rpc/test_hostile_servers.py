# SPDX-License-Identifier: Apache-2.0
"""Whatever a server sends, or does not: a client is told, and not held up."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from ours import DEADLINE_S
from rawhttp2 import SETTINGS, frame, read_all

from flowslot_rpc import client as calling
from flowslot_rpc.client import Channel
from flowslot_rpc.status import RpcError, Status

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def run(serve: Serve, work: Callable[[Channel], Awaitable[None]]) -> None:
    """`work` with a channel to a server that does to each connection what `serve` does."""

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        one = Channel(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        async with asyncio.timeout(DEADLINE_S):
            await work(one)
        one.close()
        server.close()

    asyncio.run(main())


async def fails(channel: Channel, timeout_s: float) -> Status:
    with pytest.raises(RpcError) as error:
        await channel.unary("/t.T/Twice", b"ab", timeout_s)
    assert error.value.status != Status.OK
    return error.value.status


class Greeter:
    """Greets, perhaps late, and says nothing more."""

    def __init__(self, after_s: float) -> None:
        self.after_s = after_s
        self.begun = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.begun += 1
        await asyncio.sleep(self.after_s)
        writer.write(SETTINGS)
        await read_all(reader)
        writer.close()


@pytest.mark.parametrize(
    ("answer", "stays"),
    [
        (b"", True),
        (b"", False),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", False),
        (b"\xff" * 500, True),
        (SETTINGS + frame(1, 5, 1, b"\x88"), True),  # ends without a gRPC status
        (SETTINGS + frame(1, 5, 1, b"\x8d"), True),  # HTTP status 404
        (SETTINGS + frame(7, 0, 0, bytes(8)), True),  # goes away
    ],
)
def test_a_client_is_not_held_up(answer: bytes, stays: bool) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        if stays:
            await read_all(reader)
        writer.close()

    async def work(channel: Channel) -> None:
        for _ in range(2):
            await fails(channel, 0.5)

    run(serve, work)


def test_a_greeting_may_take_longer_than_a_call() -> None:
    greeter = Greeter(after_s=0.2)

    async def work(channel: Channel) -> None:
        statuses = set()
        while not channel.connected:
            statuses.add(await fails(channel, 0.02))
        assert greeter.begun == 1 and Status.UNAVAILABLE in statuses
        channel.close()
        await fails(channel, 0.02)

    run(greeter, work)


def test_a_channel_that_is_closed_while_it_connects_leaves_nothing() -> None:
    channels: list[Channel] = []
    gone = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.read(1 << 16)
        channels[0].close()
        writer.write(SETTINGS)
        await read_all(reader)
        gone.set()
        writer.close()

    async def work(channel: Channel) -> None:
        channels.append(channel)
        assert await fails(channel, DEADLINE_S) == Status.UNAVAILABLE
        await gone.wait()

    run(serve, work)


def test_a_server_that_says_nothing_any_more_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    greeter = Greeter(after_s=0.0)

    async def work(channel: Channel) -> None:
        while greeter.begun < 3:
            await fails(channel, 0.05)

    monkeypatch.setattr(calling, "SILENT_S", 0.2)
    run(greeter, work)


def test_where_nobody_listens_it_says_so() -> None:
    async def main() -> None:
        for address in ("127.0.0.1:1", "[::1]:1", "no.such.host.invalid:1", "a..b:1"):
            with pytest.raises(RpcError) as error:
                await Channel(address).connect(DEADLINE_S)
            assert error.value.status == Status.UNAVAILABLE
            assert "cannot be reached" in error.value.details

    asyncio.run(main())
