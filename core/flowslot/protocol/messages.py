# SPDX-License-Identifier: Apache-2.0
"""Messages between a daemon and the arbiter of a contention domain.

Rates are payload bytes/s. Times are durations, never points in time: no clock is shared. `links`
are indices into the list of link names that both sides agreed on at Hello. `inc` is the flow's
incarnation: the iteration it is in; it never decreases, and a flow identifier that is used again
after Done starts with a higher one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Held:
    """A grant that the daemon enforces at the moment it says Hello.

    An arbiter that does not know the flow counts the rate on every link until its Demand arrives:
    send the demands of all flows right after Hello.
    """

    flow: int
    inc: int
    rate: float


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of a stream: replaces all that the arbiter believes about this daemon.

    `daemon` names one process of one host: a restarted daemon takes a new name, so that what its
    predecessor may still enforce stays committed until the predecessor's lease ends. `session`
    is unique among all daemons and increases with each stream of the same daemon.
    """

    daemon: str
    session: int
    held: tuple[Held, ...] = ()
    owner: str = ""
    """Whose daemon it is, as the transport has found out; names of daemons belong to owners."""


@dataclass(frozen=True, slots=True)
class Demand:
    """State of one flow: of what is scheduled as one, a socket or an aggregate of them.

    `remaining` > 0: it has bytes to send; 0: it is idle but registered.

    `cap`: most it can use (what comes from other hosts, what its peer takes); inf = no bound.
    `wait_ns`: time since it became ready.
    `period_ns`: iteration time of its job, 0 = unknown. `next_in_ns`: when it is expected to
    become ready again, once it is idle. `next_bytes`: its bytes per iteration, as far as known;
    0 = unknown, no standing grant. `gave_back`: the daemon has stopped using grant number so-and-so
    of this flow by itself, and heard of no later one; 0 = no grant was given back. `sockets`: of
    how many it consists; what is shared as TCP would share it counts these.
    """

    flow: int
    inc: int
    job: str
    links: tuple[int, ...]
    remaining: int
    cap: float = math.inf
    wait_ns: int = 0
    period_ns: int = 0
    next_in_ns: int = 0
    next_bytes: int = 0
    gave_back: int = 0
    sockets: int = 1


@dataclass(frozen=True, slots=True)
class Done:
    """The flow is gone (its socket closed)."""

    flow: int
    inc: int


@dataclass(frozen=True, slots=True)
class Ack:
    """The daemon enforces grant `seq` or a later one of this flow."""

    flow: int
    inc: int
    seq: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """`n` counts up in the life of the daemon; `wall_ns`: the sender's wall clock, for display."""

    n: int
    wall_ns: int = 0


@dataclass(frozen=True, slots=True)
class HeartbeatEcho:
    """Answer to heartbeat `n`; sent only while the arbiter honours the session's grants."""

    n: int
    wall_ns: int = 0


@dataclass(frozen=True, slots=True)
class Grant:
    """Send `flow` at `rate`; with top-up each of its sockets up to `ceiling`. `must_ack`: it lowers
    the rate.

    `standing`: it holds in all phases of the job, so nobody needs to know when the flow is active;
    only a change of what was announced (`next_bytes`) is news. When a later grant is not standing,
    the daemon answers it with a Demand. `share`: what the flow would have if all flows of its job,
    and nobody else, shared the path equally; 0 = unknown. `hold_ns`: for so long the flow sends
    nothing, not even top-up, unless another grant comes before; a hold ends with its stream, too.
    """

    flow: int
    inc: int
    seq: int
    rate: float
    ceiling: float
    must_ack: bool
    standing: bool = False
    share: float = 0.0
    hold_ns: int = 0


@dataclass(frozen=True, slots=True)
class Refusal:
    """A demand that the arbiter does not accept, and why (one sentence for a human)."""

    flow: int
    inc: int
    reason: str


# --- what travels together


@dataclass(frozen=True, slots=True)
class Opening:
    """A Hello with what only the wire needs: names of links by index, the daemon's lease, and its
    host ("": not said)."""

    hello: Hello
    links: tuple[str, ...]
    lease_ns: int
    host: str = ""


@dataclass(frozen=True, slots=True)
class FromDaemon:
    """What a daemon says at once, beside a Hello; taken in this order."""

    session: int
    dones: Sequence[Done] = ()
    acks: Sequence[Ack] = ()
    demands: Sequence[Demand] = ()
    heartbeat: Heartbeat | None = None


@dataclass(frozen=True, slots=True)
class FromArbiter:
    """What an arbiter says at once to one daemon; taken in this order."""

    session: int
    grants: Sequence[Grant] = ()
    refusals: Sequence[Refusal] = ()
    echo: HeartbeatEcho | None = None
    policy: str = ""
    """By which it decides from now on, for display; "": as before, or it does not say."""
