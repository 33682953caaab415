# SPDX-License-Identifier: Apache-2.0
"""What those who join a job that runs are told."""

from __future__ import annotations

import os
from collections.abc import Sequence

from flowslot_torch.engines import Engine
from flowslot_torch.operations import Operations


def tell(
    engine: Engine, ops: Operations, root: int, numbers: Sequence[int], state: bytes
) -> tuple[list[int], memoryview]:
    """The root's numbers and bytes, on all ranks. ValueError: a number is below 0, or the state
    has more bytes than half of this host's memory."""
    head = ops.alloc(len(numbers) + 1, "int64")
    for i, number in enumerate((*numbers, len(state))):
        head[i] = number
    ops.broadcast(head, root)
    *told, size = map(int, head)
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    if not 0 <= size <= most:
        raise ValueError(f"state: rank {root} tells of {size} bytes; at most {most}")
    if min(told) < 0:
        raise ValueError(f"state: rank {root} tells of a number below 0")
    array = engine.alloc(size, "uint8")
    if ops.rank == root:
        engine.memory(array)[:] = state
    ops.broadcast(array, root)
    return told, engine.memory(array)
