# SPDX-License-Identifier: Apache-2.0
"""What is to happen, in order of time; what is due at the same moment, in order of its making."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from flowslot.model.units import Nanos

Action = Callable[[Nanos], None]
"""Called with the time at which it was due."""


@dataclass(slots=True, eq=False)
class Event:
    """Something to be done, unless it is cancelled."""

    at: Nanos
    action: Action | None

    def cancel(self) -> None:
        """Do not do it."""
        self.action = None


class Events:
    """A queue. Deterministic: nothing depends on anything but the order of calls."""

    def __init__(self) -> None:
        self.now = Nanos(0)
        self._heap: list[tuple[int, int, Event]] = []
        self._made = 0

    def at(self, when: int, action: Action) -> Event:
        """Do something at a time; at once if it has passed."""
        event = Event(Nanos(max(when, self.now)), action)
        self._made += 1
        heapq.heappush(self._heap, (event.at, self._made, event))
        return event

    def after(self, delay: int, action: Action) -> Event:
        """Do something in so many ns."""
        return self.at(self.now + delay, action)

    def next_at(self) -> int:
        """When the next thing is due; 2**62: nothing is."""
        while self._heap and self._heap[0][2].action is None:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else 1 << 62

    def run_until(self, now: Nanos) -> None:
        """It is `now`: do all that is due, also what that makes due."""
        self.now = now
        while self.next_at() <= now:
            event = heapq.heappop(self._heap)[2]
            action, event.action = event.action, None
            if action is not None:
                action(now)
