# SPDX-License-Identifier: Apache-2.0
"""Rates by a plan against load tables (MLCC): the planner, its rounds, and what other hosts say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from flowslot.model.units import Nanos
from flowslot.policy.base import Pace, View
from flowslot.policy.mlcc import MlccPolicy
from flowslot.policy.mlcc.peers import Peers
from flowslot.policy.mlcc.planner import Reserving
from flowslotd.config import Config
from flowslotd.flows.flow_table import FlowTable
from flowslotd.negotiate.arbiter import OnRates
from flowslotd.negotiate.load_tables import FeedbackClient, OnBug
from flowslotd.negotiate.peers import PeerEndpoint
from flowslotd.negotiate.source import NO_RESERVATIONS, RateSource

if TYPE_CHECKING:
    from flowslotd.negotiate.feedback_grpc import GrpcRemote


class PlannedRates(RateSource):
    """Plans are made for whole slots, and for all flows of this host together."""

    at_boundary = joint = reports = True

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
        self._table = table
        self._planner = Reserving(
            policy,
            [asked and link.switch is not None for link in config.topology.links],
            [remote.held for remote in remotes],
            slot_ns,
            target=config.settings.arbiter.target,
        )
        book = Peers(slot_ns)
        self._rounds = FeedbackClient(
            self._planner,
            remotes,
            dependencies=lambda now: book.dependencies(now, table.transfers({})),
            on_planned=self._planned,
            on_bug=on_bug,
        )
        self.peers = PeerEndpoint(config, book, self._ask)
        self._on_rates: Callable[[Nanos], None] = on_rates
        self._all = True
        self._slot = -1

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
        pace = self._planner.rates(now, view)
        if self._planner.wanted:
            self._rounds.wake()
        return pace

    def tell(self, now: Nanos) -> None:
        """See RateSource."""
        if self.peers.listening:
            rates, left_s = self._planner.in_force(now)
            self.peers.tell(self._table.transfers(rates), left_s)

    def _planned(self, now: Nanos) -> None:
        self._all = True
        self._on_rates(now)
        self.tell(now)

    def _ask(self) -> None:
        """What this host's flows depend on has changed."""
        self._planner.ask()
        if self._planner.wanted:
            self._rounds.wake()

    # --- for `flowslot status`

    @property
    def grpc_connections(self) -> int:  # type: ignore[override]
        """Open connections to switch processes."""
        return self._rounds.grpc_connections

    def describe(self) -> dict[str, dict[str, object] | None]:
        """See RateSource."""
        own = {"feedback": self._rounds.describe(), "peers": self.peers.describe()}
        return super().describe() | own

    def why_unpaced(self) -> str:
        """See RateSource."""
        return "no plan yet, or its switch process does not answer"

    def reservations(self) -> dict[str, int]:
        """See RateSource."""
        return NO_RESERVATIONS | self._rounds.reservations()

    # --- life

    async def start(self) -> None:
        """See RateSource."""
        await self.peers.start()
        await self._rounds.start()

    async def close(self) -> None:
        """See RateSource."""
        self.peers.close()
        await self._rounds.close()
