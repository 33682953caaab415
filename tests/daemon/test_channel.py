# SPDX-License-Identifier: Apache-2.0
"""How a switch process is reached; and whatever answers there, the daemon is not held up."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from rawhttp2 import DATA, GOAWAY, HEADERS, SETTINGS, frame

from flowslot.model.topology_file import SwitchSettings
from flowslot_switch.server import Server, unary
from flowslotd.negotiate import channel as channels
from flowslotd.negotiate.channel import Channel, RpcFailed

DEADLINE_S = 30.0
TWICE = "/t.T/Twice"
GREETING = frame(SETTINGS, 0, 0, b"")


@asynccontextmanager
async def twice(address: str) -> AsyncIterator[int]:
    """A server that answers; its port."""
    server = Server({TWICE: unary(lambda caller, request: request * 2)})
    port = await server.listen(address)
    yield port
    await server.stop(0.0)


def switch_at(address: str) -> SwitchSettings:
    return SwitchSettings(name="s1", address=address)


@pytest.fixture
def two_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names ending in `.two` have these addresses, IPv6 first, as most resolvers have it."""
    real = socket.getaddrinfo

    def resolve(host: Any, port: Any, *args: Any, **more: Any) -> Any:
        if not str(host).endswith(".two"):
            return real(host, port, *args, **more)
        return [
            (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", port, 0, 0)),
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port)),
        ]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)


@pytest.mark.usefixtures("two_addresses")
async def test_the_other_family_is_tried_and_what_worked_is_remembered() -> None:
    async with twice("127.0.0.1:0") as port:
        tried = 0

        async def leave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal tried
            tried += 1
            writer.close()

        silent = await asyncio.start_server(leave, "::1", port)
        channel = Channel(switch_at(f"switch.two:{port}"))
        for _ in range(3):
            assert await channel.unary(TWICE, b"ab", DEADLINE_S) == b"abab"
            await channel.close()
        assert tried == 1, "IPv6 failed once, and was not tried again"
        silent.close()


@pytest.mark.usefixtures("two_addresses")
async def test_an_address_that_does_not_answer_leaves_time_for_the_other() -> None:
    async with twice("127.0.0.1:0") as port:
        with socket.create_server(("::1", port), family=socket.AF_INET6):  # nobody accepts
            channel = Channel(switch_at(f"switch.two:{port}"))
            assert await channel.unary(TWICE, b"ab", DEADLINE_S) == b"abab"
            await channel.close()


async def test_a_server_on_ipv6_alone_is_reached() -> None:
    async with twice("[::1]:0") as port:
        for address in (f"[::1]:{port}", f"localhost:{port}"):
            channel = Channel(switch_at(address))
            try:
                assert await channel.unary(TWICE, b"ab", DEADLINE_S) == b"abab"
            except RpcFailed:
                assert address.startswith("localhost")  # not everywhere is it ::1 too
            await channel.close()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:1", "no.such.host.invalid:1", "a..b:1"])
async def test_where_nobody_listens_it_says_so(address: str) -> None:
    with pytest.raises(RpcFailed, match="cannot be reached: ") as error:
        await Channel(switch_at(address)).connect(DEADLINE_S)
    assert "\n" not in str(error.value) and len(str(error.value)) < 200


Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def served_by(serve: Serve) -> AsyncIterator[Channel]:
    """A channel to a server that does this with each connection."""
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    channel = Channel(switch_at(f"127.0.0.1:{server.sockets[0].getsockname()[1]}"))
    yield channel
    await channel.close()
    server.close()


@pytest.mark.parametrize(
    ("answer", "stays"),
    [
        (b"", True),
        (b"", False),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", False),
        (b"\xff" * 500, True),
        (GREETING, True),  # and nothing more
        (GREETING + frame(HEADERS, 5, 1, b"\x88"), True),  # ends without a gRPC status
        (GREETING + frame(HEADERS, 5, 1, b"\x8d"), True),  # HTTP status 404
        (
            GREETING + frame(HEADERS, 4, 1, b"\x88") + frame(DATA, 0, 1, b"\0\x7f\xff\xff\xffx"),
            True,
        ),
        (GREETING + frame(GOAWAY, 0, 0, bytes(8)), True),
    ],
)
async def test_a_client_is_not_held_up(
    monkeypatch: pytest.MonkeyPatch, answer: bytes, stays: bool
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        while stays and await reader.read(1 << 16):
            pass
        writer.close()

    monkeypatch.setattr(channels, "CONNECT_S", 0.4)
    async with served_by(serve) as channel:
        for _ in range(2):
            with pytest.raises(RpcFailed):
                await channel.unary(TWICE, b"ab", 0.5)


async def test_a_connection_that_takes_longer_than_a_call_is_not_begun_anew() -> None:
    greeted = asyncio.Event()
    begun = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal begun
        begun += 1
        await greeted.wait()
        writer.write(GREETING)
        while await reader.read(1 << 16):
            pass
        writer.close()

    async with served_by(serve) as channel:
        while not channel.connected:
            with pytest.raises(RpcFailed):
                await channel.unary(TWICE, b"ab", 0.02)
            if begun:
                greeted.set()
        assert begun == 1


async def test_a_channel_that_is_closed_ends_its_calls() -> None:
    async with twice("127.0.0.1:0") as port:
        channel = Channel(switch_at(f"127.0.0.1:{port}"))
        await channel.connect(DEADLINE_S)
        call = asyncio.create_task(channel.unary(TWICE, b"ab", DEADLINE_S))
        await asyncio.sleep(0)
        await channel.close()
        try:
            assert await call == b"abab"
        except RpcFailed as error:
            assert "closed" in str(error)
        assert not channel.connected
