# SPDX-License-Identifier: Apache-2.0
"""What daemons tell each other, as datagrams. Imports no gRPC."""

from collections.abc import Sequence

from flowslot.model.errors import ProtocolError
from flowslot.policy.mlcc.peers import MAX_GROUPS, ROLES, Group, Progress
from flowslot_proto import flowslot_pb2 as pb
from flowslot_proto.checks import (
    check_count,
    check_counts,
    check_indices,
    check_name,
    check_rates,
    parse,
    same_length,
)

_NUMBER = {role: number for number, role in enumerate(ROLES, 1)}
_ROLE = {number: role for role, number in _NUMBER.items()}


def write_peer(host: str, n: int, said: Sequence[Progress]) -> bytes:
    """The counterpart of `read_peer`. Raises ValueError for values that no message can hold."""
    jobs: dict[str, int] = {}
    groups = [p.group for p in said]
    job = [jobs.setdefault(group.job, len(jobs)) for group in groups]
    message = pb.PeerMessage(
        host=host,
        n=n,
        jobs=list(jobs),
        job=job,
        role=[_NUMBER[group.role] for group in groups],  # type: ignore[misc]
        rank=[group.rank for group in groups],
        peer=[group.peer for group in groups],
        channel=[group.channel for group in groups],
        iteration=[p.iteration for p in said],
        total=[p.total for p in said],
        sent=[p.sent for p in said],
        by_end=[p.by_end for p in said],
    )
    return message.SerializeToString()


def read_peer(datagram: bytes) -> tuple[str, int, list[Progress]]:
    """Host, number, and what it says. Raises ProtocolError."""
    message = parse(pb.PeerMessage, datagram)
    length = same_length(
        "peer",
        job=message.job,
        role=message.role,
        rank=message.rank,
        peer=message.peer,
        channel=message.channel,
        iteration=message.iteration,
        total=message.total,
        sent=message.sent,
        by_end=message.by_end,
    )
    if length > MAX_GROUPS:
        raise ProtocolError(f"field `job`: must have at most {MAX_GROUPS} elements, got {length}")
    if len(message.jobs) > length:
        raise ProtocolError(f"field `jobs`: has {len(message.jobs)} names for {length} elements")
    jobs = [check_name(f"jobs[{i}]", job) for i, job in enumerate(message.jobs)]
    check_indices("job", message.job, len(jobs), "job names")
    for number in message.role:
        if number not in _ROLE:
            raise ProtocolError(f"field `role`: must be 1, 2 or 3, got {number}")
    for name, values in (("total", message.total), ("sent", message.sent)):
        check_rates(name, values)
    for total in message.total:
        if total < 1:
            raise ProtocolError("field `total`: must be at least 1")
    groups = map(
        Group,
        [jobs[i] for i in message.job],
        [_ROLE[number] for number in message.role],
        message.rank,
        message.peer,
        message.channel,
    )
    said = map(
        Progress,
        groups,
        check_counts("iteration", message.iteration),
        message.total,
        message.sent,
        check_rates("by_end", message.by_end),
    )
    return check_name("host", message.host), check_count("n", message.n), list(said)
