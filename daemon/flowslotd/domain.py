# SPDX-License-Identifier: Apache-2.0
"""Who negotiates for this daemon: a switch process while its lease lives, else we ourselves."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from flowslot.arbiter import LEASE_SLOTS, ArbiterConfig
from flowslot.errors import ConfigError
from flowslot.grantbook import Granted
from flowslot.messages import Demand, Done
from flowslot.negotiator import aged
from flowslot.policy.base import Floats
from flowslot.policy.registry import PolicyOptions, PolicySpec
from flowslot.units import Nanos
from flowslotd.clock import monotonic, wall
from flowslotd.config import Config, switch_of
from flowslotd.domain_base import Domain, DomainStats, OnGrants
from flowslotd.domain_local import LocalDomain
from flowslotd.metrics import Summary

if TYPE_CHECKING:
    from flowslotd.domain_grpc import GrpcDomain

__all__ = ["Domain", "FailoverDomain", "LocalDomain", "OnGrants", "open_domain"]

_log = logging.getLogger(__name__)


def open_domain(
    config: Config, spec: PolicySpec, options: PolicyOptions, on_grants: OnGrants
) -> Domain:
    """The domain that the configuration and its topology ask for; nothing is opened yet.

    Raises ConfigError when the links are spread over several switch processes.
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

    switch = switch_of(topology, str(config.topology_file)) if config.settings.use_switch else None
    if switch is None:
        return make_local(on_grants)
    # Only now: a daemon without switch processes never loads gRPC.
    from flowslotd.domain_grpc import GrpcDomain  # noqa: PLC0415

    remote = GrpcDomain(
        topology,
        topology.switches[switch],
        daemon=f"{config.instance[:40]}-{os.getpid()}-{secrets.token_hex(4)}",
        slot_ns=config.grid.slot_ns,
        lease_ns=Nanos(LEASE_SLOTS * config.grid.slot_ns),
        stats=stats,
    )
    return FailoverDomain(remote, make_local, on_grants, stats)


class FailoverDomain:
    """The switch process while it is live; an arbiter of our own NICs while it is not.

    That one begins anew each time, from the demands as the remote side knows them.
    """

    def __init__(
        self,
        remote: GrpcDomain,
        make_local: Callable[[OnGrants], LocalDomain],
        on_grants: OnGrants,
        stats: DomainStats,
    ) -> None:
        self._remote = remote
        self._make_local = make_local
        self._on_grants = on_grants
        self._stats = stats
        self._local: LocalDomain | None = None
        self._known: dict[int, tuple[Demand, Nanos]] = {}
        remote.on_grants = on_grants
        remote.on_live = self._to_remote
        remote.on_lost = self._to_local

    @property
    def lease_end(self) -> Nanos | None:
        """See Domain."""
        return self._remote.negotiator.lease_end if self._local is None else None

    @property
    def grpc_connections(self) -> int:
        """See Domain."""
        return self._remote.grpc_connections

    def demand(self, now: Nanos, demands: Sequence[Demand]) -> None:
        """See Domain."""
        self._known.update((demand.flow, (demand, now)) for demand in demands)
        self._remote.demand(now, demands)
        if self._local is not None:
            self._local.demand(now, demands)

    def done(self, now: Nanos, dones: Sequence[Done]) -> None:
        """See Domain."""
        for done in dones:
            self._known.pop(done.flow, None)
        self._remote.negotiator.done(dones)
        self._remote.poke()
        if self._local is not None:
            self._local.done(now, dones)

    def give_back(self, flows: Iterable[int]) -> list[Granted]:
        """See Domain."""
        return (self._local or self._remote).give_back(flows)

    def beat(self, now: Nanos) -> None:
        """See Domain."""
        self._remote.beat(now)

    def grant(self, flow: int) -> Granted:
        """See Domain."""
        return (self._local or self._remote).grant(flow)

    def covers(self, links: tuple[int, ...]) -> bool:
        """See Domain."""
        if self._local is not None:
            return self._local.covers(links)
        return bool(links) and self._remote.negotiator.links.issuperset(links)

    def describe(self) -> dict[str, object]:
        """See Domain. State: `switch`, or `fallback` while the switch process is not there."""
        state = "switch" if self._local is None else "fallback"
        return {**self._remote.describe(), "state": state}

    def reservations(self) -> dict[str, int]:
        """See Domain."""
        return self._stats.reservations()

    def negotiation(self) -> Summary:
        """See Domain."""
        return self._stats.negotiation.summary()

    def clock_offset_us(self) -> float | None:
        """See Domain."""
        return self._remote.negotiator.offset_us

    async def load_table(self, now: Nanos) -> Floats | None:
        """See Domain."""
        return await (self._local or self._remote).load_table(now)

    async def start(self) -> None:
        """See Domain. Does not wait for the switch process."""
        self._to_local(monotonic())
        await self._remote.start()

    async def close(self) -> None:
        """See Domain."""
        if self._local is not None:
            self._local.stop()
        await self._remote.close()

    def _to_local(self, now: Nanos) -> None:
        """The lease has ended: what the switch granted is void, whoever may use it now."""
        local = self._make_local(self._on_grants)
        known = self._picture(now)
        local.load(now, known)
        local.settle(now)
        local.start_now()
        self._local = local
        if known:
            _log.warning("no switch process: sharing out this host's own NICs")
            self._announce(now, known)

    def _to_remote(self, now: Nanos) -> None:
        """The switch process answers: its grants take the place of ours."""
        if self._local is not None:
            self._local.stop()
            self._local = None
        _log.info("negotiating with switch process %s", self._remote.switch)
        self._announce(now, self._picture(now))

    def _picture(self, now: Nanos) -> list[Demand]:
        return [aged(demand, now - at) for demand, at in self._known.values()]

    def _announce(self, now: Nanos, known: Sequence[Demand]) -> None:
        if known:
            self._on_grants(now, [self.grant(demand.flow) for demand in known])
