# SPDX-License-Identifier: Apache-2.0
"""HTTP/2 by hand, for ends that do as they please."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from flowslot_rpc.events import Event
from flowslot_rpc.http2 import Session
from flowslot_rpc.status import Status

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\0\0\0\4\0\0\0\0\0"


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    head = len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4)
    return head + payload


def fields(path: bytes) -> list[tuple[bytes, bytes]]:
    """Those of a request."""
    return [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", path),
        (b":authority", b"x"),
        (b"content-type", b"application/grpc"),
    ]


async def read_all(reader: asyncio.StreamReader) -> None:
    """Until the other side has closed."""
    with contextlib.suppress(ConnectionError):
        while await reader.read(1 << 16):
            pass


class RawClient:
    """A session that speaks when it is told to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.session = Session(server=False)
        self._reader = reader
        self._writer = writer

    def say(self) -> None:
        self._writer.write(self.session.output())

    async def exchange(self) -> list[Event]:
        """Say what there is to say, hear what comes."""
        self.say()
        self.session.receive(await self._reader.read(1 << 16))
        return self.session.events()

    async def status(self) -> Status:
        """What the call is closed with; there is only one."""
        told: dict[bytes, bytes] = {}
        while b"grpc-status" not in told:
            for event in await self.exchange():
                if event[0] == "headers":
                    told |= dict(event[2])
        return Status(int(told[b"grpc-status"]))


@contextlib.asynccontextmanager
async def raw_client(port: int, host: str = "127.0.0.1") -> AsyncIterator[RawClient]:
    """From `host`, any of this machine's addresses."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(host, 0))
    try:
        yield RawClient(reader, writer)
    finally:
        writer.close()
