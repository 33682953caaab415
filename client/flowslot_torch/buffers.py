# SPDX-License-Identifier: Apache-2.0
"""The last part of a gradient's way (SDCC, Figure 4): fusion buffer, `on_buffer_ready`."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from flowslot_torch.engines import Array, Engine
from flowslot_torch.operations import NOTHING
from flowslot_torch.tensors import Tensor
from flowslot_torch.transport import PeerLost, Pending


class _Begun(NamedTuple):
    """`copied`: its results are not in place."""

    tensors: Sequence[Tensor]
    buffer: Array
    copied: bool
    pending: Pending | None


class Buffers:
    """Buffers that are being summed; they end in the order in which they began. For one thread at a
    time."""

    def __init__(
        self, engine: Engine, kept: bool, scale: Callable[[], float], done: Callable[[], None]
    ) -> None:
        """`kept`: the last one is needed again, and so are its tensors, until they have their
        results. `scale`: of sums; `done`: results of `flying` are in place."""
        self._engine, self._kept, self._scale, self._done = engine, kept, scale, done
        self._begun: deque[_Begun] = deque()
        self.flying: Sequence[Tensor] = ()
        """Of the buffer that is waited for."""
        self.last: Array = None
        self.beside = False
        """Whether the last one that began went on beside computation."""
        self._spare: list[Array] = []

    def __bool__(self) -> bool:
        """Whether any is under way."""
        return bool(self._begun)

    def alloc(self, tensors: Sequence[Tensor]) -> Array:
        """As large as these."""
        total = sum(tensor.nbytes for tensor in tensors)
        kind = self._engine.dtype(tensors[0].array)
        for k, buffer in enumerate(self._spare):
            if buffer.nbytes == total and self._engine.dtype(buffer) == kind:
                return self._spare.pop(k)
        self._spare.clear()  # what follows has other sizes
        return self._engine.alloc(sum(len(tensor.array) for tensor in tensors), kind)

    def begin(
        self, tensors: Sequence[Tensor], event: Callable[[Array], Pending | None], alone: bool
    ) -> None:
        """Fuse, and have `event` sum. `alone`: it ends, too."""
        self.flying = tensors
        buffer = tensors[0].array
        copied = len(tensors) > 1 or self._kept
        if copied:
            buffer = self.alloc(tensors)
            self._engine.fuse([tensor.array for tensor in tensors], buffer)
        pending = event(buffer)
        self._begun.append(_Begun(tensors, buffer, copied, pending))
        self.flying = ()
        self.beside = not (alone or self._kept or pending is None or pending is NOTHING)
        if not self.beside:
            self.end()

    def end(self) -> None:
        """What has begun ends."""
        while self._begun:
            tensors, buffer, copied, pending = self._begun.popleft()
            self.flying = tensors
            if pending is not None:
                pending.wait()
            scale = self._scale()
            if scale != 1 and (self._kept or not copied):
                buffer *= scale
                scale = 1.0
            if self._kept:
                self.last = buffer
            self.put(buffer if copied else None, scale)
            if copied and self.beside:
                self._spare.append(buffer)

    def put(self, buffer: Array | None, scale: float = 1.0) -> None:
        """Results of `flying` are in the buffer, times `scale`; None: in place already."""
        if buffer is not None:
            self._engine.unfuse(buffer, [tensor.array for tensor in self.flying], scale)
        self._done()
        self.flying = ()

    def drop(self) -> None:
        """Nobody wants results any more. A library's group cannot be let go of while it works."""
        while self._begun:
            pending = self._begun.popleft().pending
            with contextlib.suppress(PeerLost):
                if pending is not None:
                    pending.wait()
