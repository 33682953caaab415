# SPDX-License-Identifier: Apache-2.0
"""The bound of bench.optimum: right where the answer is known, and never above what a rule does."""

import statistics

import pytest
from bench.optimum import Job, bound, draw, fair, play, shortest


@pytest.mark.parametrize(
    ("jobs", "known"),
    [
        ((Job(6, 4), Job(6, 4)), 1.0),  # they fit beside each other
        ((Job(0, 10), Job(0, 10)), 2.0),  # one link for two
        ((Job(10, 20), Job(10, 20)), 4 / 3),  # the link always works: 40 ticks for both
        ((Job(4, 8), Job(4, 8), Job(4, 8)), 2.0),  # 24 ticks for three
    ],
)
def test_bound_is_right_where_it_is_known(jobs: tuple[Job, ...], known: float) -> None:
    assert bound(jobs) == pytest.approx(known, rel=2e-3)


@pytest.mark.parametrize(("number", "count"), [(1, 2), (2, 2), (3, 2), (4, 2), (5, 3), (6, 3)])
def test_no_rule_does_better(number: int, count: int) -> None:
    jobs = draw(5, number, count, 8)
    least = bound(jobs)
    for rule in (fair(), shortest, min, max):
        assert statistics.mean(play(jobs, rule)) >= least * (1 - 2e-3)


def test_fair_sharing_slows_equal_jobs_alike() -> None:
    slowdowns = play((Job(30, 10),) * 2, fair())
    assert slowdowns[0] == pytest.approx(slowdowns[1], rel=0.01)
