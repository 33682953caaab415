# SPDX-License-Identifier: Apache-2.0
"""A daemon's side of the negotiation with one arbiter, all but the stream itself.

The caller owns the stream and the clock. It writes what `take_message` hands out, in that order;
passes in what arrives, puts the changes into force, and only then calls `enforced`, which lets the
acknowledgements go; and looks again (`check`, `take_message`) at `next_wakeup`. What waits to be
sent is state, not a queue: the newest demand of each flow, the newest acknowledgement, one
heartbeat. So a stream that is slow, or not there, never makes the caller wait.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from flowslot.model.units import Nanos
from flowslot.protocol.grantbook import Changes, GrantBook, Granted, nothing_said
from flowslot.protocol.heart import BEAT_SLOTS, Heart
from flowslot.protocol.messages import Ack, Demand, Done, FromArbiter, FromDaemon, Heartbeat, Hello

ORPHAN_SLOTS = 2
"""Grants are kept for so long after their stream has ended, for a next one to take them over."""
PATIENCE_LEASES = 2
"""An arbiter that answers, but grants nothing to active flows, is taken over after so many; and
flows that it then grants nothing for so long are left alone, until it does."""


def aged(demand: Demand, by_ns: int) -> Demand:
    """The demand as it would be put `by_ns` later."""
    if not by_ns:
        return demand
    wait_ns = demand.wait_ns
    if demand.remaining > 0:
        # At most a period: of a flow whose grant stood nothing was heard for long.
        wait_ns = min(wait_ns + by_ns, max(wait_ns, demand.period_ns))
    return replace(demand, wait_ns=wait_ns, next_in_ns=demand.next_in_ns - by_ns)


@dataclass(slots=True)
class News:
    """What a message of the arbiter brings: put it into force, then call `enforced`.

    Who takes a while to do so asks `grant` for the rates of these flows when the time has come: a
    later message, or `give_back`, may have overtaken `changes`.
    """

    session: int
    changes: Changes = field(default_factory=Changes)
    began: bool = False
    """The arbiter is live from now on: put the grants of all flows into force, not `changes`."""
    synced: bool = False
    """It is the first that this stream answers."""
    waited_ns: int | None = None
    """From the demand of a flow that had nothing to its first grant; None: it is none of those."""
    round_trip_ns: int | None = None
    """From a heartbeat to its echo."""
    left_alone: list[int] = field(default_factory=list)
    """Flows that it refuses now, or has not answered for too long: put what `grant` says of them
    into force as well."""
    refused: list[str] = field(default_factory=list)
    """Demands that are not accepted, and why, or not answered; their flows stay without grant, and
    are left alone."""


class Negotiator:
    """Pure; `now` is monotonic nanoseconds and never goes back. Streams come one after the other.

    The arbiter is `live` while its grants are to be enforced: from the first grants (until then
    flows do better with what they have) to the end of the lease, over the ends of streams.
    """

    def __init__(
        self,
        daemon: str,
        links: Iterable[int],
        *,
        slot_ns: Nanos,
        lease_ns: Nanos,
        first_session: int,
    ) -> None:
        """`daemon`: a name as in Hello. `links`: those that the arbiter holds; it is not asked for
        flows that cross none of them. `first_session`: sessions are numbered from here on, and
        must be unique among all daemons."""
        self.links = frozenset(links)
        self.live = False
        """What the arbiter has granted is to be enforced."""
        self._slot_ns = slot_ns
        self._lease_ns = lease_ns
        self._next_session = first_session
        self._book = GrantBook(daemon, lease_ns)
        self._heart = Heart(slot_ns)
        self._asks: dict[tuple[int, ...], bool] = {}
        self._known: dict[int, tuple[Demand, Nanos]] = {}
        self._asked: dict[int, Nanos] = {}
        """Active flows that have nothing yet, and since when the arbiter is asked for them."""
        self._dirty: dict[int, None] = {}
        self._dones: dict[int, Done] = {}
        self._acks: dict[int, Ack] = {}
        self._refused: set[int] = set()
        self._open = False
        self._beats = False
        """A heartbeat is to travel with the next message."""
        self._small_at = Nanos(0)
        self._synced_at: Nanos | None = None
        self._live_at = Nanos(0)

    # --- what may be asked

    @property
    def session(self) -> int | None:
        """The session of the last stream; None: its lease is lost, only `connect` helps."""
        return self._book.session

    @property
    def lease_end(self) -> Nanos | None:
        """Until when the grants may be enforced; None: no lease, and no grants."""
        return self._book.lease_end

    @property
    def offset_us(self) -> float | None:
        """The arbiter's wall clock minus ours; None: unknown."""
        return self._heart.offset_us

    @property
    def has_news(self) -> bool:
        """There is something to say, apart from a heartbeat that may be overdue."""
        return bool(self._dirty or self._dones or self._acks or self._beats)

    @property
    def busy(self) -> bool:
        """The arbiter is asked for some flows."""
        return bool(self._known)

    def grant(self, flow: int) -> Granted:
        """What a flow may send; NaN: the arbiter has no say (yet)."""
        return self._book.grant(flow) if flow in self._book else nothing_said(flow)

    def refuses(self, flow: int) -> bool:
        """The arbiter does not accept what was last said of the flow, or does not answer."""
        return flow in self._refused

    def flows(self) -> list[int]:
        """All flows that the arbiter is asked for."""
        return list(self._known)

    def picture(self, now: Nanos) -> list[Demand]:
        """Their demands, as they would be put now."""
        return [aged(demand, now - at) for demand, at in self._known.values()]

    def is_asked_for(self, links: tuple[int, ...]) -> bool:
        """Whether the arbiter holds anything of this path."""
        asks = self._asks.get(links)
        if asks is None:
            asks = self._asks[links] = not self.links.isdisjoint(links)
        return asks

    # --- what the daemon says

    def demand(self, now: Nanos, demands: Iterable[Demand]) -> None:
        """These flows are new or have changed; those that the arbiter is not asked for are left
        out."""
        for demand in demands:
            if not self.is_asked_for(demand.links):
                continue
            flow = demand.flow
            self._known[flow] = (demand, now)
            self._dirty[flow] = None
            if demand.remaining <= 0 or demand.cap <= 0:  # nothing is what it asks for
                self._asked.pop(flow, None)
            elif self._book.grant(flow).rate <= 0 and flow not in self._refused:
                self._asked.setdefault(flow, now)

    def done(self, dones: Iterable[Done]) -> None:
        """These flows are gone."""
        for done in dones:
            if self._known.pop(done.flow, None) is not None:
                self._dones[done.flow] = self._book.drop(done.flow, done.inc)
            for waiting in (self._dirty, self._asked, self._acks):
                waiting.pop(done.flow, None)
            self._refused.discard(done.flow)

    def give_back(self, flows: Iterable[int]) -> list[Granted]:
        """Stop using these grants, and say so with the flows' demands.

        Returns what is left of them, to be put into force before the next message is taken.
        """
        given = [grant for flow in flows if (grant := self._book.give_back(flow)) is not None]
        self._dirty.update(dict.fromkeys(g.flow for g in given if g.flow in self._known))
        return given

    def beat(self, now: Nanos) -> bool:
        """Once per slot: a heartbeat, if one is due, is to travel with what is said now. True:
        small news may, too; as often as heartbeats, whatever these travel with."""
        self._beats |= self._heart.rested(now)
        small = self._beats or now > self._small_at + (BEAT_SLOTS - 0.5) * self._slot_ns
        if small:
            self._small_at = now
        return small

    # --- the stream

    def connect(self, now: Nanos) -> Hello:
        """A new stream begins; returns what its first message starts with.

        Call `check` before, and have all `News` in force: Hello says what is. Everything that is
        known is said again, right after it, with a heartbeat. No grant is standing any more.
        """
        hello = self._book.connect(now, self._next_session)
        self._next_session += 1
        self._synced_at = None
        self._dones.clear()
        self._acks.clear()
        self._dirty.clear()
        self._refused.clear()
        self.demand(now, self.picture(now))
        self._open = self._beats = True
        return hello

    def closed(self, now: Nanos) -> None:
        """The stream has ended: another one may take the grants over, for a while."""
        self._open = self._beats = False
        self._synced_at = None
        self._heart.rest()
        self._book.cut(Nanos(now + ORPHAN_SLOTS * self._slot_ns))

    def take_message(self, now: Nanos, wall_ns: int) -> FromDaemon | None:
        """What is to be written now; it counts as sent at `now`. None: nothing.

        `wall_ns`: the wall clock, for a heartbeat.
        """
        session = self._book.session
        if not self._open or session is None:
            return None
        heartbeat: Heartbeat | None = None
        if self._beats or self._heart.overdue(now) or (self._dirty and self._heart.rested(now)):
            self._beats = False
            heartbeat = self._heart.beat(now, wall_ns)
            self._book.sent_heartbeat(now, heartbeat.n)
        if heartbeat is None and not self.has_news:
            return None
        message = FromDaemon(
            session,
            list(self._dones.values()),
            [self._spoken(flow) for flow in self._dirty],
            list(self._acks.values()),
            heartbeat,
        )
        self._dones, self._dirty, self._acks = {}, {}, {}
        return message

    def _spoken(self, flow: int) -> Demand:
        """The demand as it is sent now: a grant given back stays so until another one comes."""
        demand, seq = self._known[flow][0], self._book.given_back(flow)
        return replace(demand, gave_back=seq) if seq else demand

    def received(self, now: Nanos, message: FromArbiter) -> News:
        """A message has come. Those of other streams, or too late for the lease, bring nothing."""
        news = News(message.session)
        if not self._open or message.session != self._book.session:
            return news
        if message.echo is not None:
            self._book.echoed(now, message.echo.n)
            if self._synced_at is None:
                self._synced_at, news.synced = now, True
            self._check_live(now, news)
            news.round_trip_ns = self._heart.echoed(now, message.echo)
        for refusal in message.refusals:
            self._asked.pop(refusal.flow, None)
            known = self._known.get(refusal.flow)
            if known is not None:
                self._refused.add(refusal.flow)
                news.left_alone.append(refusal.flow)
            job = known[0].job if known else refusal.flow
            news.refused.append(f"flows of job {job} refused: {refusal.reason}")
        if message.grants:
            self._refused.difference_update(grant.flow for grant in message.grants)
            changes = news.changes = self._book.receive(now, message.session, message.grants)
            raised = [grant.flow for grant in changes.raised if grant.rate > 0]
            asked = [self._asked.pop(flow) for flow in raised if flow in self._asked]
            if asked and self.live:  # not the wait for an arbiter that has just started
                news.waited_ns = now - min(asked)
            self._check_live(now, news)
        if message.echo is not None and self.live:
            self._give_up(now, news)
        return news

    def _give_up(self, now: Nanos, news: News) -> None:
        """Who waits for an arbiter that does not answer must not wait for ever."""
        since = now - PATIENCE_LEASES * self._lease_ns
        if max(self._live_at, self._synced_at or now) > since:
            return  # it has only just begun
        for flow in [flow for flow, at in self._asked.items() if at <= since]:
            del self._asked[flow]
            self._refused.add(flow)
            news.left_alone.append(flow)
            news.refused.append(f"flows of job {self._known[flow][0].job} left alone: no answer")

    def enforced(self, news: News) -> None:
        """The changes are in force: their acknowledgements may be sent."""
        if self._open and news.session == self._book.session:
            for ack in news.changes.acks:
                if ack.flow in self._known:
                    self._acks[ack.flow] = ack

    # --- the lease

    def next_wakeup(self, now: Nanos) -> Nanos | None:
        """When to `check` and `take_message` next, if nothing is said before; later than now."""
        due, end = self._heart.due, self._book.lease_end
        times = [due] if due is not None and due > now else []
        if end is not None or self.live:  # though it be over: nobody has checked yet
            times.append(Nanos(max(end or now, now + 1)))
        return min(times, default=None)

    def check(self, now: Nanos) -> bool:
        """True, once: the lease of a live arbiter has ended, and all its grants are void."""
        if not self._book.expired(now):
            return False
        self._asked.clear()
        lost, self.live = self.live, False
        return lost

    def _check_live(self, now: Nanos, news: News) -> None:
        """Live once grants are there, or nobody waits for any.

        An arbiter that has just started grants nothing for a lease.
        """
        since = self._synced_at
        if self.live or since is None or self._book.expired(now):
            return
        if not self._asked or now - since >= PATIENCE_LEASES * self._lease_ns:
            self.live = news.began = True
            self._live_at = now
