# SPDX-License-Identifier: Apache-2.0
"""The registration server against honest, clumsy and hostile jobs."""

import array
import asyncio
import fcntl
import os
import resource
import socket
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowslot_shm.client import JobClient
from flowslot_shm.layout import MAGIC, PACKED_DOORBELL, REGISTER, REPLY, VERSION, Message, Role
from flowslot_shm.writer import Record as OwnRecord
from flowslotd import registration
from flowslotd.registration import Limits, Record, RegistrationServer

CC = "fs_test_01"


class Seen:
    """What the server reported."""

    def __init__(self) -> None:
        self.registered: list[Record] = []
        self.bells: list[tuple[int, int, Message]] = []
        self.left: list[Record] = []

    def ring(self, record: Record, slot: int, kind: Message) -> None:
        self.bells.append((record.id, slot, kind))


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
    return len(os.listdir("/proc/self/fd"))


async def is_well(path: Path) -> None:
    """An honest job registers: nobody else was hurt."""
    with own_record() as fd, connect(path) as sock:
        send(sock, register(job=b"honest"), fd)
        assert await answer(sock) == {"status": 0, "cc": CC.encode(), "reason": b""}


@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run])
def test_life_of_a_job(runner: Callable[[Awaitable[None]], None], tmp_path: Path) -> None:
    path = tmp_path / "register.sock"

    async def life() -> None:
        async with serving(path) as (server, seen):
            assert stat.S_IMODE(path.stat().st_mode) == 0o666
            before = open_fds()
            job = JobClient(str(path), "resnet50", rank=2, slots=4)
            await until(job.poll)
            assert job.congestion_control == CC
            (record,) = seen.registered
            assert server.records == {record.id: record}
            identity = (record.job, record.rank, record.pid, record.uid)
            assert identity == ("resnet50", 2, os.getpid(), os.getuid())
            flow = job.flow(None, peer=1, channel=0, role=Role.RING)
            flow.begin(1, 10)
            flow.ready(10)
            await until(lambda: seen.bells)
            assert seen.bells == [(record.id, 0, Message.BEGIN)]
            assert record.reader.snapshot()["ready"].tolist() == [10, 0, 0, 0]
            other = JobClient(str(path), "bert", rank=0, slots=1)
            await until(other.poll)
            job.close()
            await until(lambda: seen.left)
            assert seen.left == [record]
            assert [r.job for r in server.records.values()] == ["bert"]
            assert not record.reader.snapshot()["state"].any()
            other.close()
            await until(lambda: len(seen.left) == 2)
            seen.registered.clear()
            del record, flow
            assert open_fds() == before
        assert not path.exists()

    runner(life())


MESSAGES = [
    (b"", None),
    (b"x", "`magic`: must be b'flowslot', got b'x'"),
    (os.urandom(64), "`magic`: must be"),
    (register()[:30], "`message`: must be 56 bytes, got 30"),
    (register() + b"x", "`message`: must be 56 bytes, got 57"),
    (register() * 9, "`message`: must be 56 bytes"),
    (register(version=2), "`version`: must be 1, got 2"),
    (register(type=Message.BEGIN), "`type`: must be 1, got 3"),
    (register(job=b""), "`job`: must be 1 to 31 visible ASCII characters, got b''"),
    (register(job=b"\x1b[2J"), "`job`: must be"),
    (register(job=b"a" * 32), "`job`: must be"),
    (register(rank=-1), "`rank`: must be 0 or more, got -1"),
    (register(slots=0), "`slots`: must be 1 to 4096, got 0"),
    (register(slots=2**32 - 1), "`slots`: must be 1 to 4096, got 4294967295"),
    (register(slots=5), "`slots`: must be the same in message and record, got 5 and 4"),
]


