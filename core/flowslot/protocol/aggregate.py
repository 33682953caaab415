# SPDX-License-Identifier: Apache-2.0
"""What a daemon negotiates for: all flows of a job on one path, as one reservation (an aggregate,
RFC 3175).

The daemon finds out what the flows do. What is reported of them to an arbiter, and when, is decided
here.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from flowslot.model.units import MILLISECOND, SECOND, Nanos
from flowslot.protocol.grants import Granted
from flowslot.protocol.host import Host
from flowslot.protocol.messages import Demand, Done

NEVER = 2**62
"""A time at which nothing is expected."""
RESEND_SHARE, SMALL_SHARE = 0.2, 0.02
"""A demand is sent again when what remains differs by this share of the iteration's bytes from
what the arbiter can work out itself (what was sent, minus rate x time); by the smaller one if a
message is sent anyway."""
RELEARN_SHARE = 0.10
"""The same for the period and bytes that were announced for an idle aggregate."""
CAP_SHARE = 0.2
"""The same for what it can use, of the larger value."""
SAME_PHASE_NS = 10 * MILLISECOND
"""A phase that began later than the one that was reported by more than this is another one."""


@dataclass(slots=True)
class Reported:
    """What the arbiter last heard of an aggregate, and when."""

    at: Nanos
    active: bool
    onset: int
    remaining: float
    period: int
    expected: float
    cap: float
    sockets: int


@dataclass(slots=True, eq=False)
class Aggregate:
    """One reservation. Bytes are sums over its flows; times are monotonic ns, 0 unknown."""

    id: int
    job: str
    links: tuple[int, ...]
    inc: int
    active: bool = False
    remaining: float = 0.0
    target: float = 0.0
    expected: float = 0.0
    onset: int = 0
    """When the first of its active flows began."""
    due: int = NEVER
    """When the first of its flows is expected to begin again."""
    period: int = 0
    reported: Reported | None = None
    rate: float = math.nan
    ceiling: float = math.nan
    share: float = 0.0
    most: float = 0.0
    standing: bool = False
    granted: bool = False
    """Since it was last shared out; who does that sets it back."""
    flows: int = 0
    sockets: int = 1
    """How many of them take part in its iterations."""
    cap: float = math.inf
    """Most it can use, bytes/s, by what it does; inf: as much as it gets. 0: what it has yet to
    send has to come from another host first (MLCC, section III: followers give way), or none of it
    moves. What is granted beyond that would be reserved for nothing."""

    def demand(self, now: Nanos) -> Demand:
        """The aggregate's state as an arbiter wants it; it counts as reported."""
        active, reported = self.active, self.reported
        if active and (reported is None or self._is_another_phase(reported)):
            self.inc += 1
        cap = math.inf if self.standing else self.cap
        self.reported = Reported(
            now,
            active,
            self.onset,
            self.remaining,
            self.period,
            self.expected,
            cap,
            self.sockets,
        )
        return Demand(
            flow=self.id,
            inc=self.inc,
            job=self.job,
            links=self.links,
            remaining=max(int(self.remaining), 1) if active else 0,
            cap=cap,
            wait_ns=max(now - self.onset, 0) if active else 0,
            period_ns=self.period,
            next_in_ns=0 if active or self.due == NEVER else max(self.due - now, 0),
            next_bytes=int(self.expected),
            sockets=self.sockets,
        )

    def has_news(self, now: Nanos, small: bool) -> bool:
        """The arbiter cannot work out by itself what has changed since it was reported; `small`
        changes may count."""
        reported = self.reported
        if reported is None:
            return True
        resized = abs(self.expected - reported.expected) > RELEARN_SHARE * self.expected
        resized = resized or self.sockets != reported.sockets
        if self.standing:
            return resized
        if self.active != reported.active:
            return True
        soon = small or self.cap > reported.cap  # who can go on does not wait to say so
        if self.active and soon and self._uses_less_or_more(reported.cap):
            return True
        if not self.active:
            return resized or abs(self.period - reported.period) > RELEARN_SHARE * self.period
        rate = self.rate if self.rate > 0 else 0.0
        error = self._error(now, reported, rate)
        if self.most > rate:
            error = max(error, self._error(now, reported, self.most))
        tolerance = SMALL_SHARE if small else RESEND_SHARE
        return self._is_another_phase(reported) or error > tolerance * self.target

    def take(self, grant: Granted) -> None:
        """What it may send from now on; NaN: nobody has a say."""
        self.granted = True
        if self.standing and not grant.standing:
            self.reported = None  # nothing was reported for a while: tell everything
        self.rate, self.ceiling, self.share = grant.rate, grant.ceiling, grant.share
        self.standing, self.most = grant.standing, grant.most

    def _is_another_phase(self, reported: Reported) -> bool:
        return not reported.active or self.onset > reported.onset + SAME_PHASE_NS

    def _uses_less_or_more(self, reported: float) -> bool:
        """What it can use is not what the arbiter thinks."""
        low, high = sorted((self.cap, reported))
        return high - low > CAP_SHARE * high if high < math.inf else low < math.inf

    def _error(self, now: Nanos, reported: Reported, rate: float) -> float:
        """By how much an arbiter is wrong about what remains, which has granted `rate`."""
        spent = rate * (now - reported.at) / SECOND
        return abs(self.remaining - max(reported.remaining - spent, 0.0))


def report(
    now: Nanos,
    host: Host,
    aggregates: Mapping[int, Aggregate],
    gone: Sequence[Done] = (),
    *,
    small: bool = False,
    lent: Callable[[], Collection[int]] = tuple,
) -> list[Granted]:
    """Say what the arbiters do not know yet, with or without `small` news.

    Gives back the grants of phases that are over, says which aggregates are `gone`, and reports the
    others. A flow that waits gets what is given back a round trip earlier than if its arbiter had
    to take it back. `lent`, asked for when it matters: aggregates whose rate another one uses, so
    that it is not free yet.

    Returns what was granted at once, all of which the aggregates have taken.
    """
    granted: list[Granted] = []
    over = ended(aggregates.values())
    if over:
        used = lent()
        granted += take(aggregates, host.give_back([a.id for a in over if a.id not in used]))
    if gone:
        granted += take(aggregates, host.done(now, gone))
    news = [aggregate for aggregate in aggregates.values() if aggregate.has_news(now, small)]
    if news:
        demands = [aggregate.demand(now) for aggregate in news]
        granted += take(aggregates, host.demand(now, demands))
    return granted


def take(aggregates: Mapping[int, Aggregate], grants: Sequence[Granted]) -> Sequence[Granted]:
    """The aggregates may send at these rates from now on. Returns `grants`."""
    for grant in grants:
        aggregate = aggregates.get(grant.flow)
        if aggregate is not None:
            aggregate.take(grant)
    return grants


def ended(aggregates: Collection[Aggregate]) -> list[Aggregate]:
    """Those with grants to give back: of jobs whose last active flow here has ended since it was
    reported. A standing grant stays."""
    busy = {aggregate.job for aggregate in aggregates if aggregate.active}
    over = {b.job for b in aggregates if b.reported and b.reported.active and b.job not in busy}
    return [b for b in aggregates if b.job in over and b.rate > 0 and not b.standing]
