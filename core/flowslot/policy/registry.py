# SPDX-License-Identifier: Apache-2.0
"""Policies by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from flowslot.model.errors import FlowslotError
from flowslot.model.settings import one_of
from flowslot.model.slot import DEFAULT_SLOT
from flowslot.model.units import Nanos
from flowslot.policy.adadual import AdaDual
from flowslot.policy.base import FLOOR_SHARE, Allocator, HostPolicy
from flowslot.policy.cassini.allocator import CassiniAllocator
from flowslot.policy.ccml import CcmlAllocator
from flowslot.policy.fair import FairAllocator
from flowslot.policy.gate import Gate
from flowslot.policy.gated import GatedAllocator
from flowslot.policy.job_classes import ClassedAllocator, JobClass
from flowslot.policy.mcs import McsAllocator
from flowslot.policy.mlcc import MlccOptions, MlccPolicy
from flowslot.policy.mlcc.prototype import PrototypeAllocator
from flowslot.policy.mltcp import MltcpAllocator
from flowslot.policy.srpt import SrptAllocator
from flowslot.policy.srsf import Srsf
from flowslot.policy.srsf_chunked import ChunkedSrsf
from flowslot.policy.stagger import StaggerAllocator, StaggerPolicy
from flowslot.policy.static import StaticPolicy


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """Settings of all policies; each takes what it knows."""

    floor_share: float = FLOOR_SHARE
    partial: bool = False
    """The allocator decides about some of the links only, and others about others."""
    top_up: bool | None = None
    """What the turns of a gang policy leave is granted to active flows as well; None: unless
    by a switch process beside others, see `beside_others`. Flows that meet no other job always get
    the rest."""
    flows_on_link: Mapping[int, int] = field(default_factory=dict)
    slot_ns: Nanos = DEFAULT_SLOT
    classes: tuple[JobClass, ...] = ()
    """Of jobs, beside the policy."""


def beside_others(options: PolicyOptions) -> PolicyOptions:
    """For a switch process while others hold links of the same jobs. What it tops up takes effect
    only as far as theirs agree, and is chased all the time: it is left to the kernel (ADR 2)."""
    return replace(options, partial=True, top_up=bool(options.top_up))


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """A policy: what runs in the daemon, what runs in the arbiter (if anything).

    `feedback`: its host part is an MlccPolicy, which plans against the load tables of the links on
    its flows' paths, and reserves by explicit schedules.
    """

    name: str
    host_policy: Callable[[PolicyOptions], HostPolicy] | None = None
    """None: a daemon running it only observes."""
    allocator: Callable[[PolicyOptions], Allocator] | None = None
    feedback: bool = False

    @property
    def needs_arbiter(self) -> bool:
        """Its host part works from grants."""
        return self.host_policy is not None and self.allocator is not None


CONTENTION_B, CONTENTION_ETA = 8.53e-10, 0.235e-9
"""AdaDUAL's, seconds per byte (10 Gbit/s; its table, and its authors' code). Only their ratio has a
say in what may begin, on links of any speed."""


def _by_grants(name: str, allocator: Callable[[PolicyOptions], Allocator]) -> PolicySpec:
    """A policy that is an allocator; daemons pace every flow at its grant."""
    return PolicySpec(name, host_policy=lambda options: StaggerPolicy(), allocator=allocator)


def _gated(name: str, gate: Callable[[], Gate]) -> PolicySpec:
    return _by_grants(name, lambda options: GatedAllocator(gate(), partial=options.partial))


_POLICIES = {
    spec.name: spec
    for spec in (
        _by_grants(
            "stagger",
            lambda options: StaggerAllocator(
                options.floor_share, partial=options.partial, top_up=options.top_up is not False
            ),
        ),
        _gated("adadual", lambda: AdaDual(CONTENTION_B, CONTENTION_ETA)),
        _gated("srsf1", lambda: Srsf(1)),
        _gated("srsf2", lambda: Srsf(2)),
        _gated("srsf3", lambda: Srsf(3)),
        _gated("srsf-chunked", ChunkedSrsf),
        _by_grants("cassini", lambda options: CassiniAllocator(partial=options.partial)),
        PolicySpec("static", host_policy=lambda options: StaticPolicy(options.flows_on_link)),
        PolicySpec("fair", allocator=lambda options: FairAllocator()),
        # Live it is in the kernel (bpf/mltcp.bpf.c): a daemon has nothing to decide.
        PolicySpec("mltcp", allocator=lambda options: MltcpAllocator()),
        PolicySpec(
            "mlcc",
            host_policy=lambda options: MlccPolicy(MlccOptions.repaired(), options.slot_ns),
            feedback=True,
        ),
        # As the paper has it, but for switches that refuse what does not fit: the paper's, which
        # add everything up, are only simulated.
        PolicySpec(
            "mlcc-literal",
            host_policy=lambda options: MlccPolicy(MlccOptions(), options.slot_ns),
            feedback=True,
        ),
        _by_grants("mlcc-prototype", lambda options: PrototypeAllocator()),
        _by_grants("ccml", lambda options: CcmlAllocator()),
        _by_grants("mcs", lambda options: McsAllocator()),
        _by_grants("srpt", lambda options: SrptAllocator()),
    )
}


def allocator(name: str, options: PolicyOptions) -> Allocator:
    """What runs in an arbiter under the policy, beside the classes of jobs. Raises FlowslotError,
    when there is no such policy or it asks no arbiter."""
    make = get(name).allocator
    if make is None or not get(name).needs_arbiter:
        able = [spec.name for spec in _POLICIES.values() if spec.needs_arbiter]
        raise FlowslotError(f'no arbiter decides by "{name}"; one of: {", ".join(able)}')
    inner = make(options)
    return ClassedAllocator(inner, options.classes) if options.classes else inner


DEFAULT = next(iter(_POLICIES))


def names() -> tuple[str, ...]:
    """All policy names, the default first."""
    return tuple(_POLICIES)


def get(name: str) -> PolicySpec:
    """The policy called `name`. Raises FlowslotError, with a suggestion, when there is none."""
    try:
        return _POLICIES[name]
    except KeyError:
        raise FlowslotError(f'no policy is called "{name}"; {one_of(name, _POLICIES)}') from None
