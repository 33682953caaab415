# SPDX-License-Identifier: Apache-2.0
"""Who uses up what there is keeps himself out, and others only for so long."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from ours import DEADLINE_S, Deaf, at, channel, run
from rawhttp2 import RawClient, fields, raw_client

from flowslot_rpc import server as serving
from flowslot_rpc.quota import Quota
from flowslot_rpc.server import Server
from flowslot_rpc.status import CANCEL, RpcError, Status

OTHERS = [f"127.0.0.{n}" for n in range(2, 6)]
"""Addresses that may have everything together; our own client's is another one."""


def begin(raw: RawClient, path: bytes, calls: int = 1) -> int:
    """Calls that say nothing; returns the last one's number."""
    for _ in range(calls):
        number = raw.session.request(fields(path))
    raw.say()
    return number


async def running(server: Server, calls: int) -> None:
    while len(server._calls) != calls:
        await asyncio.sleep(0.01)


def test_one_address_leaves_connections_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(server: Server, deaf: Deaf) -> None:
        async with channel(at(server)), channel(at(server)):
            with pytest.raises(RpcError):
                async with channel(at(server)) as third:
                    await third.unary("/t.T/Twice", b"ab", 1.0)
            async with raw_client(server.port, OTHERS[0]) as other:
                begin(other, b"/t.T/Deaf")
                await running(server, 1)
        while server._connections:
            await asyncio.sleep(0.01)

    monkeypatch.setattr(serving, "MAX_CONNECTIONS", 8)
    run(work)


def test_connections_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(server: Server, deaf: Deaf) -> None:
        async with AsyncExitStack() as stack:
            for host in 2 * OTHERS:
                raw = await stack.enter_async_context(raw_client(server.port, host))
                assert await raw.exchange(), "this one is served"
            with pytest.raises(RpcError):
                async with channel(at(server)) as late:
                    await late.unary("/t.T/Twice", b"ab", 1.0)
        while server._connections:
            await asyncio.sleep(0.01)

    monkeypatch.setattr(serving, "MAX_CONNECTIONS", 8)
    run(work)


def test_one_address_leaves_calls_to_others() -> None:
    async def work(server: Server, deaf: Deaf) -> None:
        async with raw_client(server.port, OTHERS[0]) as greedy, channel(at(server)) as other:
            begin(greedy, b"/t.T/Deaf", 2)
            await running(server, 2)
            begin(greedy, b"/t.T/Deaf")
            assert await greedy.status() == Status.RESOURCE_EXHAUSTED
            assert await other.unary("/t.T/Twice", b"ab", DEADLINE_S) == b"abab"

    run(work, max_calls=8)


def test_calls_have_a_limit() -> None:
    async def work(server: Server, deaf: Deaf) -> None:
        async with AsyncExitStack() as stack:
            for host in OTHERS:
                raw = await stack.enter_async_context(raw_client(server.port, host))
                call = begin(raw, b"/t.T/Deaf", 2)
            await running(server, 8)
            async with channel(at(server)) as other:
                with pytest.raises(RpcError, match="more than 8") as error:
                    await other.unary("/t.T/Twice", b"ab", DEADLINE_S)
                assert error.value.status == Status.RESOURCE_EXHAUSTED
                raw.session.reset(call, CANCEL)
                raw.say()
                await running(server, 7)
                assert await other.unary("/t.T/Twice", b"ab", DEADLINE_S) == b"abab"

    run(work, max_calls=8)


def test_calls_that_say_nothing_keep_others_out_only_for_so_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(server: Server, deaf: Deaf) -> None:
        async with AsyncExitStack() as stack:
            silent = []
            for host in OTHERS:
                raw = await stack.enter_async_context(raw_client(server.port, host))
                begin(raw, b"/t.T/Twice", 2)
                silent.append(raw)
            for raw in silent:
                assert await raw.status() == Status.DEADLINE_EXCEEDED
            async with channel(at(server)) as other:
                assert await other.unary("/t.T/Twice", b"ab", DEADLINE_S) == b"abab"

    monkeypatch.setattr(serving, "UNARY_S", 0.3)
    run(work, max_calls=8)


def test_an_answer_that_nobody_takes_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(server: Server, deaf: Deaf) -> None:
        async with raw_client(server.port) as raw:
            call = raw.session.request(fields(b"/t.T/Twice"))
            raw.session.send(call, b"\0" + (50_000).to_bytes(4) + bytes(50_000))
            raw.session.end(call)
            closed: list[int] = []
            while not closed:  # `exchange` consumes nothing: the stream's window fills
                closed = [e[2] for e in await raw.exchange() if e[0] == "close"]
            assert closed == [CANCEL]
            (connection,) = server._connections
            assert not connection.streams and not server._calls

    monkeypatch.setattr(serving, "UNARY_S", 0.3)
    run(work)


def test_of_ipv6_a_network_counts_as_one_address() -> None:
    quota = Quota("things", 8)
    near = ("2001:db8::1", "2001:db8::2", "2001:db8::ffff:0:0:3%eth0")
    assert [quota.take(host) for host in near] == [True, True, False]
    assert quota.take("2001:db8:0:1::1") and quota.take("10.0.0.1"), "others"
    assert quota.take("::ffff:10.0.0.1") and not quota.take("10.0.0.1"), "the same as above"
    quota.give_back("2001:db8::9")
    assert quota.take("2001:db8::4")
