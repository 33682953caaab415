# SPDX-License-Identifier: Apache-2.0
"""Numbers that the daemon keeps about itself: counters, and percentiles of recent durations."""

from collections import Counter
from typing import TypedDict

import numpy as np


class Summary(TypedDict):
    """Percentiles in microseconds over the last samples; `count` is over the whole life."""

    count: int
    p50_us: float
    p90_us: float
    p99_us: float
    max_us: float


class Durations:
    """The last `size` durations (ns) and the largest ever."""

    def __init__(self, size: int = 2048) -> None:
        self._samples = np.zeros(size, dtype=np.int64)
        self.count = 0
        self.max_ns = 0
        self.last_ns = 0

    def add(self, duration_ns: int) -> None:
        """Take one sample."""
        self._samples[self.count % len(self._samples)] = duration_ns
        self.count += 1
        self.last_ns = duration_ns
        self.max_ns = max(self.max_ns, duration_ns)

    def summary(self) -> Summary:
        """Percentiles of the samples that are kept; all 0 without any."""
        kept = self._samples[: min(self.count, len(self._samples))]
        p50, p90, p99 = np.percentile(kept, (50, 90, 99)) / 1e3 if len(kept) else (0.0, 0.0, 0.0)
        return Summary(
            count=self.count,
            p50_us=round(float(p50), 1),
            p90_us=round(float(p90), 1),
            p99_us=round(float(p99), 1),
            max_us=round(self.max_ns / 1e3, 1),
        )


class Metrics:
    """What `flowslot status` shows of a running daemon."""

    def __init__(self) -> None:
        self.lateness = Durations()
        self.decision = Durations()
        """Of passes at slots, which look at everything."""
        self.replan = Durations()
        """Of passes at events between slots."""
        self.slots = 0
        self.slots_missed = 0
        self.errors: Counter[str] = Counter()
        self.last_error = ""

    def error(self, kind: str, text: str) -> None:
        """Count an error of some kind and keep its text."""
        self.errors[kind] += 1
        self.last_error = f"{kind}: {text}"
