# SPDX-License-Identifier: Apache-2.0
"""Host and Switch come to the same decisions over gRPC as in memory and over simulated streams
(tests/sim/test_wire.py): the server and the channel are those that ship."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from scripts import ONE, TWO, play, some_events
from waiting import Background

from flowslot.model.topology_file import SwitchSettings
from flowslot.protocol.messages import FromArbiter, FromDaemon, Opening
from flowslot_proto import flowslot_pb2 as pb
from flowslot_proto import methods
from flowslot_proto.checks import parse
from flowslot_proto.convert import (
    read_arbiter,
    read_daemon,
    read_opening,
    write_arbiter,
    write_daemon,
)
from flowslot_switch.server import Call, Server
from flowslotd.negotiate.channel import Channel


class Transport(Background):
    """A server, and channels to it, in an event loop of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.call(self._start)

    async def _start(self) -> None:
        self._calls: asyncio.Queue[tuple[Call, asyncio.Event]] = asyncio.Queue()
        self._server = Server({methods.NEGOTIATE: self._serve})
        port = await self._server.listen("127.0.0.1:0")
        self._settings = SwitchSettings(name="s1", address=f"127.0.0.1:{port}")
        self._channels: list[Channel] = []

    async def _serve(self, call: Call) -> None:
        over = asyncio.Event()
        await self._calls.put((call, over))
        await over.wait()

    async def begin(self) -> tuple[Any, Call, asyncio.Event]:
        """Both ends of a new stream, and what ends it."""
        channel = Channel(self._settings)  # as a daemon: one stream on each
        self._channels.append(channel)
        await channel.connect()
        stream = channel.stream(methods.NEGOTIATE)
        return stream, *(await self._calls.get())

    def close(self) -> None:
        for channel in self._channels:
            self.call(channel.close)
        self.call(self._server.stop, 0.0)
        super().close()


class Rpc:
    """A Wire (tests/helpers/wires.py): one gRPC stream."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._stream, self._call, self._over = transport.call(transport.begin)
        self._links = range(0)

    def say(self, message: FromDaemon, opening: Opening | None) -> None:
        if opening is not None:
            self._links = range(len(opening.links))
        raw = write_daemon(message, dict(enumerate(self._links)), opening)
        self._transport.call(self._stream.write, raw.SerializeToString())

    def said(self) -> tuple[FromDaemon, Opening | None]:
        raw = parse(pb.DaemonMessage, self._got(self._call.read))
        first = read_opening(raw) if raw.HasField("hello") else None
        return read_daemon(raw, self._links), first

    def answer(self, message: FromArbiter) -> None:
        self._transport.call(self._call.write, write_arbiter(message).SerializeToString())

    def answered(self) -> FromArbiter:
        return read_arbiter(parse(pb.ArbiterMessage, self._got(self._stream.read)))

    def close(self) -> None:
        self._transport.call(self._over.set)

    def _got(self, read: Callable[[], Any]) -> bytes:
        message: bytes | None = self._transport.call(read)
        assert message is not None, "the stream has ended"
        return message


@pytest.fixture(scope="module")
def transport() -> Iterator[Transport]:
    made = Transport()
    yield made
    made.close()


@pytest.mark.parametrize("held", [ONE, TWO], ids=["one", "two"])
@pytest.mark.parametrize("seed", range(3))
def test_the_same_script_comes_to_the_same_decisions(
    transport: Transport, held: tuple[tuple[int, ...], ...], seed: int
) -> None:
    events = some_events(seed)
    decisions = play(events, held)
    grants = [grant for _, *said in decisions for grant in getattr(said[0], "grants", ())]
    assert len(grants) > 20 and any(grant.must_ack for grant in grants)
    assert play(events, held, lambda: Rpc(transport)) == decisions
