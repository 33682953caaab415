# SPDX-License-Identifier: Apache-2.0
"""The daemon's side of the stream to a switch process."""

import asyncio
import contextlib
import logging
import random
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import grpc
import numpy as np

from flowslot.errors import ProtocolError
from flowslot.grantbook import GrantBook, Granted
from flowslot.messages import Ack, Demand, Done, Grant, Heartbeat, HeartbeatEcho, Refusal
from flowslot.policy.base import Floats
from flowslot.topology import Topology
from flowslot.topology_file import SwitchSettings
from flowslot.units import Nanos
from flowslot_proto import flowslot_pb2 as pb
from flowslot_proto.convert import FromDaemon, Opening, read_arbiter, write_daemon
from flowslot_proto.flowslot_pb2_grpc import EmulatedSwitchStub
from flowslotd.clock import monotonic, wall
from flowslotd.domain_base import DomainStats, OnGrants, aged, nothing_said
from flowslotd.domain_heart import Heart

FIRST_RETRY_S, LAST_RETRY_S = 0.02, 1.0
CONNECT_S = 2.0
CALL_S = 1.0
ORPHAN_SLOTS = 2
"""Grants are kept for so long after their stream has ended, for a next one to take them over."""
PATIENCE_LEASES = 2
"""A switch that answers, but grants nothing to active flows, is taken over after so many."""
_OPTIONS = [
    # A connection of our own: a dead one must not be handed to the next attempt.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_http_proxy", 0),
]

Call = grpc.aio.StreamStreamCall[pb.DaemonMessage, pb.ArbiterMessage]
_log = logging.getLogger(__name__)


class LeaseLost(Exception):
    """The switch has not answered for a lease."""


