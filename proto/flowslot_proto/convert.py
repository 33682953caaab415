# SPDX-License-Identifier: Apache-2.0
"""The bridge between the protobuf messages of the switch process and core's types.

Everything that comes in is checked here for its form (lengths, indices, finite numbers), so that
what goes on is well-typed; whether it makes sense is for the arbiter to say. Errors are
ProtocolErrors that name the field. Imports no gRPC: a daemon that needs none loads none.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from flowslot.model.errors import ProtocolError
from flowslot.protocol.messages import (
    Ack,
    Demand,
    Done,
    FromArbiter,
    FromDaemon,
    Grant,
    Heartbeat,
    HeartbeatEcho,
    Held,
    Hello,
    Opening,
    Refusal,
)
from flowslot_proto import flowslot_pb2 as pb
from flowslot_proto.checks import (
    MAX_NAME,
    check_count,
    check_counts,
    check_indices,
    check_name,
    check_range,
    check_rates,
    same_length,
)

MAX_LINKS = 65536
MAX_SLOTS = 1000
"""As many as a horizon may have."""


# --- writing


def write_daemon(
    message: FromDaemon, index: Mapping[int, int], opening: Opening | None = None
) -> pb.DaemonMessage:
    """The counterpart of `read_daemon`.

    `index[link]`: what one of the writer's links is called in this stream; others are left out of
    the paths. Raises ValueError for values that no message can hold (negative counts, say).
    """
    heartbeat = message.heartbeat
    return pb.DaemonMessage(
        session=message.session,
        hello=_write_opening(opening) if opening else None,
        dones=_write_dones(message.dones) if message.dones else None,
        demands=_write_demands(message.demands, index) if message.demands else None,
        acks=_write_acks(message.acks) if message.acks else None,
        heartbeat=pb.Heartbeat(n=heartbeat.n, wall_ns=heartbeat.wall_ns) if heartbeat else None,
    )


def write_arbiter(message: FromArbiter) -> pb.ArbiterMessage:
    """The counterpart of `read_arbiter`."""
    echo = message.echo
    return pb.ArbiterMessage(
        session=message.session,
        grants=_write_grants(message.grants) if message.grants else None,
        refusals=[pb.Refusal(flow=r.flow, inc=r.inc, reason=r.reason) for r in message.refusals],
        echo=pb.HeartbeatEcho(n=echo.n, wall_ns=echo.wall_ns) if echo else None,
        policy=message.policy,
    )


def _write_opening(opening: Opening) -> pb.Hello:
    held = opening.hello.held
    return pb.Hello(
        daemon=opening.hello.daemon,
        links=opening.links,
        lease_ns=opening.lease_ns,
        host=opening.host,
        held=pb.HeldBatch(
            flow=[h.flow for h in held],
            inc=[h.inc for h in held],
            rate=[h.rate for h in held],
        ),
    )


def _write_demands(demands: Sequence[Demand], index: Mapping[int, int]) -> pb.DemandBatch:
    jobs: dict[str, int] = {}
    paths: dict[tuple[int, ...], int] = {}
    job = [jobs.setdefault(d.job, len(jobs)) for d in demands]
    path = [paths.setdefault(d.links, len(paths)) for d in demands]
    mapped = [[index[link] for link in links if link in index] for links in paths]
    return pb.DemandBatch(
        jobs=list(jobs),
        path_hops=list(map(len, mapped)),
        path_links=[link for links in mapped for link in links],
        flow=[d.flow for d in demands],
        inc=[d.inc for d in demands],
        job=job,
        path=path,
        remaining=[d.remaining for d in demands],
        cap=[d.cap for d in demands],
        wait_ns=[d.wait_ns for d in demands],
        period_ns=[d.period_ns for d in demands],
        next_in_ns=[d.next_in_ns for d in demands],
        next_bytes=[d.next_bytes for d in demands],
        gave_back=[d.gave_back for d in demands],
        sockets=[d.sockets for d in demands],
    )


def _write_dones(dones: Sequence[Done]) -> pb.DoneBatch:
    return pb.DoneBatch(flow=[d.flow for d in dones], inc=[d.inc for d in dones])


def _write_acks(acks: Sequence[Ack]) -> pb.AckBatch:
    return pb.AckBatch(
        flow=[a.flow for a in acks], inc=[a.inc for a in acks], seq=[a.seq for a in acks]
    )


def _write_grants(grants: Sequence[Grant]) -> pb.GrantBatch:
    return pb.GrantBatch(
        flow=[g.flow for g in grants],
        inc=[g.inc for g in grants],
        seq=[g.seq for g in grants],
        rate=[g.rate for g in grants],
        ceiling=[g.ceiling for g in grants],
        must_ack=[g.must_ack for g in grants],
        standing=[g.standing for g in grants],
        share=[g.share for g in grants],
        hold_ns=[g.hold_ns for g in grants] if any(g.hold_ns for g in grants) else [],
    )


# --- reading


def read_opening(message: pb.DaemonMessage) -> Opening:
    """The Hello that the first message of a stream must have. Raises ProtocolError."""
    if not message.HasField("hello"):
        raise ProtocolError("field `hello`: the first message of a stream must have one")
    hello = message.hello
    links = tuple(hello.links)
    if len(links) > MAX_LINKS:
        raise ProtocolError(f"field `hello.links`: must have at most {MAX_LINKS} names")
    if len(set(links)) != len(links):
        raise ProtocolError("field `hello.links`: names a link twice")
    held = hello.held
    n = same_length("hello.held", flow=held.flow, inc=held.inc, rate=held.rate)
    rates = check_rates("hello.held.rate", held.rate)
    incs = check_counts("hello.held.inc", held.inc)
    if len(set(held.flow)) != n:
        raise ProtocolError("field `hello.held.flow`: lists a flow twice")
    return Opening(
        Hello(
            check_name("hello.daemon", hello.daemon),
            check_count("session", message.session),
            tuple(map(Held, held.flow, incs, rates)),
        ),
        links,
        check_count("hello.lease_ns", hello.lease_ns),
        check_name("hello.host", hello.host) if hello.host else "",
    )


def read_daemon(message: pb.DaemonMessage, links: Sequence[int]) -> FromDaemon:
    """All but the Hello. `links[i]`: what index i of the stream's Hello means to the reader.

    Raises ProtocolError.
    """
    return FromDaemon(
        session=check_count("session", message.session),
        dones=_read_dones(message.dones) if message.HasField("dones") else (),
        demands=_read_demands(message.demands, links) if message.HasField("demands") else (),
        acks=_read_acks(message.acks) if message.HasField("acks") else (),
        heartbeat=_read_heartbeat(message.heartbeat) if message.HasField("heartbeat") else None,
    )


def read_arbiter(message: pb.ArbiterMessage) -> FromArbiter:
    """Raises ProtocolError."""
    echo = message.echo if message.HasField("echo") else None
    return FromArbiter(
        session=check_count("session", message.session),
        grants=_read_grants(message.grants) if message.HasField("grants") else (),
        refusals=[Refusal(r.flow, r.inc, r.reason) for r in message.refusals],
        echo=HeartbeatEcho(check_count("echo.n", echo.n), check_count("echo.wall_ns", echo.wall_ns))
        if echo is not None
        else None,
        policy=check_name("policy", message.policy) if message.policy else "",
    )


def _read_demands(batch: pb.DemandBatch, links: Sequence[int]) -> list[Demand]:
    # Daemons that give nothing back, and older ones, leave columns out.
    gave_back = batch.gave_back or [0] * len(batch.flow)
    sockets = batch.sockets or [1] * len(batch.flow)
    same_length(
        "demands",
        flow=batch.flow,
        inc=batch.inc,
        job=batch.job,
        path=batch.path,
        remaining=batch.remaining,
        cap=batch.cap,
        wait_ns=batch.wait_ns,
        period_ns=batch.period_ns,
        next_in_ns=batch.next_in_ns,
        next_bytes=batch.next_bytes,
        gave_back=gave_back,
        sockets=sockets,
    )
    jobs = [check_name(f"demands.jobs[{i}]", job) for i, job in enumerate(batch.jobs)]
    paths = _read_paths(batch, links)
    check_indices("demands.job", batch.job, len(jobs), "job names")
    check_indices("demands.path", batch.path, len(paths), "paths")
    if any(map(math.isnan, batch.cap)):
        raise ProtocolError("field `demands.cap`: must be a number, or infinity for no bound")
    return list(
        map(
            Demand,
            batch.flow,
            check_counts("demands.inc", batch.inc),
            [jobs[i] for i in batch.job],
            [paths[i] for i in batch.path],
            batch.remaining,
            batch.cap,
            batch.wait_ns,
            batch.period_ns,
            batch.next_in_ns,
            batch.next_bytes,
            check_counts("demands.gave_back", gave_back),
            sockets,
        )
    )


def _read_paths(batch: pb.DemandBatch, links: Sequence[int]) -> list[tuple[int, ...]]:
    check_indices("demands.path_links", batch.path_links, len(links), "links in Hello")
    flat = [links[i] for i in batch.path_links]
    paths, start = [], 0
    for hops in batch.path_hops:
        paths.append(tuple(flat[start : start + hops]))
        start += hops
    if start != len(flat):
        raise ProtocolError(
            f"field `demands.path_hops`: sums up to {start}, but there are {len(flat)} path_links"
        )
    return paths


def _read_dones(batch: pb.DoneBatch) -> list[Done]:
    same_length("dones", flow=batch.flow, inc=batch.inc)
    return list(map(Done, batch.flow, check_counts("dones.inc", batch.inc)))


def _read_acks(batch: pb.AckBatch) -> list[Ack]:
    same_length("acks", flow=batch.flow, inc=batch.inc, seq=batch.seq)
    incs, seqs = check_counts("acks.inc", batch.inc), check_counts("acks.seq", batch.seq)
    return list(map(Ack, batch.flow, incs, seqs))


def _read_heartbeat(heartbeat: pb.Heartbeat) -> Heartbeat:
    n = check_count("heartbeat.n", heartbeat.n)
    return Heartbeat(n, check_count("heartbeat.wall_ns", heartbeat.wall_ns))


def _read_grants(batch: pb.GrantBatch) -> list[Grant]:
    # An arbiter that does not know of these leaves the columns out.
    standing = batch.standing or [False] * len(batch.flow)
    share = batch.share or [0.0] * len(batch.flow)
    hold_ns = batch.hold_ns or [0] * len(batch.flow)
    same_length(
        "grants",
        flow=batch.flow,
        inc=batch.inc,
        seq=batch.seq,
        rate=batch.rate,
        ceiling=batch.ceiling,
        must_ack=batch.must_ack,
        standing=standing,
        share=share,
        hold_ns=hold_ns,
    )
    return list(
        map(
            Grant,
            batch.flow,
            check_counts("grants.inc", batch.inc),
            check_counts("grants.seq", batch.seq),
            check_rates("grants.rate", batch.rate),
            check_rates("grants.ceiling", batch.ceiling),
            batch.must_ack,
            standing,
            check_rates("grants.share", share),
            check_counts("grants.hold_ns", hold_ns),
        )
    )


# --- names and numbers of the unary calls


def read_links(field: str, names: Iterable[str], known: Mapping[str, int]) -> tuple[int, ...]:
    """Indices of named links. Raises ProtocolError for an unknown or repeated one, or for none."""
    found: dict[str, int] = {}
    for i, name in enumerate(names):
        if name not in known:
            raise ProtocolError(f'field `{field}[{i}]`: no link "{name[:MAX_NAME]}" is held here')
        if name in found:
            raise ProtocolError(f'field `{field}[{i}]`: link "{name}" is named twice')
        found[name] = known[name]
    if not found:
        raise ProtocolError(f"field `{field}`: must name at least one link")
    return tuple(found.values())


def read_rates(field: str, values: Sequence[float], most: int) -> list[float]:
    """Rates of a request. Raises ProtocolError unless they are at most `most`, finite and >= 0."""
    if len(values) > most:
        raise ProtocolError(f"field `{field}`: must have at most {most} rates, got {len(values)}")
    return list(check_rates(field, values))


class Loads(NamedTuple):
    """What FetchFeedback answers of N links, in the order asked."""

    slot: int
    slot_ns: int
    load: list[Sequence[float]]
    """N rows of K payload bytes/s, from `slot` on; K is at least 1."""
    reservable: Sequence[float]


def read_feedback(reply: pb.FetchFeedbackReply, names: Sequence[str]) -> Loads:
    """The links that were asked have these names. Raises ProtocolError."""
    if [row.link for row in reply.links] != list(names):
        raise ProtocolError("field `links`: must be those that were asked, in their order")
    slots = len(reply.links[0].load) if names else 0
    if not 0 < slots <= MAX_SLOTS:
        problem = f"must have 1 to {MAX_SLOTS} rates, got {slots}"
        raise ProtocolError(f"field `links[0].load`: {problem}")
    for i, row in enumerate(reply.links):
        if len(row.load) != slots:
            problem = f"must have as many rates as the first ({slots}), got {len(row.load)}"
            raise ProtocolError(f"field `links[{i}].load`: {problem}")
    return Loads(
        check_count("slot", reply.slot),
        check_count("slot_ns", reply.slot_ns),
        [check_range(f"links[{i}].load", row.load, 0) for i, row in enumerate(reply.links)],
        check_range("links.reservable", [row.reservable for row in reply.links], 1),
    )
