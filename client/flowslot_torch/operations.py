# SPDX-License-Identifier: Apache-2.0
"""Data operations (SDCC, Table 3): what a program does with buffers, whatever the engine and the
transport."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from flowslot_torch import engines
from flowslot_torch.engines import Array, Engine
from flowslot_torch.transport import Pending, Transport

Group = Sequence[int]
_SMALL_BYTES = 4096


class _Nothing:
    """Nothing is under way: an empty array is not sent, a sum is there."""

    def wait(self) -> None:
        """At once."""


NOTHING = _Nothing()


class Operations:
    """Of one rank; for one thread at a time. A group is a sequence of ranks, in the order of its
    ring, in which all its members call the same operation; None: all ranks. A pair is a group of
    two."""

    def __init__(self, engine: Engine, transport: Transport) -> None:
        self._engine, self._transport = engine, transport
        self.rank, self.ranks = transport.rank, transport.members

    def alloc(self, count: int, dtype: str) -> Array:
        """A buffer of `count` elements."""
        return self._engine.alloc(count, dtype)

    def astype(self, array: Array, dtype: str) -> Array:
        """The array in another type."""
        return self._engine.astype(array, dtype)

    def dtype(self, array: Array) -> str:
        """Name of an array's type."""
        return self._engine.dtype(array)

    def nbytes(self, array: Array) -> int:
        """Its size."""
        return self._engine.nbytes(array)

    def apply(self, function: Callable[..., object], first: Array, *more: Array) -> None:
        """See `engines.apply`."""
        engines.apply(function, first, *more)

    def send(self, array: Array, to: int) -> Pending:
        """Begin to send; the array must not change until the result has been waited for."""
        if not len(array):
            return NOTHING
        return self._transport.send(self._engine.memory(array), to)

    def recv(self, array: Array, source: int) -> Array:
        """The next message of that rank, as long as the array, which is returned."""
        self.begin_recv(array, source).wait()
        return array

    def begin_recv(self, array: Array, source: int) -> Pending:
        """The same, which is there when the result has been waited for: in this order."""
        if not len(array):
            return NOTHING
        return self._transport.receive(self._engine.memory(array), source)

    def chunks(self, array: Array, count: int) -> list[Array]:
        """Views of `count` parts, as equal as whole elements allow."""
        ends = [len(array) * i // count for i in range(count + 1)]
        return [array[a:b] for a, b in itertools.pairwise(ends)]

    def ring(self, group: Group | None = None) -> tuple[tuple[int, ...], int, int, int]:
        """A group's ring: its ranks, our place, and the ranks after and before us."""
        ranks = self.ranks if group is None else tuple(group)
        if self.rank not in ranks or len(set(ranks)) != len(ranks) or set(ranks) - set(self.ranks):
            raise ValueError(
                f"group: must be different ranks of {self.ranks}, with {self.rank}; is {ranks}"
            )
        place = ranks.index(self.rank)
        return ranks, place, ranks[(place + 1) % len(ranks)], ranks[place - 1]

    def allreduce(self, array: Array, group: Group | None = None) -> None:
        """The sum over the group, in place: by the library's own, else a ring."""
        self.begin_allreduce(array, group).wait()

    def begin_allreduce(self, array: Array, group: Group | None = None) -> Pending:
        """The same, which is there when the result has been waited for; of a ring, at once."""
        ranks, place, _, _ = self.ring(group)
        if len(ranks) > 1 and self._transport.native:
            return self._transport.allreduce(array, self.dtype(array), ranks)
        if len(ranks) > 1:
            self.reduce_scatter(array, ranks)
            chunks = self.chunks(array, len(ranks))
            self._turn(chunks, place + 1, ranks)
        return NOTHING

    def reduce_scatter(self, array: Array, group: Group | None = None) -> Array:
        """The sum over the group of the next one's part, in place; returns that part."""
        ranks, place, after, before = self.ring(group)
        n = len(ranks)
        chunks = self.chunks(array, n)
        for step in range(n - 1):
            sent = self.send(chunks[(place - step) % n], after)
            into = chunks[(place - step - 1) % n]
            came = self.recv(self.alloc(len(into), self.dtype(into)), before)
            into += came
            sent.wait()
        return chunks[(place + 1) % n]

    def allgather(self, array: Array, group: Group | None = None) -> Array:
        """The group's arrays, all of one length, one after the other: small ones from each to each,
        others round the ring."""
        me = self.rank
        ranks, place, _, _ = self.ring(group)
        whole = self.alloc(len(array) * len(ranks), self.dtype(array))
        parts = self.chunks(whole, len(ranks))
        parts[place][:] = array
        if self.nbytes(array) > _SMALL_BYTES:
            self._turn(parts, place, ranks)
        else:  # one way takes as long as another
            others = [(rank, part) for rank, part in zip(ranks, parts, strict=True) if rank != me]
            sent = [self.send(parts[place], rank) for rank, _ in others]
            for rank, part in others:
                self.recv(part, rank)
            for one in sent:
                one.wait()
        return whole

    def broadcast(self, array: Array, root: int, group: Group | None = None) -> None:
        """The root's array, in place: from one to the next, in pieces."""
        ranks, _, after, before = self.ring(group)
        if root not in ranks:
            raise ValueError(f"root: must be one of {ranks}, is {root}")
        pieces = self.chunks(array, max(1, min(len(ranks) * 2, len(array))))
        sent = []
        for piece in pieces if len(ranks) > 1 else []:
            if self.rank != root:
                self.recv(piece, before)
            if after != root:
                sent.append(self.send(piece, after))
        for one in sent:
            one.wait()

    def barrier(self, group: Group | None = None) -> None:
        """Returns when all of the group have called it."""
        self.allgather(self.alloc(1, "uint8"), group)

    def _turn(self, parts: Sequence[Array], first: int, ranks: tuple[int, ...]) -> None:
        """All parts all the way round, ours being number `first`."""
        _, _, after, before = self.ring(ranks)
        n = len(ranks)
        for step in range(n - 1):
            sent = self.send(parts[(first - step) % n], after)
            self.recv(parts[(first - step - 1) % n], before)
            sent.wait()
