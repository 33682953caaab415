# SPDX-License-Identifier: Apache-2.0
"""The daemon's side of the stream to a switch process: gRPC, and nothing of the protocol."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import replace

import numpy as np

from flowslot.model.errors import ProtocolError
from flowslot.policy.base import Floats
from flowslot.protocol.messages import Opening
from flowslot_proto import flowslot_pb2 as pb
from flowslot_proto import methods
from flowslot_proto.checks import parse
from flowslot_proto.convert import read_arbiter, read_feedback, write_daemon
from flowslotd.clock import monotonic
from flowslotd.config import Config
from flowslotd.negotiate.arbiter import ArbiterRates
from flowslotd.negotiate.channel import Channel, RpcFailed, Stream

CALL_S = 1.0

_log = logging.getLogger(__name__)


class LeaseLost(Exception):
    """The switch has not answered for a lease."""


class SwitchClient:
    """One stream after the other, each when `dial` is called; all in the event loop's thread."""

    source: ArbiterRates
    k: int
    """Of its session."""

    def __init__(self, config: Config, switch: str) -> None:
        topology = config.topology
        self.switch = switch
        self.address = topology.switches[switch].address
        self._host = config.settings.host
        self._all_links = topology.switch_links(switch)
        self._all_names = tuple(topology.links[link].name for link in self._all_links)
        crossed = topology.links_crossed(self._host)
        self.links = tuple(link for link in self._all_links if link in crossed)
        """Of the switch process, those that flows of this host may cross."""
        self.names = tuple(topology.links[link].name for link in self.links)
        self.connected = False
        self._identity = {i: i for i in range(len(self.links))}
        self._wake = asyncio.Event()
        self._lost = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._asking: asyncio.Task[None] | None = None  # kept, or it may be gone before its end
        self._channel = Channel(topology.switches[switch], config.tls)
        self._pid: int | None = None

    def dial(self) -> None:
        """Open a stream."""
        self._task = asyncio.create_task(self._run())

    def wake(self) -> None:
        """There may be something to write."""
        self._wake.set()

    def lose(self) -> None:
        """The lease has ended: end the stream."""
        self._lost.set()

    async def close(self) -> None:
        """End it for good."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self._channel.close()

    def describe(self) -> dict[str, object]:
        """For `flowslot status`."""
        return {"switch": self.switch, "address": self.address, "switch_pid": self._pid}

    async def load_table(self) -> tuple[tuple[int, ...], Floats] | None:
        """Reserved rates of its links, float64[links, K]; None when the switch does not answer in a
        way that makes sense."""
        if not self._channel.connected:
            return None
        request = pb.FetchFeedbackRequest(links=self._all_names).SerializeToString()
        try:
            raw = await self._channel.unary(methods.FETCH_FEEDBACK, request, CALL_S)
            said = read_feedback(parse(pb.FetchFeedbackReply, raw), self._all_names)
        except (RpcFailed, ProtocolError):
            return None
        return self._all_links, np.array(said.load)

    # --- a stream

    async def _run(self) -> None:
        self._lost.clear()
        error = ""
        try:
            await self._connect()
        except (RpcFailed, LeaseLost, ProtocolError) as problem:
            error = str(problem)
        except Exception as problem:  # a bug must not end the negotiation for good
            _log.exception("negotiation failed")
            error = repr(problem)
        finally:
            if self._asking is not None:
                self._asking.cancel()
            self.connected = False
            self._pid = self._asking = None
        self.source.closed(monotonic(), self.k, error)

    async def _connect(self) -> None:
        try:
            await self._channel.connect()
            self.connected = True
            await self._talk(self._channel.stream(methods.NEGOTIATE))
        finally:
            await self._channel.close()

    async def _talk(self, call: Stream) -> None:
        opening = replace(self.source.greet(monotonic(), self.k), host=self._host)
        works = (self._read(call), self._write(call, opening), self._fall())
        tasks = [asyncio.create_task(work) for work in works]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _fall(self) -> None:
        await self._lost.wait()
        raise LeaseLost("no answer for a whole lease")

    async def _write(self, call: Stream, opening: Opening | None) -> None:
        while True:
            self._wake.clear()
            message = self.source.take_message(monotonic(), self.k)
            if message is not None:
                raw = write_daemon(message, self._identity, opening).SerializeToString()
                try:
                    await call.write(raw)
                except RpcFailed:
                    await self._lost.wait()  # the stream has ended: its reader will say why
                opening = None
            await self._wake.wait()

    async def _read(self, call: Stream) -> None:
        while True:
            raw = await call.read()
            if raw is None:
                raise ProtocolError("the switch process has closed the stream")
            message = read_arbiter(parse(pb.ArbiterMessage, raw))
            self.source.received(monotonic(), self.k, message)
            if self._asking is None:
                self._asking = asyncio.create_task(self._ask_pid())

    async def _ask_pid(self) -> None:
        with contextlib.suppress(RpcFailed, ProtocolError):
            raw = await self._channel.unary(methods.DESCRIBE, b"", CALL_S)
            self._pid = parse(pb.DescribeReply, raw).pid
