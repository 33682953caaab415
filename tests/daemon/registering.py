# SPDX-License-Identifier: Apache-2.0
"""A registration server on the running event loop, and jobs made of bare messages."""

import array
import asyncio
import gc
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np

from flowslot_shm.layout import MAGIC, REGISTER, REPLY, VERSION, Message
from flowslot_shm.writer import Record as OwnRecord
from flowslotd.observe.registration import Limits, Record, RegistrationServer

CC = "fs_test_01"


class Seen:
    """What the server reported."""

    def __init__(self) -> None:
        self.registered: list[Record] = []
        self.bells: list[tuple[int, int, Message]] = []
        self.left: list[Record] = []

    def ring(self, record: Record, slot: int, kind: Message) -> None:
        self.bells.append((record.id, slot, kind))


def on_a_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """A test that is a coroutine."""

    @wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(test(*arguments, **named))

    return run


@asynccontextmanager
async def serving(
    path: Path, limits: Limits | None = None
) -> AsyncIterator[tuple[RegistrationServer, Seen]]:
    seen = Seen()
    server = RegistrationServer(
        str(path), CC, seen.registered.append, seen.ring, seen.left.append, limits=limits
    )
    await server.start()
    try:
        yield server, seen
    finally:
        await server.close()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


async def answer(sock: socket.socket) -> dict[str, Any]:
    """The next reply; empty when the server has hung up."""
    sock.setblocking(False)
    async with asyncio.timeout(20):
        raw = await asyncio.get_running_loop().sock_recv(sock, 1024)
    if not raw:
        return {}
    reply = np.frombuffer(raw, REPLY)[0]
    assert (reply["magic"], reply["version"], reply["type"]) == (MAGIC, VERSION, Message.REPLY)
    return {name: reply[name].item() for name in ("status", "cc", "reason")}


def connect(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(str(path))
    return sock


def register(**fields: object) -> bytes:
    message = np.zeros(1, REGISTER)
    good = {"magic": MAGIC, "version": VERSION, "type": Message.REGISTER}
    for name, value in {**good, "job": b"job", "rank": 0, "slots": 4, **fields}.items():
        message[name] = value
    return message.tobytes()


def send(sock: socket.socket, data: bytes, *fds: int) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([data], rights)


@contextmanager
def own_record(slots: int = 4) -> Iterator[int]:
    record = OwnRecord(slots)
    yield record.fd
    record.close()


def open_fds() -> int:
    """Descriptors of this process; those that only garbage of earlier tests holds do not count."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


async def is_well(path: Path) -> None:
    """An honest job registers: nobody else was hurt."""
    with own_record() as fd, connect(path) as sock:
        send(sock, register(job=b"honest"), fd)
        assert await answer(sock) == {"status": 0, "cc": CC.encode(), "reason": b""}
