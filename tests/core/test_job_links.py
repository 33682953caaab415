# SPDX-License-Identifier: Apache-2.0
"""Packed lists of the links of each job, against sets and tables of jobs by links."""

import numpy as np
import pytest
from interpreted import plain

from flowslot.policy import job_links

SOURCE = plain(job_links)


@pytest.mark.parametrize("seed", range(20))
def test_cells_are_the_links_of_each_job_and_sums_those_of_a_table(seed: int) -> None:
    draw = np.random.default_rng(seed)
    n, jobs, links, longest = (int(draw.integers(1, most)) for most in (40, 12, 15, 5))
    made = [module.JobLinks(n, jobs, links, longest) for module in (job_links, SOURCE)]
    for _ in range(3):  # the second look finds nothing of the first one
        paths = np.full((n, longest), links, np.int32)
        for row in paths:
            k = draw.integers(longest + 1)
            row[:k] = draw.integers(links, size=k)
        job = draw.integers(jobs, size=n)
        amounts, room = draw.uniform(0, 9, n), np.append(draw.uniform(1, 5, links), np.inf)
        table = np.zeros((jobs, links + 1))
        for i in range(n):
            for link in paths[i]:
                table[job[i], link] += amounts[i]
        for cells in made:
            cells.find(paths, job)
            link, start = np.asarray(cells.link), np.asarray(cells.start)
            for j in range(jobs):
                own = link[start[j] : start[j + 1]].tolist()
                crossed = set(paths[job == j].ravel().tolist()) - {links}
                assert len(own) == len(crossed) and set(own) == crossed
            assert cells.count == start[-1]
        cells, sums = made[1], np.full(n * longest, 7.0)
        cells.clear(sums)
        for i in range(n):
            cells.add(i, amounts[i], sums)
        among, shared = np.zeros(links + 1, np.intp), np.zeros(links + 1, np.intp)
        cells.contested(sums, among)
        shared[:-1] = (table[:, :-1] > 0).sum(axis=0) > 1
        assert among.tolist() == shared.tolist()
        for j in range(jobs):
            at = slice(start[j], start[j + 1])
            assert sums[at].tolist() == table[j, link[at]].tolist()
            slowest = (table[j, :-1] / room[:-1]).max()
            assert cells.bottleneck(sums, j, room, 0.0) == pytest.approx(slowest)
