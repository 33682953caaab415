# SPDX-License-Identifier: Apache-2.0
"""A simulated host under MLCC: core's `Reserving` between its flows and a simulated switch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from flowslot.model.slot import DEFAULT_SLOT
from flowslot.model.units import Nanos
from flowslot.policy.base import Floats
from flowslot.policy.mlcc import MlccPolicy
from flowslot.policy.mlcc.peers import LocalFlow, Peers, Progress, letters
from flowslot.policy.mlcc.planner import Feedback, Fetch, Reserve, Reserving

if TYPE_CHECKING:
    from flowslot_sim.plane.mlcc import Mlcc


class MlccHost:
    """Flows `rows` of the plane's simulation."""

    def __init__(self, plane: Mlcc, name: str, rows: Sequence[int]) -> None:
        links, options = range(len(plane.sim.world.links)), plane.options
        self.rows = np.array(rows, np.intp)
        self.name = name
        self.planner = Reserving(
            MlccPolicy(options, DEFAULT_SLOT),
            [True] * len(links),
            [links],
            DEFAULT_SLOT,
            at_once=not options.atomic,
        )
        self.writes = 0
        """Rates put into force."""
        self._sim = plane.sim
        self._plane = plane
        self._peers = Peers(DEFAULT_SLOT)
        self._letters = 0  # so often other hosts were told
        self._slot = -1
        self._busy = self._looks = False

    # --- what happens

    def begin_slot(self, now: Nanos, slot: int, loads: tuple[Floats, Floats] | None) -> None:
        """`slot` begins. `loads`: what links carried in the last one, see `Reserving.rates`."""
        self._slot = slot
        self._look(now, loads)
        self._tell(now)

    def moved(self) -> None:
        """Flows have begun, or ended: look at all, once all that happens now has happened."""
        if not self._looks:
            self._looks = True
            self._sim.events.at(self._sim.now, self._look)

    def ended(self, now: Nanos) -> None:
        """Flows have sent everything."""
        self._tell(now)
        self.moved()

    def hear(self, now: Nanos, teller: str, n: int, said: Sequence[Progress]) -> None:
        """Another host tells of its flows, in its message `n`."""
        due = self._peers.hear(now, teller, n, said)
        if due is not None:
            self._sim.events.at(due, self._ask)

    def _ask(self, now: Nanos) -> None:
        self.planner.ask()
        self._go(now)

    def _look(self, now: Nanos, loads: tuple[Floats, Floats] | None = None) -> None:
        """Put into force what the planner says of the flows as they are."""
        self._looks = False
        view = self._sim.view(self.rows, self._slot, self._plane.switch.table.horizon)
        pace = self.planner.rates(now, view, loads)
        rates = np.zeros(len(self.rows))
        ceilings = np.full(len(self.rows), math.inf)
        if pace is not None:
            at = np.searchsorted(self.rows, pace.flows)
            rates[at] = pace.schedule.at(self._slot)
            if not self._plane.options.top_up:
                ceilings[at] = rates[at]
        self.writes += len(rates)
        self._sim.network.pace(self.rows, rates, ceilings)
        self._go(now)

    def _tell(self, now: Nanos) -> None:
        """Let other hosts know how far flows will be when the slot ends that theirs depend on."""
        self._letters += 1
        rates, left_s = self.planner.in_force(now)
        for host, said in letters(self._transfers(rates), left_s).items():
            self._plane.tell(host, self.name, self._letters, said)

    # --- the transport

    def _go(self, now: Nanos) -> None:
        """A round begins if one is due, once all that happens now has happened."""
        if self.planner.wanted and not self._busy:
            self._busy = True
            self._sim.events.at(now, self._begin)

    def _begin(self, now: Nanos) -> None:
        (fetch,) = self.planner.begin(now)
        self._plane.send(lambda then: self._fetch(then, fetch))

    def _fetch(self, now: Nanos, fetch: Fetch) -> None:
        feedback = self._plane.switch.fetch(now, fetch.links)
        self._plane.send(lambda then: self._plan(then, feedback))

    def _plan(self, now: Nanos, feedback: Feedback) -> None:
        self._look(now)
        known = self._peers.dependencies(now, self._transfers({}))
        self._call(now, self.planner.plan(now, [feedback], known) or ())

    def _call(self, now: Nanos, calls: Sequence[Reserve]) -> None:
        if calls:
            updates, switch = [call.update for call in calls], self._plane.switch
            self._plane.send(lambda then: switch.update(then, updates, self._switch_answers))
        else:
            self._busy = False
        self._look(now)
        self._tell(now)

    def _switch_answers(self, _: Nanos, accepted: list[bool]) -> None:
        self._plane.send(lambda now: self._call(now, self.planner.reserved(now, accepted)))

    # --- what is seen

    def _transfers(self, rates: Mapping[int, float]) -> list[LocalFlow]:
        """What the daemon's flow table says of flows that others may wait for, or that may wait for
        others; nothing of those that have not begun yet."""
        sim, found = self._sim, []
        for row in self.rows.tolist():
            spec, phases = sim.flows[row], int(sim.network.rows["begun"][row])
            if spec.group is None or not phases:
                continue
            found.append(
                LocalFlow(
                    flow=row,
                    host=spec.to,
                    group=spec.group,
                    iteration=phases,
                    total=spec.total,
                    ready=sim.network.ready(row),
                    sent=sim.network.sent(row),
                    rate=rates.get(row, 0.0),
                )
            )
        return found