@pytest.mark.parametrize(("message", "reason"), MESSAGES)
def test_a_bad_message_gets_one_clear_answer(
    message: bytes, reason: str | None, tmp_path: Path
) -> None:
    async def refuse() -> None:
        path = tmp_path / "register.sock"
        async with serving(path) as (server, seen):
            before = open_fds()
            with own_record() as fd, connect(path) as sock:
                send(sock, message, fd)
                reply = await answer(sock)
                if reason is not None:
                    assert reply["status"] != 0
                    assert reason.encode() in reply["reason"]
                    assert await answer(sock) == {}
                    assert server.refused == 1
            assert not seen.registered
            assert open_fds() == before
            await is_well(path)

    asyncio.run(refuse())


def _unsealed() -> list[int]:
    fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 64 + 4 * 256)
    return [fd]


def _random() -> list[int]:
    fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.write(fd, os.urandom(64 + 4 * 256))
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 7)
    return [fd]


def _sized(change: int) -> list[int]:
    good = OwnRecord(4)
    fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.write(fd, os.pread(good.fd, 5000, 0)[:change])
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 7)
    good.close()
    return [fd]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (list, "`memfd`: exactly one must come along, got 0"),
        (lambda: [os.dup(0) for _ in range(2)], "`memfd`: exactly one must come along, got 2"),
        (lambda: [os.dup(0) for _ in range(200)], "`memfd`: exactly one must come along"),
        (lambda: [os.open("/dev/null", os.O_RDWR)], "`record`: must be a memfd"),
        (_unsealed, "`seals`: must include F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_SEAL"),
        (_random, "`magic`: must be b'flowslot'"),
        (lambda: _sized(40), "`size`: must be at least 64 bytes, got 40"),
        (lambda: _sized(500), "`size`: must be 1088 bytes for 4 slots, got 500"),
    ],
)
def test_a_bad_record_gets_one_clear_answer(
    make: Callable[[], list[int]], reason: str, tmp_path: Path
) -> None:
    async def refuse() -> None:
        path = tmp_path / "register.sock"
        async with serving(path) as (_, seen):
            before = open_fds()
            with connect(path) as sock:
                fds = make()
                send(sock, register(), *fds)
                for fd in fds:
                    os.close(fd)
                assert reason.encode() in (await answer(sock))["reason"]
            assert not seen.registered
            assert open_fds() == before, "a descriptor that came along stayed open"
            await is_well(path)

    asyncio.run(refuse())


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.tuples(
            st.one_of(
                st.binary(min_size=1, max_size=300),
                st.binary(max_size=60).map(lambda tail: register()[: 56 - len(tail)] + tail),
            ),
            st.integers(0, 3),
        ),
        max_size=4,
    )
)
def test_random_messages_hurt_nobody(tmp_path: Path, messages: list[tuple[bytes, int]]) -> None:
    async def fuzz() -> None:
        path = tmp_path / "register.sock"
        async with serving(path):
            before = open_fds()
            with own_record() as fd, connect(path) as sock:
                for message, fds in messages:
                    try:
                        send(sock, message, *[fd] * fds)
                    except (BrokenPipeError, ConnectionResetError):
                        break
                    await asyncio.sleep(0)
                await is_well(path)
            await asyncio.sleep(0.002)
            await until(lambda: open_fds() == before)

    asyncio.run(fuzz())


def test_bad_doorbells_are_counted_and_dropped(tmp_path: Path) -> None:
    async def ring() -> None:
        path = tmp_path / "register.sock"
        async with serving(path) as (_, seen):
            with own_record() as fd, connect(path) as sock:
                send(sock, register(), fd)
                await answer(sock)
                bell = PACKED_DOORBELL.pack
                send(sock, bell(MAGIC, VERSION, Message.BEGIN, 4))
                send(sock, bell(MAGIC, VERSION, 77, 0))
                send(sock, bell(MAGIC, VERSION + 1, Message.BEGIN, 0))
                send(sock, os.urandom(200))
                send(sock, register(), fd)
                send(sock, bell(MAGIC, VERSION, Message.END, 3), fd)
                await until(lambda: seen.bells)
                (record,) = seen.registered
                assert record.bad_messages == 5
                assert seen.bells == [(record.id, 3, Message.END)]

    asyncio.run(ring())


