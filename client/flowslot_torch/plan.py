# SPDX-License-Identifier: Apache-2.0
"""Buffers that are those of the iteration before: nothing is to be agreed on.

An iteration's buffers, once agreed on, are alike on all ranks, and so is all that follows from
them here: who repeats them needs to ask nobody.
"""

from __future__ import annotations

from collections.abc import Sequence


class Plan:
    """Of one epoch. Tensors are named by their ids."""

    def __init__(self) -> None:
        self._all: frozenset[int] = frozenset()
        """Of an iteration."""
        self._agreed: list[list[int]] | None = None
        """Buffers since an iteration began; None: no beginning has been seen yet."""
        self._planned: list[list[int]] = []
        self._at = 0
        self._ends = False

    def next(self) -> list[int] | None:
        """The next buffer; None: it is to be agreed on."""
        return self._planned[self._at] if self._planned else None

    def renew(self) -> None:
        """The next iteration is to be agreed on."""
        self._ends = True

    def took(self, ids: Sequence[int], begins: bool) -> None:
        """A buffer has been exchanged; `begins`: the tensor by which iterations are told apart is
        in it."""
        if self._planned:
            self._at = (self._at + 1) % len(self._planned)
            if self._at == 0 and self._ends:
                self._planned, self._agreed = [], []
            return
        if begins and not self._all:
            self._all = frozenset(i for one in self._agreed or () for i in one)
            self._agreed = []
        if self._agreed is not None:
            self._agreed.append(list(ids))
            found = [i for one in self._agreed for i in one]
            if len(set(found)) < len(found):  # iterations differ: another try
                self._all, self._agreed = frozenset(), None
            elif self._all and self._all <= set(found):
                fits = len(found) == len(self._all)
                self._planned, self._agreed = (self._agreed if fits else []), None
                if not fits:
                    self._all = frozenset()
                self._at, self._ends = 0, False
