# SPDX-License-Identifier: Apache-2.0
"""Who shares the network of a cluster, slot by slot: each policy by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flowslot.policy.adadual import AdaDual
from flowslot.policy.base import Allocator
from flowslot.policy.ccml import CcmlAllocator
from flowslot.policy.gate import Gate
from flowslot.policy.mcs import McsAllocator
from flowslot.policy.mlcc import MlccOptions
from flowslot.policy.mlcc.fleet import FleetAllocator
from flowslot.policy.mlcc.prototype import PrototypeAllocator
from flowslot.policy.mltcp import MltcpAllocator
from flowslot.policy.registry import CONTENTION_B, CONTENTION_ETA
from flowslot.policy.srpt import SrptAllocator
from flowslot.policy.srsf import Srsf
from flowslot.policy.srsf_chunked import ChunkedSrsf
from flowslot.policy.stagger import StaggerAllocator
from flowslot_sim.cluster.slotted import Sharing


@dataclass(frozen=True, slots=True)
class Policy:
    """`allocator` None: max-min. `gate`: which transfers may send. `as_one`: see Sharing.
    `top_up`: flows share what is not planned for them, see Tiers. `staged`: a job's flows start
    after one another; whoever runs the policy says in how many stages."""

    allocator: Callable[[], Allocator] | None = None
    gate: Callable[[], Gate] | None = None
    as_one: bool = False
    top_up: bool = True
    staged: bool = False

    def sharing(self, stages: dict[str, int] | None = None) -> Sharing:
        """New, for one run. `stages`: by job; only a `staged` policy has them."""
        return Sharing(
            self.allocator() if self.allocator else None,
            (stages or {}) if self.staged else {},
            self.as_one,
            self.gate() if self.gate else None,
        )


POLICIES: dict[str, Policy] = {
    "fair": Policy(),
    "stagger": Policy(StaggerAllocator),
    "mltcp": Policy(MltcpAllocator),
    "srpt": Policy(SrptAllocator),
    "ccml": Policy(CcmlAllocator),
    "mcs": Policy(McsAllocator, staged=True),
    "mcs-pipelined": Policy(McsAllocator),
    "mlcc": Policy(lambda: FleetAllocator(MlccOptions.repaired()), as_one=True),
    "mlcc-literal": Policy(lambda: FleetAllocator(MlccOptions()), as_one=True, top_up=False),
    "mlcc-strict": Policy(
        lambda: FleetAllocator(MlccOptions(), count_links=True), as_one=True, top_up=False
    ),
    "mlcc-prototype": Policy(PrototypeAllocator, top_up=False),
    "adadual": Policy(gate=lambda: AdaDual(CONTENTION_B, CONTENTION_ETA)),
    "srsf1": Policy(gate=Srsf),
    "srsf2": Policy(gate=lambda: Srsf(2)),
    "srsf3": Policy(gate=lambda: Srsf(3)),
    "srsf-chunked": Policy(gate=ChunkedSrsf),
}
"""`mcs-pipelined`: without its start-after."""
UNSTAGED = tuple(name for name, policy in POLICIES.items() if not policy.staged)
"""Those that can run whatever a job's flows are."""
