# SPDX-License-Identifier: Apache-2.0
"""Two-level all-reduce (SDCC 6.3, PLink): in each group, between their first ranks, and back.

In pieces, so that slow links between groups are busy while the groups' own links carry the next
piece, or the last one's result. A group is a chain: each of its links carries a gradient once.
"""

from collections.abc import Sequence

from flowslot_torch.engines import Array
from flowslot_torch.program import Program
from flowslot_torch.transport import Pending


class TwoLevel(Program):
    """Slow links between groups carry each gradient once each way, whatever the groups' sizes."""

    pieces = 8

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        """`groups`: ranks, each in one of them. Who comes later is a group by itself."""
        self.groups = groups

    def members(self) -> list[list[int]]:
        """The groups of those who are there."""
        ranks, listed = self.ops.ranks, {rank for group in self.groups for rank in group}
        groups = [[rank for rank in group if rank in ranks] for group in self.groups]
        return [*filter(None, groups), *([rank] for rank in ranks if rank not in listed)]

    def on_buffer_ready(self, buffer: Array) -> None:
        """Sums to the first rank, sums of sums, and back."""
        ops = self.ops
        groups = self.members()
        local_group = next(group for group in groups if ops.rank in group)
        global_group = [group[0] for group in groups]
        me = local_group.index(ops.rank)
        up = local_group[me - 1] if me else None
        down = local_group[me + 1] if me + 1 < len(local_group) else None
        pieces = ops.chunks(buffer, self.pieces)
        came = [ops.alloc(len(piece), ops.dtype(piece)) for piece in pieces if down is not None]
        coming = [ops.begin_recv(array, down) for array in came if down is not None]
        sent: list[Pending] = []
        back: list[Pending] = []
        for i, piece in enumerate(pieces):
            if down is not None:
                coming[i].wait()
                pieces[i] += came[i]
            if up is not None:
                sent.append(ops.send(piece, up))
                continue
            ops.allreduce(piece, global_group)
            if down is not None:
                back.append(ops.send(piece, down))
        if up is not None:
            for i, piece in enumerate(pieces):
                sent[i].wait()
                ops.recv(piece, up)
                if down is not None:
                    back.append(ops.send(piece, down))
        for one in back:
            one.wait()
