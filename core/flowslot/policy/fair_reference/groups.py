# SPDX-License-Identifier: Apache-2.0
"""Flows of a job that take the same path: they share its links alike, and are counted as one."""

import numpy as np

from flowslot.policy.base import AllocationState, Floats, Ints, Paths, Rows


class Groups:
    """The groups of the last state that was looked at: G of them, on paths of H links."""

    def __init__(self) -> None:
        self.job: Ints = np.zeros(0, np.int64)
        self.paths: Paths = np.zeros((0, 0), np.int32)
        self._known: dict[tuple[str, tuple[int, ...]], int] = {}
        self._cells: Ints = np.zeros((0, 0), np.int64)
        self._names: list[str] = []
        self._of: Rows = np.zeros(0, np.intp)

    def follow(self, state: AllocationState) -> Rows | None:
        """Flows come and go. Returns where each group was before, intp[G], -1 for new ones; None:
        nothing has changed."""
        cells: Ints = np.column_stack((state.job, state.paths))
        names = list(state.job_names)
        if names == self._names and np.array_equal(cells, self._cells):
            return None
        self._cells, self._names = cells, names
        rows, of = np.unique(cells, axis=0, return_inverse=True)
        self.job, self._of = np.ascontiguousarray(rows[:, 0]), of.reshape(-1)
        self.paths = np.ascontiguousarray(rows[:, 1:], np.int32)
        last = len(state.capacity) - 1
        keys = [
            (names[row[0]], tuple(link for link in row[1:] if link < last)) for row in rows.tolist()
        ]
        before = np.array([self._known.get(key, -1) for key in keys], np.intp)
        self._known = {key: g for g, key in enumerate(keys)}
        return before

    def sizes(self, state: AllocationState) -> tuple[Floats, Floats]:
        """Bytes per iteration of each group, float64[G], and how many flows have any. None, where
        the path is not known."""
        volume = np.where(state.next_bytes > 0, state.next_bytes, state.remaining)
        volume = np.where(state.paths[:, 0] < len(state.capacity) - 1, volume, 0.0)
        n = len(self.job)
        sums: Floats = np.zeros((2, n))
        np.add.at(sums[0], self._of, np.maximum(volume, 0.0))
        np.add.at(sums[1], self._of, volume > 0)
        return sums[0], sums[1]
