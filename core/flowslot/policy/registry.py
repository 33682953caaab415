# SPDX-License-Identifier: Apache-2.0
"""Policies by name."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from flowslot.errors import FlowslotError
from flowslot.policy.base import Allocator, HostPolicy
from flowslot.policy.fair import FairAllocator, FairPolicy
from flowslot.policy.stagger import StaggerAllocator, StaggerPolicy
from flowslot.policy.static import StaticPolicy


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """Settings of all policies; each takes what it knows."""

    floor_share: float = 1 / 4
    partial: bool = False
    """The allocator decides about some of the links only, and others about others."""
    top_up: bool = True
    """What the turns of a gang policy leave is granted to active flows as well."""
    flows_on_link: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """A policy: what runs in the daemon, what runs in the arbiter (if anything).

    `needs_arbiter`: its host part works from grants. `paces`: it sets rates (otherwise a daemon
    running it only observes).
    """

    name: str
    host_policy: Callable[[PolicyOptions], HostPolicy]
    allocator: Callable[[PolicyOptions], Allocator] | None
    needs_arbiter: bool
    paces: bool


_POLICIES = {
    spec.name: spec
    for spec in (
        PolicySpec(
            "stagger",
            host_policy=lambda options: StaggerPolicy(),
            allocator=lambda options: StaggerAllocator(
                options.floor_share, partial=options.partial, top_up=options.top_up
            ),
            needs_arbiter=True,
            paces=True,
        ),
        PolicySpec(
            "static",
            host_policy=lambda options: StaticPolicy(options.flows_on_link),
            allocator=None,
            needs_arbiter=False,
            paces=True,
        ),
        PolicySpec(
            "fair",
            host_policy=lambda options: FairPolicy(),
            allocator=lambda options: FairAllocator(),
            needs_arbiter=False,
            paces=False,
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
        close = difflib.get_close_matches(name, _POLICIES, n=1)
        hint = f"did you mean `{close[0]}`?" if close else f"must be one of: {', '.join(_POLICIES)}"
        raise FlowslotError(f'no policy is called "{name}"; {hint}') from None
