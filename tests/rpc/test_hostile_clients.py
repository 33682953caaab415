# SPDX-License-Identifier: Apache-2.0
"""Whatever a client sends, or does not: its connection ends, and nothing else."""

import asyncio
import contextlib
from collections.abc import Iterable

import pytest
from ours import DEADLINE_S, Deaf, at, channel, run
from rawhttp2 import PREFACE, SETTINGS, fields, frame, raw_client, read_all

from flowslot_rpc import server as serving
from flowslot_rpc.connection import UNREAD_BYTES
from flowslot_rpc.http2 import RESET_BURST, STREAM_WINDOW
from flowslot_rpc.server import Server
from flowslot_rpc.status import CANCEL, Status


async def until_closed(server: Server, said: bytes) -> None:
    """Say this to the server, which closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(said)
    await read_all(reader)
    writer.close()


async def flood(server: Server, said: Iterable[bytes]) -> None:
    """Say all this and read nothing: the server leaves before the end."""
    _, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(PREFACE + SETTINGS)
    with pytest.raises(ConnectionError):
        for part in said:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
    assert not server._connections


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(600),  # TLS
        b"\xff" * 5000,
        PREFACE + b"\xff" * 5000,
        PREFACE + SETTINGS + frame(0, 0, 1, b"data of a stream that is not open"),
        PREFACE + SETTINGS + frame(1, 4, 1, b"\xff" * 100),  # fields that cannot be unpacked
        PREFACE + SETTINGS + frame(6, 0, 0, b"short"),
        PREFACE + SETTINGS + frame(8, 0, 0, b"\x7f\xff\xff\xff"),  # a window that overflows
    ],
)
def test_what_is_no_http2_is_closed(said: bytes) -> None:
    async def work(server: Server, deaf: Deaf) -> None:
        await until_closed(server, said)

    run(work)


def test_who_says_nothing_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(server: Server, deaf: Deaf) -> None:
        async with channel(at(server)) as lives:
            async with asyncio.TaskGroup() as group:
                for said in (b"", PREFACE[:7], PREFACE, PREFACE + SETTINGS):
                    group.create_task(until_closed(server, said))
            await asyncio.sleep(0.3)
            assert lives.connected, "who answers is kept"

    monkeypatch.setattr(serving, "KEEPALIVE_S", 0.1)
    run(work)


def test_fields_without_end_are_refused() -> None:
    async def work(server: Server, deaf: Deaf) -> None:
        async with raw_client(server.port) as raw:
            more = [(b"x-%d" % i, b"x" * 1000) for i in range(30)]
            many = raw.session.request([*fields(b"/t.T/Twice"), *more])
            few = raw.session.request([*fields(b"/t.T/Twice"), *more[:1]])
            for call in (many, few):
                raw.session.send(call, b"\0\0\0\0\1x")
                raw.session.end(call)
            ends = {}
            while len(ends) < 2:
                ends |= {e[1]: e[2] for e in await raw.exchange() if e[0] == "close"}
            assert ends[few] == 0 and ends[many] != 0

    run(work)


def test_a_flood_that_nobody_reads_has_to_wait() -> None:
    async def work(server: Server, deaf: Deaf) -> None:
        async with channel(at(server)) as one:
            call = one.stream("/t.T/Deaf")
            sent = 0

            async def flood() -> None:
                nonlocal sent
                while True:
                    await call.write(bytes(100))
                    sent += 100

            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(flood(), 1.0)
            assert UNREAD_BYTES / 2 < sent < 4 * (UNREAD_BYTES + STREAM_WINDOW)
            assert deaf.calls[0]._unread <= UNREAD_BYTES + STREAM_WINDOW
            assert await one.unary("/t.T/Twice", b"ab", DEADLINE_S) == b"abab", "others do not"

    run(work)


def test_who_does_not_read_is_not_written_to_without_end() -> None:
    async def work(server: Server, deaf: Deaf) -> None:
        async with raw_client(server.port) as raw:
            call = raw.session.request(fields(b"/t.T/Talkative"))
            raw.say()
            await asyncio.sleep(0.3)
            before = deaf.written
            assert 0 < before <= STREAM_WINDOW
            await asyncio.sleep(0.2)
            assert deaf.written == before
            raw.session.reset(call, CANCEL)
            raw.say()

    run(work)


def test_streams_that_are_opened_and_reset_leave_nothing() -> None:
    async def work(server: Server, deaf: Deaf) -> None:
        async with raw_client(server.port) as raw:
            for n in range(500):
                call = raw.session.request(fields(b"/t.T/Deaf"))
                raw.say()
                while len(deaf.calls) <= n:
                    await asyncio.sleep(0)
                raw.session.reset(call, CANCEL)
                raw.say()
            (connection,) = server._connections
            while connection.streams or server._calls:
                await asyncio.sleep(0.01)
            assert connection.open, "so many do not cost the connection"

    run(work)


def test_who_resets_streams_without_end_is_left_and_may_come_again() -> None:
    async def work(server: Server, deaf: Deaf) -> None:
        async with channel(at(server)) as one:
            begun = 0
            while one.connected:
                for _ in range(100):
                    one.stream("/t.T/Deaf").cancel()
                begun += 100
                await asyncio.sleep(0)
            assert begun >= RESET_BURST
            assert await one.unary("/t.T/Twice", b"ab", DEADLINE_S) == b"abab"

    run(work)


def test_who_makes_us_answer_and_takes_no_answers_is_left() -> None:
    """Streams without end, refused by frames that nobody reads."""

    async def work(server: Server, deaf: Deaf) -> None:
        await flood(
            server,
            (
                b"".join(frame(1, 5, stream, b"\x83\x86\x84") for stream in range(n, n + 20_000, 2))
                for n in range(1, 6_000_000, 20_000)
            ),
        )

    run(work)


def test_pings_without_end_end_the_connection() -> None:
    async def work(server: Server, deaf: Deaf) -> None:
        await flood(server, (frame(6, 0, 0, bytes(8)) * 10_000 for _ in range(300)))

    run(work)


def test_pongs_that_nobody_asked_for_keep_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(server: Server, deaf: Deaf) -> None:
        async def pongs(writer: asyncio.StreamWriter) -> None:
            while True:
                writer.write(frame(6, 1, 0, bytes(8)))
                await asyncio.sleep(0.01)

        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(PREFACE + SETTINGS)
        sending = asyncio.create_task(pongs(writer))
        await read_all(reader)
        sending.cancel()
        writer.close()

    monkeypatch.setattr(serving, "KEEPALIVE_S", 0.1)
    run(work)


def test_empty_messages_count_and_calls_that_are_over_keep_nothing() -> None:
    async def work(server: Server, deaf: Deaf) -> None:
        async with channel(at(server)) as one:
            call = one.stream("/t.T/Deaf")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    while True:
                        await call.write(b"")
            assert 0 < deaf.calls[0]._unread < 2 * (UNREAD_BYTES + STREAM_WINDOW)
            (kept,) = deaf.calls
            kept.finish(Status.ABORTED, "")
            assert not kept._messages and not kept._partial

    run(work)


def test_a_message_that_is_cut_off_is_no_end() -> None:
    async def work(server: Server, deaf: Deaf) -> None:
        async with raw_client(server.port) as raw:
            call = raw.session.request(fields(b"/t.T/Twice"))
            raw.session.send(call, b"\0\0\0\0\1x" + b"\0\0\0\0\2y")
            raw.session.end(call)
            assert await raw.status() == Status.INTERNAL

    run(work)


def test_answers_that_are_late_do_not_end_the_connection() -> None:
    async def work(server: Server, deaf: Deaf) -> None:
        async with channel(at(server)) as one:
            call = one.stream("/t.T/Deaf")
            await call.write(b"x")
            for _ in range(2000):
                late = one.stream("/t.T/Deaf")
                await asyncio.sleep(0)
                late.cancel()
            assert await one.unary("/t.T/Twice", b"ab", DEADLINE_S) == b"abab"
            assert not call._gone

    run(work)