def test_a_flood_of_doorbells_leaves_the_others_their_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "_WINDOW_S", 3600.0)

    async def flood() -> None:
        path = tmp_path / "register.sock"
        async with serving(path) as (server, seen):
            with own_record() as fd, connect(path) as sock:
                send(sock, register(), fd)
                await answer(sock)
                sock.setblocking(False)
                bell = PACKED_DOORBELL.pack(MAGIC, VERSION, Message.BEGIN, 0)
                with pytest.raises(BlockingIOError):
                    for _ in range(100_000):
                        sock.send(bell)
                        await asyncio.sleep(0)
                assert 1 + len(seen.bells) == registration._WINDOW_MESSAGES
                await is_well(path)
            await asyncio.sleep(0)
            await server.close()
            assert len(seen.left) == 2

    asyncio.run(flood())


def test_limits(tmp_path: Path) -> None:
    async def fill() -> None:
        path = tmp_path / "register.sock"
        limits = Limits(connections_per_uid=2, slots=8, seconds_to_register=0.05)
        async with serving(path, limits) as (server, _):
            jobs = [JobClient(str(path), "job", rank=r, slots=8) for r in range(3)]
            await until(lambda: jobs[0].poll() and jobs[1].poll() and server.refused)
            await until(lambda: not jobs[2].poll() and jobs[2].reason)
            assert jobs[2].reason == "connections: at most 2 for one user"
            jobs[0].close()
            await until(lambda: len(server.records) == 1)
            with connect(path) as silent:
                assert b"must be sent within" in (await answer(silent))["reason"]
                assert await answer(silent) == {}
            await is_well(path)
            for job in jobs[1:]:
                job.close()

    asyncio.run(fill())


def test_out_of_descriptors(tmp_path: Path) -> None:
    """Neither an endless loop nor an end: jobs wait, and are served when there is room."""

    async def starve() -> None:
        path = tmp_path / "register.sock"
        async with serving(path) as (server, _):
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            job = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with own_record() as fd, job:
                resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
                try:
                    job.connect(str(path))
                    send(job, register(), fd)
                    for _ in range(20):
                        await asyncio.sleep(0.001)
                    assert not server.records
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                assert (await answer(job))["status"] == 0

    asyncio.run(starve())


def test_a_process_that_dies_is_gone_even_if_its_child_lives(tmp_path: Path) -> None:
    async def die() -> None:
        path = tmp_path / "register.sock"
        async with serving(path) as (server, seen):
            read, write = os.pipe()
            parent = os.fork()
            if parent == 0:  # only system calls from here on, and never back into pytest
                try:
                    record = OwnRecord(4)
                    sock = connect(path)
                    send(sock, register(), record.fd)
                    sock.recv(1024)
                    os.close(write)
                    if os.fork() == 0:
                        os.read(read, 1)  # holds the connection until the test lets go
                    else:
                        os.kill(os.getpid(), 9)
                finally:
                    os._exit(0)
            os.close(read)
            try:
                await until(lambda: seen.left)
                assert seen.left[0].pid == parent
                assert not server.records
            finally:
                os.close(write)
                os.waitpid(parent, 0)

    asyncio.run(die())


def test_a_stale_socket_is_replaced_and_a_live_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "register.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(path))
        dead.listen()
    assert path.exists()

    async def start() -> None:
        async with serving(path):
            await is_well(path)
            with pytest.raises(OSError, match="another daemon is serving this socket"):
                async with serving(path):
                    pass
            await is_well(path)

    asyncio.run(start())
    path.write_text("precious")
    with pytest.raises(OSError, match="exists and is not a socket"):
        asyncio.run(start())
    assert path.read_text() == "precious"


def test_a_socket_that_is_no_longer_ours_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "register.sock"

    async def replaced() -> None:
        async with serving(path):
            path.unlink()
            path.write_text("another's")

    asyncio.run(replaced())
    assert path.read_text() == "another's"


def test_an_impossible_path_names_it() -> None:
    async def start() -> None:
        async with serving(Path("/nonexistent/register.sock")):
            pass

    with pytest.raises(OSError, match=r"/nonexistent/register\.sock"):
        asyncio.run(start())
