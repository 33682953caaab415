# SPDX-License-Identifier: Apache-2.0
"""What the jobs send: numbers whose sums every receiver can check, byte by byte.

Rank r contributes `base + k(r, iteration)` in 16-bit arithmetic that wraps; `base` is seeded
noise, different for every word, and k differs for every rank and iteration. The sum over any
set of ranks is then (size of the set) x base + the sum of their k: a word that was lost, moved,
damaged, added twice or left from an earlier iteration does not match.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from flowslot_scenario.job import WORD_BYTES

Word = np.uint16
assert np.dtype(Word).itemsize == WORD_BYTES
Words = npt.NDArray[np.uint16]


class CorruptionError(Exception):
    """Received bytes are not what the sender must have sent."""


class Content:
    """The content of one job's tensor of `words` words."""

    def __init__(self, seed: int, job: str, words: int, ranks: int) -> None:
        self._salt = zlib.crc32(job.encode())
        generator = np.random.default_rng([seed, self._salt])
        base = generator.integers(0, 1 << 16, words, dtype=Word)
        self._multiples: list[Words] = [base * Word(n) for n in range(ranks + 1)]
        self._scratch = np.empty(words, Word)

    def constant(self, ranks: Iterable[int], iteration: int) -> Word:
        """Sum of k over `ranks` in this iteration."""
        total = sum(
            (r + 1) * 0x9E37_79B1 + (iteration + 1) * 0x85EB_CA6B + self._salt for r in ranks
        )
        return Word(total & 0xFFFF)

    def fill(self, out: Words, rank: int, iteration: int) -> None:
        """Write the whole contribution of one rank into `out` (shape: words)."""
        np.add(self._multiples[1], self.constant([rank], iteration), out=out)

    def check(self, words: Words, first: int, count: int, constant: Word) -> None:
        """Compare words [first, first + len) of a sum over `count` ranks; CorruptionError."""
        base = self._multiples[count][first : first + words.size]
        scratch = self._scratch[: words.size]
        np.subtract(words, base, out=scratch)
        if not (scratch == constant).all():
            at = int(np.flatnonzero(scratch != constant)[0])
            raise CorruptionError(f"word {first + at} is not the sum over {count} ranks")
