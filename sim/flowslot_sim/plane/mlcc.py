# SPDX-License-Identifier: Apache-2.0
"""MLCC as a control plane: every host plans its own flows, and switches add up the plans.

Source: MLCC, sections III to V. All hosts plan at the same moments, on one grid of slots; calls
between them and the switches take a message's delay each way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from flowslot.model.errors import ScheduleRefused
from flowslot.model.loadtable import LoadTable
from flowslot.model.slot import DEFAULT_SLOT, SlotGrid
from flowslot.model.units import SECOND, Nanos
from flowslot.policy.base import Floats
from flowslot.policy.mlcc import MlccOptions, Update
from flowslot.policy.mlcc.peers import Progress
from flowslot.policy.mlcc.planner import Feedback
from flowslot_scenario.results import Evidence
from flowslot_sim.plane.messages import Plant
from flowslot_sim.plane.mlcc_host import MlccHost
from flowslot_sim.simulation import Control, Simulation
from flowslot_sim.stalls import StallWatch


@dataclass(frozen=True, slots=True)
class Variant:
    """How MLCC is run.

    `count_links`: hosts are told what links carried, and estimate from it what other traffic leaves
    them. As published (u_l, the highest load of the last four slots) a link that was idle for so
    long has room for nothing ever after: with jobs that compute before they send, not one byte is
    sent. Without it, hosts believe that there is no other traffic.
    """

    options: MlccOptions
    count_links: bool


VARIANTS = {
    "mlcc-strict": Variant(MlccOptions(cost="literal"), count_links=True),
    "mlcc-literal": Variant(MlccOptions(cost="literal"), count_links=False),
    "mlcc-rhs": Variant(MlccOptions(cost="rhs"), count_links=False),
    "mlcc": Variant(MlccOptions.repaired(), count_links=True),
}
"""By name: as published, to the letter; as published but for u_l, by either reading of its cost;
with every remedy."""


Answer = Callable[[Nanos, list[bool]], None]
"""Takes which updates of a call were accepted."""


class TableSwitch:
    """FetchFeedback and UpdateSchedule, over core's load table: that of Arbiter.update_schedule.

    With option `atomic`, what does not fit is refused. Otherwise the paper's switch, which adds up
    whatever it is told: a table without bounds. All links are in one table, so that an update holds
    for its whole path or not at all, also where switches of their own would have to agree.
    """

    def __init__(self, sim: Simulation, options: MlccOptions, random: np.random.Generator) -> None:
        """With order `shortest`, of updates that arrive at the same moment those with the smallest
        key come first, and not those of an arbitrary host."""
        self._capacity = np.array(sim.world.capacity)
        most = self._capacity if options.atomic else np.full(len(self._capacity), math.inf)
        self.table = LoadTable(len(most), SlotGrid().horizon, most)
        self._events = sim.events
        self._by_key = options.order == "shortest"
        self._random = random
        self._waiting: list[tuple[Sequence[Update], Answer]] = []

    def fetch(self, now: Nanos, links: tuple[int, ...]) -> Feedback:
        """FetchFeedback."""
        self.table.advance(now // DEFAULT_SLOT)
        at = list(links)
        return Feedback(self.table.slot, links, self.table.load(links), self._capacity[at])

    def update(self, now: Nanos, updates: Sequence[Update], answer: Answer) -> None:
        """UpdateSchedule of one host. Decided once all that arrives at this moment has arrived:
        hosts are on one grid, and whoever happens to come first must not always be the same."""
        self._waiting.append((updates, answer))
        if len(self._waiting) == 1:
            self._events.at(now, self._decide)

    def _decide(self, now: Nanos) -> None:
        self.table.advance(now // DEFAULT_SLOT)
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


class Mlcc(Control):
    """See Control. `watch` reports stalls, and ends the run when nothing moves any more."""

    def __init__(self, sim: Simulation, variant: Variant, plant: Plant, seed: int) -> None:
        self.sim, self.options = sim, variant.options
        self.watch = StallWatch(sim)
        self._sent = 0  # messages, in all directions
        self._delays = plant.delays
        self._count_links = variant.count_links
        self._random = np.random.default_rng([seed, 11])
        self.switch = TableSwitch(sim, variant.options, self._random)
        rows_of = self._by_host(range(len(sim.flows)))
        self.hosts = {name: MlccHost(self, name, rows) for name, rows in rows_of.items()}
        self._counted = self._counters()

    # --- Control

    def start(self) -> None:
        """See Control."""
        self.watch.start()
        self._slot(self.sim.now)

    def began(self, now: Nanos, job: int, flows: Sequence[int]) -> None:
        """See Control."""
        for host in self._by_host(flows):
            self.hosts[host].moved()

    def ended(self, now: Nanos, flows: Sequence[int]) -> None:
        """See Control."""
        for host in self._by_host(flows):
            self.hosts[host].ended(now)

    def evidence(self) -> Evidence:
        """See Control. Scheduled and refused: updates."""
        each = [host.planner.counts for host in self.hosts.values()]
        return Evidence(
            scheduled=sum(counts.accepted for counts in each),
            refused=sum(counts.refused for counts in each),
            rate_writes=sum(host.writes for host in self.hosts.values()),
            control_packets=self._sent,
            errors=self.watch.report(),
        )

    # --- how

    def _slot(self, now: Nanos) -> None:
        """A slot begins, for all hosts."""
        counted = self._counters()
        controlled, carried = (counted - self._counted) / (DEFAULT_SLOT / SECOND)
        self._counted = counted
        loads = (controlled, carried) if self._count_links else None
        for host in self.hosts.values():
            host.begin_slot(now, now // DEFAULT_SLOT, loads)
        self.sim.events.after(DEFAULT_SLOT, self._slot)

    def _counters(self) -> Floats:
        """Bytes that each link has carried: of flows under control, and in all. float64[2, L]."""
        network = self.sim.network
        return np.stack((network.carried, network.carried + network.other))[:, :-1]

    def _by_host(self, flows: Sequence[int]) -> dict[str, list[int]]:
        by_host: dict[str, list[int]] = {}
        for row in flows:
            by_host.setdefault(self.sim.flows[row].host, []).append(row)
        return by_host

    def send(self, deliver: Callable[[Nanos], None]) -> None:
        """Do something a message's delay later."""
        self._sent += 1
        self.sim.events.after(self._delays.draw(self._random), deliver)

    def tell(self, host: str, teller: str, n: int, said: Sequence[Progress]) -> None:
        """Let another host know what `teller` says in its message `n`."""
        if host in self.hosts and host != teller:  # as daemons do
            self.send(partial(self.hosts[host].hear, teller=teller, n=n, said=said))
