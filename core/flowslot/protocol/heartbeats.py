# SPDX-License-Identifier: Apache-2.0
"""Heartbeats to an arbiter: when the next one is due, and what their echoes tell."""

from collections import deque

from flowslot.model.units import SECOND, Nanos
from flowslot.protocol.messages import Heartbeat, HeartbeatEcho

BEAT_SLOTS, RESTLESS_SLOTS = 2, 1
"""One heartbeat in so many slots, with what is said then (ADR 1); the second while the machine or
the network is restless: in the last RESTLESS_NS a heartbeat was late by more than LATE_SLOTS, or
its answer took more than SLOW_SLOTS. A lease bears all the longer delays."""
OVERDUE_SLOTS = 0.25
"""So much later it is sent although nobody asked for it."""
LATE_SLOTS, SLOW_SLOTS = 0.25, 0.5
RESTLESS_NS = 2 * SECOND
_SAMPLES = 32


class Heartbeats:
    """Numbers heartbeats, never one twice; estimates the offset between the two wall clocks.

    One is sent in every other slot, with what is said then, and by itself when it is overdue. Pure:
    `now` is monotonic nanoseconds, `wall_ns` the wall clock at the same moment.
    """

    def __init__(self, slot_ns: Nanos) -> None:
        self._slot_ns = slot_ns
        self._n = 0
        self._last = Nanos(0)
        self.due: Nanos | None = None
        """When the next heartbeat is overdue; None: there is no stream to send it on."""
        self._restless_until = 0
        self._sent: dict[int, tuple[Nanos, int]] = {}
        self._samples: deque[tuple[int, int]] = deque(maxlen=_SAMPLES)

    @property
    def offset_us(self) -> float | None:
        """Their wall clock minus ours, by the quickest of the last answers."""
        return min(self._samples)[1] / 1e3 if self._samples else None

    def rested(self, now: Nanos) -> bool:
        """There is a stream, and the slot has come for the next one, or nearly so."""
        slots = self._every(now) - 0.5
        return self.due is not None and now > self._last + slots * self._slot_ns

    def overdue(self, now: Nanos) -> bool:
        """There is a stream, and none has been sent on it for a while."""
        return self.due is not None and now >= self.due

    def beat(self, now: Nanos, wall_ns: int) -> Heartbeat:
        """The next heartbeat, to be sent now."""
        if self.due is not None and now > self.due + LATE_SLOTS * self._slot_ns:
            self._restless_until = now + RESTLESS_NS
        self.due = Nanos(now + int((self._every(now) + OVERDUE_SLOTS) * self._slot_ns))
        self._n += 1
        self._last = now
        self._sent[self._n] = (now, wall_ns)
        return Heartbeat(self._n, wall_ns)

    def echoed(self, now: Nanos, echo: HeartbeatEcho) -> int | None:
        """Round trip in ns; None: nothing is known of that heartbeat (any more)."""
        sent = self._sent.pop(echo.n, None)
        if sent is None:
            return None
        round_trip = now - sent[0]
        if round_trip > SLOW_SLOTS * self._slot_ns:
            self._restless_until = now + RESTLESS_NS
        self._samples.append((round_trip, echo.wall_ns - sent[1] - round_trip // 2))
        self._sent = {n: at for n, at in self._sent.items() if n > echo.n}
        return round_trip

    def _every(self, now: Nanos) -> int:
        """One in so many slots."""
        return RESTLESS_SLOTS if now < self._restless_until else BEAT_SLOTS

    def rest(self) -> None:
        """The stream has ended: none is due until the next `beat`, none is answered any more."""
        self.due = None
        self._sent.clear()
