# SPDX-License-Identifier: Apache-2.0
"""The two kinds of policy objects, and what they see.

Shapes: F flows, L links, H the longest path, K slots. Paths are int32[F, H], padded with the
index L; arrays over links that are indexed by a path have L + 1 entries, the last one without
bound. Rates are payload bytes/s, float64.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from flowslot.model.schedule import Schedule
from flowslot.model.units import Nanos

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Rows = NDArray[np.intp]
Bools = NDArray[np.bool_]
Paths = NDArray[np.int32]

FLOOR_SHARE = 0.1
"""Part of its max-min fair rate that is always a flow's own under `stagger` (ADR 2)."""


class Keys(NamedTuple):
    """What tells N jobs or aggregates apart, from one allocation to the next.

    A number that is used for another one, or again after all its flows had gone, has another
    `turn`.
    """

    numbers: Rows  # [N] small, and different in the whole domain
    turns: Ints  # [N]

    @classmethod
    def lasting(cls, n: int) -> "Keys":
        """Of N that never change."""
        return cls(np.arange(n), np.zeros(n, np.int64))


@dataclass(frozen=True, slots=True, eq=False)
class AllocationState:
    """What an allocator sees: flows of a contention domain, and all flows that share a link or a
    job with one of these. Read only. L, J and G (aggregates, a job's flows on one path) are those
    of the flows that it sees.

    A flow whose path is not known has one of only L, and nothing to send.
    A flow with `remaining` > 0 is active. An idle one is expected to become active in `due_ns`
    (negative: overdue), and was last active `idle_ns` ago.
    """

    paths: Paths  # int32[F, H], padded with L
    capacity: Floats  # [L + 1]: what may be given out; last inf
    goodput: Floats  # [L + 1]: what the links carry; last inf
    job: Ints  # [F]: index into job_names
    job_names: Sequence[str]
    jobs: Keys  # of J
    flow: NDArray[np.uint64]  # [F]: identifier, for ties
    aggregate: Ints  # [F]: which of G
    aggregates: Keys  # of G
    remaining: Floats  # [F] bytes, estimated for now
    cap: Floats  # [F] most it can use; 0: it cannot send now, and is stalled; inf: no bound
    sockets: Floats  # [F] at least 1: so many flows it is, to what is shared as TCP would
    wait_ns: Floats  # [F] since it became ready (0 when idle)
    period_ns: Floats  # [F] iteration time of its job, 0 = unknown
    due_ns: Floats  # [F]
    next_bytes: Floats  # [F] bytes per iteration, 0 = unknown
    idle_ns: Floats  # [F] (inf: never active; 0 when active)
    goal: Floats  # [F]: what the flow was to have after the last allocation
    links: Rows | None = None
    """[L] numbers of the links in the whole domain, from one allocation to the next; None: their
    indices."""

    @property
    def link_numbers(self) -> Rows:
        """[L], see `links`."""
        return np.arange(len(self.capacity) - 1) if self.links is None else self.links


class Terms(NamedTuple):
    """What goes with the targets of F flows."""

    standing: Bools | None = None
    """[F]: the target holds in all phases of the job: the flow's activity is not reported any more.
    None: no flow's."""
    hold: Ints | None = None
    """[F]: until when (the arbiter's clock) the flow is to send nothing, not even top-up; 0: it
    may. None: all may."""
    most: Floats | None = None
    """[F]: bytes/s up to which it may top up; the target, if that is more. None: no bound."""


NO_TERMS = Terms()


class Allocator(Protocol):
    """Runs in the arbiter: shares links out among flows. What it says beside rates is about the
    flows that it was asked for last."""

    def allocate(self, state: AllocationState, now: Nanos) -> Floats:
        """Target rate of each flow, float64[F]; their sum on each link is within its capacity."""
        ...

    def next_change(self, state: AllocationState) -> Floats:
        """In how many ns each flow, by being there, may change targets although nothing is
        reported, float64[F]; inf: never; 0: at any time, little by little."""
        return np.full(len(state.remaining), np.inf)

    def terms(self) -> Terms:
        """What goes with the targets that were allocated last."""
        return NO_TERMS


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """What a host policy sees: the flows that start at this host, packed. Read only."""

    slot: int
    horizon: int
    capacity: Floats  # [L] goodput of each link
    flow: NDArray[np.uint64]  # [F] identifier (socket cookie)
    paths: Paths  # int32[F, H], padded with L; a row of only L: not mapped
    job: Ints  # [F]: index into job_names
    job_names: Sequence[str]
    remaining: Floats  # [F] bytes; > 0: active
    guaranteed: Bools  # [F] a live arbiter holds every link of the path
    load: Floats | None = None  # [L, K] load table, for policies that ask for feedback
    passed: float = 0.0  # part of the slot that is over
    sent: Floats | None = None  # [F] bytes sent so far; NaN: they are not counted
    grants: Floats | None = None  # [F] granted rates; NaN: no arbiter has a say
    ceilings: Floats | None = None  # [F] granted ceilings


@dataclass(frozen=True, slots=True, eq=False)
class Pace:
    """Send each of N flows at its rate of the schedule; with top-up up to its ceiling.

    `guaranteed`: an arbiter holds capacity for the flow on every link of its path, so that loss is
    no reason to slow down. Otherwise the rate is only an upper bound for congestion control.
    """

    flows: NDArray[np.uint64]  # [N]
    schedule: Schedule  # of N flows
    ceilings: NDArray[np.float64]  # [N], payload bytes/s
    guaranteed: NDArray[np.bool_]  # [N]


class HostPolicy(Protocol):
    """Runs in the daemon: turns grants (and what the policy sees itself) into rates."""

    def decide(self, now: Nanos, view: View) -> Pace:
        """Rates from the slot `view.slot` on. Other flows are not paced."""
        ...
