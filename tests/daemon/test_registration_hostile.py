# SPDX-License-Identifier: Apache-2.0
"""The registration server against clumsy and hostile jobs."""

import asyncio
import os
import random
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
)
from waiting import until

from flowslot_shm.layout import MAGIC, PACKED_DOORBELL, VERSION, Message
from flowslotd.observe import registration

GOOD = ("record",)
BAD = [
    (b"", GOOD, None),
    (b"x", GOOD, "`magic`: must be b'flowslot', got b'x'"),
    (random.Random(1).randbytes(64), GOOD, "`magic`: must be"),
    (register()[:30], GOOD, "`message`: must be 56 bytes, got 30"),
    (register() + b"x", GOOD, "`message`: must be 56 bytes, got 57"),
    (register() * 9, GOOD, "`message`: must be 56 bytes"),
    (register(version=2), GOOD, "`version`: must be 1, got 2"),
    (register(type=Message.BEGIN), GOOD, "`type`: must be 1, got 3"),
    (register(job=b""), GOOD, "`job`: must be 1 to 31 visible ASCII characters, got b''"),
    (register(job=b"\x1b[2J"), GOOD, "`job`: must be"),
    (register(job=b"a" * 32), GOOD, "`job`: must be"),
    (register(rank=-1), GOOD, "`rank`: must be 0 or more, got -1"),
    (register(slots=0), GOOD, "`slots`: must be 1 to 4096, got 0"),
    (register(slots=2**32 - 1), GOOD, "`slots`: must be 1 to 4096, got 4294967295"),
    (register(slots=5), GOOD, "`slots`: must be the same in message and record, got 5 and 4"),
    (register(), (), "`memfd`: exactly one must come along, got 0"),
    (register(), GOOD * 2, "`memfd`: exactly one must come along, got 2"),
    (register(), GOOD * 200, "`memfd`: exactly one must come along"),
    (register(), ("null",), "`record`: must be a memfd"),
]


@pytest.mark.parametrize(("message", "along", "reason"), BAD)
async def test_a_bad_registration_gets_one_clear_answer(
    message: bytes, along: tuple[str, ...], reason: str | None, path: Path
) -> None:
    async with serving(path) as (server, seen):
        before = open_fds()
        with own_record() as fd, connect(path) as sock, open(os.devnull) as null:
            files = {"record": fd, "null": null.fileno()}
            send(sock, message, *(files[name] for name in along))
            reply = await answer(sock)
            if reason is not None:
                assert reply["status"] != 0
                assert reason.encode() in reply["reason"]
                assert await answer(sock) == {}
                assert server.refused == 1
        assert not seen.registered
        assert open_fds() == before, "a descriptor that came along stayed open"
        await is_well(path)


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
def test_random_messages_hurt_nobody(path: Path, messages: list[tuple[bytes, int]]) -> None:
    async def send_all() -> None:
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

    asyncio.run(send_all())


async def test_bad_doorbells_are_counted_and_dropped(path: Path) -> None:
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


async def test_a_flood_of_doorbells_leaves_the_others_their_turn(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
