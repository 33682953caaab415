# SPDX-License-Identifier: Apache-2.0
"""The daemon's side of the negotiation: what it may send, and for how long.

Rules of the protocol kept here: an acknowledgement is made only together with the change that the
caller applies before sending it (4); messages of other sessions, of earlier lives of a flow, and
repeated ones have no effect (8); the lease counts from the moment at which the last *echoed*
heartbeat was *sent* (9), so it ends here before it ends at the arbiter, whatever the delay.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from flowslot.model.units import Nanos
from flowslot.protocol.messages import Ack, Done, Grant, Held, Hello

_MAX_PENDING = 64  # heartbeats remembered while their echo is awaited
_MAX_DROPPED = 4096  # flows remembered after their end, against grants still on their way


class Granted(NamedTuple):
    """What a flow may send: payload bytes/s; `standing` and `share` as in Grant.

    `most`: where several arbiters grant it, what the one that grants most believes that the flow
    sends at; 0 = they all know.
    """

    flow: int
    rate: float
    ceiling: float
    standing: bool = False
    share: float = 0.0
    most: float = 0.0


def nothing_said(flow: int) -> Granted:
    """No arbiter has a say about this flow (yet)."""
    return Granted(flow, math.nan, math.nan)


@dataclass(slots=True)
class Changes:
    """What a batch of grants changes. Apply `lowered` first, then `raised`, then send `acks`."""

    lowered: list[Granted] = field(default_factory=list)
    raised: list[Granted] = field(default_factory=list)
    """Also those that only begin or cease to be standing."""
    acks: list[Ack] = field(default_factory=list)


@dataclass(slots=True)
class _Entry:
    inc: int
    seq: int
    rate: float
    ceiling: float
    standing: bool = False
    share: float = 0.0
    given_back: bool = False


class GrantBook:
    """Grants of one daemon from one arbiter. Pure; `now` is monotonic nanoseconds.

    Once the lease has ended, all grants are void and nothing is accepted until the next
    `connect`: the arbiter may have given the capacity away.
    """

    def __init__(self, daemon: str, lease_ns: Nanos) -> None:
        self._daemon = daemon
        self._lease_ns = lease_ns
        self._session: int | None = None
        self._last_session = -1
        self._entries: dict[int, _Entry] = {}
        self._dropped: dict[int, int] = {}
        self._hello_at = Nanos(0)
        self._sent: dict[int, Nanos] = {}
        self._lease_end: Nanos | None = None

    @property
    def session(self) -> int | None:
        """The session of the present stream; None: there is none, `connect` is needed."""
        return self._session

    @property
    def lease_end(self) -> Nanos | None:
        """Until when the grants may be enforced; None: no lease, and no grants."""
        return self._lease_end

    def connect(self, now: Nanos, session: int) -> Hello:
        """Begin a new stream and return its first message; send all demands right after it.

        Grants still under lease are kept, and listed; what arrives later from an older stream is
        ignored. Raises ValueError unless `session` is greater than all earlier ones.
        """
        if session <= self._last_session:
            raise ValueError(f"session {session} is not greater than {self._last_session}")
        self.expired(now)
        self._session = self._last_session = session
        self._dropped.clear()
        self._sent.clear()
        self._hello_at = now
        if self._lease_end is None:
            # Nothing is held: a grant made in this session is what the lease is for.
            self._lease_end = Nanos(now + self._lease_ns)
        for entry in self._entries.values():
            # Hello says what is held, and all numbers before it are void.
            entry.seq, entry.standing, entry.given_back = 0, False, False
        held = tuple(Held(flow, e.inc, e.rate) for flow, e in self._entries.items())
        return Hello(self._daemon, session, held)

    def receive(self, now: Nanos, session: int, grants: Iterable[Grant]) -> Changes:
        """Take grants in. The caller applies the changes to the kernel FIRST, then sends the acks.

        Grants of another session, of a flow that was dropped, and repeated ones change nothing.
        """
        changes = Changes()
        if self.expired(now) or session != self._session or self._lease_end is None:
            return changes
        # A grant proves that Hello arrived, which counts as the first heartbeat.
        self._lease_end = Nanos(max(self._lease_end, self._hello_at + self._lease_ns))
        for grant in grants:
            self._take(grant, changes)
        return changes

    def _take(self, grant: Grant, changes: Changes) -> None:
        entry = self._entries.get(grant.flow)
        if entry is None:
            if grant.inc <= self._dropped.get(grant.flow, -1):
                return
            entry = self._entries[grant.flow] = _Entry(grant.inc, 0, 0.0, 0.0)
        if grant.seq <= entry.seq:
            return
        rate = grant.rate if 0.0 <= grant.rate < math.inf else 0.0
        before = (entry.rate, entry.ceiling, entry.standing)
        entry.inc = max(entry.inc, grant.inc)
        entry.seq, entry.rate, entry.ceiling = grant.seq, rate, grant.ceiling
        entry.standing, entry.given_back = grant.standing, False
        entry.share = grant.share if 0.0 <= grant.share < math.inf else 0.0
        if rate < before[0]:
            changes.lowered.append(self.grant(grant.flow))
        elif before != (rate, grant.ceiling, grant.standing):
            changes.raised.append(self.grant(grant.flow))
        if grant.must_ack:
            changes.acks.append(Ack(grant.flow, grant.inc, grant.seq))

    def sent_heartbeat(self, now: Nanos, n: int) -> None:
        """Heartbeat `n` is being sent; numbers are never used twice in the daemon's life."""
        self._sent[n] = now
        if len(self._sent) > _MAX_PENDING:
            del self._sent[next(iter(self._sent))]

    def echoed(self, now: Nanos, n: int) -> None:
        """The echo of heartbeat `n` came: the lease runs from when it was sent."""
        if self.expired(now) or n not in self._sent or self._lease_end is None:
            return
        sent = self._sent[n]
        self._sent = {m: at for m, at in self._sent.items() if at > sent}
        self._lease_end = Nanos(max(self._lease_end, sent + self._lease_ns))

    def cut(self, end: Nanos) -> None:
        """The stream has ended: unless another one renews it, the lease ends at `end` already."""
        if self._lease_end is not None:
            self._lease_end = min(self._lease_end, end)

    def expired(self, now: Nanos) -> bool:
        """No grant may be enforced: the lease has ended, or there never was a stream.

        True until the next `connect`; all grants are forgotten at once.
        """
        if self._lease_end is not None and now >= self._lease_end:
            self.reset()
        return self._lease_end is None

    def grant(self, flow: int) -> Granted:
        """What a flow may send; nothing when it has no grant."""
        entry = self._entries.get(flow)
        if entry is None:
            return Granted(flow, 0.0, 0.0)
        return Granted(flow, entry.rate, entry.ceiling, entry.standing, entry.share)

    def give_back(self, flow: int) -> Granted | None:
        """Stop using a flow's grant; put the result into force, then send a Demand of the flow.

        None: there is nothing that the arbiter would know by its number.
        """
        entry = self._entries.get(flow)
        if entry is None or not entry.seq or entry.rate <= 0.0:
            return None
        entry.rate, entry.given_back = 0.0, True
        return self.grant(flow)

    def given_back(self, flow: int) -> int:
        """Number of the grant that was given back, if no other has come since; else 0."""
        entry = self._entries.get(flow)
        return entry.seq if entry is not None and entry.given_back else 0

    def __contains__(self, flow: int) -> bool:
        return flow in self._entries

    def drop(self, flow: int, inc: int) -> Done:
        """The flow has ended, in incarnation `inc`: forget its grant, and return what to send.

        A later flow of the same identifier must start with a higher incarnation.
        """
        entry = self._entries.pop(flow, None)
        inc = max(inc, entry.inc) if entry else inc
        self._dropped.pop(flow, None)
        self._dropped[flow] = inc
        if len(self._dropped) > _MAX_DROPPED:
            del self._dropped[next(iter(self._dropped))]
        return Done(flow, inc)

    def reset(self) -> None:
        """Forget all grants and the stream; nothing is enforced any more."""
        self._session = None
        self._lease_end = None
        self._entries.clear()
        self._dropped.clear()
        self._sent.clear()
