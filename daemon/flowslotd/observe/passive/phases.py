# SPDX-License-Identifier: Apache-2.0
"""Iterations of a flow, and how many bytes they have, learnt from counters alone. No clock.

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

from flowslot.model.units import MILLISECOND
from flowslot_shm.writer import FlowWriter

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
OVERDUE = 2
"""An iteration that has taken so many times as long as the longest that agreed (and the threshold)
does not bring what was announced: something else goes on. But not while"""
BACKLOG = 64 * 1024
"""so many bytes wait to be acknowledged: then it is the network that is slow."""
LARGEST = 1 << 40
"""An iteration of more bytes is none: a flow that never pauses. A record can hold 2^50."""


class Phases:
    """Of one flow, which are written to its slot. `iteration`: the present one's number, from 1.
    `threshold`: see above. `busy`: it was sending when last looked at."""

    def __init__(self, now: int, posted: int, acked: int, writer: FlowWriter) -> None:
        """`posted` and `acked`: what the flow's counters are. The first iteration may have begun
        before, and is not learnt from."""
        self.iteration = 1
        self._writer = writer
        self.threshold = FIRST_NS
        self._posted = self._acked = max(posted, 0)
        self.busy = acked < posted
        self._last = now  # when it was last seen busy
        self._origin = max(acked, 0)  # of this iteration
        self._reported = self._reported_done = 0  # of it: posted, done
        self._total = 0
        self._overdue = 0  # when what was announced is not believed any more
        # The pause before it, its bytes, and for how long it was sending.
        self._bursts: deque[list[int]] = deque(maxlen=KEEP)
        writer.begin(self.iteration)

    def idle_ns(self, now: int) -> int:
        """How long it has been seen to send nothing."""
        return 0 if self.busy else now - self._last

    def look(self, now: int, posted: int, acked: int) -> bool:
        """What the counters are now. True: the iteration has ended with fewer bytes than were
        announced, or has gone on for so long that it must have."""
        if not self.busy and posted == self._posted:
            return self._rest(now)
        posted = max(posted, self._posted)
        acked = max(min(acked, posted), min(self._acked, posted))
        more, moved = posted - self._posted, acked > self._acked
        self._posted, self._acked = posted, acked
        if not self.busy:
            if more <= SMALL:
                self._origin += more  # belongs to no iteration
                return self._rest(now)
            return self._start(now, more)
        busy = more > 0 or moved or acked < posted
        if self._bursts:
            self._bursts[-1][1] += more
            if busy:
                self._bursts[-1][2] += now - self._last
        self.busy = busy
        if not self.busy:
            return self._rest(now)
        self._last = now
        if posted - self._origin > LARGEST:
            return self._begin(now, more, Learnt(self.threshold))
        return self._go_on(now)

    def _start(self, now: int, more: int) -> bool:
        """It sends again, after a pause."""
        pause = now - self._last
        self._bursts.append([pause, 0, 0])
        # No threshold is shorter than the floor, and learning takes some 0.6 ms.
        learnt = learn(self._bursts) if pause > FLOOR_NS else Learnt(self.threshold)
        self.threshold = learnt.threshold
        self._bursts[-1][1] = more
        self.busy, self._last = True, now
        if pause <= self.threshold:
            return self._go_on(now)
        return self._begin(now, more, learnt)

    def _begin(self, now: int, more: int, learnt: "Learnt") -> bool:
        self.iteration += 1
        self._origin = self._posted - more
        self._reported = self._reported_done = 0
        self._total = learnt.total
        self._overdue = now + OVERDUE * learnt.longest + learnt.threshold
        self._writer.begin(self.iteration, self._total)
        return self._go_on(now)

    def _go_on(self, now: int) -> bool:
        posted = max(self._posted - self._origin, self._reported)
        done = max(min(self._acked - self._origin, posted), self._reported_done)
        self._report(posted, done)
        return self._correct(now > self._overdue and self._posted - self._acked <= BACKLOG)

    def _rest(self, now: int) -> bool:
        """It sends nothing: then all was acknowledged."""
        self._report(self._reported, self._reported)
        return self._correct(now - self._last > self.threshold or now > self._overdue)

    def _report(self, posted: int, done: int) -> None:
        """So many bytes of this iteration."""
        self._writer.advance(posted=posted - self._reported, done=done - self._reported_done)
        self._reported, self._reported_done = posted, done

    def _correct(self, over: bool) -> bool:
        """What was announced and will not come is taken back, once."""
        if not over or self._reported >= self._total:
            return False
        self._total = self._reported
        self._writer.begin(self.iteration, self._total)
        return True


class Learnt(NamedTuple):
    """Of the iterations seen."""

    threshold: int
    total: int = 0
    """Bytes of the next one; 0: not known."""
    longest: int = 0
    """The longest of those that agree took so long, from its first bytes to its last."""


def learn(bursts: Sequence[list[int]]) -> Learnt:
    """From [pause before it, bytes, time spent sending] of each burst; the last one is only about
    to begin.

    Where iterations agree about several thresholds, the one in the widest step counts: parts of one
    size, one after the other, agree as well. FIRST_NS counts where no step is wide: a few stray
    pauses can fill one up.
    """
    thresholds = [*_steps(sorted(burst[0] for burst in bursts)), FIRST_NS]
    for threshold in thresholds:
        alike = _alike(list(_iterations(bursts, threshold))[-RECENT:])
        # The smallest: better too small than too big, as the flow would go on to hold what it does
        # not need.
        total = min((size for size, _ in alike), default=0)
        if total:
            return Learnt(threshold, total, max(took for _, took in alike))
    return Learnt(thresholds[0])


def _alike(iterations: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Those whose bytes agree; none: too few do."""
    if not iterations:
        return []
    middle = sorted(size for size, _ in iterations)[len(iterations) // 2]
    alike = [one for one in iterations if abs(one[0] - middle) <= middle * TOLERANCE]
    return alike if len(alike) >= AGREE and 4 * len(alike) > 3 * len(iterations) else []


def _steps(pauses: list[int]) -> list[int]:
    """Thresholds in the wide steps between pauses (ascending), the widest first. AGREE + 1 pauses
    are longer, at least, so that AGREE iterations are bounded by them."""
    floored = [FLOOR_NS, *(max(pause, FLOOR_NS) for pause in pauses)]
    pairs = list(pairwise(floored))[: max(len(pauses) - AGREE, 0)]
    wide = [(below, above) for below, above in pairs if above >= below * STEP]
    wide.sort(key=lambda pair: pair[0] / pair[1])
    return [isqrt(below * above) for below, above in wide[:SPLITS]]


def _iterations(bursts: Sequence[list[int]], threshold: int) -> Iterator[tuple[int, int]]:
    """Bytes and duration of the iterations of which both ends were seen."""
    size = -1
    took = 0
    for pause, sent, busy in bursts:
        if pause > threshold:
            if size >= 0:
                yield size, took
            size = took = 0
        elif size >= 0:
            took += pause
        if size >= 0:
            size += sent
            took += busy
