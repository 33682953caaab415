# SPDX-License-Identifier: Apache-2.0
"""Which of two jobs goes first, where the other one can use what that leaves."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from flowslot.policy.job_links import JobLinks
from flowslot.policy.stagger.packing import PACKS, REACH, pack

Needs = Sequence[dict[int, float]]


def packed(needs: Needs, worth: Sequence[float], links: int = 3) -> list[int]:
    """The order that jobs 0, 1, ... get. `needs`: bytes by link; each link carries 100 a second."""
    flows = [(job, link, size) for job, need in enumerate(needs) for link, size in need.items()]
    cells = JobLinks(len(flows), len(needs), links, 1)
    jobs = np.array([job for job, _, _ in flows])
    cells.find(np.array([[link] for _, link, _ in flows], np.int32), jobs)
    sums = np.array([size for _, _, size in flows])  # a cell for each flow
    order = np.arange(len(needs), dtype=np.intp)
    pack(cells, sums, np.array([100.0] * links + [np.inf]), np.array(worth, float), order)
    return [int(job) for job in order]


def total(needs: Needs, worth: Sequence[float], order: Sequence[int]) -> float:
    """What this order is worth."""
    room, found = dict[int, float](), 0.0
    for job in order:
        speed = min(max(room.get(link, 100.0), 1.0) / size for link, size in needs[job].items())
        found += worth[job] * speed
        for link, size in needs[job].items():
            room[link] = room.get(link, 100.0) - speed * size
    return found


def some_needs(rng: np.random.Generator, jobs: int) -> list[dict[int, float]]:
    """On one to three of three links."""
    links = [rng.permutation(3)[: rng.integers(1, 4)].tolist() for _ in range(jobs)]
    return [{link: float(rng.uniform(20, 200)) for link in some} for some in links]


@pytest.mark.parametrize("seed", range(50))
def test_of_two_jobs_the_better_order(seed: int) -> None:
    rng = np.random.default_rng(seed)
    needs = some_needs(rng, 2)
    worth = rng.uniform(1, 4, 2).tolist()
    kept, changed = (total(needs, worth, order) for order in ((0, 1), (1, 0)))
    assert packed(needs, worth) == ([1, 0] if changed > PACKS * kept else [0, 1])


def test_a_job_passes_those_that_it_does_not_meet() -> None:
    half, whole, far = {0: 50.0, 1: 100.0}, {0: 100.0}, {2: 10.0}
    assert packed([whole, far, half], [1, 1, 2]) == [2, 0, 1]
    assert packed([whole, far, half], [2, 1, 0.9]) == [0, 1, 2]


def test_a_job_reaches_only_so_far() -> None:
    far = [{2: 10.0}]
    for between in (REACH - 1, REACH):
        needs = [{0: 100.0}, *(far * between), {0: 50.0, 1: 100.0}]
        first = packed(needs, [1.0, *([1.0] * between), 2.0])[0]
        assert first == (0 if between == REACH else len(needs) - 1)


@pytest.mark.parametrize("seed", range(20))
def test_every_job_keeps_a_place(seed: int) -> None:
    rng = np.random.default_rng(seed)
    needs = some_needs(rng, int(rng.integers(1, 40)))
    order = packed(needs, rng.uniform(1, 100, len(needs)).tolist())
    assert sorted(order) == list(range(len(needs)))


def test_three_jobs_are_nearly_as_good_as_their_best_order() -> None:
    """If they come in the order that would be right on one link."""
    rng, before, after = np.random.default_rng(1), [], []
    for _ in range(200):
        pairs = zip(some_needs(rng, 3), rng.uniform(1, 4, 3).tolist(), strict=True)
        needs, worth = zip(*sorted(pairs, key=lambda x: max(x[0].values()) / x[1]), strict=True)
        best = max(total(needs, worth, order) for order in itertools.permutations(range(3)))
        before.append(total(needs, worth, (0, 1, 2)) / best)
        after.append(total(needs, worth, packed(needs, worth)) / best)
    assert np.mean(after) > max(0.985, np.mean(before))
