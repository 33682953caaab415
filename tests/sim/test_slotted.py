# SPDX-License-Identifier: Apache-2.0
"""Jobs that queue, on a network that allocators share out slot by slot; papers' comparisons."""

import numpy as np
import pytest
from interpreted import plain

from flowslot.policy.base import Allocator
from flowslot.policy.ccml import CcmlAllocator
from flowslot.policy.mcs import McsAllocator
from flowslot.policy.mlcc import MlccOptions
from flowslot.policy.mlcc.fleet import FleetAllocator
from flowslot.policy.mlcc.prototype import PrototypeAllocator
from flowslot.policy.srpt import SrptAllocator
from flowslot_sim.cluster import planned
from flowslot_sim.cluster.jobs import JobSpec, Phase
from flowslot_sim.cluster.run import Cluster
from flowslot_sim.cluster.slotted import Sharing, Slots, Slotted
from flowslot_sim.cluster.tiers import Tiers
from flowslot_sim.papers.mlcc import apart

NIC = Tiers(2, (8.0, 8.0, 8.0), servers_per_rack=2)
RATE = float(NIC.capacity[0])


def job(name: str, compute_s: float, send_s: float, iterations: int = 40, **more) -> JobSpec:
    """A ring of two servers: each flow has a NIC's up and down link."""
    phase = Phase(round(compute_s * 1e9), send_s * RATE)
    return JobSpec(name, 2, iterations, (phase,), memory_mb=1.0, **more)


def run(jobs: list[JobSpec], allocator: Allocator | None, until_s: float = 1e4, **how) -> Slots:
    tiers = Tiers(2, (8.0, 8.0, 8.0), servers_per_rack=2, top_up=how.pop("top_up", True))
    cluster = Cluster(2, len(jobs), 1.0)
    slotted = Slotted(jobs, cluster, tiers, apart(0, 0), Sharing(allocator, **how))
    return slotted.go_on(until_s)


def mean_s(jobs: list[JobSpec], allocator: Allocator | None, **how) -> float:
    found = run(jobs, allocator, **how)
    assert found.done.all() and not found.stalled
    return float(found.jct_s.mean())


MAKE = {
    "fair": lambda: None,
    "srpt": SrptAllocator,
    "mcs": McsAllocator,
    "ccml": CcmlAllocator,
    "mlcc": lambda: FleetAllocator(MlccOptions.repaired()),
}


@pytest.mark.parametrize("name", MAKE)
def test_a_job_alone_is_as_fast_as_its_links(name: str) -> None:
    alone = run([job("a", 0.3, 0.6)], MAKE[name]())
    assert alone.jct_s[0] == pytest.approx(40 * 0.9, rel=1e-3)


def test_where_jobs_fit_beside_each_other_ccml_beats_fair() -> None:
    jobs = [job("a", 0.5, 0.45), job("b", 0.5, 0.45)]
    assert mean_s(jobs, CcmlAllocator()) < 1.03 * 40 * 0.95
    assert mean_s(jobs, None) > 1.3 * 40 * 0.95


def test_where_a_small_coflow_meets_a_large_one_mcs_beats_fair() -> None:
    """Without gaps for its start-after: the small one is through first, again and again."""
    jobs = [job("small", 0.2, 0.2, 60), job("large", 0.2, 2.0, 20)]
    assert mean_s(jobs, McsAllocator()) < 0.9 * mean_s(jobs, None)
    assert mean_s(jobs, SrptAllocator()) < 0.9 * mean_s(jobs, None)


def test_flows_that_start_after_one_another_take_as_many_times_longer() -> None:
    slow = run([job("a", 0.3, 0.6)], McsAllocator(), start_after={"a": 2})
    assert slow.jct_s[0] == pytest.approx(40 * 1.5, rel=0.05)


def test_a_livelock_is_found_and_ends_the_run() -> None:
    strict = FleetAllocator(MlccOptions(), count_links=True)
    jobs = [job("a", 0.5, 0.4), job("b", 0.6, 0.4)]
    found = run(jobs, strict, top_up=False, as_one=True)
    assert found.stalled.startswith("livelock: no byte after 0.") and not found.done.any()
    assert "not done after 5 s" in run(jobs, None, until_s=5.0).stalled


def test_compiled_loops_do_what_their_source_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert planned.COMPILED
    jobs = [job("a", 0.5, 0.4), job("b", 0.3, 0.6)]

    def ends() -> list[float]:
        return run(jobs, PrototypeAllocator(), top_up=False, as_one=True).jct_s.tolist()

    compiled = ends()
    monkeypatch.setattr("flowslot_sim.cluster.tiers.Planned", plain(planned).Planned)
    assert ends() == compiled


@pytest.mark.parametrize("seed", range(3))
def test_no_link_carries_more_than_it_can_and_every_byte_arrives_once(seed: int) -> None:
    draw = np.random.default_rng(seed)
    tiers = Tiers(40, servers_per_rack=4, racks_per_group=5)
    assert tiers.links == 2 * (40 + 10 + 2) == len(tiers.capacity) - 1
    jobs = [
        JobSpec(
            f"j{k}", int(draw.integers(2, 5)), int(draw.integers(2, 5)),
            (Phase(int(draw.integers(1, 8)) * 10**8, float(draw.uniform(1e7, 5e8))),),
            int(draw.integers(0, 2 * 10**9)), 1.0,
        )
        for k in range(40)
    ]  # fmt: skip
    for make, how in (
        (SrptAllocator, {}), (McsAllocator, {}), (CcmlAllocator, {}), (PrototypeAllocator, {}),
        (lambda: FleetAllocator(MlccOptions.repaired()), {"as_one": True}),
    ):  # fmt: skip
        results = []
        for order in (jobs, jobs[::-1]):
            sharing = Sharing(make(), **how)
            slotted = Slotted(order, Cluster(40, 2, 1.0), tiers, apart(seed, 0), sharing)
            found = slotted.go_on(1e4)
            assert found.done.all(), found.stalled
            results.append(found.jct_s)
        assert results[0] == pytest.approx(results[1]), "order in the file"
        carried = np.asarray(slotted.engine.carried)[:-1]
        rows, each = slotted.table.jobs, slotted.table.volume[:, 0]
        sent = sum(v * j.iterations * j.workers for v, j in zip(each, rows, strict=True))
        assert carried[:80:2].sum() == pytest.approx(sent), "up from servers: each flow once"
        assert carried[1:80:2].sum() == pytest.approx(sent)
        last_s = found.slots * 0.06
        assert (carried <= tiers.capacity[:-1] * last_s).all()
