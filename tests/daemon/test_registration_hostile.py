# SPDX-License-Identifier: Apache-2.0
"""The registration server against clumsy and hostile jobs."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from registering import (
    answer,
    connect,
    is_well,
    open_fds,
    own_record,
    register,
    send,
    serving,
    until,
)

from flowslot_shm.layout import MAGIC, PACKED_DOORBELL, VERSION, Message
from flowslotd.observe import registration

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


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (list, "`memfd`: exactly one must come along, got 0"),
        (lambda: [os.dup(0) for _ in range(2)], "`memfd`: exactly one must come along, got 2"),
        (lambda: [os.dup(0) for _ in range(200)], "`memfd`: exactly one must come along"),
        (lambda: [os.open("/dev/null", os.O_RDWR)], "`record`: must be a memfd"),
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
    async def flood() -> None:
        path = tmp_path / "register.sock"
        async with serving(path) as (server, seen):
            with own_record() as fd, connect(path) as sock:
                send(sock, register(), fd)
                await answer(sock)
                await asyncio.sleep(2 * registration._MUTE_S)
                monkeypatch.setattr(registration, "_MUTE_S", 3600.0)
                sock.setblocking(False)
                bell = PACKED_DOORBELL.pack(MAGIC, VERSION, Message.BEGIN, 0)
                full = 0
                while full < 20:  # ms in which nothing more was taken
                    try:
                        sock.send(bell)
                        full = 0
                    except BlockingIOError:
                        full += 1
                        await asyncio.sleep(0.001)
                assert len(seen.bells) == registration._BURST
                await is_well(path)
            await asyncio.sleep(0)
            await server.close()
            assert len(seen.left) == 2

    asyncio.run(flood())
