# SPDX-License-Identifier: Apache-2.0
"""The daemon's registration server, on this event loop or on another thread; and jobs made of bare
messages."""

import array
import asyncio
import gc
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from waiting import Background

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

    def server(self, path: str, cc: str, limits: Limits | None = None) -> RegistrationServer:
        reports = self.registered.append, self.ring, self.left.append
        return RegistrationServer(path, cc, *reports, limits=limits)


@asynccontextmanager
async def serving(
    path: Path, limits: Limits | None = None
) -> AsyncIterator[tuple[RegistrationServer, Seen]]:
    seen = Seen()
    server = seen.server(str(path), CC, limits)
    await server.start()
    try:
        yield server, seen
    finally:
        await server.close()


class Registrar(Background):
    """On a thread of its own. `environment`: of jobs that are to find it."""

    def __init__(self, path: str, cc: str, limits: Limits | None) -> None:
        super().__init__()
        seen = Seen()
        self.bells, self.left = seen.bells, seen.left
        self.environment = {"FLOWSLOT_SOCKET": path}
        self.server = seen.server(path, cc, limits)
        self.call(self.server.start)

    @property
    def record(self) -> Record:
        """The only one."""
        (record,) = self.server.records.values()
        return record

    def close(self) -> None:
        if self._thread.is_alive():
            self.call(self.server.close)
        super().close()


@pytest.fixture(name="start_daemon")
def starting(tmp_path: Path) -> Iterator[Callable[..., Registrar]]:
    """For conftest.py."""
    made: list[Registrar] = []

    def start(cc: str = "", limits: Limits | None = None, path: str | None = None) -> Registrar:
        made.append(Registrar(path or str(tmp_path / "register.sock"), cc, limits))
        return made[-1]

    yield start
    for one in made:
        one.close()


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
