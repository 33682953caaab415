# SPDX-License-Identifier: Apache-2.0
"""A simulated daemon: core's Host between a host's flows and simulated streams to switches.

Its flows are the simulation's, and its kernel is the fluid network.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from flowslot.model.units import Nanos
from flowslot.protocol.aggregate import Aggregate, report, take
from flowslot.protocol.grants import Granted, nothing_said
from flowslot.protocol.host import Changes, Host
from flowslot.protocol.messages import FromArbiter, Opening
from flowslot_sim.events import Action, Event
from flowslot_sim.plane.switch import SwitchNode
from flowslot_sim.plane.wire import Clock, Stream

if TYPE_CHECKING:
    from flowslot_sim.plane.messages import Messages


class DaemonNode:
    """The daemon of one host. A dead one does nothing; its rates run out."""

    def __init__(
        self,
        plane: Messages,
        clock: Clock,
        mine: Sequence[int],
        host: Host,
        switches: Sequence[SwitchNode],
    ) -> None:
        """`mine`: its bunches, by number in the plane's observer. `switches`: of the host's
        sessions."""
        self.alive = True
        self.messages = 0
        self.host = host
        self._plane, self._clock, self._switches = plane, clock, switches
        self._events, self._observer, self._kernel = plane.events, plane.observer, plane.kernel
        self._streams: list[Stream | None] = [None] * len(switches)
        self._alarm: Event | None = None
        self._frozen_until = Nanos(0)
        self._due = False  # a pass at events
        bunches = plane.observer.bunches
        self._all = {
            b + 1: Aggregate(b + 1, (one := bunches[b]).job, one.links, 0, sockets=len(one.rows))
            for b in mine
        }
        self._seen: dict[int, Aggregate] = {}
        """Those whose flows are there: a socket that has never sent is nobody's business."""

    # --- life

    def start(self, now: Nanos) -> None:
        """Begin to negotiate."""
        self.host.start(self._clock.read(now))
        self._put(now, [nothing_said(b) for b in self._all])
        self._wake(now)

    def kill(self, now: Nanos) -> None:
        """The process ends without a word; the kernel closes its streams."""
        self.alive = False
        if self._alarm is not None:
            self._alarm.cancel()
        self.cut(now)

    def hold(self, until: Nanos) -> None:
        """Its streams stand still until then."""
        for stream in self._streams:
            if stream is not None:
                stream.hold(until)

    def cut(self, now: Nanos) -> None:
        """Its streams end; it begins new ones."""
        for stream in list(self._streams):
            if stream is not None:
                stream.close(now, Stream.DAEMON)

    def freeze(self, until: Nanos) -> None:
        """The process stands still until then: whatever happens to it waits."""
        self._frozen_until = max(self._frozen_until, until)

    def _waits(self, action: Action) -> bool:
        """A dead process does nothing, and a frozen one does it later."""
        if self.alive and self._events.now < self._frozen_until:
            self._events.at(self._frozen_until, action)
            return True
        return not self.alive

    # --- what flows do

    def touched(self, now: Nanos, bunches: Iterable[int]) -> None:
        """Flows of these bunches have begun, or all of them have ended."""
        its = list(bunches)
        if not self._waits(lambda then: self.touched(then, its)):
            self._seen.update((b + 1, self._all[b + 1]) for b in its)
            if not self._due:
                self._due = True
                self._events.at(now + self._plane.look_ns, self._look_at_events)

    def _look_at_events(self, now: Nanos) -> None:
        if not self._waits(self._look_at_events):
            self._due = False
            self._pass(now, small=False)

    def on_slot(self, now: Nanos) -> None:
        """Once per slot of this host."""
        if self.alive and now >= self._frozen_until:
            self._pass(now, small=self.host.beat(self._clock.read(now)))
            self._kernel.renew((b - 1 for b in self._seen), self._deadline(now))

    def _pass(self, now: Nanos, *, small: bool) -> None:
        """Look at all flows, negotiate, put into force."""
        at = self._clock.read(now)
        self._look(now, at)
        self._put(now, report(at, self.host, self._seen, small=small))
        self._flush(now)

    def _look(self, now: Nanos, at: Nanos) -> None:
        seen = self._observer
        shift = at - now  # onsets were seen on the simulation's clock
        remaining, due = seen.remaining(), seen.due(now)
        for number, aggregate in self._seen.items():
            b = number - 1
            aggregate.active = bool(seen.active[b])
            aggregate.remaining = float(remaining[b])
            aggregate.target = aggregate.expected = float(seen.expected[b])
            aggregate.onset, aggregate.due = int(seen.onset[b]) + shift, int(due[b]) + shift
            aggregate.period = int(seen.period[b])

    # --- what arbiters say

    def _put(self, now: Nanos, grants: Iterable[Granted]) -> None:
        """Put into force."""
        until = self._deadline(now)
        for grant in grants:
            links = self._all[grant.flow].links
            live = [link for link in links if self.host.own is None and self.host.covers((link,))]
            self._kernel.put(now, grant.flow - 1, grant, live, until)

    def _deadline(self, now: Nanos) -> Nanos:
        return self._clock.when(self.host.deadline(self._clock.read(now)))

    def _take(self, now: Nanos, k: int, changes: Changes) -> None:
        """Put into force, then let acknowledgements go; report what the answer asks for."""
        self._put(now, take(self._all, changes.grants))
        self.host.enforced(k, changes)
        if any(aggregate.reported is None for aggregate in self._seen.values()):
            self._pass(now, small=False)
        else:
            self._flush(now)

    def _heard(self, now: Nanos, k: int, message: FromArbiter) -> None:
        if not self._waits(lambda then: self._heard(then, k, message)):
            self._take(now, k, self.host.received(self._clock.read(now), k, message))

    # --- the transport

    def _flush(self, now: Nanos) -> None:
        for k, stream in enumerate(self._streams):
            if stream is not None:
                self._send(now, k, stream, None)
        self._rearm(now)

    def _send(self, now: Nanos, k: int, stream: Stream, opening: Opening | None) -> None:
        at = self._clock.read(now)
        message = self.host.take_message(at, k, at)
        if message is None:
            return
        self.messages += 1

        def answer(then: Nanos, reply: FromArbiter) -> None:
            self._heard(then, k, reply)

        said, switch = message, self._switches[k]
        stream.send(True, lambda then: switch.hear(then, stream, opening, said, answer))

    def _connect(self, now: Nanos, k: int) -> None:
        at = self._clock.read(now)
        if not self._switches[k].alive:
            changes = self.host.closed(at, k, self._jitter())
            self._put(now, take(self._all, changes.grants))
            return
        opening, changes = self.host.connect(at, k)
        stream = self._streams[k] = self._plane.stream()
        stream.on_close(Stream.DAEMON, lambda then: self._closed(then, k, stream))
        self._put(now, take(self._all, changes.grants))
        self._send(now, k, stream, opening)

    def _closed(self, now: Nanos, k: int, stream: Stream) -> None:
        if self._streams[k] is stream and not self._waits(lambda t: self._closed(t, k, stream)):
            self._streams[k] = None
            at = self._clock.read(now)
            self._take(now, k, self.host.closed(at, k, self._jitter()))

    def _jitter(self) -> float:
        return float(self._plane.random.uniform(0.75, 1.25))

    def _rearm(self, now: Nanos) -> None:
        due = self.host.next_wakeup(self._clock.read(now))
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = None if due is None else self._events.at(self._clock.when(due), self._wake)

    def _wake(self, now: Nanos) -> None:
        if self._waits(self._wake):
            return
        at = self._clock.read(now)
        self._put(now, take(self._all, self.host.wake(at).grants))
        for k, session in enumerate(self.host.sessions):
            stream = self._streams[k]
            if session.lost and stream is not None:
                stream.close(now, Stream.DAEMON)
            elif session.dial(at):
                self._connect(now, k)
        self._flush(now)
