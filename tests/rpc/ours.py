# SPDX-License-Identifier: Apache-2.0
"""Our client and our server, for tests of each."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from flowslot_rpc.client import Channel
from flowslot_rpc.server import Server, ServerCall, unary

DEADLINE_S = 30.0


@contextlib.asynccontextmanager
async def channel(address: str) -> AsyncIterator[Channel]:
    """Connected."""
    one = Channel(address)
    await one.connect(DEADLINE_S)
    try:
        yield one
    finally:
        one.close()


class Deaf:
    """A method that does not read, and one that writes without end."""

    def __init__(self) -> None:
        self.calls: list[ServerCall] = []
        self.written = 0

    async def deaf(self, call: ServerCall) -> None:
        self.calls.append(call)
        await asyncio.sleep(DEADLINE_S)

    async def talkative(self, call: ServerCall) -> None:
        while True:
            await call.write(bytes(1000))
            self.written += 1000


def run(work: Callable[[Server, Deaf], Awaitable[None]], max_calls: int = 400) -> None:
    """`work` with a server, which serves others afterwards."""

    async def main() -> None:
        deaf = Deaf()
        handlers = {
            "/t.T/Deaf": deaf.deaf,
            "/t.T/Talkative": deaf.talkative,
            "/t.T/Twice": unary(lambda call, request: request * 2),
        }
        server = Server(handlers, max_message=1 << 20, max_calls=max_calls)
        await server.listen("127.0.0.1:0")
        async with asyncio.timeout(DEADLINE_S):
            await work(server, deaf)
            async with channel(at(server)) as one:
                assert await one.unary("/t.T/Twice", b"ab", DEADLINE_S) == b"abab"
        await server.stop(0.0)

    asyncio.run(main())


def at(server: Server) -> str:
    return f"127.0.0.1:{server.port}"
