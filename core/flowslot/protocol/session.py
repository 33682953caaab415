# SPDX-License-Identifier: Apache-2.0
"""A daemon's end of the negotiation with one arbiter.

Theory of operation
===================
A `Session` does no I/O and reads no clock. The caller owns the stream, and passes in `now`
(monotonic nanoseconds, never going back) and what arrives. Streams come one after the other:

1. `dial` says when to open a stream. When it is open, `connect` returns its first message.
   When it has ended, or could not be opened, the caller says `closed`.
2. `demand`, `done`, `give_back` and `beat` only change state. What waits to be sent is state, not
   a queue: the newest demand of each flow, the newest acknowledgement, one heartbeat.
   `take_message` collects it as one message. So a slow or missing stream never holds the caller up.
3. `received` returns `News`: flows whose grants have changed, lowers first. The caller puts them
   into force, and only then calls `enforced`, which lets the acknowledgements go (ADR 1, 3: an
   arbiter raises others only after a lower was acknowledged).
4. At `next_wakeup` the caller calls `check`, which ends the lease in time, and `take_message`.

The states of a session, and what may be enforced in each. A session is `live` while its grants are
to be enforced; until then flows do better with what they have.

| state    | stream | lease  | live | leaves it by                                             |
| -------- | ------ | ------ | ---- | -------------------------------------------------------- |
| DOWN     | no     | rest   | no   | `connect` -> GREETED                                     |
| GREETED  | open   | begun  | no   | first echo -> SYNCED                                     |
| SYNCED   | open   | runs   | no   | a grant, or no flow waits for one, or patience -> LIVE   |
| LIVE     | open   | runs   | yes  | lease ends -> LOST; `closed` -> ORPHANED                 |
| ORPHANED | no     | 2 slots| yes  | `connect` -> LIVE with all grants; lease ends -> DOWN    |
| LOST     | open   | no     | no   | the caller ends the stream: `closed` -> DOWN             |

GREETED and SYNCED become DOWN by `closed`, and LOST when the lease ends. When the lease ends all
grants are void at once: the arbiter may have given the capacity away. In DOWN, what was granted
before the session was live may still have a rest of its lease, of 2 slots at most. The next Hello
lists it.

The lease counts from the moment at which the last *echoed* heartbeat was *sent* (ADR 1, 7), so it
ends here before it ends at the arbiter, whatever the delay. Messages of other sessions, of earlier
lives of a flow, and repeated ones have no effect (ADR 1, 9).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from flowslot.model.units import MILLISECOND, SECOND, Nanos
from flowslot.protocol.grants import MOST_HOLD_NS, Granted, Grants, nothing_said
from flowslot.protocol.heartbeats import BEAT_SLOTS, Heartbeats
from flowslot.protocol.messages import (
    Ack,
    Demand,
    Done,
    FromArbiter,
    FromDaemon,
    Heartbeat,
    Hello,
    Opening,
)

ORPHAN_SLOTS = 2
"""Grants are kept for so many slots after their stream has ended, for the next stream."""
PATIENCE_LEASES = 2
"""An arbiter that answers, but grants nothing to active flows, counts as live after so many leases.
Flows that it grants nothing for so long after that are left alone, until it does."""
FIRST_RETRY_NS, LAST_RETRY_NS = 20 * MILLISECOND, SECOND
"""Wait before a stream is opened again. It doubles until a stream has been answered."""


def aged(demand: Demand, by_ns: int) -> Demand:
    """The demand as it would be put `by_ns` later."""
    wait_ns = demand.wait_ns
    if demand.remaining > 0:
        # At most a period: a flow with a standing grant has not been reported for long.
        wait_ns = min(wait_ns + by_ns, max(wait_ns, demand.period_ns))
    return replace(demand, wait_ns=wait_ns, next_in_ns=demand.next_in_ns - by_ns)


def _asks(demand: Demand) -> bool:
    """It is for more than nothing."""
    return demand.remaining > 0 and demand.cap > 0


@dataclass(slots=True)
class News:
    """What a message of the arbiter brings. Put `grant` of these flows into force, in this order,
    then call `enforced`."""

    session: int
    lowered: list[int] = field(default_factory=list)
    raised: list[int] = field(default_factory=list)
    """Also flows whose grants only begin or cease to be standing."""
    left_alone: list[int] = field(default_factory=list)
    """Flows that the arbiter refuses now, or has not answered for too long."""
    acks: list[Ack] = field(default_factory=list)
    began: bool = False
    """The session is live from now on: put the grants of all its flows into force."""
    synced: bool = False
    """It is the first answer on this stream."""
    waited_ns: int | None = None
    """From the demand of a flow that had nothing to its first grant."""
    round_trip_ns: int | None = None
    """From a heartbeat to its echo."""
    refused: list[str] = field(default_factory=list)
    """Why flows are left alone, in words."""


class Session:
    """See the theory of operation above."""

    def __init__(
        self,
        daemon: str,
        links: Sequence[int],
        names: Sequence[str],
        *,
        slot_ns: Nanos,
        lease_ns: Nanos,
        first_session: int,
    ) -> None:
        """`daemon`: a name as in Hello. `links`: those that the arbiter holds, as the caller
        numbers them, and their names. It is not asked for flows that cross none of them.
        `first_session`: sessions are numbered from here on, and must be unique among daemons."""
        self.links = frozenset(links)
        self.live = False
        """What the arbiter has granted is to be enforced."""
        self.policy = ""
        """By which the arbiter decides, as it says; "": it does not."""
        self._names = tuple(names)
        self._index = {link: i for i, link in enumerate(links)}
        self._paths: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._slot_ns, self._lease_ns = slot_ns, lease_ns
        self._patience_ns = PATIENCE_LEASES * lease_ns
        self._next_session = first_session
        self._grants = Grants(daemon, lease_ns)
        self._heart = Heartbeats(slot_ns)
        self._known: dict[int, tuple[Demand, Nanos]] = {}
        """The last demand of each flow, its path as this session numbers links, and since when."""
        self._asked: dict[int, Nanos] = {}
        """Active flows that have nothing yet, and since when the arbiter is asked for them."""
        self._refused: set[int] = set()
        self._dirty: dict[int, None] = {}
        self._dones: dict[int, Done] = {}
        self._acks: dict[int, Ack] = {}
        self._beats = False
        """A heartbeat is to travel with the next message."""
        self._open = self._dialling = False
        self._retry_ns, self._retry_at = FIRST_RETRY_NS, Nanos(0)
        self._small_at = self._live_at = Nanos(0)
        self._synced_at: Nanos | None = None

    # --- what may be asked

    @property
    def session(self) -> int | None:
        """The session of the last stream. None: its lease is lost, only `connect` helps."""
        return self._grants.session

    @property
    def lost(self) -> bool:
        """The stream is open, but its lease has ended: the caller has to end the stream."""
        return self._open and self._grants.session is None

    @property
    def lease_end(self) -> Nanos | None:
        """Until when the grants may be enforced. None: no lease, and no grants."""
        return self._grants.lease_end

    @property
    def offset_us(self) -> float | None:
        """The arbiter's wall clock minus ours. None: unknown."""
        return self._heart.offset_us

    @property
    def has_news(self) -> bool:
        """There is something to say, apart from a heartbeat that may be overdue."""
        return bool(self._dirty or self._dones or self._acks or self._beats)

    def held(self, flow: int) -> bool:
        """The arbiter holds the flow back for now."""
        return self._grants.held(flow)

    def grant(self, flow: int) -> Granted:
        """What a flow may send. NaN: the arbiter has no say (yet)."""
        return self._grants.of(flow) if flow in self._grants else nothing_said(flow)

    def refuses(self, flow: int) -> bool:
        """The arbiter does not accept the flow's last demand, or does not answer it."""
        return flow in self._refused

    def flows(self) -> list[int]:
        """All flows that the arbiter is asked for."""
        return list(self._known)

    def is_asked_for(self, links: tuple[int, ...]) -> bool:
        """Whether the arbiter holds any link of this path."""
        return bool(self._path(links))

    # --- what the daemon says

    def demand(self, now: Nanos, demands: Iterable[Demand]) -> None:
        """These flows are new or have changed. Flows that cross no link of the arbiter are left
        out."""
        for demand in demands:
            path = self._path(demand.links)
            if path:
                self._demand(now, replace(demand, links=path))

    def _demand(self, now: Nanos, demand: Demand) -> None:
        flow = demand.flow
        self._known[flow] = (demand, now)
        self._dirty[flow] = None
        if not _asks(demand):
            self._asked.pop(flow, None)
        elif self._grants.of(flow).rate <= 0 and flow not in self._refused:
            self._asked.setdefault(flow, now)

    def done(self, dones: Iterable[Done]) -> None:
        """These flows are gone."""
        for done in dones:
            if self._known.pop(done.flow, None) is not None:
                self._dones[done.flow] = self._grants.drop(done.flow, done.inc)
            for waiting in (self._dirty, self._asked, self._acks):
                waiting.pop(done.flow, None)
            self._refused.discard(done.flow)

    def give_back(self, flows: Iterable[int]) -> list[int]:
        """Stop using these grants, and say so with the flows' demands.

        Returns the flows that had one: put what is left of it into force before the next message
        is taken.
        """
        given = [flow for flow in flows if self._grants.give_back(flow)]
        self._dirty.update((flow, None) for flow in given if flow in self._known)
        return given

    def beat(self, now: Nanos) -> bool:
        """Once per slot: a heartbeat, if one is due, is to travel with what is said now.

        True: small news may travel, too. They may as often as heartbeats do.
        """
        self._beats |= self._heart.rested(now)
        small = self._beats or now > self._small_at + (BEAT_SLOTS - 0.5) * self._slot_ns
        if small:
            self._small_at = now
        return small

    # --- the stream

    def dial(self, now: Nanos) -> bool:
        """True, once: the time has come to open a stream. `connect` or `closed` has to follow."""
        if self._open or self._dialling or now < self._retry_at:
            return False
        self._dialling = True
        return True

    def connect(self, now: Nanos) -> Opening:
        """A stream is open. Returns what its first message starts with.

        Call `check` before, and have all `News` in force: Hello says what is. Everything that is
        known is said again, right after it, with a heartbeat. No grant is standing any more.
        """
        hello: Hello = self._grants.connect(now, self._next_session)
        self._next_session += 1
        self._synced_at = None
        for waiting in (self._dones, self._acks, self._dirty, self._refused):
            waiting.clear()
        for demand, at in list(self._known.values()):
            self._demand(now, aged(demand, now - at))
        self._open = self._beats = True
        self._dialling = False
        return Opening(hello, self._names, self._lease_ns)

    def closed(self, now: Nanos, jitter: float = 1.0) -> None:
        """The stream has ended, or could not be opened. Another one may take the grants over, for
        a while. `jitter`, about 1: all daemons lose a switch at the same moment, and must not come
        back at the same."""
        if self._synced_at is not None:
            self._retry_ns = FIRST_RETRY_NS
        self._retry_at = Nanos(now + int(self._retry_ns * jitter))
        self._retry_ns = min(2 * self._retry_ns, LAST_RETRY_NS)
        if self._open:
            self._heart.rest()
            self._grants.cut(Nanos(now + ORPHAN_SLOTS * self._slot_ns))
            self._grants.let_all_go(now)  # nobody is there who could let them go in time
        self._open = self._dialling = self._beats = False
        self._synced_at = None

    def take_message(self, now: Nanos, wall_ns: int) -> FromDaemon | None:
        """What is to be written now. It counts as sent at `now`. None: nothing.

        `wall_ns`: the wall clock, for a heartbeat.
        """
        session = self._grants.session
        if not self._open or session is None:
            return None
        heartbeat: Heartbeat | None = None
        if self._beats or self._heart.overdue(now) or (self.has_news and self._heart.rested(now)):
            self._beats = False
            heartbeat = self._heart.beat(now, wall_ns)
        if heartbeat is None and not self.has_news:
            return None
        message = FromDaemon(
            session,
            list(self._dones.values()),
            list(self._acks.values()),
            [self._spoken(flow) for flow in self._dirty],
            heartbeat,
        )
        self._dones, self._dirty, self._acks = {}, {}, {}
        return message

    def _spoken(self, flow: int) -> Demand:
        """The demand as it is sent now. A grant given back stays so until another one comes."""
        demand, seq = self._known[flow][0], self._grants.given_back(flow)
        return replace(demand, gave_back=seq) if seq else demand

    def received(self, now: Nanos, message: FromArbiter) -> News:
        """A message has come. Those of other streams, or too late for the lease, bring nothing."""
        news = News(message.session)
        if not self._open or message.session != self._grants.session:
            return news
        self.policy = message.policy or self.policy
        if message.echo is not None:
            news.round_trip_ns = self._heart.echoed(now, message.echo)
            if news.round_trip_ns is not None:
                self._grants.renew(now, now - news.round_trip_ns)
            if self._synced_at is None:
                self._synced_at, news.synced = now, True
            self._check_live(now, news)
        for refusal in message.refusals:
            self._asked.pop(refusal.flow, None)
            self._grants.let_go(refusal.flow, now)
            known = self._known.get(refusal.flow)
            if known is not None:
                self._refused.add(refusal.flow)
                news.left_alone.append(refusal.flow)
            job = known[0].job if known else refusal.flow
            news.refused.append(f"flows of job {job} refused: {refusal.reason}")
        if message.grants:
            self._take_grants(now, message, news)
        if message.echo is not None and self.live:
            self._give_up(now, news)
        return news

    def _take_grants(self, now: Nanos, message: FromArbiter, news: News) -> None:
        self._refused.difference_update(grant.flow for grant in message.grants)
        changes = self._grants.receive(now, message.session, message.grants)
        news.lowered, news.raised, news.acks = changes
        for grant in message.grants:
            known = self._known.get(grant.flow)
            if grant.hold_ns > 0 and known is not None and _asks(known[0]):
                since = self._asked.setdefault(grant.flow, now)
                self._grants.let_go(grant.flow, since + MOST_HOLD_NS)
        raised = [flow for flow in news.raised if self._grants.of(flow).rate > 0]
        asked = [self._asked.pop(flow) for flow in raised if flow in self._asked]
        if asked and self.live:  # not the wait for an arbiter that has just started
            news.waited_ns = now - min(asked)
        self._check_live(now, news)

    def _give_up(self, now: Nanos, news: News) -> None:
        """A flow that its arbiter does not answer must not wait for ever."""
        since = now - self._patience_ns
        if max(self._live_at, self._synced_at or now) > since:
            return  # it has only just begun
        unheard = [flow for flow, at in self._asked.items() if at <= since and not self.held(flow)]
        for flow in unheard:
            del self._asked[flow]
            self._refused.add(flow)
            news.left_alone.append(flow)
            news.refused.append(f"flows of job {self._known[flow][0].job} left alone: no answer")

    def enforced(self, news: News) -> None:
        """The changes are in force: their acknowledgements may be sent."""
        if self._open and news.session == self._grants.session:
            self._acks.update((ack.flow, ack) for ack in news.acks if ack.flow in self._known)

    # --- time

    def next_wakeup(self, now: Nanos) -> Nanos | None:
        """When to `dial`, `check` and `take_message` next, if nothing is said before; later than
        now. None: no need to."""
        due, end, opens = self._heart.due, self._grants.lease_end, self._grants.hold_end
        times = [due] if due is not None and due > now else []
        if opens is not None:
            times.append(Nanos(max(opens, now + 1)))
        if end is not None or self.live:  # though it be over: nobody has checked yet
            times.append(Nanos(max(end or now, now + 1)))
        if not (self._open or self._dialling):
            times.append(Nanos(max(self._retry_at, now + 1)))
        return min(times, default=None)

    def opened(self, now: Nanos) -> list[int]:
        """Flows whose hold has ended since this was asked last: put their grants into force."""
        return self._grants.opened(now)

    def check(self, now: Nanos) -> bool:
        """True, once: the lease of a live session has ended, and all its grants are void."""
        if not self._grants.expired(now):
            return False
        self._asked.clear()
        lost, self.live = self.live, False
        return lost

    def _check_live(self, now: Nanos, news: News) -> None:
        """Live once grants are there, or no flow waits for any: a hold is an answer, too.

        An arbiter that has just started grants nothing for a lease.
        """
        since = self._synced_at
        if self.live or since is None or self._grants.expired(now):
            return
        if all(map(self.held, self._asked)) or now - since >= self._patience_ns:
            self.live = news.began = True
            self._live_at = now

    def _path(self, links: tuple[int, ...]) -> tuple[int, ...]:
        """The part of a path that the arbiter holds, as this session numbers links."""
        path = self._paths.get(links)
        if path is None:
            path = tuple(self._index[link] for link in links if link in self._index)
            self._paths[links] = path
        return path
