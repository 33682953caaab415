# SPDX-License-Identifier: Apache-2.0
"""The daemon's side of the stream to a switch process."""

import asyncio
import contextlib
import logging
import random
import secrets
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from flowslot.model.errors import ProtocolError
from flowslot.model.topology import Topology
from flowslot.model.topology_file import SwitchSettings
from flowslot.model.units import MILLISECOND, Nanos
from flowslot.policy.base import Floats
from flowslot.protocol.grantbook import Granted
from flowslot.protocol.messages import Demand, FromArbiter, Opening
from flowslot.protocol.negotiator import Negotiator
from flowslot_proto import flowslot_pb2 as pb
from flowslot_proto import methods
from flowslot_proto.checks import parse
from flowslot_proto.convert import read_arbiter, read_feedback, write_daemon
from flowslot_proto.tls import TlsFiles
from flowslotd.clock import monotonic, wall
from flowslotd.negotiate.channel import Channel, RpcFailed, Stream
from flowslotd.negotiate.domain_base import DomainStats, OnGrants

FIRST_RETRY_S, LAST_RETRY_S = 0.02, 1.0
CALL_S = 1.0

_log = logging.getLogger(__name__)


class LeaseLost(Exception):
    """The switch has not answered for a lease."""


class SwitchClient:
    """One long-lived stream, begun again and again; all in the event loop's thread.

    What is said on it, and when, is the Negotiator's business. Callbacks: `on_grants` while live;
    `on_live` before the first of them; `on_lost` when the lease has ended and all grants are void.
    """

    def __init__(
        self,
        topology: Topology,
        switch: SwitchSettings,
        *,
        host: str,
        daemon: str,
        slot_ns: Nanos,
        lease_ns: Nanos,
        stats: DomainStats,
        tls: TlsFiles | None = None,
    ) -> None:
        self.switch = switch.name
        self.on_grants: OnGrants = lambda now, grants: None
        self.on_live: Callable[[Nanos], None] = lambda now: None
        self.on_lost: Callable[[Nanos], None] = lambda now: None
        self.grpc_connections = 0
        self._address = switch.address
        self._topology = topology
        self._host = host
        self._links = topology.switch_links(switch.name)
        crossed = topology.links_crossed(host)
        self._held = tuple(link for link in self._links if link in crossed)
        self._names = tuple(topology.links[link].name for link in self._held)
        self._index = {link: i for i, link in enumerate(self._held)}
        self._lease_ns = lease_ns
        self._stats = stats
        self.negotiator = Negotiator(
            daemon,
            self._held,
            slot_ns=slot_ns,
            lease_ns=lease_ns,
            # Unique among all daemons without asking anyone, and increasing.
            first_session=secrets.randbits(41) << 20,
        )
        self._synced = False
        self._wake = asyncio.Event()
        self._lost = asyncio.Event()
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at: Nanos | None = None
        self._task: asyncio.Task[None] | None = None
        self._asking: asyncio.Task[None] | None = None  # kept, or it may be gone before its end
        self._channel = Channel(switch, tls)
        self._pid: int | None = None

    # --- what the daemon sees

    def demand(self, now: Nanos, demands: Sequence[Demand]) -> None:
        """See Domain."""
        self.negotiator.demand(now, demands)
        self.poke()

    def give_back(self, flows: Iterable[int]) -> list[Granted]:
        """See Domain."""
        given = self.negotiator.give_back(flows)
        self.poke()
        return given

    def grant(self, flow: int) -> Granted:
        """See Domain."""
        return self.negotiator.grant(flow)

    def poke(self) -> None:
        """Something was said to the negotiator: send it."""
        if self.negotiator.has_news:
            self._wake.set()

    def describe(self) -> dict[str, object]:
        """The stream, for `flowslot status`."""
        return {
            "switch": self.switch,
            "address": self._address,
            "switch_pid": self._pid,
            "session": self.negotiator.session,
            "live": self.negotiator.live,
        }

    async def load_table(self, now: Nanos) -> Floats | None:
        """See Domain; None when the switch does not answer in a way that makes sense."""
        if not self._channel.connected:
            return None
        names = [self._topology.links[link].name for link in self._links]
        request = pb.FetchFeedbackRequest(links=names).SerializeToString()
        try:
            raw = await self._channel.unary(methods.FETCH_FEEDBACK, request, CALL_S)
            said = read_feedback(parse(pb.FetchFeedbackReply, raw), names)
        except (RpcFailed, ProtocolError):
            return None
        table = np.full((len(self._topology.links), len(said.load[0])), np.nan)
        table[list(self._links)] = said.load
        return table

    async def start(self) -> None:
        """See Domain."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """See Domain."""
        if self._task:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._alarm:
            self._alarm.cancel()

    # --- streams, one after the other

    async def _run(self) -> None:
        retry_s = FIRST_RETRY_S
        while True:
            self._synced = False
            try:
                await self._connect()
            except (RpcFailed, LeaseLost, ProtocolError) as error:
                self._failed(str(error))
            except Exception as error:  # a bug must not end the negotiation for good
                _log.exception("negotiation failed")
                self._failed(repr(error))
            finally:
                self.grpc_connections = 0
                self._pid = None
            if self._synced:
                retry_s = FIRST_RETRY_S
            # All daemons lose a switch at the same moment; they must not come back at the same.
            await asyncio.sleep(retry_s * random.uniform(0.75, 1.25))
            retry_s = min(2 * retry_s, LAST_RETRY_S)

    def _failed(self, error: str) -> None:
        if error != self._stats.last_error:
            _log.warning("switch process %s at %s: %s", self.switch, self._address, error)
        self._stats.last_error = error

    async def _connect(self) -> None:
        try:
            await self._channel.connect()
            self.grpc_connections = 1
            call = self._channel.stream(methods.NEGOTIATE)
            await self._talk(call, self._greet(monotonic()))
        finally:
            await self._channel.close()

    async def _talk(self, call: Stream, opening: Opening) -> None:
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
            now = monotonic()
            self.negotiator.closed(now)
            self._check(now)

    def _greet(self, now: Nanos) -> Opening:
        """Begin a session."""
        self._check(now)
        hello = self.negotiator.connect(now)
        self._lost.clear()
        if self.negotiator.live:  # what stood in the last stream does not stand in this one
            self.on_grants(now, [self.grant(flow) for flow in self.negotiator.flows()])
        return Opening(hello, self._names, self._lease_ns, self._host)

    async def _fall(self) -> None:
        await self._lost.wait()
        raise LeaseLost("no answer for a whole lease")

    async def _write(self, call: Stream, opening: Opening | None) -> None:
        while True:
            self._wake.clear()
            self._check(monotonic())
            message = self.negotiator.take_message(monotonic(), wall())
            self._rearm()
            if message is not None:
                raw = write_daemon(message, self._index, opening).SerializeToString()
                try:
                    await call.write(raw)
                except RpcFailed:
                    await self._lost.wait()  # the stream has ended: its reader will say why
                opening = None
                self._stats.messages_out += 1
            await self._wake.wait()

    async def _read(self, call: Stream) -> None:
        while True:
            raw = await call.read()
            if raw is None:
                raise ProtocolError("the switch process has closed the stream")
            message = read_arbiter(parse(pb.ArbiterMessage, raw))
            self._stats.messages_in += 1
            self._take(monotonic(), message)

    def _take(self, now: Nanos, message: FromArbiter) -> None:
        """What the arbiter says: first into force, then acknowledged."""
        news = self.negotiator.received(now, message)
        self._stats.take(news)
        if news.synced:
            self._synced = True
            self._asking = asyncio.create_task(self._ask_pid())
        if news.began:
            self.on_live(now)
        elif self.negotiator.live and (message.grants or news.left_alone):
            alone = [self.grant(flow) for flow in news.left_alone]
            self.on_grants(now, [*news.changes.lowered, *news.changes.raised, *alone])
        self.negotiator.enforced(news)
        self.poke()

    async def _ask_pid(self) -> None:
        with contextlib.suppress(RpcFailed, ProtocolError):
            raw = await self._channel.unary(methods.DESCRIBE, b"", CALL_S)
            self._pid = parse(pb.DescribeReply, raw).pid

    # --- time

    def _check(self, now: Nanos) -> None:
        """Whether the lease still lives, and when to look again."""
        lost = self.negotiator.check(now)
        if self.negotiator.session is None:
            self._lost.set()
        self._rearm()
        if lost:
            self._stats.expired += 1
            self.on_lost(now)

    def _rearm(self) -> None:
        now = monotonic()
        at = self.negotiator.next_wakeup(now)
        if at == self._alarm_at:
            return
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm, self._alarm_at = None, at
        if at is not None:
            # Timers of the loop may be early by almost a millisecond.
            delay = (at - now + MILLISECOND) / 1e9
            self._alarm = asyncio.get_running_loop().call_later(delay, self._look)

    def _look(self) -> None:
        """The time has come: a heartbeat is overdue, or the lease has ended."""
        self._alarm = self._alarm_at = None
        self._wake.set()
        self._check(monotonic())
