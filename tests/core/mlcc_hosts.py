# SPDX-License-Identifier: Apache-2.0
"""Hosts that run MLCC against a switch, for its tests. Capacity 100 bytes/s, slots of 1 s."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from flowslot.model.errors import ScheduleRefused
from flowslot.model.loadtable import LoadTable
from flowslot.model.units import SECOND, Nanos
from flowslot.policy.base import Floats, Pace, View
from flowslot.policy.mlcc import MlccPolicy, Update

K = 10
Flows = Mapping[int, tuple[tuple[int, ...], float]]
"""By identifier: links, bytes left."""


def view_of(slot: int, flows: Flows, load: Floats | None = None, n_links: int = 1) -> View:
    """`load`: of links that carry something else."""
    paths = np.full((len(flows), 3), n_links, dtype=np.int32)
    for row, (links, _) in enumerate(flows.values()):
        paths[row, : len(links)] = links
    return View(
        slot=slot,
        horizon=K,
        capacity=np.full(n_links, 100.0),
        flow=np.array(list(flows), dtype=np.uint64),
        paths=paths,
        job=np.zeros(len(flows), dtype=np.int64),
        job_names=["job"],
        remaining=np.array([left for _, left in flows.values()]),
        guaranteed=np.zeros(len(flows), np.bool_),
        load=np.zeros((n_links, K)) if load is None else load,
    )


def decide(
    policy: MlccPolicy, view: View, at_s: float | None = None
) -> tuple[Pace, dict[int, list[float]]]:
    """The decision at `at_s` (default: the slot's beginning), and each flow's rates."""
    at_s = view.slot if at_s is None else at_s
    pace = policy.decide(Nanos(round(at_s * SECOND)), replace(view, passed=at_s - view.slot))
    return pace, rates_of(pace)


def rates_of(pace: Pace) -> dict[int, list[float]]:
    return dict(zip(pace.flows.tolist(), pace.schedule.rates.tolist(), strict=True))


class Switch:
    """Refuses what does not fit, by core's load table; checks what it is sent. Of boundless
    `capacity` it is the paper's switch: adds up whatever it is told."""

    def __init__(self, n_links: int = 1, capacity: float = 100.0) -> None:
        self.n_links = n_links
        self.table = LoadTable(n_links, K, [capacity] * n_links)
        self._told: dict[int, Update] = {}

    def held(self, flow: int, slot: int) -> Floats:
        """What was last accepted for the flow, from `slot` on, float64[K]."""
        rates = np.zeros(K)
        if flow in self._told:
            rest = self._told[flow].rates[slot - self._told[flow].slot :]
            rates[: len(rest)] = rest
        return rates

    def load(self, slot: int) -> Floats:
        self.table.advance(slot)
        return self.table.load(range(self.n_links))

    def send(self, updates: Sequence[Update]) -> list[Update]:
        """Those that the table refuses."""
        refused = []
        for update in updates:
            gives_back = np.all(update.rates <= self.held(update.flow, self.table.slot) + 1e-9)
            try:
                self.table.update(update.flow, update.links, update.rates.tolist())
            except ScheduleRefused:
                assert not gives_back, "nobody may refuse to take something back"
                refused.append(update)
            else:
                self._told[update.flow] = update
        return refused


def settle(policy: MlccPolicy, switch: Switch, flows: Flows, stale: Floats | None = None) -> Pace:
    """Decide, reserve, and decide again while the switch refuses; `stale`: what is fetched first.

    Nobody is ever paced at anything but what the switch holds.
    """
    slot, load = switch.table.slot, stale
    while True:
        load = switch.load(slot) if load is None else load
        pace, _ = decide(policy, view_of(slot, flows, load, switch.n_links))
        refused = switch.send(policy.updates)
        if refused:
            pace = policy.refused(refused)
        for flow, rates in rates_of(pace).items():
            assert np.allclose(rates, switch.held(flow, slot), atol=1e-6)
        if not refused:
            return pace
        load = None
