# SPDX-License-Identifier: Apache-2.0
"""Numbers that the daemon keeps about itself: counters, and percentiles of recent durations."""

from collections import Counter, deque

import numpy as np


class Durations:
    """The last `size` durations (ns) and the largest ever."""

    def __init__(self, size: int = 2048) -> None:
        self._samples: deque[int] = deque(maxlen=size)
        self.count = 0
        self.max_ns = 0

    def add(self, duration_ns: int) -> None:
        """Take one sample."""
        self._samples.append(duration_ns)
        self.count += 1
        self.max_ns = max(self.max_ns, duration_ns)

    def summary(self) -> dict[str, float]:
        """Percentiles of the samples that are kept, all 0 without any; `count` and the largest are
        over the whole life."""
        kept = self._samples
        p50, p90, p99 = np.percentile(kept, (50, 90, 99)) / 1e3 if kept else (0.0, 0.0, 0.0)
        times = {"p50_us": p50, "p90_us": p90, "p99_us": p99, "max_us": self.max_ns / 1e3}
        return {"count": self.count, **{name: round(float(x), 1) for name, x in times.items()}}


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
