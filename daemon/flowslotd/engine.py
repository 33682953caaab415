# SPDX-License-Identifier: Apache-2.0
"""What a configuration decides: rate source, pacer, slot loop. Built and replaced as a whole."""

import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from flowslot.arbiter import LEASE_SLOTS, ArbiterConfig
from flowslot.model.errors import ConfigError, FlowslotError
from flowslot.model.units import Nanos
from flowslot.policy import registry
from flowslot.policy.mlcc import MlccPolicy
from flowslot.policy.registry import PolicyOptions, PolicySpec
from flowslot.protocol.host import Host
from flowslot.protocol.loopback import Loopback
from flowslot.protocol.session import Session
from flowslotd.clock import monotonic, wall
from flowslotd.config import Config
from flowslotd.flows.flow_info import PROTOCOLS
from flowslotd.flows.flow_table import FlowTable
from flowslotd.negotiate.aggregates import Aggregates
from flowslotd.negotiate.arbiter import ArbiterRates, OnRates
from flowslotd.negotiate.load_tables import OnBug, PlannedRates
from flowslotd.negotiate.source import FixedRates, RateSource
from flowslotd.observe.observer import Observer
from flowslotd.pace import handover
from flowslotd.pace.enforcer import Enforcer
from flowslotd.pace.pacer import Pacer, PacingError
from flowslotd.pace.select import make_pacer
from flowslotd.slotloop import SlotLoop
from flowslotd.trace import Trace

if TYPE_CHECKING:
    from flowslotd.negotiate.feedback_grpc import GrpcRemote
    from flowslotd.negotiate.switch_client import SwitchClient


class Engine:
    """Where nothing is enforced, its pacer paces nothing."""

    def __init__(
        self,
        config: Config,
        *,
        observer: Observer,
        on_rates: OnRates,
        on_bug: OnBug,
        pacer: Pacer | None = None,
        trace: Trace | None = None,
    ) -> None:
        """Opens a pacer if one is needed and `pacer` (of a predecessor) paces nothing; and a trace
        if the configuration names one, and the predecessor has none.

        Raises FlowslotError when the kernel lacks what the configuration asks for.
        """
        settings = config.settings
        spec = registry.get(settings.policy)
        self.config = config
        self.trace = trace or _open_trace(config)
        self.source, self.pacer = RateSource(), Pacer()
        if settings.enforces(spec):
            self.source = open_source(
                config, spec, observer.table, on_rates=on_rates, on_bug=on_bug, trace=self.trace
            )
            # Last: if a source cannot be built, no pacer stays open.
            self.pacer = pacer if pacer and pacer.name != "none" else _open_pacer(config)
            self.pacer.leave_by(config.addresses)
        self.enforcer = Enforcer(self.pacer, settings.pacing.hard, self.trace)
        observer.protocols = self.pacer.traits.protocols or tuple(PROTOCOLS.values())
        observer.negotiated = self.source.reports
        lends = self.pacer.lends and not settings.pacing.hard
        # Only then may a flow that has nothing to send ask for nothing.
        self.source.tops_up = lends
        self.loop = SlotLoop(
            config.grid,
            observer,
            self.source,
            pacer=self.pacer,
            enforcer=self.enforcer,
            lends=lends and spec.needs_arbiter,
        )

    async def stop(self, keep_pacer: bool = False) -> None:
        """Let all flows go, and leave the arbiter."""
        try:
            self.loop.release()
        finally:  # an arbiter that goes on would give to its successor's flows
            try:
                await self.source.close()
            finally:
                if not keep_pacer:
                    self.pacer.close()


def _open_pacer(config: Config) -> Pacer:
    pacing = config.settings.pacing
    try:
        return make_pacer(
            pacing.backend,
            config.instance,
            devices=pacing.devices,
            sysctls=pacing.sysctls,
        )
    except (PacingError, OSError) as error:
        raise FlowslotError(f"cannot pace: {error}; `flowslot doctor` says more") from error


def _open_trace(config: Config) -> Trace | None:
    if config.settings.trace_file is None:
        return None
    try:
        return Trace(config.file.parent / config.settings.trace_file)
    except OSError as error:
        problem = f"cannot be written: {error.strerror or error}"
        raise ConfigError(str(config.file), "trace_file", problem) from None


def open_source(
    config: Config,
    spec: PolicySpec,
    table: FlowTable,
    *,
    on_rates: OnRates,
    on_bug: OnBug,
    trace: Trace | None = None,
) -> RateSource:
    """Where the policy's rates come from; nothing is connected yet."""
    settings, topology = config.settings, config.topology
    flows_on_link = settings.static.flows_on_link.items()
    options = PolicyOptions(
        floor_share=settings.arbiter.floor_share,
        flows_on_link={topology.link_index[name]: flows for name, flows in flows_on_link},
        slot_ns=config.grid.slot_ns,
    )
    assert spec.host_policy is not None, f"{spec.name} paces no flow"
    policy = spec.host_policy(options)
    if spec.feedback:
        assert isinstance(policy, MlccPolicy)
        remotes = _remotes(config)
        return PlannedRates(config, policy, remotes, table, on_rates=on_rates, on_bug=on_bug)
    if not spec.needs_arbiter:
        return FixedRates(policy)
    clients = _clients(config)
    return ArbiterRates(
        Host(_sessions(config, clients), _own(config, spec, options), config.grid.slot_ns),
        Aggregates(table, trace),
        policy,
        clients,
        n_links=len(topology.links),
        on_rates=on_rates,
        lent=lambda now: handover.in_use(now, table.rows),
    )


def _own(config: Config, spec: PolicySpec, options: PolicyOptions) -> Callable[[Nanos], Loopback]:
    """Makes the arbiter of this host's own links."""
    settings, topology = config.settings, config.topology
    options = replace(options, partial=True, classes=settings.classes)

    def make(now: Nanos) -> Loopback:
        return Loopback(
            now,
            topology.host_links(settings.host),
            topology.capacity().tolist(),
            allocator=registry.allocator(spec.name, options),
            config=ArbiterConfig(
                target=settings.arbiter.target,
                slot_ns=config.grid.slot_ns,
                # Numbers slots as the wall clock does.
                slot_origin_ns=Nanos(monotonic() - wall()),
                horizon=config.grid.horizon,
            ),
        )

    return make


def _sessions(config: Config, clients: "Sequence[SwitchClient]") -> list[Session]:
    slot_ns = config.grid.slot_ns
    daemon = f"{config.instance[:40]}-{os.getpid()}-{secrets.token_hex(4)}"
    return [
        Session(
            daemon,
            client.links,
            client.names,
            slot_ns=slot_ns,
            lease_ns=Nanos(LEASE_SLOTS * slot_ns),
            # Unique among all daemons without asking anyone, and increasing.
            first_session=secrets.randbits(41) << 20,
        )
        for client in clients
    ]


def _clients(config: Config) -> "list[SwitchClient]":
    if not config.switches:
        return []
    # Only now: a daemon without switch processes never loads gRPC.
    from flowslotd.negotiate.switch_client import SwitchClient  # noqa: PLC0415

    return [SwitchClient(config, name) for name in config.switches]


def _remotes(config: Config) -> "list[GrpcRemote]":
    if not config.switches:
        return []
    from flowslotd.negotiate.feedback_grpc import GrpcRemote  # noqa: PLC0415

    return [GrpcRemote(config, name) for name in config.switches]
