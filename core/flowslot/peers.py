# SPDX-License-Identifier: Apache-2.0
"""What daemons tell each other: how far the flows have come that flows of the other host wait for.

A server's broadcasts wait for what all workers push, a rank of a ring for what the rank before it
sends: both for what their host receives. So the host that receives a flow is told of it, and of a
server's broadcasts all of its workers' hosts are, as Algorithm 2 (MLCC, section IV-C) wants to know
the one that is furthest. Each message replaces what its host has said before, so lost, repeated and
overtaken ones do no harm. Pure: who sends and receives is somebody else's business.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from flowslot.policy.mlcc import Dependency
from flowslot.policy.mlcc.depend import Kind
from flowslot.units import Nanos

Role = Literal["ring", "push", "pull"]
"""What a flow does: goes from rank to rank, to a parameter server, or from there."""
ROLES: tuple[Role, ...] = ("ring", "push", "pull")
PATIENCE_SLOTS = 4
"""What a host has said counts for no longer: then nothing is known of its flows."""
MAX_GROUPS = 512
"""In one message. More than a few for each GPU of the other host is no honest daemon's."""
_Name = tuple[str, Role, int, int, int]
"""Job, role, rank, peer, channel."""
_KINDS: dict[Role, Kind] = {"ring": "ring", "push": "aggregation", "pull": "broadcast"}


@dataclass(frozen=True, slots=True)
class Progress:
    """A job's flows of one role from one rank to another: `sent` bytes of `total` in this
    `iteration`, and `by_end` (F) when the current slot ends, as far as is planned.

    A ring's channels are rings of their own; what goes to and from a parameter server is striped
    over all channels, which are one here, `channel` 0.
    """

    job: str
    role: Role
    rank: int
    peer: int
    channel: int
    iteration: int
    total: float
    sent: float
    by_end: float


@dataclass(frozen=True, slots=True)
class LocalFlow:
    """A flow that starts here and ends at `host`. Bytes of this iteration: `ready` may be sent now,
    `sent` have been acknowledged. `rate`: in force, payload bytes/s."""

    flow: int
    host: str
    job: str
    role: Role
    rank: int
    peer: int
    channel: int
    iteration: int
    total: float
    ready: float
    sent: float
    rate: float


@dataclass(frozen=True, slots=True)
class _Heard:
    at: Nanos
    n: int
    said: tuple[Progress, ...]


def letters(flows: Iterable[LocalFlow], left_s: float) -> dict[str, list[Progress]]:
    """What to tell each host; `left_s`: seconds until the current slot ends."""
    groups: dict[_Name, list[LocalFlow]] = {}
    for flow in flows:
        name = flow.job, flow.role, flow.rank, flow.peer, _channel(flow)
        groups.setdefault(name, []).append(flow)
    audience: dict[tuple[str, int], dict[str, None]] = {}
    for (job, role, rank, *_), members in groups.items():
        if role == "pull":
            audience.setdefault((job, rank), {}).update(dict.fromkeys(f.host for f in members))
    told: dict[str, list[Progress]] = {}
    for (job, role, rank, *_), members in groups.items():
        one = _sum_up(members, left_s)
        hosts = audience[job, rank] if role == "pull" else dict.fromkeys(f.host for f in members)
        for host in hosts:
            told.setdefault(host, []).append(one)
    return {host: said[:MAX_GROUPS] for host, said in told.items()}


def _sum_up(flows: Sequence[LocalFlow], left_s: float) -> Progress:
    """Of one group. Sockets begin their iterations one after the other: the last one counts."""
    iteration = min(flow.iteration for flow in flows)
    total = sum(flow.total for flow in flows)
    sent = by_end = 0.0
    for flow in flows:
        done = flow.sent if flow.iteration == iteration else flow.total
        sent += done
        by_end += min(max(done + flow.rate * left_s, done), max(flow.total, done))
    of = flows[0]
    return Progress(of.job, of.role, of.rank, of.peer, _channel(of), iteration, total, sent, by_end)


class Peers:
    """What other hosts have said of flows that flows of this host depend on."""

    def __init__(self, slot_ns: Nanos) -> None:
        self._patience = PATIENCE_SLOTS * slot_ns
        self._heard: dict[str, _Heard] = {}

    def hear(self, now: Nanos, host: str, n: int, said: Sequence[Progress]) -> bool:
        """Message `n` of a host. True: a flow has ended there, or begun another iteration, so that
        it is worthwhile to decide anew. One that was overtaken has no effect."""
        known = self._heard.get(host)
        fresh = known is not None and now - known.at <= self._patience
        if known is not None and fresh and n <= known.n:
            return False
        before = {_name(p): _stage(p) for p in known.said} if known is not None else {}
        self._heard[host] = _Heard(now, n, tuple(said))
        return any(before.get(_name(p)) != _stage(p) for p in said)

    def dependencies(self, now: Nanos, flows: Iterable[LocalFlow]) -> Mapping[int, Dependency]:
        """Of each flow that has bytes to send and is known to depend on others, by identifier.

        Others' bytes are counted as the same part of this flow's own: a group of flows may be
        striped in one way over there, and in another one here.
        """
        said = [
            progress
            for heard in self._heard.values()
            if now - heard.at <= self._patience
            for progress in heard.said
        ]
        found = {}
        for flow in flows:
            others = [p for p in said if _concerns(p, flow)] if flow.sent < flow.total else []
            dependency = _dependency(flow, others)
            if dependency is not None:
                found[flow.flow] = dependency
        return found


def _channel(flow: LocalFlow) -> int:
    return flow.channel if flow.role == "ring" else 0


def _name(progress: Progress) -> _Name:
    return progress.job, progress.role, progress.rank, progress.peer, progress.channel


def _stage(progress: Progress) -> tuple[int, bool]:
    return progress.iteration, progress.sent >= progress.total


def _concerns(other: Progress, flow: LocalFlow) -> bool:
    """Whether what the flow may send, or is to send, hangs on these."""
    if other.job != flow.job:
        return False
    if flow.role == "push":
        return other.role == "pull" and other.rank == flow.peer
    if flow.role == "pull":
        return other.role == "push" and other.peer == flow.rank
    same = other.role == "ring" and other.channel == flow.channel
    return same and other.peer == flow.rank


def _dependency(flow: LocalFlow, others: Sequence[Progress]) -> Dependency | None:
    """None: nothing is known of others, or all have sent everything and hold nobody up."""
    sent, by_end = [], []
    for other in others:
        over = other.iteration > flow.iteration or (
            other.iteration == flow.iteration and other.sent >= other.total
        )
        if over:
            continue
        part = flow.total / other.total if other.iteration == flow.iteration else 0.0
        sent.append(other.sent * part)
        by_end.append(other.by_end * part)
    if not by_end:
        return None
    # What is ready has come already, or is the rank's own.
    lead = 0.0 if flow.role == "push" else flow.ready - min(sent)
    return Dependency(_KINDS[flow.role], flow.sent, tuple(by_end), lead)
