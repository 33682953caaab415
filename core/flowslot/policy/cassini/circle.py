# SPDX-License-Identifier: Apache-2.0
"""The unified circle of the jobs on a link (thesis, sections 4.3.2 and 4.3.5).

Its perimeter is the least common multiple of their iteration times. Measured times hardly have a
small one: that of 273 and 274 ms is 74.8 s, where an angle of 5 degrees is longer than an
iteration. So times are rounded up first, by `tolerance` at most: up, because a job can be held back
and never hurried. Of all multiples of the longest time, the first one that is (nearly) one of all
others, too, decides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from flowslot.policy.base import Floats
from flowslot.policy.cassini.profile import Profile

TOLERANCE = 0.01
DEGREES = 5.0
MOST_TURNS = 24
"""Most iterations of a job on a circle, and so at most 24 times as many angles. The thesis leaves
open what happens beyond: here the multiple is taken that needs the least rounding."""
OWN_SHARE = 3
"""Of its own iteration, every job has at least a third as many angles as the whole circle."""
MOST_ANGLES = 2520


class Circle(NamedTuple):
    """`perimeter_ns`, and `turns`, int[J]: iterations of each job on it. `angles`: so many equal
    ones. `rounded`: by how much the period that needed most was rounded up, as a part of it."""

    perimeter_ns: int
    turns: tuple[int, ...]
    angles: int
    rounded: float

    def rotations(self, j: int) -> int:
        """Of job j that differ: those within its first iteration (equation 4.4)."""
        return -(-self.angles // self.turns[j])

    def ns(self, rotation: int) -> int:
        """As a time shift, before it is reduced to an iteration (equation 4.5)."""
        return round(rotation * self.perimeter_ns / self.angles)


def unified(
    periods_ns: Sequence[int], degrees: float = DEGREES, tolerance: float = TOLERANCE
) -> Circle:
    """The circle of jobs with these iteration times, at least one. With `tolerance` 0 its perimeter
    is their exact least common multiple, if no job has more than MOST_TURNS iterations in it."""
    turns = _turns(periods_ns, tolerance)
    perimeter = _perimeter(periods_ns, turns)
    angles = math.ceil(360 / degrees)
    angles = max(angles, -(-angles // OWN_SHARE) * max(turns))
    whole = math.lcm(*turns)  # so that iterations are whole angles
    if whole <= MOST_ANGLES:
        angles = -(-angles // whole) * whole
    return Circle(perimeter, turns, angles, _rounded(periods_ns, turns))


def _turns(periods_ns: Sequence[int], tolerance: float) -> tuple[int, ...]:
    longest, shortest = max(periods_ns), min(periods_ns)
    best: tuple[int, ...] = ()
    for n in range(1, max(MOST_TURNS * shortest // longest, 1) + 1):
        turns = tuple(max((2 * n * longest + each) // (2 * each), 1) for each in periods_ns)
        rounded = _rounded(periods_ns, turns)
        if not best or rounded < _rounded(periods_ns, best):
            best = turns
        if rounded <= tolerance:
            break
    divisor = math.gcd(*best)
    return tuple(each // divisor for each in best)


def _perimeter(periods_ns: Sequence[int], turns: Sequence[int]) -> int:
    return max(r * each for r, each in zip(turns, periods_ns, strict=True))


def _rounded(periods_ns: Sequence[int], turns: Sequence[int]) -> float:
    least = min(r * each for r, each in zip(turns, periods_ns, strict=True))
    return (_perimeter(periods_ns, turns) - least) / least


def demand(profile: Profile, link: int, turns: int, circle: Circle) -> Floats:
    """What the job wants of a link at each angle, on average over it, payload bytes/s, float64[A].
    `turns`: its iterations on the circle; what they were rounded up by, it waits at their end."""
    period = circle.perimeter_ns / turns
    at, sent = [0.0], [0.0]
    for phase in profile.phases:
        at += [phase.start_ns, phase.start_ns + phase.length_ns]
        sent += [sent[-1], sent[-1] + phase.length_ns * phase.demand]
    edges = np.arange(circle.angles + 1) * (circle.perimeter_ns / circle.angles)
    done, within = np.divmod(edges, period)
    sums = done * sent[-1] + np.interp(within, at, sent)
    per_angle: Floats = np.diff(sums) * (circle.angles / circle.perimeter_ns)
    return np.maximum(per_angle, 0.0) * profile.links[link]
