# SPDX-License-Identifier: Apache-2.0
"""The kernels of all simulated hosts: rates in force, and what may be sent above them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from flowslot.model.top_up import LONGEST_QUEUE_US, burst, growth, highest, least, longest
from flowslot.model.units import Nanos
from flowslot.policy.base import Floats, Rows
from flowslot.protocol.grants import Granted, nothing_said
from flowslot_sim.fluid import STARTED_WINDOW, TAKEN_BYTES
from flowslot_sim.observed import Observer
from flowslot_sim.simulation import Simulation

_NOTHING = nothing_said(0)


@dataclass(slots=True)
class _Entry:
    """What the kernel of a host has in force for a bunch."""

    grant: Granted = _NOTHING
    covered: Sequence[int] = ()
    until: int = 0


class FluidKernel:
    """Rates in force, by bunch; one that is not renewed in time is void, as if never granted."""

    def __init__(self, sim: Simulation, observer: Observer, tops_up: bool) -> None:
        """`tops_up`: flows may send more than their rates: within the kernel's limits where the
        world says how long buffers last, else whatever others leave."""
        self._sim = sim
        self._tops_up = tops_up
        self._limited = tops_up and bool(sim.world.queue_us)
        self._observer = observer
        self._entries = [_Entry() for _ in observer.bunches]
        self._rows = [np.array(bunch.rows, np.intp) for bunch in observer.bunches]
        self._tightest = [
            min(sim.world.capacity[link] for link in bunch.links) for bunch in observer.bunches
        ]
        self.writes = 0
        """Rates put into force."""
        if self._limited:
            path = np.append(sim.world.queue_us, math.inf)[sim.network.paths]
            self._queue_us = np.minimum(path.min(axis=1), LONGEST_QUEUE_US)
            capacity = np.array(sim.world.capacity)
            self._kernel = sim.network.use_queues(capacity * np.array(sim.world.queue_us) / 1e6)
            self._kernel["buffer"] = self._queue_us / 1e6
            self._kernel["longest"] = [longest(float(us)) / 1e6 for us in self._queue_us]
            sim.network.rows["holds"] = STARTED_WINDOW * TAKEN_BYTES

    def put(self, now: Nanos, b: int, grant: Granted, covered: Sequence[int], until: Nanos) -> None:
        """Bunch b has this rate until then, unless it is renewed; NaN: it is left alone. `covered`:
        those of its links that live arbiters hold."""
        self.writes += 1
        self._entries[b] = _Entry(grant, covered, until)
        self.share_out(b)
        self._watch(b)

    def renew(self, bunches: Iterable[int], until: Nanos) -> None:
        """What these have stays in force until then; what is void stays void."""
        for b in bunches:
            entry = self._entries[b]
            if entry.until > self._sim.now:
                entry.until = until
                self._watch(b)

    def share_out(self, b: int) -> None:
        """Divide a bunch's rate among its flows by what they have left."""
        grant, rows, network = self._entries[b].grant, self._rows[b], self._sim.network
        said = not math.isnan(grant.rate)
        reserved: Floats = np.zeros(len(rows))
        if said:
            reserved = self._observer.split_one(b, grant.rate)
        ceilings = np.full(len(rows), math.inf)
        if said and not self._tops_up:
            ceilings = reserved
        elif said and grant.ceiling < self._tightest[b]:
            ceilings = np.maximum(reserved, grant.ceiling)
        network.pace(rows, reserved, ceilings)
        if self._limited:
            self._limit(rows, reserved, grant, said)

    def _limit(self, rows: Rows, reserved: Floats, grant: Granted, said: bool) -> None:
        kernel, share = self._kernel, grant.share / len(rows)
        taking_turns = 0.0 if grant.standing else grant.share
        for row, rate in zip(rows.tolist(), reserved.tolist(), strict=True):
            queue_us = float(self._queue_us[row])
            one = kernel[row]
            one["limited"] = said
            one["most"] = highest(rate, grant.ceiling, share, taking_turns)
            one["growth"] = 1e3 * growth(rate, share, taking_turns, queue_us)
            one["burst"] = burst(share, queue_us)
            one["least"] = least(share, grant.ceiling)

    def in_force(self, b: int) -> bool:
        """An arbiter's rate, more than nothing, is in force for a bunch."""
        return self._entries[b].grant.rate > 0

    def guaranteed(self) -> Floats:
        """What flows are in force to send at by live arbiters' leave, on each link, float64[L]."""
        sums = np.zeros(len(self._sim.world.links))
        for entry in self._entries:
            if not math.isnan(entry.grant.rate):
                sums[list(entry.covered)] += entry.grant.rate
        return sums

    def _watch(self, b: int) -> None:
        """Void it when its time is over."""
        self._sim.events.at(Nanos(self._entries[b].until), partial(self._look, b))

    def _look(self, b: int, now: Nanos) -> None:
        entry = self._entries[b]
        if entry.until <= now and not math.isnan(entry.grant.rate):
            self._entries[b] = _Entry()
            self.share_out(b)
