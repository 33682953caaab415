# SPDX-License-Identifier: Apache-2.0
"""Ranks agree on what is in the next buffer.

All tell which tensors they have. What all have, in the first rank's order, is the buffer's content,
as far as it fits; the rest waits. Everything that a rank tells is checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from flowslot_torch.engines import Array, Engine
from flowslot_torch.operations import Operations
from flowslot_torch.tensors import Tensor

LISTED = 64
"""Tensors that a rank tells of at once."""
_HEAD = 3  # before them: bytes of a buffer, tensors, whether somebody wants to join


class Agreed(NamedTuple):
    """Alike on all ranks. `fusion_bytes`: the first rank's; `joining`: a rank knows of somebody who
    wants to join."""

    chosen: list[Tensor]
    fusion_bytes: int
    joining: bool


class Coordination:
    """Of one rank, in one epoch. `lacking`: ranks that had not all that this one told of."""

    def __init__(self, engine: Engine, ops: Operations) -> None:
        self._engine, self._ops = engine, ops
        self._by_id = False
        self.lacking: list[int] = []

    def agree(
        self, queue: Sequence[Tensor], fusion_bytes: int, joining: int, *, over: bool = False
    ) -> Agreed:
        """`queue`: what this rank has, most urgent first; `fusion_bytes`: the first rank's counts.
        `over`: the tensor that fills the buffer is in it, as in DDP's buckets; else in the next.
        ValueError: a rank tells of something impossible. PeerLost."""
        if self._by_id:  # ranks whose priorities differ might never name the same ones
            queue = sorted(queue, key=lambda tensor: tensor.id)
        mine = {tensor.id: tensor for tensor in queue[:LISTED]}
        message = np.zeros(_HEAD + LISTED, np.int64)
        message[:_HEAD] = fusion_bytes, len(mine), joining
        message[_HEAD : _HEAD + len(mine)] = list(mine)
        rows = self._tell(message)
        told = [_parse(rank, row) for rank, row in rows]
        common = set(mine).intersection(*(ids for _, _, ids in told))
        self.lacking = [rank for rank, _, ids in told if not set(mine) <= set(ids)]
        self._by_id = not common and not self._by_id
        _, first_bytes, order = told[0]
        chosen = self._choose([mine[i] for i in order if i in common], first_bytes, over)
        return Agreed(chosen, first_bytes, any(row[2] for _, row in rows))

    def _tell(self, message: Any) -> list[tuple[int, Any]]:
        array: Array = self._engine.alloc(len(message) * 8, "uint8")
        self._engine.memory(array)[:] = message.tobytes()
        whole = self._ops.allgather(array)
        rows = np.frombuffer(self._engine.memory(whole), np.int64).reshape(-1, len(message))
        return list(zip(self._ops.ranks, rows, strict=True))

    def _choose(self, tensors: Sequence[Tensor], fusion_bytes: int, over: bool) -> list[Tensor]:
        """As many as fit, of one type."""
        chosen: list[Tensor] = []
        total = 0
        for tensor in tensors:
            full = total >= fusion_bytes if over else total + tensor.nbytes > fusion_bytes
            if chosen and (full or self._type(tensor) != self._type(chosen[0])):
                break
            chosen.append(tensor)
            total += tensor.nbytes
        return chosen

    def _type(self, tensor: Tensor) -> str:
        return self._ops.dtype(tensor.array)


def _parse(rank: int, row: Any) -> tuple[int, int, list[int]]:
    """Rank, bytes of a buffer, tensors."""
    fusion, count = int(row[0]), int(row[1])
    if fusion < 0 or not 0 <= count <= LISTED:
        raise ValueError(f"rank {rank}: tells of {count} tensors and buffers of {fusion} bytes")
    ids = [int(i) for i in row[_HEAD : _HEAD + count]]
    if len(set(ids)) != count:
        raise ValueError(f"rank {rank}: tells of one tensor more than once")
    return rank, fusion, ids
