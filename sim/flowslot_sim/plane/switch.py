# SPDX-License-Identifier: Apache-2.0
"""A simulated switch process: core's Switch at the end of simulated streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flowslot.arbiter import Arbiter, ArbiterConfig
from flowslot.model.errors import FlowslotError
from flowslot.model.units import Nanos
from flowslot.policy.base import Allocator
from flowslot.protocol.messages import FromArbiter, FromDaemon, Opening
from flowslot.protocol.switch import Switch
from flowslot_sim.events import Event
from flowslot_sim.plane.wire import Clock, Stream
from flowslot_sim.simulation import Simulation

Deliver = Callable[[Nanos, FromArbiter], None]


class SwitchNode:
    """The arbiter of `links`, numbered as in the topology. A dead one accepts no streams."""

    def __init__(
        self,
        sim: Simulation,
        clock: Clock,
        links: Sequence[int],
        config: ArbiterConfig,
        make_allocator: Callable[[], Allocator],
    ) -> None:
        self.links = tuple(links)
        self.names = tuple(str(link) for link in links)
        self.messages = 0
        """Sent, over all lives."""
        self._events = sim.events
        self._clock = clock
        self._goodput = [sim.world.capacity[link] for link in links]
        self._make_allocator = make_allocator
        self._config = config
        self._deliver: dict[Stream, Deliver] = {}
        self._alarm: Event | None = None
        self._counts = [0, 0, 0, 0]
        self.start()

    def start(self) -> None:
        """A new process, which knows nothing of its predecessor."""
        self.alive = True
        self.switch: Switch[Stream] = Switch(
            self.time(), self.names, self._goodput, self._config, self._make_allocator()
        )
        self._rearm()

    def kill(self, now: Nanos) -> None:
        """The process ends: all streams do."""
        self._counts = self.counts()
        self.alive = False
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        streams, self._deliver = list(self._deliver), {}
        for stream in streams:
            stream.close(now, Stream.SWITCH)

    @property
    def arbiter(self) -> Arbiter:
        """Of the present life."""
        return self.switch.arbiter

    def time(self) -> Nanos:
        """What its clock shows."""
        return self._clock.read(self._events.now)

    def counts(self) -> list[int]:
        """Granted, refused, pre-empted and expired, over all lives."""
        a = self.arbiter
        own = [a.granted, a.refused, a.preempted, a.expired] if self.alive else [0] * 4
        return [x + y for x, y in zip(self._counts, own, strict=True)]

    # --- the transport

    def hear(
        self,
        now: Nanos,
        stream: Stream,
        opening: Opening | None,
        message: FromDaemon,
        deliver: Deliver,
    ) -> None:
        """A message of a daemon has come; `opening`: it is the first of its stream. `deliver`: how
        to answer. A stream that is not honoured is closed."""
        if not self.alive:
            stream.close(now, Stream.SWITCH)
            return
        at = self._clock.read(now)
        try:
            if opening is not None:
                self.switch.join(at, stream, opening)
                self._deliver[stream] = deliver
                stream.on_close(Stream.SWITCH, lambda then: self._leave(then, stream))
            self.switch.received(at, stream, message, at)
        except FlowslotError:
            stream.close(now, Stream.SWITCH)
        self._flush(now)

    def _leave(self, now: Nanos, stream: Stream) -> None:
        if self._deliver.pop(stream, None) is not None:
            self.switch.leave(self._clock.read(now), stream)
            self._flush(now)

    def _flush(self, now: Nanos) -> None:
        for stream in self.switch.take_ready():
            self._send(stream)
        for stream, _ in self.switch.take_ended():
            stream.close(now, Stream.SWITCH)
        self._rearm()

    def _send(self, stream: Stream) -> None:
        message, deliver = self.switch.take(stream), self._deliver[stream]
        if message is not None:
            self.messages += 1
            answer = message
            stream.send(False, lambda now: deliver(now, answer))

    def _rearm(self) -> None:
        at = Nanos(max(self._clock.when(self.switch.next_wakeup), self._events.now))
        if self._alarm is not None:
            if self._alarm.action is not None and self._alarm.at == at:
                return
            self._alarm.cancel()
        self._alarm = self._events.at(at, self._wake)

    def _wake(self, now: Nanos) -> None:
        self._alarm = None
        self.switch.decide(self._clock.read(now))
        self._flush(now)
