# SPDX-License-Identifier: Apache-2.0
"""What backward passes bring: gradients in their order, bytes, and time from one to the next."""

from __future__ import annotations

import time

from flowslot_torch.program import BYTES, ITERATIONS, Statistics
from flowslot_torch.report import Reporter


class Passes:
    """Of the thread that trains."""

    def __init__(self, statistics: Statistics, reporter: Reporter | None) -> None:
        self._statistics, self._reporter = statistics, reporter
        self._orders: dict[int, int] = {}
        self._seen, self._bytes = 0, 0
        self._anchor: int | None = None
        """The tensor that was the first of all begins each pass."""
        self._began = 0.0

    def came(self, index: int, size: int) -> int:
        """A gradient of `size` bytes: how late it was ready in the pass before, from 0; in its
        first one, in this."""
        if self._anchor is None:
            self._anchor = index
        if index == self._anchor:
            self._begin()
        order = self._orders.get(index, self._seen)
        self._orders[index] = self._seen
        self._seen += 1
        self._bytes += size
        if self._reporter is not None:
            self._reporter.ready(size)
        return order

    def _begin(self) -> None:
        now = time.monotonic()
        if self._began:
            self._statistics.record(ITERATIONS, now - self._began)
            self._statistics.record(BYTES, self._bytes)
        self._began, self._seen, self._bytes = now, 0, 0
        if self._reporter is not None:
            self._reporter.begin()
