# SPDX-License-Identifier: Apache-2.0
"""What a configuration decides: policy, arbiter, pacer. Built as a whole, replaced as a whole."""

from collections.abc import Callable, Collection

from flowslot.errors import FlowslotError
from flowslot.policy import registry
from flowslot.policy.registry import PolicyOptions
from flowslotd.config import Config
from flowslotd.domain import open_domain
from flowslotd.domain_base import Domain, OnGrants
from flowslotd.enforcer import Enforcer
from flowslotd.flowinfo import Source
from flowslotd.flowtable import FlowTable
from flowslotd.pacing.base import Pacer, PacingError
from flowslotd.pacing.select import make_pacer
from flowslotd.slotloop import SlotLoop


class Engine:
    """`domain` None: no arbiter is asked; `pacer` None: nothing is changed on this host."""

    def __init__(
        self,
        config: Config,
        *,
        table: FlowTable,
        records: Callable[[], Collection[Source]],
        on_grants: OnGrants,
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
        )
        enforcing = settings.enforces(spec)
        self.config = config
        self.domain: Domain | None = None
        if enforcing and spec.needs_arbiter:
            self.domain = open_domain(config, spec, options, on_grants)
        self.pacer = None
        self.enforcer = None
        if enforcing:  # last: if a domain cannot be built, no pacer stays open
            self.pacer = pacer or _open(settings.pacing.backend, config.instance)
            self.enforcer = Enforcer(self.pacer, settings.pacing.hard)
        self.loop = SlotLoop(
            config.grid,
            table,
            records=records,
            policy=spec.host_policy(options),
            domain=self.domain,
            pacer=self.pacer,
            enforcer=self.enforcer,
            by_grant=spec.needs_arbiter,
        )

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

    async def stop(self, keep_pacer: bool = False) -> None:
        """Let all flows go, and leave the arbiter."""
        try:
            self.loop.release()
        finally:  # an arbiter that goes on would give to its successor's flows
            try:
                if self.domain is not None:
                    await self.domain.close()
            finally:
                if self.pacer is not None and not keep_pacer:
                    self.pacer.close()


def _open(backend: str, instance: str) -> Pacer:
    try:
        return make_pacer(backend, instance)
    except (PacingError, OSError) as error:
        raise FlowslotError(f"pacing.backend {backend}: {error}; see `flowslot doctor`") from None
