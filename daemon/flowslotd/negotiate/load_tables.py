# SPDX-License-Identifier: Apache-2.0
"""Rates by a plan against the load tables of switch processes (MLCC).

The I/O around `Reserving`: makes its calls, one round after the other. The slot loop is never
waited for, nor does it wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from flowslot.model.errors import ProtocolError
from flowslot.model.units import SECOND, Nanos
from flowslot.policy.base import Pace, View
from flowslot.policy.mlcc import MlccPolicy
from flowslot.policy.mlcc.peers import Peers
from flowslot.policy.mlcc.planner import Feedback, Fetch, Reserve, Reserving
from flowslotd.clock import monotonic
from flowslotd.config import Config
from flowslotd.flows.flow_table import FlowTable
from flowslotd.negotiate.arbiter import OnRates
from flowslotd.negotiate.peers import PeerEndpoint
from flowslotd.negotiate.source import NO_RESERVATIONS, RateSource

if TYPE_CHECKING:  # without switch processes a daemon does without gRPC
    from flowslotd.negotiate.feedback_grpc import GrpcRemote

OnBug = Callable[[str, BaseException], None]
T = TypeVar("T")
_log = logging.getLogger(__name__)


class NoAnswer(Exception):
    """A switch process does not answer in time, or is set up otherwise; says why."""


class PlannedRates(RateSource):
    """Plans are made for whole slots, and for all flows of this host together."""

    at_boundary = joint = reports = True
    why_unpaced = "no plan yet, or its switch process does not answer"

    def __init__(
        self,
        config: Config,
        policy: MlccPolicy,
        remotes: Sequence[GrpcRemote],
        table: FlowTable,
        *,
        on_rates: OnRates,
        on_bug: OnBug,
    ) -> None:
        """`on_rates`: the plan has changed; it has to be in force when this returns."""
        slot_ns = config.grid.slot_ns
        asked = bool(remotes)
        self.stalls: Counter[str] = Counter()
        self.last_error = ""
        self.planner = Reserving(
            policy,
            [asked and link.switch is not None for link in config.topology.links],
            [remote.held for remote in remotes],
            slot_ns,
            target=config.settings.arbiter.target,
        )
        self._table = table
        self._remotes = remotes
        self._book = Peers(slot_ns)
        self.peers = PeerEndpoint(config, self._book, self._ask)
        self._on_rates = on_rates
        self._on_bug = on_bug
        self._all = True
        self._slot = -1
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def beat(self, now: Nanos) -> bool:
        """See RateSource. Each slot has rates of its own."""
        return True

    def negotiate(self, now: Nanos, slot: int, *, moved: bool, small: bool) -> None:
        """See RateSource."""
        self._all |= moved or slot != self._slot
        self._slot = slot

    def due(self, now: Nanos) -> set[int] | None:
        """See RateSource."""
        every, self._all = self._all, False
        return None if every else set()

    def rates(self, now: Nanos, view: View) -> Pace | None:
        """See RateSource."""
        pace = self.planner.rates(now, view)
        self._wake_if_wanted()
        return pace

    def tell(self, now: Nanos) -> None:
        """See RateSource."""
        if self.peers.listening:
            rates, left_s = self.planner.in_force(now)
            self.peers.tell(self._table.transfers(rates), left_s)

    def _ask(self) -> None:
        """What this host's flows depend on has changed."""
        self.planner.ask()
        self._wake_if_wanted()

    def _wake_if_wanted(self) -> None:
        if self.planner.wanted:
            self._wake.set()

    # --- rounds

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                self._report_stalls()
                while self.planner.wanted:
                    await self._round()
            except Exception as error:  # ours; flows are let go as of a switch without answer
                self._on_bug("feedback", error)

    async def _round(self) -> None:
        answers = await asyncio.gather(*map(self._fetch, self.planner.begin(monotonic())))
        fetched = monotonic()
        known = self._book.dependencies(fetched, self._table.transfers({}))
        calls = self.planner.plan(fetched, answers, known)
        if calls is None:
            return
        if calls:
            self._planned()
        while calls:
            accepted = await asyncio.gather(*map(self._reserve, calls))
            calls = self.planner.reserved(monotonic(), accepted)
        self._planned()

    async def _fetch(self, call: Fetch) -> Feedback | None:
        remote = self._remotes[call.switch]
        return await self._answer(remote, remote.fetch(call.links, _left_s(call.until)))

    async def _reserve(self, call: Reserve) -> bool | None:
        remote, left_s = self._remotes[call.switch], _left_s(call.until)
        if left_s <= 0.0:
            return False  # no time left: as if it were refused
        return await self._answer(remote, remote.update(call.update, left_s))

    async def _answer(self, remote: GrpcRemote, call: Awaitable[T]) -> T | None:
        """None: it is silent."""
        try:
            return await call
        except NoAnswer as error:
            problem = str(error)
        except ProtocolError as error:
            problem = f"answered something else: {error}"
        text = f"switch process {remote.switch}: {problem}"
        if text != self.last_error:
            _log.warning("%s", text)
        self.last_error = text
        return None

    def _planned(self) -> None:
        now = monotonic()
        self._all = True
        self._on_rates(now)
        self.tell(now)

    def _report_stalls(self) -> None:
        for stall in self.planner.stalls:
            self.stalls[stall.kind] += 1
            slots = stall.slot - stall.since + 1
            whom = "while others did" if stall.kind == "starvation" else "and neither did others"
            flows = f"{len(stall.flows)} flows with bytes to send"
            self.last_error = f"{stall.kind}: {flows} did not move for {slots} slots, {whom}"
            _log.error("%s", self.last_error)
        self.planner.stalls.clear()

    # --- for `flowslot status`

    def describe(self) -> dict[str, Any]:
        """See RateSource; reservations that are scheduled: accepted by all switch processes of
        their path."""
        counts = self.planner.counts
        rounds = {
            "switches": [{"switch": r.switch, "live": r.connected} for r in self._remotes],
            "rounds": counts.rounds,
            "late": counts.late,
            "undone": counts.undone,
            "livelocks": self.stalls["livelock"],
            "starvations": self.stalls["starvation"],
            "error": self.last_error,
        }
        return super().describe() | {
            "feedback": rounds,
            "peers": self.peers.describe(),
            "grpc_connections": sum(remote.connected for remote in self._remotes),
            "reservations": NO_RESERVATIONS
            | {"scheduled": counts.accepted, "refused": counts.refused},
        }

    # --- life

    async def start(self) -> None:
        """See RateSource."""
        await self.peers.start()
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """See RateSource; what is reserved is given back where switch processes answer."""
        self.peers.close()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await asyncio.gather(*map(self._reserve, self.planner.end(monotonic())))
        for remote in self._remotes:
            await remote.close()


def _left_s(until: Nanos) -> float:
    return (until - monotonic()) / SECOND
