# SPDX-License-Identifier: Apache-2.0
"""The switches that MLCC's hosts ask: one load table for all links, and the paper's two calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from flowslot.model.errors import ScheduleRefused
from flowslot.model.loadtable import LoadTable
from flowslot.model.units import Nanos
from flowslot.policy.mlcc import Update
from flowslot.policy.mlcc.planner import Feedback
from flowslot_sim.events import Events

HORIZON = 10
"""K: slots of a schedule."""
Answer = Callable[[Nanos, list[bool]], None]
"""Takes which updates of a call were accepted."""


class TableSwitch:
    """FetchFeedback and UpdateSchedule, over core's load table: that of Arbiter.update_schedule.

    `atomic`: what does not fit is refused. Otherwise the paper's switch, which adds up whatever it
    is told: a table without bounds. All links are in one table, so that an update holds for its
    whole path or not at all, also where switches of their own would have to agree.
    """

    def __init__(
        self,
        events: Events,
        capacity: Sequence[float],
        slot_ns: Nanos,
        *,
        atomic: bool,
        by_key: bool,
        random: np.random.Generator,
    ) -> None:
        """`capacity`: payload bytes/s by link. `by_key`: of updates that arrive at the same moment
        those with the smallest key come first, and not those of an arbitrary host."""
        most = capacity if atomic else [math.inf] * len(capacity)
        self.table = LoadTable(len(capacity), HORIZON, most)
        self._capacity = np.array(capacity)
        self._events = events
        self._slot_ns = slot_ns
        self._by_key = by_key
        self._random = random
        self._waiting: list[tuple[Sequence[Update], Answer]] = []

    def fetch(self, now: Nanos, links: tuple[int, ...]) -> Feedback:
        """FetchFeedback."""
        self.table.advance(now // self._slot_ns)
        at = list(links)
        return Feedback(self.table.slot, links, self.table.load(links), self._capacity[at])

    def update(self, now: Nanos, updates: Sequence[Update], answer: Answer) -> None:
        """UpdateSchedule of one host. Decided once all that arrives at this moment has arrived:
        hosts are on one grid, and whoever happens to come first must not always be the same."""
        self._waiting.append((updates, answer))
        if len(self._waiting) == 1:
            self._events.at(now, self._decide)

    def _decide(self, now: Nanos) -> None:
        self.table.advance(now // self._slot_ns)
        waiting, self._waiting = self._waiting, []
        drawn: list[int] = self._random.permutation(len(waiting)).tolist()
        queue = [update for i in drawn for update in waiting[i][0]]
        if self._by_key:
            queue.sort(key=lambda update: update.key)
        accepted = {id(update): self._take(update) for update in queue}
        for updates, answer in waiting:
            answer(now, [accepted[id(update)] for update in updates])

    def _take(self, update: Update) -> bool:
        """Whether it fits. What was for slots that are over by now is dropped."""
        late = self.table.slot - update.slot
        rates = update.rates[late:].tolist()
        try:
            self.table.update(update.flow, update.links, rates)
        except ScheduleRefused:
            return False
        return True
