# SPDX-License-Identifier: Apache-2.0
"""A simulated host under MLCC: its flows, its policy, and its calls to switches and other hosts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from flowslot.model.units import SECOND, Nanos
from flowslot.policy.base import Floats, Pace, View
from flowslot.policy.mlcc import MlccPolicy, Observed, Update
from flowslot.policy.mlcc.peers import LocalFlow, Peers, Progress, letters
from flowslot_sim.plane.mlcc_switch import HORIZON, TableSwitch
from flowslot_sim.simulation import Simulation

ATTEMPTS = 8
"""Plans of a host in one slot that switches may refuse; then it waits for the next slot."""
EARLY_S = 1e-4
"""Plans count on so much less of a slot: what is to end with it must not miss it by a rounding
error, as it would wait for the next one with its last byte."""


@dataclass(frozen=True, slots=True)
class Wiring:
    """What a host is connected to. `send`: does something after a message's delay, counted.
    `answer_s`: seconds that an update and its answer take. `tell`: (another host, who tells it,
    the message's number, what it says)."""

    send: Callable[[Callable[[Nanos], None]], None]
    switch: TableSwitch
    slot_ns: Nanos
    answer_s: float
    tell: Callable[[str, str, int, Sequence[Progress]], None]


class MlccHost:
    """Runs `policy` on flows `rows` of the simulation.

    One conversation with the switches at a time: FetchFeedback, decide, UpdateSchedule. Without
    atomic reservations what is decided holds at once; with them only what is taken back does, the
    rest with the answer. Between conversations the plan goes on slot by slot.
    """

    def __init__(
        self,
        sim: Simulation,
        name: str,
        rows: Sequence[int],
        *,
        policy: MlccPolicy,
        wiring: Wiring,
    ) -> None:
        self.rows = np.array(rows, np.intp)
        self.name = name
        self.writes = 0
        """Rates put into force."""
        self._sim = sim
        self._policy = policy
        self._options = policy.options
        self._wiring = wiring
        self._peers = Peers(wiring.slot_ns)
        self._letters = 0  # so often other hosts were told
        self._iteration = np.zeros(len(rows), np.int64)
        self._slot = -1
        self._base = sim.network.rows["sent"][self.rows]  # bytes of each when the slot began
        self._whole: Floats = np.zeros(len(rows))  # sent in it by iterations that have ended
        self._plan: Pace | None = None
        self._next: Pace | None = None  # decided, and not yet answered
        self._busy = self._due = False
        self._attempts = 0
        self._flow = self.rows.astype(np.uint64)
        self._job = np.array([sim.job_of[row] for row in rows], np.int64)
        self._names = [job.name for job in sim.world.jobs]
        self._unbounded = np.full(len(rows), math.inf)
        self._free = np.zeros(len(rows), np.bool_)

    # --- what happens

    def begin_slot(self, now: Nanos, slot: int, loads: Floats | None) -> None:
        """`slot` begins. `loads`: payload bytes/s that each link carried in the last one, of flows
        under control and in all, float64[2, L]; None: not known, no other traffic is expected."""
        if self._slot >= 0:
            sent = dict(zip(self.rows.tolist(), self._sent_in_slot().tolist(), strict=True))
            self._policy.observe(Observed(self._slot, sent, *(() if loads is None else loads)))
        self._slot = slot
        self._base = self._sim.network.rows["sent"][self.rows]
        self._whole[:] = 0.0
        self._attempts = 0
        self._enforce()
        self.tell()
        self.ask(now)

    def began(self, now: Nanos, rows: Sequence[int]) -> None:
        """These flows have begun an iteration."""
        at = np.isin(self.rows, rows)
        # What the last iteration sent in this slot was noted when it ended.
        self._base[at] = 0.0
        self._iteration[at] += 1
        if self._options.replan_on_events:
            self.ask(now)

    def ended(self, now: Nanos, rows: Sequence[int]) -> None:
        """These flows have sent everything."""
        at = np.isin(self.rows, rows)
        total = self._sim.network.rows["total"][self.rows]
        self._whole[at] += (total - self._base)[at]
        self._base[at] = total[at]
        self.tell()
        if self._options.replan_on_events:
            self.ask(now)

    def hear(self, now: Nanos, teller: str, n: int, said: Sequence[Progress]) -> None:
        """Another host tells of its flows, in its message `n`."""
        due = self._peers.hear(now, teller, n, said)
        if due is not None and self._options.replan_on_events:
            self._sim.events.at(due, self.ask)

    def tell(self) -> None:
        """Let other hosts know how far flows will be when the slot ends that theirs depend on."""
        self._letters += 1
        for host, said in letters(self._transfers(), self._left_s()).items():
            self._wiring.tell(host, self.name, self._letters, said)

    # --- the conversation

    def ask(self, now: Nanos) -> None:
        """Plan anew: once all that happens now has happened, and what is under way has ended."""
        if self._busy:
            self._due = True
            return
        self._busy = True
        self._sim.events.at(now, lambda _: self._wiring.send(self._at_switch))

    def _at_switch(self, now: Nanos) -> None:
        slot, load = self._wiring.switch.fetch(now)
        self._wiring.send(partial(self._decide, slot=slot, load=load))

    def _decide(self, now: Nanos, slot: int, load: Floats) -> None:
        late = self._slot - slot  # it was on its way when the slot began
        if late > 0:
            load = np.concatenate((load[:, late:], np.zeros((len(load), late))), axis=1)
        policy = self._policy
        policy.dependencies = self._peers.dependencies(now, self._transfers())
        wait_s = self._wiring.answer_s if self._options.atomic else 0.0
        policy.left_s = self._left_s() - wait_s - EARLY_S
        self._next = policy.decide(now, self._view(load))
        if self._options.atomic and policy.updates:
            self._enforce()
            updates, switch = policy.updates, self._wiring.switch
            self._wiring.send(lambda then: switch.update(then, updates, self._switch_answers))
            return
        if policy.updates:
            updates, switch = policy.updates, self._wiring.switch
            self._wiring.send(lambda then: switch.update(then, updates, _nobody_waits))
        self._settle(now)

    def _switch_answers(self, _: Nanos, refused: list[Update]) -> None:
        self._wiring.send(lambda now: self._answered(now, refused))

    def _answered(self, now: Nanos, refused: list[Update]) -> None:
        if refused:
            self._next = self._policy.refused(refused)
            self._attempts += 1
            self._due = self._due or self._attempts < ATTEMPTS
        self._settle(now)

    def _settle(self, now: Nanos) -> None:
        """What was decided last holds; on with what has come up meanwhile."""
        self._plan, self._next = self._next, None
        self._enforce()
        self.tell()
        self._busy = False
        if self._due:
            self._due = False
            self.ask(now)

    # --- rates

    def _rates(self) -> Floats:
        """What is in force now: float64[F]; of two plans, each flow's lesser rate."""
        none: Floats = np.zeros(len(self.rows))
        rates = none if self._plan is None else self._plan.schedule.at(self._slot)
        if self._next is not None:
            rates = np.minimum(rates, self._next.schedule.at(self._slot))
        return rates

    def _enforce(self) -> None:
        rates = self._rates()
        self.writes += len(rates)
        ceilings = self._unbounded if self._options.top_up else rates
        self._sim.network.pace(self.rows, rates, ceilings)

    # --- what is seen

    def _sent_in_slot(self) -> Floats:
        now = self._sim.network.rows["sent"][self.rows]
        sent: Floats = self._whole + np.maximum(now - self._base, 0.0)
        return sent

    def _left_s(self) -> float:
        """Of the current slot."""
        end = (self._slot + 1) * self._wiring.slot_ns
        return max(end - self._sim.now, 0) / SECOND

    def _transfers(self) -> list[LocalFlow]:
        """What the daemon's flow table says of flows that others may wait for, or that may wait for
        others; nothing of those that have not begun yet."""
        network, rates = self._sim.network, self._rates()
        found = []
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
                    rate=float(rates[i]),
                )
            )
        return found

    def _view(self, load: Floats) -> View:
        network = self._sim.network
        rows = network.rows[self.rows]
        left = np.where(rows["active"], np.maximum(rows["total"] - rows["sent"], 1.0), 0.0)
        paths: NDArray[np.int32] = network.paths[self.rows]
        return View(
            slot=self._slot,
            horizon=HORIZON,
            capacity=network.capacity[:-1],
            flow=self._flow,
            paths=paths,
            job=self._job,
            job_names=self._names,
            remaining=left,
            guaranteed=self._free,
            load=load,
        )


def _nobody_waits(_now: Nanos, _refused: list[Update]) -> None:
    """The paper's hosts do not ask whether an update was accepted; the paper's switch does."""
