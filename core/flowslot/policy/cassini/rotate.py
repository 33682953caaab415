# SPDX-License-Identifier: Apache-2.0
# cython: infer_types=True
"""The rotations of circles for which their demands exceed a link least (thesis, Table 4.1).

J jobs, A angles. Branch and bound over all rotations: of some jobs that are placed, the excess
only grows by the others; and what these want, beyond what is free, becomes excess. Compiled
(rotate.pxd).
"""

import numpy as np

from flowslot.policy.base import Floats, Rows

COMPILED = not __file__.endswith(".py")
STEPS = 40_000_000
"""So many angles are added up at most, then the best found so far stands. Four jobs at 72 angles
need less."""
_near = 1e-9


class Search:
    """`demand`, float64[J, A], at least one job; `most`, intp[J]: rotations of each. The first job
    is not rotated. After `go`: `best`, intp[J], delays each job by so many angles; `least`: the
    excess, bytes/s summed over angles; `exact`: no rotations have less."""

    def __init__(self, demand: Floats, most: Rows, capacity: float, steps: int = STEPS) -> None:
        self.demand, self.most, self.capacity = demand, most, capacity
        self.jobs, self.angles = demand.shape
        self.sums = np.zeros((self.jobs + 1, self.angles))
        self.chosen, self.best = np.zeros(self.jobs, np.intp), np.zeros(self.jobs, np.intp)
        self.twin = np.full(self.jobs, -1, np.intp)  # an equal job before it
        self.rest = np.zeros(self.jobs)  # what all later jobs want
        total = 0.0
        for j in range(self.jobs - 1, -1, -1):
            self.rest[j] = total
            for a in range(self.angles):
                total += demand[j, a]
            for k in range(1, j):
                if self.equal(j, k):
                    self.twin[j] = k
        self.floor = max(total - self.angles * capacity, 0.0)
        self.slack = _near * self.angles * capacity
        self.least, self.left, self.exact = 0.0, steps, True
        self.spare = steps // 8  # for what makes equally good ones better

    def equal(self, j: int, k: int) -> bool:
        """Two jobs are the same."""
        for a in range(self.angles):
            if self.demand[j, a] != self.demand[k, a]:
                return False
        return bool(self.most[j] == self.most[k])

    def go(self) -> None:
        """Find them."""
        self.least = self.improve()
        for a in range(self.angles):
            self.sums[0, a] = self.demand[0, a]
        self.descend(1)
        self.exact = self.left > 0
        self.left = self.spare
        for _ in range(self.jobs):
            for j in range(1, self.jobs):
                if self.left > 0:
                    self.centre(j)

    def improve(self) -> float:
        """From no rotations on, the best one of each job in turn, as long as that helps."""
        least = self.beside(0, 0)
        before = least + 1.0 + self.slack
        while least < before - self.slack and self.left > 0:
            before = least
            for j in range(1, self.jobs):
                if self.left <= 0:
                    break
                self.others(j)
                for k in range(self.most[j]):
                    found = self.excess(j, k)
                    if found < least - self.slack:
                        least, self.best[j] = found, k
        return least

    def descend(self, j: int) -> None:
        """Place job j and all later ones; those before are placed."""
        start = self.chosen[self.twin[j]] if j < self.jobs and self.twin[j] >= 0 else 0
        if j == self.jobs:
            return
        for k in range(start, self.most[j]):
            if self.left <= 0 or self.least <= self.floor + self.slack:
                return
            over, free = 0.0, 0.0
            at = self.angles - k if k else 0
            for a in range(self.angles):
                total = self.sums[j - 1, a] + self.demand[j, at]
                self.sums[j, a] = total
                if total > self.capacity:
                    over += total - self.capacity
                else:
                    free += self.capacity - total
                at += 1
                if at == self.angles:
                    at = 0
            self.left -= self.angles
            if over + max(self.rest[j] - free, 0.0) < self.least - self.slack:
                self.chosen[j] = k
                if j + 1 < self.jobs:
                    self.descend(j + 1)
                else:
                    self.least = over
                    for i in range(self.jobs):
                        self.best[i] = self.chosen[i]

    def beside(self, j: int, k: int) -> float:
        """The excess with job j rotated by k, and all others as they are best."""
        self.others(j)
        return self.excess(j, k)

    def others(self, j: int) -> None:
        """Add up what all but job j want, as they are best, into the last row of `sums`."""
        last = self.jobs
        self.left -= self.jobs * self.angles
        for a in range(self.angles):
            self.sums[last, a] = 0.0
        for i in range(self.jobs):
            if i != j:
                k = self.best[i]
                for a in range(self.angles):
                    at = a - k if a >= k else a - k + self.angles
                    self.sums[last, a] += self.demand[i, at]

    def excess(self, j: int, k: int) -> float:
        """With job j rotated by k beside `others`."""
        over = 0.0
        self.left -= self.angles
        for a in range(self.angles):
            at = a - k if a >= k else a - k + self.angles
            total = self.sums[self.jobs, a] + self.demand[j, at]
            if total > self.capacity:
                over += total - self.capacity
        return over

    def centre(self, j: int) -> None:
        """Put job j into the middle of all equally good rotations around its own: as far as can be
        from where it would be in the way. Where all are equally good, it stays."""
        self.others(j)
        most, k, before, after = self.most[j], self.best[j], 0, 0
        least = self.excess(j, k)
        while (
            before < most and self.excess(j, (k + most - 1 - before) % most) <= least + self.slack
        ):
            before += 1
        if before == most:
            return
        while self.excess(j, (k + 1 + after) % most) <= least + self.slack:
            after += 1
        self.best[j] = (k + most + (after - before) // 2) % most
