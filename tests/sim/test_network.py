# SPDX-License-Identifier: Apache-2.0
"""The fluid network against what can be worked out by hand. Bytes, bytes/s and seconds."""

import math

import numpy as np
import pytest

from flowslot_sim.network import FlowSpec
from flowslot_sim.simulation import Control, Simulation, Stalled
from flowslot_sim.world import SimJob, World

MB = 1e6
EXACT = 1e-6


def world(*jobs: SimJob, capacity: tuple[float, ...] = (100 * MB,)) -> World:
    links = tuple(f"l{i}" for i in range(len(capacity)))
    return World(links, capacity, ("h1",), jobs)


def job(*flows: FlowSpec, compute_s: float = 1.0, start_s: float = 0.0, name: str = "a") -> SimJob:
    compute = round(compute_s * 1e9)
    return SimJob(name, flows, lambda _: compute, round(start_s * 1e9), 1.0)  # type: ignore[arg-type]


def flow(total: float, *links: int, **more: object) -> FlowSpec:
    return FlowSpec("h1", links or (0,), total, **more)  # type: ignore[arg-type]


def times(sim: Simulation, j: int = 0) -> list[float]:
    progress = sim.progress[j]
    return [(e - b) / 1e9 for b, e in zip(progress.began, progress.ends, strict=False)]


def run(made: World, seconds: float) -> Simulation:
    sim = Simulation(made, lambda _: Control())
    sim.run(until_ns=round(seconds * 1e9))
    return sim


def ring(n: int, chunk: float = 5 * MB) -> list[FlowSpec]:
    return [
        flow(2 * (n - 1) * chunk, r, preds=((r - 1) % n,), own=chunk, head=chunk) for r in range(n)
    ]


@pytest.mark.parametrize(
    ("flows", "capacity", "seconds", "within"),
    [
        ([flow(50 * MB)], (100,), 0.5, EXACT),
        # 50 MB/s each: the shorter one ends after 0.4 s; then 80 MB are left at full rate.
        ([flow(20 * MB), flow(100 * MB)], (100,), 0.4 + 0.8, EXACT),
        # 6 MB of its own at once; then at the other one's rate; the last 6 when that has ended.
        (
            [flow(30 * MB, 0), flow(30 * MB, 1, preds=(0,), own=6 * MB, head=6 * MB)],
            (10, 100),
            3.0,
            1e-3,
        ),
        (
            [flow(30 * MB, 0), flow(30 * MB, 1, preds=(0,), head=-10 * MB)],
            (10, 10),
            3.0 + 1.0,
            EXACT,
        ),
        # The slowest of several predecessors decides; with a barrier, when all have ended.
        (
            [flow(10 * MB, 0), flow(10 * MB, 1), flow(10 * MB, 2, preds=(0, 1), head=-1 * MB)],
            (5, 50, 50),
            2.0 + 0.02,
            EXACT,
        ),
        (
            [flow(10 * MB, 0), flow(30 * MB, 0), flow(40 * MB, 1, preds=(0, 1), head=-math.inf)],
            (10, 10),
            4.0 + 4.0,
            EXACT,
        ),
        (ring(4), (10,) * 4, 3.0, EXACT),
        (ring(3), (10, 2, 10), 10.0, 0.01),  # at the rate of its slowest link
    ],
)
def test_how_long_an_iterations_bytes_take(
    flows: list[FlowSpec], capacity: tuple[float, ...], seconds: float, within: float
) -> None:
    """Links of so many MB/s; `seconds` after a computation of 1 s."""
    sim = run(world(job(*flows), capacity=tuple(c * MB for c in capacity)), 2 * (1 + seconds) + 0.5)
    assert times(sim) == pytest.approx([1 + seconds] * 2, rel=within)
    for link in range(len(capacity)):
        sent = sum(each.total for each in flows if each.links == (link,))
        assert sim.network.carried[link] == pytest.approx(2 * sent, rel=1e-6)


def test_the_slowest_link_of_a_path_decides_and_leaves_the_rest_to_others() -> None:
    long = job(flow(30 * MB, 0, 1), compute_s=0, name="long")
    short = job(flow(70 * MB, 0), compute_s=0, name="short")
    sim = run(world(long, short, capacity=(100 * MB, 30 * MB)), 1.0)
    assert times(sim, 0) == pytest.approx([1.0]) and times(sim, 1) == pytest.approx([1.0])


@pytest.mark.parametrize(
    ("own", "head", "ready"),
    [
        (6 * MB, 6 * MB, (11 * MB, 21 * MB, 30 * MB)),
        (8 * MB, 2 * MB, (8 * MB, 17 * MB, 30 * MB)),
        (0.0, -10 * MB, (0.0, 5 * MB, 30 * MB)),
        (0.0, -math.inf, (0.0, 0.0, 30 * MB)),
    ],
)
def test_what_is_ready_is_ones_own_and_what_has_come(
    own: float, head: float, ready: tuple[float, ...]
) -> None:
    first, last = flow(30 * MB, 0), flow(30 * MB, 1, preds=(0,), own=own, head=head)
    sim = Simulation(world(job(first, last), capacity=(10 * MB, 1 * MB)), lambda _: Control())
    for seconds, expected in zip((1.5, 2.5, 4.5), ready, strict=True):
        sim.run(until_ns=round(seconds * 1e9))
        assert sim.network.ready(0) == 30 * MB
        assert sim.network.ready(1) == pytest.approx(expected)


@pytest.mark.parametrize("slow", range(0, 20, 3))
def test_nobody_sends_what_it_has_not_got_in_long_rings_either(slow: int) -> None:
    n, chunk = 20, 5 * MB
    capacity = tuple(2 * MB if r == slow else 10 * MB for r in range(n))
    sim = Simulation(world(job(*ring(n, chunk)), capacity=capacity), lambda _: Control())
    sim.run(until_ns=1)
    while sim.now < 60 * 10**9:
        sim._step(60 * 10**9)
        rows = sim.network.rows
        before = np.roll(np.arange(n), 1)
        most = np.maximum(chunk, chunk + rows["sent"][before])
        assert np.all((rows["sent"] <= most + 10) | ~rows["active"][before])


def test_flows_that_wait_for_each_other_for_ever_are_reported() -> None:
    first, second = (flow(MB, preds=(other,), head=-1000.0) for other in (1, 0))
    sim = Simulation(world(job(first, second)), lambda _: Control())
    with pytest.raises(Stalled, match=r"at 1\.000 s"):
        sim.run(until_ns=10**10)
