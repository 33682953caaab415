# SPDX-License-Identifier: Apache-2.0
"""Adaptive tensor fusion (SDCC 6.4): hill climbing on the iteration time.

A walk doubles or halves the fusion buffer, timer by timer, until that costs time; then the best
size on its way is taken. One size of a walk can be too slow. Each rest is twice as long as the one
before, up to 64 timers: so walks cost a bounded part of training.
"""

from collections import Counter
from math import inf
from statistics import median

from flowslot_torch.engines import Array
from flowslot_torch.program import BYTES, ITERATIONS, Program, Statistics
from flowslot_torch.transport import Pending


class AdaptiveFusion(Program):
    """`longest_rest`: timers between two walks; `same`: what is less slow is as fast."""

    repeats = True
    least, most = 1 << 16, 1 << 27
    longest_rest = 64
    same = 1.01

    def __init__(self) -> None:
        self.begin()

    def begin(self, epoch: int = 0) -> None:
        """With these members. The first iterations show nothing yet."""
        self.epoch = epoch
        self.up, self.rest, self.left = True, 1, 2
        self.times: dict[int, float] = {}
        """Seconds of an iteration by size, on this walk."""

    def on_timer_expired(self, statistics: Statistics) -> bool:
        """A step, or rest. The ranks' most frequent wish counts."""
        if self.epoch != self.connection.epoch:  # who has come knows nothing of walks
            self.begin(self.connection.epoch)
        self.left -= 1
        if self.left > 0:
            return True
        before = self.tasks.fusion_bytes
        now = self.negotiate(self.within(before, statistics))
        # A size's first iteration may have begun with the one before.
        last = statistics.get(ITERATIONS)[-max(self.timer_iterations - 1, 1) :]
        self.times[now] = median(last or [inf])
        best = min(self.times, key=lambda size: self.times[size])
        wish = self.within(now * 2 if self.up else now // 2, statistics)
        if wish == now or self.times[now] > self.same * self.times[best]:
            wish = best
        self.tasks.fusion_bytes = self.negotiate(wish)
        if self.tasks.fusion_bytes in self.times:  # the end of the walk
            self.up, self.left, self.times = not self.up, self.rest, {}
            self.rest = min(2 * self.rest, self.longest_rest)
        return self.tasks.fusion_bytes == before

    def on_buffer_ready(self, buffer: Array) -> Pending:
        """Small buffers go beside large ones."""
        return self.ops.begin_allreduce(buffer)

    def within(self, size: int, statistics: Statistics) -> int:
        """No less than `least`; no more than all gradients of an iteration fill."""
        whole = 1 << int(sum(statistics.get(BYTES)[-1:]) or self.most).bit_length()
        return max(min(size, self.most, whole), self.least)

    def negotiate(self, wish: int) -> int:
        """The mode over all ranks; of equally frequent ones the smallest. ValueError: a rank's is
        no size."""
        mine = self.ops.alloc(1, "int64")
        mine[0] = wish
        wishes = [int(value) for value in self.ops.allgather(mine)]
        for rank, one in zip(self.ops.ranks, wishes, strict=True):
            if not self.least <= one <= self.most:
                limits = f"{self.least} to {self.most}"
                raise ValueError(f"rank {rank}: wants buffers of {one} bytes, must be {limits}")
        counts = Counter(wishes)
        return min(counts, key=lambda value: (-counts[value], value))