class GrpcDomain:
    """One long-lived stream, begun again and again; all in the event loop's thread.

    What waits to be sent is state, not a queue: the newest demand of each flow, the newest
    acknowledgement, the newest heartbeat. So nothing here ever makes the slot loop wait.
    Callbacks: `on_grants` while live; `on_live` before the first of them; `on_lost` when the lease
    has ended and all grants are void.
    """

    def __init__(
        self,
        topology: Topology,
        switch: SwitchSettings,
        *,
        daemon: str,
        slot_ns: Nanos,
        lease_ns: Nanos,
        stats: DomainStats,
    ) -> None:
        self.switch = switch.name
        self.on_grants: OnGrants = lambda now, grants: None
        self.on_live: Callable[[Nanos], None] = lambda now: None
        self.on_lost: Callable[[Nanos], None] = lambda now: None
        self.live = False
        self.grpc_connections = 0
        self._address = switch.address
        self._topology = topology
        self._held = topology.switch_links(switch.name)
        self._names = tuple(topology.links[link].name for link in self._held)
        self._index = {link: i for i, link in enumerate(self._held)}
        self._asks: dict[tuple[int, ...], bool] = {}
        self._slot_ns = slot_ns
        self._lease_ns = lease_ns
        self._heart = Heart(slot_ns, self._new_heartbeat)
        self._stats = stats
        self._book = GrantBook(daemon, lease_ns)
        # Unique among all daemons without asking anyone, and increasing.
        self._session = secrets.randbits(41) << 20
        self._known: dict[int, tuple[Demand, Nanos]] = {}
        self._asked: dict[int, Nanos] = {}
        self._dirty: dict[int, None] = {}
        self._dones: dict[int, Done] = {}
        self._acks: dict[int, Ack] = {}
        self._heartbeat: Heartbeat | None = None
        self._synced_at: Nanos | None = None
        self._wake = asyncio.Event()
        self._lost = asyncio.Event()
        self._alarm: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._stub: EmulatedSwitchStub | None = None
        self._pid: int | None = None

    # --- what the daemon sees

    @property
    def lease_end(self) -> Nanos | None:
        """Until when the grants may be enforced."""
        return self._book.lease_end

    def demand(self, now: Nanos, demands: Sequence[Demand]) -> None:
        """See Domain."""
        for demand in demands:
            flow = demand.flow
            self._known[flow] = (demand, now)
            if self._is_asked_for(demand.links):
                self._dirty[flow] = None
                if demand.remaining <= 0:
                    self._asked.pop(flow, None)
                elif flow not in self._asked and self._book.grant(flow).rate <= 0:
                    self._asked[flow] = now
        self._wake.set()

    def done(self, now: Nanos, dones: Sequence[Done]) -> None:
        """See Domain."""
        for done in dones:
            if self._known.pop(done.flow, None) is not None:
                self._dones[done.flow] = self._book.drop(done.flow, done.inc)
            for waiting in (self._dirty, self._asked, self._acks):
                waiting.pop(done.flow, None)
        self._wake.set()

    def give_back(self, flows: Iterable[int]) -> list[Granted]:
        """See Domain."""
        given = [grant for flow in flows if (grant := self._book.give_back(flow)) is not None]
        if given:
            self._dirty.update(dict.fromkeys(g.flow for g in given if g.flow in self._known))
            self._wake.set()
        return given

    def grant(self, flow: int) -> Granted:
        """See Domain."""
        return self._book.grant(flow) if flow in self._book else nothing_said(flow)

    def beat(self, now: Nanos) -> None:
        """See Domain."""
        if self._heart.rested(now):
            self._new_heartbeat()

    def covers(self, links: tuple[int, ...]) -> bool:
        """See Domain."""
        return self.live and bool(links) and all(link in self._index for link in links)

    def picture(self, now: Nanos) -> list[Demand]:
        """The demands of all flows, as they would be put now."""
        return [aged(demand, now - at) for demand, at in self._known.values()]

    def describe(self) -> dict[str, object]:
        """See Domain."""
        return {
            "switch": self.switch,
            "address": self._address,
            "switch_pid": self._pid,
            "session": self._book.session,
            "messages_in": self._stats.messages_in,
            "messages_out": self._stats.messages_out,
            "round_trip": self._stats.round_trip.summary(),
            "error": self._stats.last_error,
        }

    def clock_offset_us(self) -> float | None:
        """See Domain."""
        return self._heart.offset_us

    async def load_table(self, now: Nanos) -> Floats | None:
        """See Domain; None when the switch does not answer."""
        if self._stub is None:
            return None
        try:
            reply = await self._stub.FetchFeedback(
                pb.FetchFeedbackRequest(links=self._names), timeout=CALL_S
            )
        except grpc.aio.AioRpcError:
            return None
        table = np.full((len(self._topology.links), len(reply.path)), np.nan)
        table[list(self._held)] = [row.load for row in reply.links]
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
            self._synced_at = None
            try:
                await self._connect()
            except grpc.aio.AioRpcError as error:
                self._failed(f"{error.code().name}: {error.details()}")
            except (LeaseLost, ProtocolError, TimeoutError) as error:
                self._failed(str(error) or type(error).__name__)
            except Exception as error:  # a bug must not end the negotiation for good
                _log.exception("negotiation failed")
                self._failed(repr(error))
            finally:
                self.grpc_connections = 0
                self._stub = self._pid = None
            if self._synced_at is not None:
                retry_s = FIRST_RETRY_S
            # All daemons lose a switch at the same moment; they must not come back at the same.
            await asyncio.sleep(retry_s * random.uniform(0.75, 1.25))
            retry_s = min(2 * retry_s, LAST_RETRY_S)

    def _failed(self, error: str) -> None:
        if error != self._stats.last_error:
            _log.warning("switch process %s at %s: %s", self.switch, self._address, error)
        self._stats.last_error = error

    async def _connect(self) -> None:
        async with grpc.aio.insecure_channel(self._address, options=_OPTIONS) as channel:
            try:
                await asyncio.wait_for(channel.channel_ready(), CONNECT_S)
            except TimeoutError:
                raise TimeoutError("cannot be reached") from None
            self.grpc_connections = 1
            stub = EmulatedSwitchStub(channel)  # type: ignore[no-untyped-call]
            self._stub = stub
            opening = self._greet(monotonic())
            call: Call = stub.Negotiate()
            self._new_heartbeat()  # for the first message
            works = (self._read(call), self._write(call, opening), self._fall())
            tasks = [asyncio.create_task(work) for work in works]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                self._heart.rest()
                for task in tasks:
                    task.cancel()
                call.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                self._book.cut(Nanos(monotonic() + ORPHAN_SLOTS * self._slot_ns))
                self._watch_lease()

    def _greet(self, now: Nanos) -> Opening:
        """Begin a session: everything that is known has to be said again."""
        self._check_lease(now)
        self._session += 1
        hello = self._book.connect(now, self._session)
        self._acks.clear()
        self._dones.clear()
        self._lost.clear()
        self._dirty.clear()
        self.demand(now, self.picture(now))
        if self.live:  # what stood in the last stream does not stand in this one
            self.on_grants(now, [self.grant(flow) for flow in self._known])
        if self._alarm is None:
            self._watch_lease()
        return Opening(hello, self._names, self._lease_ns)

    async def _fall(self) -> None:
        await self._lost.wait()
        raise LeaseLost("no answer for a whole lease")

    def _new_heartbeat(self) -> None:
        now = monotonic()
        self._heartbeat = self._heart.beat(now, wall())
        self._book.sent_heartbeat(now, self._heartbeat.n)
        self._wake.set()

    async def _write(self, call: Call, opening: Opening | None) -> None:
        while True:
            if self._dirty and self._heart.soon(monotonic()):
                self._new_heartbeat()  # one message instead of two
            message = FromDaemon(
                self._session,
                list(self._dones.values()),
                [self._spoken(flow) for flow in self._dirty],
                list(self._acks.values()),
                self._heartbeat,
            )
            self._dones, self._dirty, self._acks, self._heartbeat = {}, {}, {}, None
            self._wake.clear()
            try:
                await call.write(write_daemon(message, self._index, opening))
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await self._lost.wait()  # the stream has ended: its reader will say why
            opening = None
            self._stats.messages_out += 1
            await self._wake.wait()

    def _spoken(self, flow: int) -> Demand:
        """The demand as it is sent now: a grant given back stays so until another one comes."""
        demand, seq = self._known[flow][0], self._book.given_back(flow)
        return replace(demand, gave_back=seq) if seq else demand

    async def _read(self, call: Call) -> None:
        while True:
            raw = await call.read()
            if not isinstance(raw, pb.ArbiterMessage):
                raise ProtocolError(f"the stream was closed: {await call.details()}")
            message = read_arbiter(raw)
            self._stats.messages_in += 1
            if message.session != self._session:
                continue
            now = monotonic()
            if message.echo is not None:
                self._echoed(now, message.echo)
            for refusal in message.refusals:
                self._refused(refusal)
            if message.grants:
                self._granted(now, message.grants)

    # --- what the arbiter says

    def _granted(self, now: Nanos, grants: Sequence[Grant]) -> None:
        changes = self._book.receive(now, self._session, grants)
        self._stats.count(changes)
        asked = [self._asked.pop(flow) for flow, *_ in changes.raised if flow in self._asked]
        if asked and self.live:  # not the wait for a switch that has just started
            self._stats.negotiation.add(now - min(asked))
        self._check_live(now)
        if self.live:
            self.on_grants(now, [*changes.lowered, *changes.raised])
        # Only now: an acknowledgement says that the rate is in force.
        for ack in changes.acks:
            self._acks[ack.flow] = ack
        if changes.acks:
            self._wake.set()

    def _echoed(self, now: Nanos, echo: HeartbeatEcho) -> None:
        self._book.echoed(now, echo.n)
        if self._synced_at is None:
            self._synced_at = now
            assert self._stub is not None
            self._asking = asyncio.create_task(self._ask_pid(self._stub))
        self._check_live(now)
        round_trip = self._heart.echoed(now, echo)
        if round_trip is not None:
            self._stats.round_trip.add(round_trip)

    def _refused(self, refusal: Refusal) -> None:
        """The flow stays without grant, and so is left alone."""
        self._asked.pop(refusal.flow, None)
        self._stats.refused += 1
        known = self._known.get(refusal.flow)
        job = known[0].job if known else refusal.flow
        self._stats.last_error = f"flows of job {job} refused: {refusal.reason}"

    async def _ask_pid(self, stub: EmulatedSwitchStub) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            self._pid = (await stub.Describe(pb.DescribeRequest(), timeout=CALL_S)).pid

    # --- being live

    def _check_live(self, now: Nanos) -> None:
        """Live once grants are there: until then flows do better with what they have.

        A switch process that has just started grants nothing for a lease.
        """
        if self.live or self._book.expired(now):
            return
        waiting = any(d.remaining > 0 and d.flow in self._asked for d, _ in self._known.values())
        since = self._synced_at
        patient = since is not None and now - since < PATIENCE_LEASES * self._lease_ns
        if since is not None and not (waiting and patient):
            self.live = True
            self.on_live(now)

    def _watch_lease(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        now = monotonic()
        self._check_lease(now)
        end = self._book.lease_end
        if end is None:
            self._alarm = None
        else:
            delay = (end - now) / 1e9
            self._alarm = asyncio.get_running_loop().call_later(delay, self._watch_lease)

    def _check_lease(self, now: Nanos) -> None:
        if not self._book.expired(now):
            return
        self._lost.set()
        self._asked.clear()
        if self.live:
            self.live = False
            self._stats.expired += 1
            self.on_lost(now)

    def _is_asked_for(self, links: tuple[int, ...]) -> bool:
        """Whether the switch holds anything of this path."""
        asks = self._asks.get(links)
        if asks is None:
            asks = self._asks[links] = any(link in self._index for link in links)
        return asks
