# SPDX-License-Identifier: Apache-2.0
"""Load of each link in the next K slots, made of explicit schedules of single flows.

Source: MLCC, the reservation table of a switch (FetchFeedback and UpdateSchedule), made safe: an
update is refused, not trimmed, when any slot would exceed the capacity.
"""

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flowslot.model.errors import ScheduleRefused

Floats = NDArray[np.float64]
_MAX_FLOWS = 65536


class _Planned(NamedTuple):
    links: NDArray[np.intp]
    base: int  # slot of rates[0]
    rates: Floats  # [horizon]


class LoadTable:
    """Explicit schedules over `n_links` links and `horizon` slots; rates in payload bytes/s."""

    def __init__(self, n_links: int, horizon: int, capacity: ArrayLike) -> None:
        """`capacity`: float64[n_links], the most that a slot of a link may hold."""
        self.capacity: Floats = np.array(capacity, dtype=np.float64)
        if self.capacity.shape != (n_links,) or not np.all(self.capacity >= 0):
            raise ValueError(f"capacity must be {n_links} numbers of at least 0")
        self.horizon = horizon
        self.slot = 0
        self._load = np.zeros((n_links, horizon))
        self._flows: dict[Hashable, _Planned] = {}

    def __len__(self) -> int:
        return len(self._flows)

    def advance(self, slot: int) -> None:
        """Slot `slot` has begun: earlier ones fall out, empty ones come in. Never goes back."""
        steps = min(slot - self.slot, self.horizon)
        if steps <= 0:
            return
        self.slot = slot
        # Rounding errors of updates leave the table together with their slot.
        self._load[:, : self.horizon - steps] = self._load[:, steps:]
        self._load[:, self.horizon - steps :] = 0.0
        over = [f for f, p in self._flows.items() if p.base + self.horizon <= slot]
        for flow in over:
            del self._flows[flow]

    def update(
        self,
        flow: Hashable,
        links: Sequence[int],
        rates: Sequence[float],
        offset: int = 0,
        committed: Floats | None = None,
    ) -> None:
        """Replace the flow's schedule: `rates[k]` in slot `offset + k` from now, on all `links`.

        Nothing (all zero) removes it. `committed`: float64[n_links], what others hold in every
        slot beside this table. Raises ScheduleRefused and changes nothing when a link is out of
        range, a rate is not a finite number of at least 0, or a slot would be over capacity.
        """
        index, row = self._validated(links, rates, offset)
        if len(self._flows) >= _MAX_FLOWS and flow not in self._flows:
            raise ScheduleRefused(f"the table already holds {_MAX_FLOWS} flows")
        free = self.capacity[index, None] - self._load[index]
        if committed is not None:
            free -= committed[index, None]
        old = self._flows.get(flow)
        if old is not None:
            free[np.isin(index, old.links)] += self._rest(old)
        # Where the flow asks for nothing, a slot that is already too full is none of its fault.
        over = np.any((row > free + 1e-9 * self.capacity[index, None]) & (row > 0), axis=1)
        if over.any():
            link = int(index[np.argmax(over)])
            raise ScheduleRefused("a slot would exceed the link's capacity", link)
        self.remove(flow)
        if row.any():
            self._flows[flow] = _Planned(index, self.slot, row)
            self._load[index] += row

    def remove(self, flow: Hashable) -> None:
        """Forget the flow's schedule, if it has one."""
        old = self._flows.pop(flow, None)
        if old is not None:
            self._load[old.links] = np.maximum(self._load[old.links] - self._rest(old), 0.0)

    def load(self, links: Sequence[int]) -> Floats:
        """Reserved rates, float64[len(links), horizon]; a copy."""
        return self._load[np.asarray(links, dtype=np.intp)]

    def peak(self) -> Floats:
        """The fullest slot of each link, float64[n_links]."""
        peak: Floats = self._load.max(axis=1)
        return peak

    def _validated(
        self, links: Sequence[int], rates: Sequence[float], offset: int
    ) -> tuple[NDArray[np.intp], Floats]:
        n_links = len(self.capacity)
        if not links or len(set(links)) != len(links):
            raise ScheduleRefused("links must be named, each once")
        if not all(0 <= link < n_links for link in links):
            raise ScheduleRefused(f"link index must be from 0 to {n_links - 1}")
        if offset < 0 or offset + len(rates) > self.horizon:
            raise ScheduleRefused(f"schedule must lie within {self.horizon} slots from now")
        if not all(math.isfinite(rate) and rate >= 0 for rate in rates):
            raise ScheduleRefused("rates must be finite and at least 0")
        row = np.zeros(self.horizon)
        row[offset : offset + len(rates)] = rates
        return np.asarray(links, dtype=np.intp), row

    def _rest(self, planned: _Planned) -> Floats:
        """Its rates from the current slot on, float64[horizon]."""
        gone = self.slot - planned.base
        return np.concatenate((planned.rates[gone:], np.zeros(gone)))
