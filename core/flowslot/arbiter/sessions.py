# SPDX-License-Identifier: Apache-2.0
"""Sessions: one per stream of a daemon, and how long its grants are honoured."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from flowslot.arbiter.config import GUARD_NS, ArbiterConfig
from flowslot.model.errors import ProtocolError, SessionEnded
from flowslot.model.units import Nanos
from flowslot.protocol.messages import Hello

_MAX_DROPPED = 4096  # ended flows remembered per session, against demands still on their way
_NAMES_PER_SESSION = 4  # names of daemons remembered, against Hellos still on their way


@dataclass(slots=True)
class Session:
    """A synced session. `closed`: its stream has ended, or it broke a rule: its lease runs out.
    `overdue`: it has not acknowledged a lower in time."""

    id: int
    daemon: str
    heard: Nanos
    owner: str = ""
    closed: bool = False
    overdue: bool = False
    flows: int = 0
    ended: dict[int, int] = field(default_factory=dict)
    """flow -> incarnation of flows that are done"""

    def end(self, flow: int, inc: int) -> None:
        """Remember that the flow is done."""
        self.ended.pop(flow, None)
        self.ended[flow] = inc
        if len(self.ended) > _MAX_DROPPED:
            del self.ended[next(iter(self.ended))]


class Sessions:
    """All sessions that may still enforce something, by id."""

    def __init__(self, config: ArbiterConfig) -> None:
        self._config = config
        self._lease = config.lease_ns + GUARD_NS
        self._synced: dict[int, Session] = {}
        self._expiry = Nanos(0)
        """No lease ends before."""
        self._over: list[int] = []
        self._latest: dict[tuple[str, str], int] = {}
        """By owner and name: nobody takes another one's name away."""

    def __iter__(self) -> Iterator[Session]:
        return iter(self._synced.values())

    def newest(self, hello: Hello) -> int:
        """Id of the daemon's newest session so far, also if that is over; -1: there was none."""
        return self._latest.get((hello.owner, hello.daemon), -1)

    def open(self, now: Nanos, hello: Hello) -> tuple[Session, int | None] | None:
        """Sync a new session; also returns the id of the daemon's older one that it replaces.

        None: this Hello was already seen, or is older than the daemon's present session.
        Raises ProtocolError when the id belongs to another daemon, or there are too many;
        SessionEnded when the older one is overdue: what that enforces must end with its lease.
        """
        name, latest = (hello.owner, hello.daemon), self.newest(hello)
        if hello.session <= latest:
            return None
        if hello.session in self._synced:
            raise ProtocolError(f"session {hello.session} belongs to another daemon")
        older = self._synced.get(latest)
        if older is not None and older.overdue:
            raise SessionEnded("a lower was not acknowledged in time; its lease has to end first")
        if older is None:
            theirs = sum(session.owner == hello.owner for session in self)
            if hello.owner and theirs >= self._config.max_sessions_per_owner:
                raise ProtocolError(f"there are already {theirs} sessions of {hello.owner}")
            if len(self._synced) >= self._config.max_sessions:
                raise ProtocolError(f"there are already {len(self._synced)} sessions")
        if self._synced.pop(latest, None) is not None:
            self._over.append(latest)
        session = Session(hello.session, hello.daemon, now, hello.owner)
        self._synced[hello.session] = session
        self._latest.pop(name, None)
        self._latest[name] = hello.session
        if len(self._latest) > _NAMES_PER_SESSION * self._config.max_sessions:
            del self._latest[next(k for k, id in self._latest.items() if id not in self._synced)]
        return session, older.id if older else None

    def live(self, session: int) -> Session | None:
        """The session, when its stream is open and its grants are honoured."""
        found = self._synced.get(session)
        return None if found is None or found.closed else found

    def give_up(self, session: int) -> bool:
        """A lower of the session is overdue: it is not honoured any more. False: nor was it."""
        found = self._synced[session]
        honoured, found.closed, found.overdue = not found.closed, True, True
        if honoured:
            self._over.append(session)
        return honoured

    def take_over(self) -> list[int]:
        """Sessions that are not honoured any more, since this was asked last, other than those
        whose stream has closed."""
        over, self._over = self._over, []
        return over

    def expire(self, now: Nanos) -> list[Session]:
        """Remove and return the sessions whose lease has ended."""
        if now < self._expiry:
            return []
        over = [s for s in self._synced.values() if now >= s.heard + self._lease]
        for session in over:
            del self._synced[session.id]
        self._over += [session.id for session in over]
        self._expiry = self.next_expiry() or Nanos(0)
        return over

    def next_expiry(self) -> Nanos | None:
        """When the next lease ends unless a heartbeat comes; None: there is no session."""
        if not self._synced:
            return None
        return Nanos(min(s.heard for s in self._synced.values()) + self._lease)
