# SPDX-License-Identifier: Apache-2.0
"""The grants of a session, and the lease under which they hold."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flowslot.model.units import SECOND, Nanos
from flowslot.protocol.messages import Ack, Done, Grant, Held, Hello

MOST_HOLD_NS = 10 * SECOND
"""A flow that wants to send is held back for no longer, whatever an arbiter says."""
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
class Counts:
    """What negotiation has brought, as the daemon saw it."""

    granted: int = 0
    """Raises."""
    refused: int = 0
    preempted: int = 0
    """Lowers."""
    expired: int = 0
    """Leases that were lost."""
    error: str = ""
    """Why flows were refused last, in words."""

    def take(self, raised: int, lowered: int, refused: Sequence[str]) -> None:
        """Take what a message has brought into account."""
        self.granted += raised
        self.preempted += lowered
        self.refused += len(refused)
        if refused:
            self.error = refused[-1]


@dataclass(slots=True)
class _Entry:
    inc: int
    seq: int
    granted: Granted
    given_back: bool = False


def _checked(grant: Grant) -> Granted:
    """What the grant says; nonsense counts as nothing."""
    rate = grant.rate if 0.0 <= grant.rate < math.inf else 0.0
    share = grant.share if 0.0 <= grant.share < math.inf else 0.0
    return Granted(grant.flow, rate, grant.ceiling, grant.standing, share)


class Grants:
    """Grants of one daemon from one arbiter. Once the lease has ended, all are void, and nothing is
    accepted until the next `connect`."""

    def __init__(self, daemon: str, lease_ns: Nanos) -> None:
        self.session: int | None = None
        """Of the present stream. None: `connect` is needed."""
        self.lease_end: Nanos | None = None
        """Until when the grants may be enforced. None: no lease, and no grants."""
        self._daemon = daemon
        self._lease_ns = lease_ns
        self._entries: dict[int, _Entry] = {}
        self._holds: dict[int, int] = {}
        """Flows that send nothing for now, and until when."""
        self._dropped: dict[int, int] = {}
        self._hello_at = Nanos(0)

    def connect(self, now: Nanos, session: int) -> Hello:
        """A new stream begins. Grants still under lease are kept, and listed in its Hello."""
        self.expired(now)
        self.session = session
        self._dropped.clear()
        self._holds.clear()
        self._hello_at = now
        if self.lease_end is None:
            # Nothing is held: a grant made in this session is what the lease is for.
            self.lease_end = Nanos(now + self._lease_ns)
        for entry in self._entries.values():
            # Hello says what is held, and all numbers before it are void.
            entry.seq, entry.given_back = 0, False
            entry.granted = entry.granted._replace(standing=False)
        held = tuple(Held(flow, e.inc, e.granted.rate) for flow, e in self._entries.items())
        return Hello(self._daemon, session, held)

    def receive(
        self, now: Nanos, session: int, grants: Iterable[Grant]
    ) -> tuple[list[int], list[int], list[Ack]]:
        """Take grants in. Returns flows lowered, flows otherwise changed, and acknowledgements.

        Grants of another session, of a flow that was dropped, and repeated ones change nothing.
        """
        lowered: list[int] = []
        raised: list[int] = []
        acks: list[Ack] = []
        if self.expired(now) or session != self.session or self.lease_end is None:
            return lowered, raised, acks
        # A grant proves that Hello arrived, which counts as the first heartbeat.
        self.renew(now, self._hello_at)
        for grant in grants:
            entry = self._entries.get(grant.flow)
            if entry is None:
                if grant.inc <= self._dropped.get(grant.flow, -1):
                    continue
                entry = _Entry(grant.inc, 0, Granted(grant.flow, 0.0, 0.0))
                self._entries[grant.flow] = entry
            if grant.seq <= entry.seq:
                continue
            before, entry.granted = self.of(grant.flow), _checked(grant)
            entry.inc, entry.seq = max(entry.inc, grant.inc), grant.seq
            entry.given_back = False
            self._holds.pop(grant.flow, None)
            if grant.hold_ns > 0:
                self._holds[grant.flow] = now + min(grant.hold_ns, MOST_HOLD_NS)
            after = self.of(grant.flow)
            if after.rate < before.rate:
                lowered.append(grant.flow)
            elif after[:4] != before[:4]:  # the share alone changes nothing
                raised.append(grant.flow)
            if grant.must_ack:
                acks.append(Ack(grant.flow, grant.inc, grant.seq))
        return lowered, raised, acks

    def renew(self, now: Nanos, sent: int) -> None:
        """What was sent at `sent` has arrived: the lease runs from then (ADR 1, 7)."""
        if not self.expired(now) and self.lease_end is not None:
            self.lease_end = Nanos(max(self.lease_end, sent + self._lease_ns))

    def cut(self, end: Nanos) -> None:
        """The stream has ended: unless another one renews it, the lease ends at `end` already."""
        if self.lease_end is not None:
            self.lease_end = min(self.lease_end, end)

    def expired(self, now: Nanos) -> bool:
        """No grant may be enforced: the lease has ended, or there never was a stream.

        True until the next `connect`; all grants are forgotten at once.
        """
        if self.lease_end is not None and now >= self.lease_end:
            self.session = self.lease_end = None
            self._entries.clear()
            self._dropped.clear()
            self._holds.clear()
        return self.lease_end is None

    def of(self, flow: int) -> Granted:
        """What a flow may send; nothing when it has no grant, or is held."""
        entry = self._entries.get(flow)
        if entry is None:
            return Granted(flow, 0.0, 0.0)
        held = flow in self._holds
        return entry.granted._replace(rate=0.0, ceiling=0.0) if held else entry.granted

    def held(self, flow: int) -> bool:
        """It sends nothing for now."""
        return flow in self._holds

    def let_go(self, flow: int, by: int) -> None:
        """It is held until then at most."""
        if flow in self._holds:
            self._holds[flow] = min(self._holds[flow], by)

    def let_all_go(self, by: Nanos) -> None:
        """Nothing is held for longer."""
        for flow in self._holds:
            self.let_go(flow, by)

    @property
    def hold_end(self) -> int | None:
        """When the first hold ends; None: there is none."""
        return min(self._holds.values(), default=None)

    def opened(self, now: Nanos) -> list[int]:
        """Flows whose hold has ended since this was asked last."""
        over = [flow for flow, end in self._holds.items() if end <= now]
        for flow in over:
            del self._holds[flow]
        return over

    def give_back(self, flow: int) -> bool:
        """Stop using a flow's grant. False: it has none that the arbiter knows by its number."""
        entry = self._entries.get(flow)
        if entry is None or not entry.seq or entry.granted.rate <= 0.0:
            return False
        entry.granted, entry.given_back = entry.granted._replace(rate=0.0), True
        return True

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
        self._holds.pop(flow, None)
        inc = max(inc, entry.inc) if entry else inc
        self._dropped.pop(flow, None)
        self._dropped[flow] = inc
        if len(self._dropped) > _MAX_DROPPED:
            del self._dropped[next(iter(self._dropped))]
        return Done(flow, inc)
