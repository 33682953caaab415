# SPDX-License-Identifier: Apache-2.0
"""Who negotiates for this daemon: switch processes while their leases live, else we ourselves."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from flowslot.arbiter import LEASE_SLOTS, ArbiterConfig
from flowslot.model.errors import ConfigError
from flowslot.model.units import Nanos
from flowslot.policy.base import Floats
from flowslot.policy.registry import PolicyOptions, PolicySpec
from flowslot.protocol.grantbook import Granted
from flowslot.protocol.messages import Demand, Done
from flowslot.protocol.shards import Shards
from flowslotd.clock import monotonic, wall
from flowslotd.config import Config
from flowslotd.metrics import Summary
from flowslotd.negotiate.domain_base import Domain, DomainStats, OnGrants
from flowslotd.negotiate.domain_local import LocalDomain

if TYPE_CHECKING:
    from flowslotd.negotiate.switch_client import SwitchClient

__all__ = ["Domain", "FailoverDomain", "LocalDomain", "OnGrants", "open_domain"]

OnLeaseEnd = Callable[[Nanos], None]

_log = logging.getLogger(__name__)


def open_domain(
    config: Config,
    spec: PolicySpec,
    options: PolicyOptions,
    on_grants: OnGrants,
    on_lease_end: OnLeaseEnd = lambda now: None,
) -> Domain:
    """The domain that the configuration and its topology ask for; nothing is opened yet.

    `on_lease_end`: one of several leases has ended, and `lease_end` is later now.

    Raises ConfigError when the policy asks nobody.
    """
    topology, stats = config.topology, DomainStats()
    make_allocator = spec.allocator
    if make_allocator is None:
        raise ConfigError(str(config.file), "policy", f"{spec.name} asks no arbiter for grants")

    def make_local(on_grants: OnGrants) -> LocalDomain:
        return LocalDomain(
            topology.host_links(config.settings.host),
            topology.capacity().tolist(),
            allocator=make_allocator(replace(options, partial=True)),
            config=ArbiterConfig(
                target=config.settings.arbiter.target,
                slot_ns=config.grid.slot_ns,
                # Numbers slots as the wall clock does.
                slot_origin_ns=Nanos(monotonic() - wall()),
                horizon=config.grid.horizon,
            ),
            on_grants=on_grants,
            stats=stats,
        )

    if not config.switches:
        return make_local(on_grants)
    # Only now: a daemon without switch processes never loads gRPC.
    from flowslotd.negotiate.switch_client import SwitchClient  # noqa: PLC0415

    daemon = f"{config.instance[:40]}-{os.getpid()}-{secrets.token_hex(4)}"
    remotes = [
        SwitchClient(
            topology,
            topology.switches[switch],
            host=config.settings.host,
            daemon=daemon,
            tls=config.tls,
            slot_ns=config.grid.slot_ns,
            lease_ns=Nanos(LEASE_SLOTS * config.grid.slot_ns),
            stats=stats,
        )
        for switch in config.switches
    ]
    return FailoverDomain(remotes, make_local, on_grants, stats, on_lease_end)


class FailoverDomain:
    """The switch processes while any is live; an arbiter of our own NICs while none is.

    That one begins anew each time, from all demands as they would be put then.
    """

    def __init__(
        self,
        remotes: Sequence[SwitchClient],
        make_local: Callable[[OnGrants], LocalDomain],
        on_grants: OnGrants,
        stats: DomainStats,
        on_lease_end: OnLeaseEnd = lambda now: None,
    ) -> None:
        self._on_lease_end = on_lease_end
        self._remotes = remotes
        self._shards = Shards([remote.negotiator for remote in remotes])
        self._make_local = make_local
        self._on_grants = on_grants
        self._stats = stats
        self._local: LocalDomain | None = None
        for remote in remotes:
            # What a single one says needs no combining.
            remote.on_grants = self._granted if len(remotes) > 1 else on_grants
            remote.on_live = partial(self._began, remote)
            remote.on_lost = partial(self._lost, remote)

    @property
    def lease_end(self) -> Nanos | None:
        """See Domain."""
        return self._shards.lease_end

    @property
    def grpc_connections(self) -> int:
        """See Domain."""
        return sum(remote.grpc_connections for remote in self._remotes)

    def demand(self, now: Nanos, demands: Sequence[Demand]) -> None:
        """See Domain."""
        self._shards.demand(now, demands)
        self._poke()
        if self._local is not None:
            self._local.demand(now, demands)

    def done(self, now: Nanos, dones: Sequence[Done]) -> None:
        """See Domain."""
        self._shards.done(dones)
        self._poke()
        if self._local is not None:
            self._local.done(now, dones)

    def give_back(self, flows: Iterable[int]) -> list[Granted]:
        """See Domain."""
        if self._local is not None:
            return self._local.give_back(flows)
        given = self._shards.give_back(flows)
        self._poke()
        return given

    def beat(self, now: Nanos) -> bool:
        """See Domain."""
        small = self._shards.beat(now)
        self._poke()
        return small or self._local is not None

    def grant(self, flow: int) -> Granted:
        """See Domain."""
        return (self._local or self._shards).grant(flow)

    def covers(self, links: tuple[int, ...]) -> bool:
        """See Domain."""
        return (self._local or self._shards).covers(links)

    def describe(self) -> dict[str, object]:
        """See Domain. State: `switch`, or `fallback` while no switch process is there.

        `switch`: those that are live, or all, by name; `switches`: each of several.
        """
        streams = [remote.describe() for remote in self._remotes]
        state = {**self._stats.describe(), "state": "switch" if self._local is None else "fallback"}
        if len(streams) == 1:
            return {**streams[0], **state}
        live = [stream for stream in streams if stream["live"]] or streams
        names = ", ".join(str(stream["switch"]) for stream in live)
        return {"switch": names, "switches": streams, **state}

    def reservations(self) -> dict[str, int]:
        """See Domain."""
        return self._stats.reservations()

    def negotiation(self) -> Summary:
        """See Domain."""
        return self._stats.negotiation.summary()

    def clock_offset_us(self) -> float | None:
        """See Domain. Of several, the one that is furthest off."""
        offsets = [remote.negotiator.offset_us for remote in self._remotes]
        return max((x for x in offsets if x is not None), key=abs, default=None)

    async def load_table(self, now: Nanos) -> Floats | None:
        """See Domain."""
        if self._local is not None:
            return await self._local.load_table(now)
        answers = await asyncio.gather(*(remote.load_table(now) for remote in self._remotes))
        tables = [table for table in answers if table is not None]
        if not tables:
            return None
        horizon = min(table.shape[1] for table in tables)
        whole = np.full((len(tables[0]), horizon), np.nan)
        for table in tables:  # of other links each
            whole = np.where(np.isnan(whole), table[:, :horizon], whole)
        return whole

    async def start(self) -> None:
        """See Domain. Does not wait for switch processes."""
        self._to_local(monotonic())
        for remote in self._remotes:
            await remote.start()

    async def close(self) -> None:
        """See Domain."""
        if self._local is not None:
            self._local.stop()
        for remote in self._remotes:
            await remote.close()

    def _poke(self) -> None:
        for remote in self._remotes:
            remote.poke()

    def _granted(self, now: Nanos, grants: Sequence[Granted]) -> None:
        """A live switch process has changed its mind: with what the others say, that makes..."""
        self._announce(now, [grant.flow for grant in grants])

    def _began(self, remote: SwitchClient, now: Nanos) -> None:
        """A switch process answers: its grants count from now on, and ours do not."""
        _log.info("negotiating with switch process %s", remote.switch)
        if self._local is None:
            self._announce(now, remote.negotiator.flows())
        else:
            self._local.stop()
            self._local = None
            self._announce(now, self._shards.flows())

    def _lost(self, remote: SwitchClient, now: Nanos) -> None:
        """A lease has ended: what this switch granted is void, whoever may use it now."""
        if self._shards.live:
            _log.warning("no switch process %s: its links are on their own", remote.switch)
            self._announce(now, remote.negotiator.flows())
            self._on_lease_end(now)
            return
        self._to_local(now)
        if self._shards.flows():
            _log.warning("no switch process: sharing out this host's own NICs")
            self._announce(now, self._shards.flows())

    def _to_local(self, now: Nanos) -> None:
        local = self._make_local(self._on_grants)
        local.load(now, self._shards.picture(now))
        local.settle(now)
        local.start_now()
        self._local = local

    def _announce(self, now: Nanos, flows: Sequence[int]) -> None:
        if flows:
            self._on_grants(now, [self.grant(flow) for flow in flows])
