# SPDX-License-Identifier: Apache-2.0
"""Where gradients are in memory: the operations of Table 3 (SDCC) that compute, per engine.

An array is the engine's own, with one dimension: it has a length, can be sliced without a copy, and
knows `a += b`, also where `b` has a smaller type. A program needs no more. Its memory must be the
processor's: what is on an accelerator is copied there and back by whoever has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

Array = Any
DTYPES = ("float32", "float64", "float16", "int32", "int64", "uint8")
_BLOCK = 1 << 16
"""Elements that `apply` hands over at once: what is computed of them stays in the cache."""


class Engine(Protocol):
    """What `Operations` needs of NumPy, of PyTorch, of any other."""

    def alloc(self, count: int, dtype: str) -> Array:
        """`count` elements of any value."""

    def astype(self, array: Array, dtype: str) -> Array:
        """A copy in another type, or the array itself where that is its own."""

    def dtype(self, array: Array) -> str:
        """Name of its type, one of DTYPES."""

    def nbytes(self, array: Array) -> int:
        """Its size. ValueError: it is not in one piece, or not in this memory."""

    def memory(self, array: Array) -> memoryview:
        """Its bytes, not a copy. ValueError as `nbytes`."""

    def fuse(self, arrays: Sequence[Array], buffer: Array) -> None:
        """Copy them into a buffer, one after the other; together they are as long."""

    def unfuse(self, buffer: Array, arrays: Sequence[Array], scale: float = 1.0) -> None:
        """And back, times `scale`."""


class NumpyEngine:
    """Arrays are `numpy.ndarray`."""

    def alloc(self, count: int, dtype: str) -> Array:
        """See Engine."""
        return np.empty(count, dtype)

    def astype(self, array: Array, dtype: str) -> Array:
        """See Engine."""
        return array.astype(dtype, copy=False)

    def dtype(self, array: Array) -> str:
        """See Engine."""
        return str(array.dtype)

    def nbytes(self, array: Array) -> int:
        """See Engine."""
        if not array.flags.c_contiguous:
            raise ValueError("array: must be in one piece; pass a contiguous one")
        return int(array.nbytes)

    def memory(self, array: Array) -> memoryview:
        """See Engine."""
        self.nbytes(array)
        return memoryview(array.reshape(-1).view(np.uint8))

    def fuse(self, arrays: Sequence[Array], buffer: Array) -> None:
        """See Engine."""
        np.concatenate(arrays, out=buffer)

    def unfuse(self, buffer: Array, arrays: Sequence[Array], scale: float = 1.0) -> None:
        """See Engine."""
        at = 0
        for array in arrays:
            part = buffer[at : at + len(array)]
            np.multiply(part, scale, out=array) if scale != 1 else np.copyto(array, part)
            at += len(array)


def apply(function: Callable[..., object], first: Array, *more: Array) -> None:
    """Call `function(first, *more)` on all elements, block by block: what it does in several steps
    passes through memory once. All arrays have the first one's length, else ValueError."""
    for array in more:
        if len(array) != len(first):
            raise ValueError(f"array: must have {len(first)} elements, has {len(array)}")
    for start in range(0, len(first), _BLOCK):
        function(*(array[start : start + _BLOCK] for array in (first, *more)))
