# SPDX-License-Identifier: Apache-2.0
"""Gradients on their way."""

from __future__ import annotations

from dataclasses import dataclass, field

from flowslot_torch.engines import Array

_PARTS = 1 << 16


@dataclass(eq=False, slots=True)
class Tensor:
    """A gradient on its way, or a part of one. `index`: of the layer's parameter, alike on all
    ranks; `order`: how late it was ready in the last backward pass, from 0; `priority`: larger goes
    first, and of equal ones what was ready first; `id`: alike on all ranks; `nbytes`: its size.
    Only `priority` may be set."""

    index: int
    array: Array
    order: int = 0
    part: int = 0
    priority: int = 0
    whole: Whole | None = None
    id: int = field(init=False)
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.id, self.nbytes = id_of(self.index, self.part), self.array.nbytes

    def split(self, elements: int) -> list[Tensor]:
        """Parts of at most so many elements."""
        if elements < 1 or -(-len(self.array) // elements) > _PARTS:
            raise ValueError(f"elements: {elements} make none, or more than {_PARTS} parts")
        starts = range(0, len(self.array), elements)
        return [
            Tensor(self.index, self.array[a : a + elements], self.order, i, self.priority)
            for i, a in enumerate(starts)
        ]


@dataclass(eq=False, slots=True)
class Whole:
    """What is waited for."""

    index: int
    left: int = 1
    """Parts without their results."""


def id_of(index: int, part: int = 0) -> int:
    """What a tensor's part is called."""
    return index * _PARTS + part


def index_of(of: int) -> int:
    """The index of the tensor with this id."""
    return of // _PARTS
