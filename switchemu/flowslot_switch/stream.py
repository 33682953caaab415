# SPDX-License-Identifier: Apache-2.0
"""One Negotiate stream of a daemon."""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import replace

from flowslot.model.errors import LimitExceeded, ProtocolError
from flowslot.protocol.messages import Opening
from flowslot_proto import flowslot_pb2 as pb
from flowslot_proto.checks import parse
from flowslot_proto.convert import read_daemon, read_opening, write_arbiter
from flowslot_switch import limits
from flowslot_switch.caller import Denied
from flowslot_switch.config import SwitchConfig
from flowslot_switch.runner import Runner
from flowslot_switch.server import Call


def check_links(field: str, names: Iterable[str], config: SwitchConfig, host: str) -> None:
    """Whether flows from that host may cross these links of ours; "": some host. Raises Denied."""
    foreign = config.foreign(host) if host else ()
    for i, name in enumerate(names):
        if name in foreign:
            problem = f'no flow from {host} crosses "{name}"; compare the topologies'
            raise Denied(f"field `{field}[{i}]`: {problem}")


class Stream:
    """Reads what a daemon says into the runner, and writes out what is posted for it."""

    def __init__(self, runner: Runner, call: Call) -> None:
        self.session = -1
        self.daemon = ""
        self.peer, self.owner = call.caller.peer, call.caller.owner
        self.messages_in = 0
        self.messages_out = 0
        self._runner = runner
        self._call = call
        self._messages = limits.TokenBucket(limits.MESSAGES_PER_S, limits.MESSAGE_BURST)
        self._items = limits.TokenBucket(limits.ITEMS_PER_S, limits.ITEM_BURST)
        self._wake = asyncio.Event()
        self._error: Exception | None = None
        self._writer: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Until either side closes. Raises what the stream is to be closed with."""
        self._writer = asyncio.create_task(self._write())
        tasks = {asyncio.create_task(self._read()), self._writer}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if self._error is not None:
                raise self._error
            for task in done:
                task.result()
        finally:
            self._runner.leave(self)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # --- Listener

    def wake(self) -> None:
        """See Listener."""
        self._wake.set()

    def end(self, error: Exception) -> None:
        """See Listener."""
        if self._writer is not None and self._error is None:
            self._error = error
            self._writer.cancel()

    # --- both directions

    async def _read(self) -> None:
        try:
            async with asyncio.timeout(limits.HELLO_TIMEOUT_S):
                raw = await self._next()
        except TimeoutError:
            raise LimitExceeded(f"no Hello within {limits.HELLO_TIMEOUT_S:g} s") from None
        if raw is None:
            return
        opening = self._checked(read_opening(raw))
        self._runner.join(self, opening)
        self.session, self.daemon = opening.hello.session, opening.hello.daemon
        links = range(len(opening.links))
        self._runner.take(self, read_daemon(raw, links))
        while (raw := await self._next()) is not None:
            if raw.HasField("hello"):
                raise ProtocolError("field `hello`: only the first message of a stream has one")
            self._runner.take(self, read_daemon(raw, links))

    def _checked(self, opening: Opening) -> Opening:
        """The Hello of the host that calls, about its own links. Raises Denied, ProtocolError."""
        config, caller, host = self._runner.config, self._call.caller, opening.host
        caller.check("hello.host", host)
        if host and not config.knows(host):
            raise ProtocolError(f'field `hello.host`: no host is called "{host}" in the topology')
        check_links("hello.links", opening.links, config, host)
        # Names of daemons belong to hosts, or, where anybody may claim to be one, to addresses.
        owner = host if caller.names else caller.owner
        return replace(opening, hello=replace(opening.hello, owner=owner))

    async def _next(self) -> pb.DaemonMessage | None:
        message = await self._call.read()
        if message is None:
            return None  # end of stream
        raw = parse(pb.DaemonMessage, message)
        now = time.monotonic_ns()
        items = len(raw.demands.flow) + len(raw.acks.flow) + len(raw.dones.flow)
        if not (self._messages.take(now) and self._items.take(now, items)):
            raise LimitExceeded(
                f"more than {limits.MESSAGES_PER_S:.0f} messages or {limits.ITEMS_PER_S:.0f} "
                "demands and acknowledgements per second"
            )
        self.messages_in += 1
        return raw

    async def _write(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            message = self._runner.switch.take(self)
            if message is not None:
                await self._call.write(write_arbiter(message).SerializeToString())
                self.messages_out += 1
