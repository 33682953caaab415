# SPDX-License-Identifier: Apache-2.0
"""Policies by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from flowslot.model.errors import FlowslotError
from flowslot.model.settings import one_of
from flowslot.model.slot import DEFAULT_SLOT
from flowslot.model.units import Nanos
from flowslot.policy.base import Allocator, HostPolicy
from flowslot.policy.fair import FairAllocator
from flowslot.policy.mlcc import MlccOptions, MlccPolicy
from flowslot.policy.stagger import StaggerAllocator, StaggerPolicy
from flowslot.policy.static import StaticPolicy


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """Settings of all policies; each takes what it knows."""

    floor_share: float = 1 / 4
    partial: bool = False
    """The allocator decides about some of the links only, and others about others."""
    top_up: bool | None = None
    """What the turns of a gang policy leave is granted to active flows as well; None: unless
    by a switch process beside others, see `beside_others`."""
    flows_on_link: Mapping[int, int] = field(default_factory=dict)
    slot_ns: Nanos = DEFAULT_SLOT


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


_POLICIES = {
    spec.name: spec
    for spec in (
        PolicySpec(
            "stagger",
            host_policy=lambda options: StaggerPolicy(),
            allocator=lambda options: StaggerAllocator(
                options.floor_share, partial=options.partial, top_up=options.top_up is not False
            ),
        ),
        PolicySpec("static", host_policy=lambda options: StaticPolicy(options.flows_on_link)),
        PolicySpec("fair", allocator=lambda options: FairAllocator()),
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
    )
}


def names() -> tuple[str, ...]:
    """All policy names, the default first."""
    return tuple(_POLICIES)


def get(name: str) -> PolicySpec:
    """The policy called `name`. Raises FlowslotError, with a suggestion, when there is none."""
    try:
        return _POLICIES[name]
    except KeyError:
        raise FlowslotError(f'no policy is called "{name}"; {one_of(name, _POLICIES)}') from None
