# SPDX-License-Identifier: Apache-2.0
"""When a flow's iterations begin, how long and how large they are, learnt from its bursts. Pure.

A burst is bytes without a longer pause in between. What repeats is looked for, in the whole of a
short history, anew each time: nothing that was guessed before counts. Where pauses between bursts
differ widely, the longer ones are boundaries, and what lies between two of them is a part. A part
is an iteration, or some parts are, one after the other (buckets, gradients that are accumulated):
the fewest of which bytes and durations repeat. Until something has repeated nothing is known.

Which boundary an iteration begins at is any one's guess; its period and its bytes are not.

Times are ns, of any clock that never runs backwards; amounts are bytes.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import inf, isqrt
from typing import NamedTuple

from flowslot.model.units import MILLISECOND

FLOOR_NS = 10 * MILLISECOND
"""Pauses this short are one like the other: who looks from outside sees hardly shorter ones."""
BLUR_NS = 5 * MILLISECOND
"""When a burst begins is not known better."""
FIRST_NS = 30 * MILLISECOND
"""The threshold before anything is learnt, and where nothing can be."""
AGREE, RECENT = 3, 8
"""Something repeats that has come so many times, and in more than three quarters of the last RECENT
times: with the same bytes,"""
TOLERANCE = 0.03
"""but for so much (headers differ, and a reply may come an iteration later), and as long,"""
IN_TIME = 0.25
"""but for so much. Parts with the same bytes that last longer and shorter in turns are known by
that where the difference is"""
APART = 2
"""times as large as what varies among those in one place. Where computing or the network just takes
longer now and then, bytes alone will do, once they have come"""
UNTIMED = 2 * AGREE
"""times."""
MOST_PARTS = 8
"""Parts that can be an iteration."""
STEP = 1.5
"""Boundaries are longer than other pauses by so much, at least."""
SPLITS = 4
"""So many of the widest steps are tried."""


class Burst:
    """Begun at `start`, after a pause; `size` bytes so far, the last of them after `busy`."""

    __slots__ = ("busy", "pause", "size", "start")

    def __init__(self, start: int, pause: int, size: int = 0, busy: int = 0) -> None:
        self.start, self.pause, self.size, self.busy = start, pause, size, busy


class Rhythm(NamedTuple):
    """`threshold`: longer pauses are boundaries. All else is 0 while it is not known."""

    threshold: int
    total: int = 0
    """Bytes of an iteration."""
    period: int = 0
    """From the beginning of one to that of the next, on average."""
    longest: int = 0
    """The longest of those that repeated took so long, from its first bytes to its last."""
    parts: int = 1
    """So many boundaries, one after the other, belong to an iteration."""


class _Part(NamedTuple):
    size: int
    lasts: int
    """To the beginning of the next one."""
    took: int
    """To its last bytes."""


def learn(bursts: Sequence[Burst]) -> Rhythm:
    """From the last bursts; the newest of them is only about to begin.

    Of what repeats, the longest boundaries count: parts of one size, one after the other, repeat as
    well. FIRST_NS counts where no step is wide: a few stray pauses can fill one up.
    """
    steps = _steps(sorted(burst.pause for burst in bursts))
    for threshold in [*sorted(steps, reverse=True), FIRST_NS]:
        if found := _found(threshold, _parts(bursts, threshold)):
            return found
    return Rhythm(steps[0] if steps else FIRST_NS)


def _found(threshold: int, parts: Sequence[_Part]) -> Rhythm | None:
    """What parts between such boundaries repeat; None: not even bytes do."""
    several = range(2, min(len(parts) // AGREE, MOST_PARTS) + 1)
    alike = _repeated(parts, 1)
    for number in several:
        found = _repeated(parts, number)
        if found and (_take_turns(parts, number) if alike else _strange(parts[-number:], inf)):
            return _rhythm(threshold, found, number)
    if not alike:
        return None
    if found := _repeated(parts, 1, IN_TIME):
        return _rhythm(threshold, found, 1)
    return _rhythm(threshold, alike, 1) if len(parts) >= UNTIMED else Rhythm(threshold)


def _rhythm(threshold: int, found: Sequence[_Part], parts: int) -> Rhythm:
    middle = _middle(one.lasts for one in found)
    usual = [one.lasts for one in found if _near(one.lasts, middle, IN_TIME)]
    return Rhythm(
        threshold,
        # The smallest: better too small than too big, as the flow would go on to hold what it does
        # not need.
        min(one.size for one in found),
        # Of neighbours the errors of when they were seen cancel out.
        sum(usual) // len(usual),
        max(one.took for one in found),
        parts,
    )


def _steps(pauses: Sequence[int]) -> list[int]:
    """Thresholds in the wide steps between pauses (ascending), the widest first. AGREE + 1 pauses
    are longer, at least, so that AGREE parts are bounded by them."""
    floored = [FLOOR_NS, *(max(pause, FLOOR_NS) for pause in pauses)]
    pairs = list(pairwise(floored))[: max(len(pauses) - AGREE, 0)]
    wide = [(below, above) for below, above in pairs if above >= below * STEP]
    wide.sort(key=lambda pair: pair[0] / pair[1])
    return [isqrt(below * above) for below, above in wide[:SPLITS]]


def _parts(bursts: Sequence[Burst], threshold: int) -> list[_Part]:
    """Those of which both ends were seen."""
    parts = []
    start, size = -1, 0
    for burst in bursts:
        if burst.pause > threshold:
            if start >= 0:
                lasts = burst.start - start
                parts.append(_Part(size, lasts, lasts - burst.pause))
            start, size = burst.start, 0
        size += burst.size
    return parts


def _repeated(parts: Sequence[_Part], number: int, within: float = inf) -> list[_Part]:
    """The last iterations, of `number` parts each, that agree with each other; none: too few do.
    `within`: how much of their durations may differ."""
    times = min(len(parts) // number, RECENT if number == 1 else AGREE)
    if times < AGREE:
        return []
    last = parts[len(parts) - times * number :]
    groups = [_joined(last[i : i + number]) for i in range(0, len(last), number)]
    middle = _middle(one.size for one in groups)
    alike = [one for one in groups if _near(one.size, middle, TOLERANCE)]
    strange = sum(_strange(last[i::number], within) for i in range(number))
    if number > 1:  # a few look like that by chance, or while something changes
        return alike if strange == 0 else []
    return alike if _most(len(alike), times) and _most(times - strange, times) else []


def _take_turns(parts: Sequence[_Part], number: int) -> bool:
    """In how long they last, as far back as anything counts, and once more than AGREE times: chance
    can do that, too."""
    times = min(len(parts) // number, RECENT)
    last = parts[len(parts) - times * number :]
    places = [[one.lasts for one in last[i::number]] for i in range(number)]
    varies = BLUR_NS + max(max(place) - min(place) for place in places)
    return times > AGREE and max(map(min, places)) - min(map(max, places)) > APART * varies


def _strange(parts: Sequence[_Part], within: float) -> int:
    """How many are not like the others."""
    size, lasts = _middle(one.size for one in parts), _middle(one.lasts for one in parts)
    return sum(
        not (_near(one.size, size, TOLERANCE) and _near(one.lasts, lasts, within, BLUR_NS))
        for one in parts
    )


def _joined(parts: Sequence[_Part]) -> _Part:
    """One after the other."""
    size, lasts = sum(one.size for one in parts), sum(one.lasts for one in parts)
    return _Part(size, lasts, lasts - parts[-1].lasts + parts[-1].took)


def _most(some: int, of_all: int) -> bool:
    return some >= AGREE and 4 * some > 3 * of_all


def _near(one: int, other: int, share: float, more: int = 0) -> bool:
    return abs(one - other) <= other * share + more


def _middle(values: Iterable[int]) -> int:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
