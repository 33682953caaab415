# SPDX-License-Identifier: Apache-2.0
"""The arbiter inside the daemon: shares out the NICs of this host, and nothing else."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from flowslot.arbiter import Arbiter, ArbiterConfig
from flowslot.grantbook import GrantBook, Granted
from flowslot.messages import Demand, Done
from flowslot.policy.base import Allocator, Floats
from flowslot.units import Nanos
from flowslotd.clock import monotonic
from flowslotd.domain_base import DomainStats, OnGrants, nothing_said
from flowslotd.metrics import Summary

FOREVER = Nanos(2**60)
"""A lease that does not end: the daemon cannot lose touch with itself."""
_SESSION = 1
_ROUNDS = 8  # lower, acknowledge, raise what that frees: two settle nearly everything


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
        self._links = tuple(links)
        self._n_links = len(goodput)
        self._index = {link: i for i, link in enumerate(links)}
        self._paths: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._on_grants = on_grants
        self._stats = stats
        config = replace(config, lease_ns=FOREVER, ack_timeout_ns=FOREVER, recovery=False)
        self._arbiter = Arbiter([goodput[link] for link in links], config, allocator)
        self._book = GrantBook("local", FOREVER)
        now = monotonic()
        self._arbiter.hello(now, self._book.connect(now, _SESSION))
        self._alarm: asyncio.TimerHandle | None = None

    # --- Domain

    def demand(self, now: Nanos, demands: Sequence[Demand]) -> None:
        """See Domain."""
        self.load(now, demands)
        self._settle(now)

    def load(self, now: Nanos, demands: Sequence[Demand]) -> None:
        """Take demands in without deciding."""
        mine = [replace(d, links=path) for d in demands if (path := self._path(d.links))]
        refusals = self._arbiter.demand(now, _SESSION, mine)
        if refusals:
            self._stats.refused += len(refusals)
            self._stats.last_error = refusals[0].reason

    def done(self, now: Nanos, dones: Sequence[Done]) -> None:
        """See Domain."""
        self._arbiter.done(now, _SESSION, [self._book.drop(d.flow, d.inc) for d in dones])
        self._settle(now)

    def give_back(self, flows: Iterable[int]) -> list[Granted]:
        """See Domain."""
        return []

    def beat(self, now: Nanos) -> None:
        """See Domain."""

    def grant(self, flow: int) -> Granted:
        """See Domain."""
        return self._book.grant(flow) if flow in self._book else nothing_said(flow)

    def covers(self, links: tuple[int, ...]) -> bool:
        """See Domain. A path that goes on beyond this host is not ours to guarantee."""
        return bool(links) and all(link in self._index for link in links)

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
        own = self._arbiter.load_table(now)
        table = np.full((self._n_links, own.shape[1]), np.nan)
        table[list(self._links)] = own
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

    def _path(self, links: tuple[int, ...]) -> tuple[int, ...]:
        """The part of a path that is ours, as the arbiter numbers it."""
        path = self._paths.get(links)
        if path is None:
            path = tuple(self._index[link] for link in links if link in self._index)
            self._paths[links] = path
        return path

    def settle(self, now: Nanos) -> list[Granted]:
        """Decide until nothing moves; returns what has changed.

        A lower is acknowledged before the kernel knows of it, which only this arbiter may do: it
        and whatever is raised in exchange go down in one batch.
        """
        before: dict[int, Granted] = {}
        for _ in range(_ROUNDS):
            grants = self._arbiter.step(now).get(_SESSION)
            if not grants:
                break
            for grant in grants:
                before.setdefault(grant.flow, self._book.grant(grant.flow))
            changes = self._book.receive(now, _SESSION, grants)
            self._stats.count(changes)
            self._arbiter.ack(now, _SESSION, changes.acks)
        after = [self._book.grant(flow) for flow in before]
        return [grant for grant in after if grant != before[grant.flow]]

    def _settle(self, now: Nanos) -> None:
        changed = self.settle(now)
        if changed:
            self._on_grants(now, changed)

    def _rearm(self) -> None:
        now = monotonic()
        delay = max(0, self._arbiter.next_wakeup(now) - now) / 1e9
        self._alarm = asyncio.get_running_loop().call_later(delay, self._wake)

    def _wake(self) -> None:
        self._rearm()  # first, so that an error below does not stop the clock
        self._settle(monotonic())
