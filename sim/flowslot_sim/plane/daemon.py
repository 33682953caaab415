# SPDX-License-Identifier: Apache-2.0
"""A simulated daemon: core's side of the protocol between a host's flows and streams to switches.

What `flowslotd` does between its sources (here: the simulation's flows) and its pacer (here: the
rates of the fluid network), by the same objects of core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from flowslot.model.units import MILLISECOND, SECOND, Nanos
from flowslot.protocol.aggregate import Aggregate, ended
from flowslot.protocol.grantbook import Granted, nothing_said
from flowslot.protocol.messages import FromArbiter, FromDaemon, Hello
from flowslot.protocol.negotiator import Negotiator
from flowslot.protocol.ownlinks import OwnLinks
from flowslot.protocol.shards import Shards
from flowslot_sim.events import Action, Event, Events
from flowslot_sim.observed import Observer
from flowslot_sim.plane.switch import SwitchNode
from flowslot_sim.plane.wire import Clock, Stream

FIRST_RETRY_NS, LAST_RETRY_NS = 20 * MILLISECOND, SECOND
ENTRY_SLOTS = 2
"""Rates outlive the last sign of life of their daemon by this many slots."""


class Kernel(Protocol):
    """Where rates are put into force."""

    def put(self, now: Nanos, b: int, grant: Granted, covered: Sequence[int], until: Nanos) -> None:
        """Bunch b has this rate until then, unless it is renewed; NaN: it is left alone. `covered`:
        those of its links that live arbiters hold."""
        ...

    def renew(self, bunches: Iterable[int], until: Nanos) -> None:
        """What these have stays in force until then."""
        ...


class _Link(NamedTuple):
    """A negotiator, its switch process, and the stream between them if there is one."""

    negotiator: Negotiator
    switch: SwitchNode


class DaemonNode:
    """The daemon of one host. A dead one does nothing; its rates run out."""

    def __init__(
        self,
        *,
        events: Events,
        clock: Clock,
        observer: Observer,
        mine: Sequence[int],
        kernel: Kernel,
        switches: Sequence[tuple[Negotiator, SwitchNode]],
        make_own: Callable[[Nanos], OwnLinks],
        open_stream: Callable[[], Stream],
        random: np.random.Generator,
        slot_ns: Nanos,
    ) -> None:
        """`mine`: its bunches, by their number in `observer`. `make_own`: for the time without any
        switch process."""
        self.alive = True
        self.messages = 0
        self.raised = self.lowered = 0
        """By its own arbiter, for want of a switch process."""
        self._events, self._clock, self._observer = events, clock, observer
        self._kernel, self._random, self._slot_ns = kernel, random, slot_ns
        self._links = [_Link(*pair) for pair in switches]
        self._shards = Shards([link.negotiator for link in self._links])
        self._make_own, self._open_stream = make_own, open_stream
        self._streams: list[Stream | None] = [None] * len(self._links)
        self._retry = [FIRST_RETRY_NS] * len(self._links)
        self._alarms: list[Event | None] = [None] * len(self._links)
        self._frozen_until = Nanos(0)
        self._own: OwnLinks | None = None
        self._own_alarm: Event | None = None
        bunches = observer.bunches
        self._aggregates = {
            b: Aggregate(b + 1, bunches[b].job, bunches[b].links, 0, flows=len(bunches[b].rows))
            for b in mine
        }
        self._started: set[int] = set()
        """Bunches whose flows are there: a socket that has never sent is nobody's business."""

    # --- life

    def start(self, now: Nanos) -> None:
        """Begin to negotiate."""
        self._to_own(now)
        for k in range(len(self._links)):
            self._connect(now, k)

    def kill(self, now: Nanos) -> None:
        """The process ends without a word; the kernel closes its streams."""
        self.alive = False
        for alarm in (*self._alarms, self._own_alarm):
            if alarm is not None:
                alarm.cancel()
        for stream in self._streams:
            if stream is not None:
                stream.close(now, Stream.DAEMON)

    def negotiating(self) -> bool:
        """All switch processes that it has to do with honour its grants."""
        return self.alive and all(link.negotiator.live for link in self._links)

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
            self._started.update(its)
            self._pass(now, small=False)

    def on_slot(self, now: Nanos) -> None:
        """Once per slot of this host."""
        if self.alive and now >= self._frozen_until:
            small = self._shards.beat(self._clock.read(now))
            self._pass(now, small=small or self._own is not None)
            self._kernel.renew(self._started, self._deadline(now))

    def _pass(self, now: Nanos, *, small: bool) -> None:
        """Look at all flows; give back what is over; say what is new; put into force."""
        at = self._clock.read(now)
        self._look(now, at)
        over = [aggregate.id for aggregate in ended([self._aggregates[b] for b in self._started])]
        if over:
            given = self._shards.give_back(over) if self._own is None else []
            self._take(now, given)
        said = [self._aggregates[b] for b in self._started]
        demands = [aggregate.demand(at) for aggregate in said if aggregate.has_news(at, small)]
        if demands:
            self._shards.demand(at, demands)
            if self._own is not None:
                self._own.load(at, demands)
                self._settle(now)
        self._flush(now)

    def _look(self, now: Nanos, at: Nanos) -> None:
        seen = self._observer
        shift = at - now  # onsets were seen on the simulation's clock
        remaining, due = seen.remaining(), seen.due(now)
        for b in self._started:
            aggregate = self._aggregates[b]
            aggregate.active = bool(seen.active[b])
            aggregate.remaining = float(remaining[b])
            aggregate.target = aggregate.expected = float(seen.expected[b])
            aggregate.onset, aggregate.due = int(seen.onset[b]) + shift, int(due[b]) + shift
            aggregate.period = int(seen.period[b])

    # --- what arbiters say

    def _take(self, now: Nanos, grants: Iterable[Granted]) -> None:
        """Put into force."""
        until = self._deadline(now)
        for grant in grants:
            aggregate = self._aggregates[grant.flow - 1]
            aggregate.take(grant)
            live = [link for link in aggregate.links if self._shards.covers((link,))]
            self._kernel.put(now, grant.flow - 1, grant, live if self._own is None else [], until)

    def _deadline(self, now: Nanos) -> Nanos:
        own = now + ENTRY_SLOTS * self._slot_ns
        lease = self._shards.lease_end if self._own is None else None
        return Nanos(own if lease is None else min(own, self._clock.when(lease)))

    def _heard(self, now: Nanos, k: int, message: FromArbiter) -> None:
        if self._waits(lambda then: self._heard(then, k, message)):
            return
        negotiator = self._links[k].negotiator
        news = negotiator.received(self._clock.read(now), message)
        if news.synced:
            self._retry[k] = FIRST_RETRY_NS
        if news.began:
            self._to_switches(now)
            self._take(now, map(self._shards.grant, self._shards.flows()))
        elif negotiator.live:
            changed = [grant.flow for grant in (*news.changes.lowered, *news.changes.raised)]
            self._take(now, map(self._shards.grant, [*changed, *news.left_alone]))
        negotiator.enforced(news)
        if any(self._aggregates[b].told is None for b in self._started):
            self._pass(now, small=False)
        self._flush(now)

    # --- streams

    def _connect(self, now: Nanos, k: int) -> None:
        link = self._links[k]
        if self._waits(lambda then: self._connect(then, k)):
            return
        if not link.switch.alive:
            self._again(now, k)
            return
        at = self._clock.read(now)
        self._check(now, k)
        hello = link.negotiator.connect(at)
        stream = self._streams[k] = self._open_stream()
        stream.on_close(Stream.DAEMON, lambda then: self._closed(then, k, stream))
        if link.negotiator.live:
            self._take(now, map(self._shards.grant, link.negotiator.flows()))
        self._send(now, k, hello)

    def _closed(self, now: Nanos, k: int, stream: Stream) -> None:
        if self._streams[k] is not stream:
            return
        if not self._waits(lambda then: self._closed(then, k, stream)):
            self._streams[k] = None
            self._links[k].negotiator.closed(self._clock.read(now))
            self._check(now, k)
            self._again(now, k)

    def _again(self, now: Nanos, k: int) -> None:
        wait = self._retry[k] * self._random.uniform(0.75, 1.25)
        self._retry[k] = min(2 * self._retry[k], LAST_RETRY_NS)
        self._events.after(int(wait), lambda then: self._connect(then, k))

    def _flush(self, now: Nanos) -> None:
        for k in range(len(self._links)):
            if self._streams[k] is not None:
                self._send(now, k, None)
            self._rearm(now, k)

    def _send(self, now: Nanos, k: int, hello: Hello | None) -> None:
        link, stream, at = self._links[k], self._streams[k], self._clock.read(now)
        message: FromDaemon | None = link.negotiator.take_message(at, at)
        if message is None or stream is None:
            return
        self.messages += 1

        def answer(then: Nanos, reply: FromArbiter) -> None:
            self._heard(then, k, reply)

        said = message
        stream.send(True, lambda then: link.switch.hear(then, stream, hello, said, answer))

    # --- time

    def _rearm(self, now: Nanos, k: int) -> None:
        alarm = self._alarms[k]
        if alarm is not None:
            alarm.cancel()
        due = self._links[k].negotiator.next_wakeup(self._clock.read(now))
        self._alarms[k] = None
        if due is not None:
            self._alarms[k] = self._events.at(
                self._clock.when(due), lambda then: self._alarmed(then, k)
            )

    def _alarmed(self, now: Nanos, k: int) -> None:
        if self._waits(lambda then: self._alarmed(then, k)):
            return
        self._check(now, k)
        self._flush(now)

    def _check(self, now: Nanos, k: int) -> None:
        """Whether the lease still lives."""
        negotiator, stream = self._links[k].negotiator, self._streams[k]
        lost = negotiator.check(self._clock.read(now))
        if lost:
            if self._shards.live:
                self._take(now, map(self._shards.grant, self._shards.flows()))
            else:
                self._to_own(now)
        if negotiator.session is None and stream is not None:
            stream.close(now, Stream.DAEMON)

    # --- without a switch

    def _to_own(self, now: Nanos) -> None:
        """Share out this host's own links, beginning with what was told before."""
        at = self._clock.read(now)
        self._own = self._make_own(at)
        self._own.load(at, self._shards.picture(at))
        self._take(now, [nothing_said(aggregate.id) for aggregate in self._aggregates.values()])
        self._settle(now)

    def _to_switches(self, now: Nanos) -> None:
        self._own = None
        if self._own_alarm is not None:
            self._own_alarm.cancel()

    def _settle(self, now: Nanos) -> None:
        own = self._own
        if own is None or self._waits(self._settle):
            return
        at = self._clock.read(now)
        settled = own.settle(at)
        self.raised += settled.raised
        self.lowered += settled.lowered
        self._take(now, settled.changed)
        if self._own_alarm is not None:
            self._own_alarm.cancel()
        self._own_alarm = self._events.at(self._clock.when(own.next_wakeup(at)), self._settle)
