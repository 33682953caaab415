# SPDX-License-Identifier: Apache-2.0
"""All sessions of a daemon as one, and what it does when no switch process is live.

Several arbiters, each of some of the links, grant together: the least of what they say. A flow is
paced at the smallest rate that any arbiter of its path grants. So a raise takes effect once all
agree to it, a lower takes effect at once, and each can be acknowledged by itself. An arbiter counts
while its session is live. Until it has answered for a flow, the flow has nothing on its links (and
the kernel's top-up). When its lease is lost, what the others say holds.

While no session is live the host shares out its own links by an arbiter of its own (Loopback). That
one begins anew each time, from all demands as they would be put then. The first session that is
live takes over.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from flowslot.model.units import Nanos
from flowslot.protocol.grants import Counts, Granted, nothing_said
from flowslot.protocol.loopback import Loopback
from flowslot.protocol.messages import Demand, Done, FromArbiter, FromDaemon, Opening
from flowslot.protocol.session import News, Session, aged

ENTRY_SLOTS = 2
"""What is in force outlives the last sign of life of its daemon by so many slots."""


@dataclass(slots=True)
class Changes:
    """What is to be put into force, in this order, before anything else is said.

    All that a Host returns is put into force in the order in which it was returned: a raise may
    need a lower that came before it, though by another session.
    """

    grants: list[Granted] = field(default_factory=list)
    """A rate of NaN: no arbiter has a say, leave the flow alone."""
    news: News | None = None
    """What the message that caused this has brought: call `enforced` with it afterwards."""
    lost: list[int] = field(default_factory=list)
    """Sessions whose leases have ended: `deadline` may be later than before."""


def combined(flow: int, said: Sequence[Granted]) -> Granted:
    """The least of what live arbiters say about a flow. A rate of NaN: that one has not answered.

    When none has, the flow is left alone. When some have not, it has nothing yet. It is standing
    when it is for all of them, as otherwise one has to hear of its phases.
    """
    answers = [grant for grant in said if not math.isnan(grant.rate)]
    if not answers:
        return nothing_said(flow)
    if len(said) == 1:
        return said[0]
    least, most = (pick(grant.rate for grant in answers) for pick in (min, max))
    if len(answers) < len(said):
        least = 0.0
    return Granted(
        flow,
        least,
        min(grant.ceiling for grant in answers),
        all(grant.standing for grant in said),
        min(grant.share for grant in answers),
        most if most > least else 0.0,
    )


class Host:
    """`now` is monotonic nanoseconds. No I/O: see Session for what the streams' owner has to do."""

    def __init__(
        self,
        sessions: Sequence[Session],
        make_own: Callable[[Nanos], Loopback],
        slot_ns: Nanos,
    ) -> None:
        """`sessions`: no two hold the same link."""
        self.sessions = tuple(sessions)
        self.own: Loopback | None = None
        """The arbiter of this host's own links, while no session is live."""
        self.counts, self.own_counts = Counts(), Counts()
        """Of switch processes, and of the own arbiter."""
        self._make_own = make_own
        self._slot_ns = slot_ns
        self._known: dict[int, tuple[Demand, Nanos]] = {}
        self._asked: dict[tuple[int, ...], tuple[Session, ...]] = {}

    def start(self, now: Nanos) -> None:
        """Begin, without any switch process."""
        self._to_own(now)

    # --- what the daemon says

    def demand(self, now: Nanos, demands: Sequence[Demand]) -> list[Granted]:
        """These flows are new or have changed. Returns what is to be put into force at once."""
        self._known.update((demand.flow, (demand, now)) for demand in demands)
        for session in self.sessions:
            session.demand(now, demands)
        return self._load(now, demands, ())

    def done(self, now: Nanos, dones: Sequence[Done]) -> list[Granted]:
        """These flows are gone. Returns what is to be put into force at once."""
        for done in dones:
            self._known.pop(done.flow, None)
        for session in self.sessions:
            session.done(dones)
        return self._load(now, (), dones)

    def give_back(self, flows: Iterable[int]) -> list[Granted]:
        """Stop using the grants of these flows, whose phase has ended; say so with their demands.

        Returns what they have now, to be put into force before the next message is taken. The own
        arbiter answers at once, and needs no help: nothing changes.
        """
        if self.own is not None:
            return []
        wanted = list(flows)
        given = dict.fromkeys(f for session in self.sessions for f in session.give_back(wanted))
        left = [self.grant(flow) for flow in given]
        return [grant for grant in left if not math.isnan(grant.rate)]

    def beat(self, now: Nanos) -> bool:
        """Once per slot, see Session.beat. What is said to the own arbiter costs no message."""
        small = [session.beat(now) for session in self.sessions]  # all of them
        return any(small) or self.own is not None

    # --- streams, by the number of their session

    def connect(self, now: Nanos, k: int) -> tuple[Opening, Changes]:
        """See Session.connect. What stood in the last stream does not stand in this one."""
        changes = self.wake(now)
        session = self.sessions[k]
        opening = session.connect(now)
        if session.live:
            changes.grants += map(self.grant, session.flows())
        return opening, changes

    def closed(self, now: Nanos, k: int, jitter: float = 1.0) -> Changes:
        """See Session.closed."""
        self.sessions[k].closed(now, jitter)
        return self.wake(now)

    def received(self, now: Nanos, k: int, message: FromArbiter) -> Changes:
        """See Session.received."""
        session = self.sessions[k]
        news = session.received(now, message)
        self.counts.take(len(news.raised), len(news.lowered), news.refused)
        flows: list[int] = []
        if news.began:
            flows = session.flows() if self.own is None else list(self._known)
            self.own = None
        elif session.live:
            flows = [*news.lowered, *news.raised, *news.left_alone]
        return Changes([self.grant(flow) for flow in flows], news)

    def enforced(self, k: int, changes: Changes) -> None:
        """These changes are in force: their acknowledgements may be sent."""
        if changes.news is not None:
            self.sessions[k].enforced(changes.news)

    def take_message(self, now: Nanos, k: int, wall_ns: int) -> FromDaemon | None:
        """See Session.take_message."""
        return self.sessions[k].take_message(now, wall_ns)

    # --- time

    def wake(self, now: Nanos) -> Changes:
        """End leases in time, and let the own arbiter decide. At `next_wakeup` at the latest."""
        changes = Changes()
        for k, session in enumerate(self.sessions):
            if session.check(now):
                changes.lost.append(k)
        self.counts.expired += len(changes.lost)
        if changes.lost and not self.live:
            self._to_own(now)
            changes.grants = [self.grant(flow) for flow in self._known]
        elif changes.lost:
            lost = {flow: None for k in changes.lost for flow in self.sessions[k].flows()}
            changes.grants = [self.grant(flow) for flow in lost]
        elif self.own is not None and now >= self.own.next_wakeup:
            changes.grants = self.own.settle(now)
        opened = dict.fromkeys(flow for session in self.sessions for flow in session.opened(now))
        changes.grants += map(self.grant, opened)
        return changes

    def next_wakeup(self, now: Nanos) -> Nanos | None:
        """When to `wake`, dial and take messages next, if nothing is said before."""
        times = [session.next_wakeup(now) for session in self.sessions]
        if self.own is not None:
            times.append(self.own.next_wakeup)
        return min((at for at in times if at is not None), default=None)

    def deadline(self, now: Nanos) -> Nanos:
        """Until when what is in force may stay so unheard: not beyond the first lease to end."""
        own = Nanos(now + ENTRY_SLOTS * self._slot_ns)
        lease = self.lease_end
        return own if lease is None else min(own, lease)

    # --- what may be asked

    @property
    def live(self) -> bool:
        """Some session is; the grants of these are to be enforced."""
        return any(session.live for session in self.sessions)

    @property
    def lease_end(self) -> Nanos | None:
        """The first moment at which grants become void; None: there are none, or no end."""
        if self.own is not None:
            return None
        leases = (s.lease_end for s in self.sessions if s.live and s.flows())
        return min((end for end in leases if end is not None), default=None)

    def grant(self, flow: int) -> Granted:
        """What a flow may send; NaN: no live arbiter has a say (yet)."""
        if self.own is not None:
            return self.own.session.grant(flow)
        known = self._known.get(flow)
        if known is None:
            return nothing_said(flow)
        live = [session for session in self._sessions_of(known[0].links) if session.live]
        if any(session.refuses(flow) for session in live):
            return nothing_said(flow)
        return combined(flow, [session.grant(flow) for session in live])

    def covers(self, links: tuple[int, ...]) -> bool:
        """Live arbiters hold every one of these links. A path that goes on beyond this host is not
        the own arbiter's to guarantee."""
        if self.own is not None:
            held = len(self.own.session.links.intersection(links))
        else:
            live = (s for s in self._sessions_of(links) if s.live)
            held = sum(len(session.links.intersection(links)) for session in live)
        return bool(links) and held == len(set(links))

    def flows(self) -> list[int]:
        """All flows that were asked for."""
        return list(self._known)

    def picture(self, now: Nanos) -> list[Demand]:
        """All demands, as they would be put now."""
        return [aged(demand, now - at) for demand, at in self._known.values()]

    # --- inside

    def _load(self, now: Nanos, demands: Sequence[Demand], dones: Sequence[Done]) -> list[Granted]:
        if self.own is None or not (demands or dones):
            return []
        return self.own.settle(now, demands, dones)

    def _to_own(self, now: Nanos) -> None:
        self.own = self._make_own(now)
        self.own.counts = self.own_counts
        self.own.settle(now, self.picture(now))

    def _sessions_of(self, links: tuple[int, ...]) -> tuple[Session, ...]:
        asked = self._asked.get(links)
        if asked is None:
            asked = tuple(s for s in self.sessions if s.is_asked_for(links))
            self._asked[links] = asked
        return asked
