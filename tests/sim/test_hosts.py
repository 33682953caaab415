# SPDX-License-Identifier: Apache-2.0
"""Host schedulers, with leases; and CASSINI's choice among placements."""

import numpy as np
import pytest

from flowslot_sim.cluster.hosts import (
    SHORTEST,
    HostScheduler,
    Pollux,
    Standing,
    Themis,
    one_server_or_line,
)
from flowslot_sim.cluster.jobs import JobSpec, Phase
from flowslot_sim.cluster.placement import first_fit
from flowslot_sim.cluster.run import Cluster
from flowslot_sim.cluster.slotted import Sharing, Slots, Slotted
from flowslot_sim.cluster.tiers import Tiers

S = 10**9
NETWORK = Tiers(4, (8.0, 8.0, 8.0), servers_per_rack=4)
RATE = float(NETWORK.capacity[0])


def job(name: str, workers: int, iterations: int, compute_s: float, send_s: float = 0.0, **more):
    phase = Phase(round(compute_s * S), send_s * RATE)
    return JobSpec(name, workers, iterations, (phase,), memory_mb=1.0, **more)


def run(jobs: list[JobSpec], host: HostScheduler, gpus: int = 2) -> tuple[Slotted, Slots]:
    made = Slotted(jobs, Cluster(4, gpus, 1.0), NETWORK, first_fit, Sharing(), host=host)
    found = made.go_on(1e5)
    assert found.done.all() and not found.stalled
    return made, found


def drawn(seed: int) -> list[JobSpec]:
    draw = np.random.default_rng(seed)
    return [
        job(
            f"j{k}",
            int(draw.integers(1, 9)),
            int(draw.integers(5, 40)),
            float(draw.uniform(0.1, 1.0)),
            float(draw.uniform(0.0, 1.0)),
            arrival_ns=int(draw.integers(0, 30 * S)),
        )
        for k in range(14)
    ]


ALONE = one_server_or_line(RATE, 2)
HOSTS = [SHORTEST, Themis(ALONE, 5 * S), Pollux(ALONE, 5 * S)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("host", HOSTS, ids=lambda host: type(host).__name__)
def test_jobs_that_move_do_all_of_their_work(host: HostScheduler, seed: int) -> None:
    made, found = run(drawn(seed), host)
    computed = np.asarray(made.engine.busy).sum()
    wanted = sum(each.compute_ns * each.workers for each in found.jobs)
    if isinstance(host, Pollux):  # smaller batches teach more per sample: less is to be done
        assert 0.5 * wanted < computed <= wanted
        assert computed < wanted  # some were smaller
    else:
        assert computed == wanted
        assert found.iterations.tolist() == [each.iterations for each in found.jobs]
    assert not np.asarray(made.engine.sharing.n) and (np.asarray(made.engine.head) < 0).all()


@pytest.mark.parametrize("host", HOSTS[1:], ids=lambda host: type(host).__name__)
def test_the_order_in_the_file_does_not_matter(host: HostScheduler) -> None:
    jobs = drawn(9)
    assert np.array_equal(run(jobs, host)[1].jct_s, run(jobs[::-1], host)[1].jct_s)


def test_leases_take_from_who_came_first_what_is_unfair() -> None:
    """On 8 GPUs: one job of 100 s has all, one of 10 s comes a second later. With finish-time
    fairness the short one gets its turn when the first lease ends; without, after the long one."""
    jobs = [job("long", 8, 100, 1.0), job("short", 8, 10, 1.0, arrival_ns=S)]
    by_name = {}
    for host in (SHORTEST, Themis(ALONE, 19 * S)):
        _, found = run(jobs, host)
        by_name[type(host).__name__] = found.jct_s.tolist()
    assert by_name["ShortestFirst"] == [100.0, 109.0]
    assert by_name["Themis"] == [110.0, 29.0]


def test_who_makes_room_does_not_take_it_again() -> None:
    """b and c stop at different times; what b leaves is kept for a, which needs both's GPUs."""
    jobs = [
        job("a", 8, 5, 1.0, arrival_ns=S),
        job("b", 4, 100, 1.0),
        job("c", 4, 100, 1.7),
    ]
    made, found = run(jobs, Themis(ALONE, 19 * S))
    by_name = dict(zip((x.name for x in found.jobs), found.jct_s.tolist(), strict=True))
    assert by_name["a"] == pytest.approx(20.4 + 5.0 - 1.0)
    assert np.asarray(made.engine.busy).sum() == sum(x.compute_ns * x.workers for x in jobs)


def standing(i: int, each: JobSpec, age_s: float = 0.0, left: float | None = None) -> Standing:
    left = each.iterations if left is None else left
    return Standing(i, each, age_s, left, each.compute_ns * each.workers)


def test_who_is_treated_worst_comes_first() -> None:
    one, two = job("a", 8, 10, 1.0), job("b", 8, 100, 1.0)
    host = Themis(ALONE, S)
    assert host.shares([standing(0, one, 1.0), standing(1, two, 1.0)], 8)[0] == (0, 8)
    # The second has waited for twenty times as long as both need.
    assert host.shares([standing(0, one, 1.0), standing(1, two, 2200.0)], 8)[0] == (1, 8)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("gpus", [3, 8, 20, 27, 34, 41, 64])
def test_pollux_gives_gpus_where_they_bring_most(gpus: int, seed: int) -> None:
    host, jobs = Pollux(ALONE, S), [standing(k, each) for k, each in enumerate(drawn(seed))]
    shares = host.shares(jobs, gpus)
    has = dict(shares)
    assert len(has) == len(shares) == min(gpus, len(jobs)) and sum(has.values()) <= gpus
    left, fair = gpus - sum(has.values()), gpus / len(jobs)
    for each in jobs:
        if each.i in has:
            slow, n = host._slowness(each.job, fair), has[each.i]
            fits = [m for m in slow if n < m <= n + left]
            assert all(slow[m] >= slow[n] for m in fits)  # nobody would gain by what is left
            assert n in slow and n <= each.job.workers


@pytest.mark.parametrize("host", HOSTS, ids=lambda host: type(host).__name__)
def test_a_job_that_computes_nothing_has_its_share(host: HostScheduler) -> None:
    jobs = [standing(0, job("one", 2, 5, 0.0, 0.5)), standing(1, job("more", 4, 5, 0.0, 0.5))]
    assert sorted(i for i, _ in host.shares(jobs, 8)) == [0, 1]


def test_a_network_that_is_slow_makes_pollux_stay_on_a_server() -> None:
    slow, quick = job("slow", 4, 10, 0.1, 5.0), job("quick", 4, 10, 0.1, 0.01)
    shares = dict(Pollux(ALONE, S).shares([standing(0, slow), standing(1, quick)], 8))
    assert shares == {0: 2, 1: 4}


def test_cassini_takes_the_placement_where_jobs_do_not_meet() -> None:
    busy = [job("a", 2, 1000, 0.1, 0.9), job("b", 2, 1000, 0.1, 0.9, arrival_ns=S)]
    asked = []

    def place(question):
        beside, apart = np.array([1, 3]), np.array([4, 6])
        if question.name == "a":
            return np.array([0, 2])
        asked.extend([question.best([beside, apart]), question.best([apart, beside])])
        return apart

    Slotted(busy, Cluster(4, 2, 1.0), NETWORK, place, Sharing()).go_on(2.0)
    assert asked == [1, 0]
