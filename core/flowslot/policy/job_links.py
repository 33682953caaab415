# SPDX-License-Identifier: Apache-2.0
# cython: infer_types=True
"""Which links each job crosses, as packed lists. Compiled (job_links.pxd).

F flows, J jobs, L links, H the longest path. A *cell* is a job on a link that one of its flows
crosses; each job's cells stand together, jobs in their order. Sums by job and link are arrays over
the C cells: float64[C], C at most F * H, whatever J and L are.
"""

import math
from typing import Any

import numpy as np

from flowslot.policy.base import AllocationState, Ints, Paths, Rows

COMPILED = not __file__.endswith(".py")

_inf = math.inf


class JobLinks:
    """`count`: C, of the paths looked at last. `link`, intp[C]: of each cell; those of job j are
    `start[j]:start[j + 1]`. `first[j]`, `following[i]`: a job's first flow, and the one after flow
    i; -1: none."""

    def __init__(self, n_flows: int, n_jobs: int, n_links: int, longest: int) -> None:
        self.count, self.links = 0, n_links
        self.link = np.zeros(n_flows * longest, np.intp)
        self.start = np.zeros(n_jobs + 1, np.intp)
        self.first, self.following = np.zeros(n_jobs, np.intp), np.zeros(n_flows, np.intp)
        self.cell = np.zeros((n_flows, longest), np.intp)  # of each entry of the paths; -1: none
        self.latest = np.zeros(n_links, np.intp)  # cell of the last job that crosses the link

    def find(self, paths: Paths, job: Ints) -> None:
        """Look at `paths`, int32[F, H], padded with L, of flows of `job`, int64[F]."""
        last, count = self.links, 0
        for j in range(len(self.first)):
            self.first[j] = -1
        for k in range(len(self.following)):
            i = len(self.following) - 1 - k
            self.following[i], self.first[job[i]] = self.first[job[i]], i
        for link in range(last):
            self.latest[link] = -1
        for j in range(len(self.first)):
            self.start[j] = count
            i = self.first[j]
            while i >= 0:
                for h in range(paths.shape[1]):
                    link = paths[i, h]
                    self.cell[i, h] = -1
                    if link < last:
                        if self.latest[link] < self.start[j]:
                            self.latest[link], self.link[count] = count, link
                            count += 1
                        self.cell[i, h] = self.latest[link]
                i = self.following[i]
        self.start[len(self.first)] = self.count = count

    def clear(self, sums: Any) -> None:
        """Zero in all cells of float64[C]."""
        for c in range(self.count):
            sums[c] = 0.0

    def add(self, i: int, amount: float, sums: Any) -> None:
        """Add an amount to the sums of flow i's job, on the links of flow i, once for each time
        that it crosses them."""
        for h in range(self.cell.shape[1]):
            if self.cell[i, h] >= 0:
                sums[self.cell[i, h]] += amount

    def contested(self, need: Any, links: Rows) -> None:
        """Set `links`, intp[L + 1], to 1 where more than one job has something in `need`,
        float64[C], to 0 elsewhere."""
        for link in range(len(links)):
            links[link] = 0
        for c in range(self.count):
            links[self.link[c]] += need[c] > 0
        for link in range(len(links)):
            links[link] = links[link] > 1

    def bottleneck(self, need: Any, job: int, room: Any, least: float) -> float:
        """Seconds that a job needs on its slowest link for `need` bytes, float64[C], if it has
        `room`, float64[L + 1]; `least`: no link counts as slower than that."""
        seconds = 0.0
        for c in range(self.start[job], self.start[job + 1]):
            if need[c] > 0:
                seconds = max(seconds, lasts(need[c], max(room[self.link[c]], least)))
        return seconds


def of(state: AllocationState) -> JobLinks:
    """Of all paths of the state."""
    n, longest = state.paths.shape
    cells = JobLinks(n, len(state.job_names), len(state.goodput) - 1, longest)
    cells.find(state.paths, state.job)
    return cells


def lasts(volume: float, rate: float) -> float:
    """Seconds that so many bytes take; for ever without a rate."""
    return volume / rate if rate > 0 else _inf
