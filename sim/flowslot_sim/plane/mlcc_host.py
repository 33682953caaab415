# SPDX-License-Identifier: Apache-2.0
"""A simulated host under MLCC: core's `Reserving` between its flows and a simulated switch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from flowslot.model.units import Nanos
from flowslot.policy.base import Floats, View
from flowslot.policy.mlcc.peers import LocalFlow, Peers, Progress, letters
from flowslot.policy.mlcc.planner import Feedback, Fetch, Reserve, Reserving
from flowslot_sim.plane.mlcc_switch import HORIZON, TableSwitch
from flowslot_sim.simulation import Simulation


@dataclass(frozen=True, slots=True)
class Wiring:
    """What a host is connected to. `send`: does something after a message's delay, counted.
    `tell`: (another host, who tells it, the message's number, what it says)."""

    send: Callable[[Callable[[Nanos], None]], None]
    switch: TableSwitch
    slot_ns: Nanos
    tell: Callable[[str, str, int, Sequence[Progress]], None]


class MlccHost:
    """Runs `planner` on flows `rows` of the simulation. `top_up`: beyond their rates, flows share
    what others leave."""

    def __init__(
        self,
        sim: Simulation,
        name: str,
        rows: Sequence[int],
        *,
        planner: Reserving,
        top_up: bool,
        wiring: Wiring,
    ) -> None:
        self.rows = np.array(rows, np.intp)
        self.name = name
        self.planner = planner
        self.writes = 0
        """Rates put into force."""
        self._sim = sim
        self._top_up = top_up
        self._wiring = wiring
        self._peers = Peers(wiring.slot_ns)
        self._letters = 0  # so often other hosts were told
        self._iteration = np.zeros(len(rows), np.int64)
        self._slot = -1
        self._busy = self._looks = False
        self._job = np.array([sim.job_of[row] for row in rows], np.int64)
        self._names = [job.name for job in sim.world.jobs]

    # --- what happens

    def begin_slot(self, now: Nanos, slot: int, loads: tuple[Floats, Floats] | None) -> None:
        """`slot` begins. `loads`: what links carried in the last one, see `Reserving.rates`."""
        self._slot = slot
        self._look(now, loads)
        self._tell(now)

    def began(self, rows: Sequence[int]) -> None:
        """These flows have begun an iteration."""
        self._iteration[np.isin(self.rows, rows)] += 1
        self._moved()

    def ended(self, now: Nanos) -> None:
        """Flows have sent everything."""
        self._tell(now)
        self._moved()

    def hear(self, now: Nanos, teller: str, n: int, said: Sequence[Progress]) -> None:
        """Another host tells of its flows, in its message `n`."""
        due = self._peers.hear(now, teller, n, said)
        if due is not None:
            self._sim.events.at(due, self._ask)

    def _ask(self, now: Nanos) -> None:
        self.planner.ask()
        self._go(now)

    def _moved(self) -> None:
        """Look at all flows, once all that happens now has happened."""
        if not self._looks:
            self._looks = True
            self._sim.events.at(self._sim.now, self._look)

    def _look(self, now: Nanos, loads: tuple[Floats, Floats] | None = None) -> None:
        """Put into force what the planner says of the flows as they are."""
        self._looks = False
        pace = self.planner.rates(now, self._view(), loads)
        rates = np.zeros(len(self.rows))
        ceilings = np.full(len(self.rows), math.inf)
        if pace is not None:
            at = np.searchsorted(self.rows, pace.flows)
            rates[at] = pace.schedule.at(self._slot)
            if not self._top_up:
                ceilings[at] = rates[at]
        self.writes += len(rates)
        self._sim.network.pace(self.rows, rates, ceilings)
        self._go(now)

    def _tell(self, now: Nanos) -> None:
        """Let other hosts know how far flows will be when the slot ends that theirs depend on."""
        self._letters += 1
        rates, left_s = self.planner.in_force(now)
        for host, said in letters(self._transfers(rates), left_s).items():
            self._wiring.tell(host, self.name, self._letters, said)

    # --- the transport

    def _go(self, now: Nanos) -> None:
        """A round begins if one is due, once all that happens now has happened."""
        if self.planner.wanted and not self._busy:
            self._busy = True
            self._sim.events.at(now, self._begin)

    def _begin(self, now: Nanos) -> None:
        (fetch,) = self.planner.begin(now)
        self._wiring.send(lambda then: self._fetch(then, fetch))

    def _fetch(self, now: Nanos, fetch: Fetch) -> None:
        feedback = self._wiring.switch.fetch(now, fetch.links)
        self._wiring.send(lambda then: self._plan(then, feedback))

    def _plan(self, now: Nanos, feedback: Feedback) -> None:
        self._look(now)
        known = self._peers.dependencies(now, self._transfers({}))
        self._call(now, self.planner.plan(now, [feedback], known) or ())

    def _call(self, now: Nanos, calls: Sequence[Reserve]) -> None:
        if calls:
            updates, switch = [call.update for call in calls], self._wiring.switch
            self._wiring.send(lambda then: switch.update(then, updates, self._switch_answers))
        else:
            self._busy = False
        self._look(now)
        self._tell(now)

    def _switch_answers(self, _: Nanos, accepted: list[bool]) -> None:
        self._wiring.send(lambda now: self._call(now, self.planner.reserved(now, accepted)))

    # --- what is seen

    def _transfers(self, rates: Mapping[int, float]) -> list[LocalFlow]:
        """What the daemon's flow table says of flows that others may wait for, or that may wait for
        others; nothing of those that have not begun yet."""
        network, found = self._sim.network, []
        for i, row in enumerate(self.rows.tolist()):
            spec = self._sim.flows[row]
            if spec.group is None or not self._iteration[i]:
                continue
            found.append(
                LocalFlow(
                    flow=row,
                    host=spec.to,
                    group=spec.group,
                    iteration=int(self._iteration[i]),
                    total=spec.total,
                    ready=network.ready(row),
                    sent=float(network.rows["sent"][row]),
                    rate=rates.get(row, 0.0),
                )
            )
        return found

    def _view(self) -> View:
        network = self._sim.network
        rows = network.rows[self.rows]
        left = np.where(rows["active"], np.maximum(rows["total"] - rows["sent"], 1.0), 0.0)
        return View(
            slot=self._slot,
            horizon=HORIZON,
            capacity=network.capacity[:-1],
            flow=self.rows.astype(np.uint64),
            paths=network.paths[self.rows],
            job=self._job,
            job_names=self._names,
            remaining=left,
            guaranteed=np.zeros(len(rows), np.bool_),
            acked=np.maximum(self._iteration - 1, 0) * rows["total"] + rows["sent"],
        )
