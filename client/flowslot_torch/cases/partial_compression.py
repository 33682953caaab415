# SPDX-License-Identifier: Apache-2.0
"""Partial compression (SDCC 6.1): a ring that sends float16 on slow links, and only there."""

from flowslot_torch.engines import Array
from flowslot_torch.program import Program, Statistics


def add(into: Array, came: Array) -> None:
    """A float16 `came` is widened and added in one pass: `apply` goes block by block."""
    into += came


class PartialCompression(Program):
    """What links are slow, the ranks' daemons say, or who knows them; see `Links.is_slow`."""

    everywhere = False
    """Plain float16 compression, to compare with."""
    epoch = -1
    """The members who have told each other of their links."""

    def learn(self) -> None:
        """Alike on all ranks: a sender and its receiver must agree."""
        self.links.refresh()
        self.links.share(self.ops)
        self.epoch = self.connection.epoch

    def on_timer_expired(self, statistics: Statistics) -> None:
        """Links change."""
        self.learn()

    def sent_as(self, source: int, to: int) -> str:
        """Type in which gradients go from rank to rank."""
        return "float16" if self.everywhere or self.links.is_slow(source, to) else "float32"

    def on_buffer_ready(self, buffer: Array) -> None:
        """A ring all-reduce of float32."""
        if self.epoch != self.connection.epoch:
            self.learn()
        ops = self.ops
        ranks, me, after, before = ops.ring()
        n = len(ranks)
        out_type, in_type = self.sent_as(ops.rank, after), self.sent_as(before, ops.rank)
        chunks = ops.chunks(buffer, n)
        for step in range(n - 1):  # reduce-scatter
            sent = ops.send(ops.astype(chunks[(me - step) % n], out_type), after)
            into = chunks[(me - step - 1) % n]
            ops.apply(add, into, ops.recv(ops.alloc(len(into), in_type), before))
            sent.wait()
        if any(self.sent_as(ranks[i - 1], ranks[i]) == "float16" for i in range(n)):
            mine = chunks[(me + 1) % n]  # what some will have rounded, all have rounded
            mine[:] = ops.astype(ops.astype(mine, "float16"), "float32")
        for step in range(n - 1):  # all-gather
            sent = ops.send(ops.astype(chunks[(me - step + 1) % n], out_type), after)
            into = chunks[(me - step) % n]
            into[:] = ops.astype(ops.recv(ops.alloc(len(into), in_type), before), "float32")
            sent.wait()
