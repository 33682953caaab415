# SPDX-License-Identifier: Apache-2.0
"""Iterations of a flow, and how many bytes they have, learnt from counters alone. Pure: no clock.

As in MLTCP, an iteration begins after a pause that is longer than a learnt threshold. Pauses within
an iteration (a server waits for the next key) are short, those of computing are long. Where one
kind ends and the other begins is taken from the widest relative steps between the pauses seen, and
the iterations that this makes must agree about their bytes: otherwise no total is announced.

Times are ns, of any clock that never runs backwards; amounts are bytes.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import isqrt
from typing import NamedTuple

from flowslot.units import MILLISECOND

FLOOR_NS = 20 * MILLISECOND
"""Pauses this short are one like the other: with a look every 10 ms none is seen to be shorter."""
FIRST_NS = 30 * MILLISECOND
"""The threshold before anything is learnt, and where nothing can be."""
AGREE, RECENT = 3, 8
"""A total is announced once so many iterations have had the same bytes, and more than three
quarters of the last RECENT ones,"""
TOLERANCE = 0.03
"""but for so much: headers differ, and a reply may come an iteration later."""
KEEP = 128
"""Pauses that are remembered."""
STEP = 1.5
"""Pauses that belong to iterations are longer than the others by so much, at least."""
SPLITS = 4
"""So many of the widest steps are tried."""
SMALL = 4096
"""Bytes since the last look that are no sign of a phase: requests, acknowledgements, heartbeats."""
LARGEST = 1 << 40
"""An iteration of more bytes is none: a flow that never pauses. A record can hold 2^50."""


class Move(NamedTuple):
    """What one look has found."""

    began: bool = False
    """An iteration has begun."""
    total: int = 0
    """Expected in this iteration, now that it has begun or been corrected; 0: not known."""
    posted: int = 0
    """So many more bytes of this iteration were posted,"""
    done: int = 0
    """and so many more acknowledged."""
    corrected: bool = False
    """It has ended with fewer bytes than announced: `total`."""


NOTHING = Move()


class Phases:
    """Of one flow. `iteration`: the present one's number, from 1. `threshold`: see above."""

    def __init__(self, now: int, posted: int, acked: int) -> None:
        """`posted` and `acked`: what the flow's counters are. The first iteration may have begun
        before, and is not learnt from."""
        self.iteration = 1
        self.threshold = FIRST_NS
        self._posted = self._acked = max(posted, 0)
        self._busy = acked < posted
        self._last = now  # when it was last seen busy
        self._origin = max(acked, 0)  # of this iteration
        self._told = self._told_done = 0  # of it: posted, done
        self._total = 0
        self._bursts: deque[list[int]] = deque(maxlen=KEEP)  # the pause before it, its bytes

    @property
    def busy(self) -> bool:
        """It was sending when last looked at."""
        return self._busy

    def idle_ns(self, now: int) -> int:
        """How long it has been seen to send nothing."""
        return 0 if self._busy else now - self._last

    def look(self, now: int, posted: int, acked: int) -> Move:
        """What the counters are now. NOTHING, the object, where nothing has happened."""
        if not self._busy and posted == self._posted:
            return self._rest(now)
        posted = max(posted, self._posted)
        acked = max(min(acked, posted), min(self._acked, posted))
        more, moved = posted - self._posted, acked > self._acked
        self._posted, self._acked = posted, acked
        if not self._busy:
            if more <= SMALL:
                self._origin += more  # belongs to no iteration
                return self._rest(now)
            return self._start(now, more)
        if self._bursts:
            self._bursts[-1][1] += more
        self._busy = more > 0 or moved or acked < posted
        if not self._busy:
            return self._rest(now)
        self._last = now
        if posted - self._origin > LARGEST:
            return self._begin(now, more, 0)
        return self._go_on()

    def _start(self, now: int, more: int) -> Move:
        """It sends again, after a pause."""
        pause = now - self._last
        self._bursts.append([pause, 0])
        self.threshold, total = learn(self._bursts)
        self._bursts[-1][1] = more
        self._busy, self._last = True, now
        if pause <= self.threshold:
            return self._go_on()
        return self._begin(now, more, total)

    def _begin(self, now: int, more: int, total: int) -> Move:
        self.iteration += 1
        self._origin = self._posted - more
        self._told = self._told_done = 0
        self._total = total
        return self._go_on()._replace(began=True, total=total)

    def _go_on(self) -> Move:
        told, told_done = self._told, self._told_done
        self._told = max(self._posted - self._origin, told)
        self._told_done = max(min(self._acked - self._origin, self._told), told_done)
        return Move(posted=self._told - told, done=self._told_done - told_done)

    def _rest(self, now: int) -> Move:
        """It sends nothing: then all was acknowledged."""
        done = self._told - self._told_done
        self._told_done = self._told
        if self._told < self._total and now - self._last > self.threshold:
            self._total = self._told
            return Move(done=done, total=self._told, corrected=True)
        return Move(done=done) if done else NOTHING


def learn(bursts: Sequence[list[int]]) -> tuple[int, int]:
    """The threshold, and the bytes of the next iteration (0: not known), from [pause before it,
    bytes] of each burst; the last one is only about to begin.

    Where iterations agree about several thresholds, the one in the widest step counts: parts of one
    size, one after the other, agree as well. FIRST_NS counts where no step is wide: a few stray
    pauses can fill one up.
    """
    thresholds = [*_steps(sorted(burst[0] for burst in bursts)), FIRST_NS]
    for threshold in thresholds:
        total = _same(list(_iterations(bursts, threshold))[-RECENT:])
        if total:
            return threshold, total
    return thresholds[0], 0


def _same(sizes: list[int]) -> int:
    """The smallest of those that agree; 0: they do not. Better too small than too big: the flow
    would go on to hold what it does not need."""
    if not sizes:
        return 0
    middle = sorted(sizes)[len(sizes) // 2]
    alike = [size for size in sizes if abs(size - middle) <= middle * TOLERANCE]
    return min(alike) if len(alike) >= AGREE and 4 * len(alike) > 3 * len(sizes) else 0


def _steps(pauses: list[int]) -> list[int]:
    """Thresholds in the wide steps between pauses (ascending), the widest first. AGREE + 1 pauses
    are longer, at least, so that AGREE iterations are bounded by them."""
    floored = [FLOOR_NS, *(max(pause, FLOOR_NS) for pause in pauses)]
    pairs = list(pairwise(floored))[: max(len(pauses) - AGREE, 0)]
    wide = [(below, above) for below, above in pairs if above >= below * STEP]
    wide.sort(key=lambda pair: pair[0] / pair[1])
    return [isqrt(below * above) for below, above in wide[:SPLITS]]


def _iterations(bursts: Sequence[list[int]], threshold: int) -> Iterator[int]:
    """Bytes of the iterations of which both ends were seen."""
    size = -1
    for pause, sent in bursts:
        if pause > threshold:
            if size >= 0:
                yield size
            size = 0
        if size >= 0:
            size += sent
