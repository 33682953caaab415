# SPDX-License-Identifier: Apache-2.0
"""What holds in every run of the cluster engine, whoever shares the network out."""

import random

import numpy as np
import pytest

from flowslot.model.units import SECOND
from flowslot_sim.cluster.contest import POLICIES, Contest
from flowslot_sim.cluster.jobs import JobSpec, Phase
from flowslot_sim.cluster.placement import at_random
from flowslot_sim.cluster.run import Cluster
from flowslot_sim.cluster.slotted import Sharing as Shared
from flowslot_sim.cluster.slotted import Slotted
from flowslot_sim.cluster.tiers import Tiers

CLUSTER, NETWORK = Cluster(12, 2, 10.0), Tiers(12, servers_per_rack=3, racks_per_group=2)


def jobs(seed: int) -> list[JobSpec]:
    draw = np.random.default_rng(seed)

    def phase() -> Phase:
        return Phase(int(draw.integers(1, 80)) * 10**6, float(draw.choice([0.0, 3e7, 2e8])))

    return [
        JobSpec(
            f"j{k}",
            int(draw.integers(1, 9)),
            int(draw.integers(1, 12)),
            tuple(phase() for _ in range(draw.integers(1, 4))),
            int(draw.integers(3000)) * 10**6,
            4.0,
        )
        for k in range(14)
    ]


class Watched(Slotted):
    """Looks at all links whenever the engine stops, and remembers what each job was placed on."""

    def __init__(self, policy: str, specs: list[JobSpec]) -> None:
        asked = Contest(policy, servers=4, jobs=1).built()._how
        how = Shared(asked.allocator, gate=asked.gate)
        super().__init__(specs, CLUSTER, NETWORK, at_random(3), how)
        self.links: dict[str, list[int]] = {}
        self.stops = 0

    def _path(self, i, gpus):
        path = list(super()._path(i, gpus))
        self.links[self.table.jobs[i].name] = path
        return path

    def _advance(self, until: int) -> bool:
        engine, goes_on = self.engine, True
        while goes_on and engine.now < until:  # in steps: also within a slot
            begun, running = engine.now, self._running
            goes_on = super()._advance(min(until, begun + 7 * 10**6))
            sharing = engine.sharing
            load = np.zeros(NETWORK.links + 1)
            for i in np.asarray(sharing.live)[: sharing.n].tolist():
                np.add.at(load, sharing.paths[i], sharing.rate[i] * np.asarray(sharing.flows[i]))
            assert (load[:-1] <= NETWORK.capacity[:-1] * (1 + 1e-6)).all()
            carried = np.asarray(engine.carried)[:-1]
            most = NETWORK.capacity[:-1] * engine.now / SECOND
            assert (carried <= most * (1 + 1e-6) + 1).all()
            self.stops += 1
            if self._running < running:
                break
        return goes_on


@pytest.mark.parametrize("policy", POLICIES)
def test_every_byte_once_no_link_too_full_and_nothing_before_its_time(policy: str) -> None:
    for seed in range(2):
        specs = jobs(seed)
        run = Watched(policy, specs)
        found = run.go_on(1e4)
        assert found.done.all(), found.stalled
        assert run.stops > 100
        due = np.zeros(NETWORK.links)
        for spec in specs:
            np.add.at(due, run.links[spec.name], spec.volume * spec.iterations)
        assert np.asarray(run.engine.carried)[:-1] == pytest.approx(due, rel=1e-9, abs=1e-3)
        for spec, took in zip(found.jobs, found.run_s, strict=True):
            # No phase begins before the one before it is over: together they take this long.
            path = run.links[spec.name]
            links, counts = np.unique(path, return_counts=True)
            fastest = float((NETWORK.capacity[links] / counts).min()) if path else np.inf
            least = spec.iterations * spec.volume / fastest + spec.compute_ns / SECOND
            assert took >= least * (1 - 1e-6)


@pytest.mark.parametrize("policy", ["fair", "stagger", "adadual"])
def test_the_order_of_jobs_in_a_file_decides_nothing(policy: str) -> None:
    specs = jobs(5)
    found = []
    for order in range(3):
        random.Random(order).shuffle(specs)
        slots = Watched(policy, specs).go_on(1e4)
        found.append({j.name: t for j, t in zip(slots.jobs, slots.jct_s, strict=True)})
    assert found[0] == found[1] == found[2]
