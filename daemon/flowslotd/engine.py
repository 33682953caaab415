# SPDX-License-Identifier: Apache-2.0
"""What a configuration decides: policy, arbiter, pacer. Built as a whole, replaced as a whole."""

from collections.abc import Callable, Collection

from flowslot.model.errors import FlowslotError
from flowslot.model.units import Nanos
from flowslot.policy import registry
from flowslot.policy.base import HostPolicy
from flowslot.policy.mlcc.peers import Peers
from flowslot.policy.mlcc.planner import Reserving
from flowslot.policy.registry import PolicyOptions, PolicySpec
from flowslotd.config import Config
from flowslotd.flows.flow_info import PROTOCOLS, Source
from flowslotd.negotiate.domain import open_domain
from flowslotd.negotiate.domain_base import Domain, OnGrants
from flowslotd.negotiate.load_tables import (
    FeedbackClient,
    OnBug,
    OnPlanned,
    held_by_switches,
    open_feedback,
)
from flowslotd.negotiate.peers import PeerEndpoint
from flowslotd.observe.observer import Observer
from flowslotd.pace.enforcer import Enforcer
from flowslotd.pace.pacer import Pacer, PacingError
from flowslotd.pace.select import make_pacer
from flowslotd.slotloop import SlotLoop

NO_RESERVATIONS = {"granted": 0, "scheduled": 0, "refused": 0, "preempted": 0, "expired": 0}


class Engine:
    """`domain` None: no arbiter is asked; `pacer` None: nothing is changed on this host;
    `feedback` None: the policy plans nothing; `peers` None: it does not mind other hosts' flows."""

    def __init__(
        self,
        config: Config,
        *,
        observer: Observer,
        records: Callable[[], Collection[Source]],
        on_grants: OnGrants,
        on_planned: OnPlanned,
        on_bug: OnBug,
        pacer: Pacer | None = None,
    ) -> None:
        """Opens a pacer if one is needed and `pacer` (of a predecessor) is None.

        Raises FlowslotError when the kernel lacks what the configuration asks for.
        """
        settings, topology = config.settings, config.topology
        spec = registry.get(settings.policy)
        options = PolicyOptions(
            floor_share=settings.arbiter.floor_share,
            flows_on_link={
                topology.link_index[name]: flows
                for name, flows in settings.static.flows_on_link.items()
            },
            slot_ns=config.grid.slot_ns,
        )
        enforcing = settings.enforces(spec)
        self.config = config
        self.domain: Domain | None = None
        if enforcing and spec.needs_arbiter:
            self.domain = open_domain(config, spec, options, on_grants, self._renew)
        self.feedback: FeedbackClient | None = None
        self.peers: PeerEndpoint | None = None
        self._table = observer.table
        self._planner: Reserving | None = None
        policy = spec.host_policy(options)
        if enforcing and spec.planner is not None:
            policy = self._planning(spec, options, on_planned, on_bug)
        self.pacer = None
        self.enforcer = None
        if enforcing:  # last: if a domain cannot be built, no pacer stays open
            self.pacer = pacer or _open(config)
            self.pacer.leave_by(config.addresses)
            self.enforcer = Enforcer(self.pacer, settings.pacing.hard)
        paced = self.pacer.traits.protocols if self.pacer is not None else ()
        observer.protocols = paced or tuple(PROTOCOLS.values())
        self.loop = SlotLoop(
            config.grid,
            observer,
            records=records,
            policy=policy,
            domain=self.domain,
            pacer=self.pacer,
            enforcer=self.enforcer,
            by_grant=spec.needs_arbiter,
            follows=self.feedback is not None,
        )

    def _renew(self, now: Nanos) -> None:
        """Others' leases go on: what is in the kernel was to end with the first of them."""
        self.loop.refresh(now)

    def _planning(
        self, spec: PolicySpec, options: PolicyOptions, on_planned: OnPlanned, on_bug: OnBug
    ) -> HostPolicy:
        """The host part of a policy that plans, and who fetches and sends for it."""
        assert spec.planner is not None
        config = self.config
        held = held_by_switches(config.topology, config.settings.use_switch)
        target = config.settings.arbiter.target
        policy = Reserving(spec.planner(options), held, config.grid.slot_ns, target)
        self.feedback = open_feedback(config, policy, on_planned=on_planned, on_bug=on_bug)
        book, table = Peers(config.grid.slot_ns), self._table
        policy.dependencies = lambda now: book.dependencies(now, table.transfers({}))
        self.peers, self._planner = PeerEndpoint(config, book, policy.ask), policy
        return policy

    def tell(self, now: Nanos) -> None:
        """Let other hosts know what theirs depends on: in each slot, and when plans change."""
        if self.peers is not None and self._planner is not None and self.peers.listening:
            rates, left_s = self._planner.in_force(now)
            self.peers.tell(self._table.transfers(rates), left_s)

    def reservations(self) -> dict[str, int]:
        """Of whoever reserves for this daemon; zeros where nobody does."""
        reserving = self.domain or self.feedback
        return NO_RESERVATIONS | (reserving.reservations() if reserving else {})

    @property
    def grpc_connections(self) -> int:
        """Open connections to switch processes."""
        reserving = self.domain or self.feedback
        return reserving.grpc_connections if reserving else 0

    @property
    def backend(self) -> str:
        """Name of the pacing back end."""
        return self.pacer.name if self.pacer else "none"

    @property
    def congestion_control(self) -> str:
        """What jobs are told to select; "" to leave their sockets alone."""
        return self.pacer.congestion_control if self.pacer else ""

    async def start(self) -> None:
        """Begin to negotiate."""
        if self.domain is not None:
            await self.domain.start()
        if self.peers is not None:
            await self.peers.start()
        if self.feedback is not None:
            await self.feedback.start()

    async def stop(self, keep_pacer: bool = False) -> None:
        """Let all flows go, and leave the arbiter."""
        try:
            self.loop.release()
        finally:  # an arbiter that goes on would give to its successor's flows
            try:
                if self.peers is not None:
                    self.peers.close()
                if self.feedback is not None:
                    await self.feedback.close()
                if self.domain is not None:
                    await self.domain.close()
            finally:
                if self.pacer is not None and not keep_pacer:
                    self.pacer.close()


def _open(config: Config) -> Pacer:
    pacing = config.settings.pacing
    try:
        return make_pacer(
            pacing.backend,
            config.instance,
            devices=pacing.devices,
            sysctls=pacing.sysctls,
        )
    except (PacingError, OSError) as error:
        where = f"pacing.backend {pacing.backend}"
        raise FlowslotError(f"{where}: {error}; see `flowslot doctor`") from None
