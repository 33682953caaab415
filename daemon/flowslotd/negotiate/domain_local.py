# SPDX-License-Identifier: Apache-2.0
"""The arbiter inside the daemon: shares out the NICs of this host, and nothing else."""

import asyncio
from collections.abc import Iterable, Sequence

import numpy as np

from flowslot.arbiter import ArbiterConfig
from flowslot.model.units import Nanos
from flowslot.policy.base import Allocator, Floats
from flowslot.protocol.grantbook import Granted
from flowslot.protocol.messages import Demand, Done
from flowslot.protocol.ownlinks import OwnLinks
from flowslotd.clock import monotonic
from flowslotd.metrics import Summary
from flowslotd.negotiate.domain_base import DomainStats, OnGrants


class LocalDomain:
    """Arbiter and daemon in one process, without messages; answers at once."""

    lease_end = None
    grpc_connections = 0

    def __init__(
        self,
        links: Sequence[int],
        goodput: Sequence[float],
        *,
        allocator: Allocator,
        config: ArbiterConfig,
        on_grants: OnGrants,
        stats: DomainStats,
    ) -> None:
        """`links`: the host's egress links; `goodput`: of all the topology's links, bytes/s."""
        self._n_links = len(goodput)
        self._on_grants = on_grants
        self._stats = stats
        self._own = OwnLinks(monotonic(), links, goodput, allocator=allocator, config=config)
        self._alarm: asyncio.TimerHandle | None = None

    # --- Domain

    def demand(self, now: Nanos, demands: Sequence[Demand]) -> None:
        """See Domain."""
        self.load(now, demands)
        self._settle(now)

    def load(self, now: Nanos, demands: Sequence[Demand]) -> None:
        """Take demands in without deciding."""
        refusals = self._own.load(now, demands)
        if refusals:
            self._stats.refused += len(refusals)
            self._stats.last_error = refusals[0].reason

    def done(self, now: Nanos, dones: Sequence[Done]) -> None:
        """See Domain."""
        self._own.done(now, dones)
        self._settle(now)

    def give_back(self, flows: Iterable[int]) -> list[Granted]:
        """See Domain."""
        return []

    def beat(self, now: Nanos) -> bool:
        """See Domain. It is next door: nothing that is said to it costs a message."""
        return True

    def grant(self, flow: int) -> Granted:
        """See Domain."""
        return self._own.grant(flow)

    def covers(self, links: tuple[int, ...]) -> bool:
        """See Domain."""
        return self._own.covers(links)

    def describe(self) -> dict[str, object]:
        """See Domain."""
        return {"state": "local", "switch": None, "error": self._stats.last_error}

    def reservations(self) -> dict[str, int]:
        """See Domain."""
        return self._stats.reservations()

    def negotiation(self) -> Summary:
        """See Domain."""
        return self._stats.negotiation.summary()

    def clock_offset_us(self) -> float | None:
        """See Domain."""
        return None

    async def load_table(self, now: Nanos) -> Floats | None:
        """See Domain."""
        own = self._own.load_table(now)
        table = np.full((self._n_links, own.shape[1]), np.nan)
        table[list(self._own.links)] = own
        return table

    async def start(self) -> None:
        """See Domain."""
        self.start_now()

    def start_now(self) -> None:
        """As `start`, at once."""
        self._rearm()

    async def close(self) -> None:
        """See Domain."""
        self.stop()

    def stop(self) -> None:
        """As `close`, at once."""
        if self._alarm:
            self._alarm.cancel()

    # --- how

    def settle(self, now: Nanos) -> list[Granted]:
        """Decide until nothing moves; returns what has changed, to be put into force."""
        settled = self._own.settle(now)
        self._stats.count(settled.raised, settled.lowered)
        return settled.changed

    def _settle(self, now: Nanos) -> None:
        changed = self.settle(now)
        if changed:
            self._on_grants(now, changed)

    def _rearm(self) -> None:
        now = monotonic()
        delay = max(0, self._own.next_wakeup(now) - now) / 1e9
        self._alarm = asyncio.get_running_loop().call_later(delay, self._wake)

    def _wake(self) -> None:
        self._rearm()  # first, so that an error below does not stop the clock
        self._settle(monotonic())
