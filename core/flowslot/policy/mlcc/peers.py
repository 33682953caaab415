# SPDX-License-Identifier: Apache-2.0
"""What daemons tell each other: how far the flows have come that flows of the other host wait for.

A server's broadcasts wait for what all workers push, a rank of a ring for what the rank before it
sends: both for what their host receives. So the host that receives a flow is told of it, and of a
server's broadcasts all of its workers' hosts are, as Algorithm 2 (MLCC, section IV-C) wants to know
the one that is furthest. Each message replaces what its host has said before, so lost, repeated and
overtaken ones do no harm. Pure: who sends and receives is somebody else's business.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from flowslot.model.units import Nanos
from flowslot.policy.mlcc import Dependency

Role = Literal["ring", "push", "pull"]
"""What a flow does: goes from rank to rank, to a parameter server, or from there."""
ROLES: tuple[Role, ...] = ("ring", "push", "pull")
PATIENCE_SLOTS = 4
"""What a host has said counts for no longer: then nothing is known of its flows."""
ASKS_PER_SLOT = 4
"""Decisions that what others say can call for."""
MAX_GROUPS = 512
"""In one message. More than a few for each GPU of the other host is no honest daemon's."""


class Group(NamedTuple):
    """A job's flows of one role from one rank to another.

    A ring's channels are rings of their own. What goes to and from a parameter server is striped
    over all channels, and is told as one, with `channel` 0.
    """

    job: str
    role: Role
    rank: int
    peer: int
    channel: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """`sent` bytes of `total` in this `iteration`, and `by_end` (F) when the current slot ends, as
    far as is planned."""

    group: Group
    iteration: int
    total: float
    sent: float
    by_end: float


@dataclass(frozen=True, slots=True)
class LocalFlow:
    """A flow that starts here and ends at `host`; its group's `channel` is its own. Bytes of this
    iteration: `ready` may be sent now, `sent` have been. `rate`: in force, payload bytes/s."""

    flow: int
    host: str
    group: Group
    iteration: int
    total: float
    ready: float
    sent: float
    rate: float


_Wanted = tuple[str, Role, int, int]
"""What flows look others up by: job, role, the rank at which the two meet, channel."""


@dataclass(frozen=True, slots=True)
class _Heard:
    at: Nanos
    n: int
    stages: dict[Group, tuple[int, bool]]
    said: dict[_Wanted, list[Progress]]


def letters(flows: Iterable[LocalFlow], left_s: float) -> dict[str, list[Progress]]:
    """What to tell each host; `left_s`: seconds until the current slot ends."""
    groups: dict[Group, list[LocalFlow]] = {}
    for flow in flows:
        groups.setdefault(_told_as(flow.group), []).append(flow)
    audience: dict[tuple[str, int], dict[str, None]] = {}
    for group, members in groups.items():
        if group.role == "pull":
            hosts = audience.setdefault((group.job, group.rank), {})
            hosts.update(dict.fromkeys(f.host for f in members))
    told: dict[str, list[Progress]] = {}
    for group, members in groups.items():
        one = _sum_up(group, members, left_s)
        pulls = group.role == "pull"
        hosts = audience[group.job, group.rank] if pulls else dict.fromkeys(f.host for f in members)
        for host in hosts:
            told.setdefault(host, []).append(one)
    return {host: said[:MAX_GROUPS] for host, said in told.items()}


def _told_as(group: Group) -> Group:
    return group if group.role == "ring" else group._replace(channel=0)


def _sum_up(group: Group, flows: Sequence[LocalFlow], left_s: float) -> Progress:
    """Of one group. Sockets begin their iterations one after the other: the last one counts."""
    iteration = min(flow.iteration for flow in flows)
    total = sum(flow.total for flow in flows)
    sent = by_end = 0.0
    for flow in flows:
        done = flow.sent if flow.iteration == iteration else flow.total
        sent += done
        by_end += min(max(done + flow.rate * left_s, done), max(flow.total, done))
    return Progress(group, iteration, total, sent, by_end)


class Peers:
    """What other hosts have said of flows that flows of this host depend on."""

    def __init__(self, slot_ns: Nanos) -> None:
        self._patience = PATIENCE_SLOTS * slot_ns
        self._pause = slot_ns // ASKS_PER_SLOT
        self._called = Nanos(-self._pause)
        """For when a decision was last called for: it may be to come."""
        self._heard: dict[str, _Heard] = {}

    def hear(self, now: Nanos, host: str, n: int, said: Sequence[Progress]) -> Nanos | None:
        """Message `n` of a host; one that was overtaken has no effect. Returns when to decide anew:
        a flow has ended there, or begun another iteration. If others have just called for that, it
        is a little later. None: nothing calls for it, or what is to come anyway will do."""
        known = self._heard.get(host)
        if known is not None and now - known.at <= self._patience and n <= known.n:
            return None
        stages = {p.group: (p.iteration, p.sent >= p.total) for p in said}
        by_need: dict[_Wanted, list[Progress]] = {}
        for p in said:
            by_need.setdefault(_met_at(p.group), []).append(p)
        self._heard[host] = _Heard(now, n, stages, by_need)
        if self._called > now or (known is not None and stages == known.stages):
            return None
        self._called = Nanos(max(now, self._called + self._pause))
        return self._called

    def dependencies(self, now: Nanos, flows: Iterable[LocalFlow]) -> Mapping[int, Dependency]:
        """Of each flow that has bytes to send and is known to depend on others, by identifier.

        Of several others only the one that counts, the slowest (of a server's broadcasts, the one
        that is furthest), and its bytes as the same part of this flow's own: what is striped in one
        way there may be in another one here.
        """
        fresh = [heard.said for heard in self._heard.values() if now - heard.at <= self._patience]
        parts: dict[tuple[_Wanted, int], tuple[float, float] | None] = {}
        found = {}
        for flow in flows:
            if flow.sent >= flow.total:
                continue
            wanted = _waits_for(flow.group)
            key = wanted, flow.iteration
            if key not in parts:
                others = [p for said in fresh for p in said.get(wanted, ())]
                parts[key] = _part_of(others, flow.iteration, flow.group.role)
            part = parts[key]
            if part is not None:
                found[flow.flow] = _dependency(flow, *part)
        return found


def _met_at(other: Group) -> _Wanted:
    """A broadcast concerns those that push to its server; all else, those that go on from where it
    arrives."""
    meets = other.rank if other.role == "pull" else other.peer
    return other.job, other.role, meets, other.channel


def _waits_for(group: Group) -> _Wanted:
    if group.role == "push":
        return group.job, "pull", group.peer, 0
    if group.role == "pull":
        return group.job, "push", group.rank, 0
    return group.job, "ring", group.rank, group.channel


def _part_of(others: Iterable[Progress], iteration: int, role: Role) -> tuple[float, float] | None:
    """How far others are, as parts of the whole: now, and when the slot ends. None: nothing is
    known of them, or all have sent everything and hold nobody up."""
    parts = []
    for other in others:
        if other.iteration < iteration:
            parts.append((0.0, 0.0))
        elif other.iteration == iteration and other.sent < other.total:
            parts.append((other.sent / other.total, min(other.by_end / other.total, 1.0)))
    if not parts:
        return None
    now, then = zip(*parts, strict=True)
    return min(now), max(then) if role == "push" else min(then)


def _dependency(flow: LocalFlow, now: float, then: float) -> Dependency:
    # What is ready has come already, or is the rank's own.
    lead = math.inf if flow.group.role == "push" else flow.ready - now * flow.total
    return Dependency(flow.sent, then * flow.total, lead)
