# SPDX-License-Identifier: Apache-2.0
"""Which calls count as rejected: those that the other side has spoilt, not those that it ended."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from switchproc import topology

from flowslot_proto import methods
from flowslot_rpc.server import Server
from flowslot_rpc.status import CANCEL, Status
from flowslot_switch import limits
from flowslot_switch.config import Overrides, load
from flowslot_switch.engine import Engine
from flowslot_switch.service import SwitchService

sys.path.insert(0, str(Path(__file__).parents[1] / "rpc"))
from ours import DEADLINE_S
from rawhttp2 import RawClient, fields, raw_client

CUT_OFF = b"\0\0\0\0\5cut"
both_kinds = pytest.mark.parametrize("path", [methods.DESCRIBE, methods.NEGOTIATE])


def rejected(folder: Path, work: Callable[[RawClient, Server], Awaitable[None]]) -> int:
    """How many calls a service counts after `work` with a connection to it."""
    (folder / "switch.toml").write_text('name = "s1"')
    (folder / "topology.toml").write_text(topology(7400))

    async def main() -> int:
        service = SwitchService(Engine(load(folder / "switch.toml", Overrides()), pytest.fail))
        server = Server(
            service.handlers(),
            max_message=limits.MAX_MESSAGE_BYTES,
            max_calls=10,
            on_rejected=service.rejected,
        )
        await server.listen("127.0.0.1:0")
        async with asyncio.timeout(DEADLINE_S):
            async with raw_client(server.port) as raw:
                await work(raw, server)
            while server._connections or server._calls:
                await asyncio.sleep(0.01)
        await server.stop(0.0)
        service.close()
        return service._rejected

    return asyncio.run(main())


@both_kinds
@pytest.mark.parametrize(
    ("said", "status"),
    [
        (b"\0" + (limits.MAX_MESSAGE_BYTES + 1).to_bytes(4), Status.RESOURCE_EXHAUSTED),
        (b"\1\0\0\0\1x", Status.UNIMPLEMENTED),  # compressed
        (CUT_OFF, Status.INTERNAL),
    ],
)
def test_a_message_that_cannot_be_taken_is_counted(
    tmp_path: Path, path: str, said: bytes, status: Status
) -> None:
    async def work(raw: RawClient, server: Server) -> None:
        call = raw.session.request(fields(path.encode()))
        raw.session.send(call, said)
        raw.session.end(call)
        assert await raw.status() == status

    assert rejected(tmp_path, work) == 1


def test_one_message_too_many_is_counted(tmp_path: Path) -> None:
    async def work(raw: RawClient, server: Server) -> None:
        call = raw.session.request(fields(methods.DESCRIBE.encode()))
        raw.session.send(call, 2 * b"\0\0\0\0\0")
        raw.session.end(call)
        assert await raw.status() == Status.INVALID_ARGUMENT

    assert rejected(tmp_path, work) == 1


def test_what_does_not_reach_a_method_is_counted(tmp_path: Path) -> None:
    """There is none of that name; and then more calls than one address may have at once."""

    async def work(raw: RawClient, server: Server) -> None:
        raw.session.request(fields(b"/t.T/None"))
        assert await raw.status() == Status.UNIMPLEMENTED
        for _ in range(4):  # a quarter of 10 is 3
            raw.session.request(fields(methods.NEGOTIATE.encode()))
        assert await raw.status() == Status.RESOURCE_EXHAUSTED

    assert rejected(tmp_path, work) == 2


@both_kinds
@pytest.mark.parametrize("cancels", [True, False])
def test_a_call_that_is_cancelled_or_lost_is_not(tmp_path: Path, path: str, cancels: bool) -> None:
    async def work(raw: RawClient, server: Server) -> None:
        call = raw.session.request(fields(path.encode()))
        raw.session.send(call, CUT_OFF)
        raw.say()
        while not server._calls:
            await asyncio.sleep(0.01)
        if cancels:
            raw.session.reset(call, CANCEL)
            raw.say()
            while server._calls:
                await asyncio.sleep(0.01)

    assert rejected(tmp_path, work) == 0
