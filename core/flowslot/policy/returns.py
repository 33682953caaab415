# SPDX-License-Identifier: Apache-2.0
"""When jobs come back: predicted from what is seen of them, with how far that may be off.

There are two predictions of when a job begins to send again. One is what its daemons say: the last
begin and a period. The other is the last end and a computation: how long a job sends depends on
others, how long it computes does not. But a job that pauses within an iteration, as between push
and pull, has computations of several lengths. So the one counts that was off by less, lately.

J jobs, F flows, as in AllocationState. Times are ns.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from flowslot.model.units import MILLISECOND, Nanos
from flowslot.policy.base import AllocationState, Bools, Floats

SMOOTHING = 0.25
"""Weight of the latest computation, and of how far it was off."""
FIRST = 2
"""The first computation that counts: the end before an earlier one was noticed late, while daemons
had yet to learn what an iteration is."""
LONGER = 2.0
"""No computation counts for more than so many times what was known, and at least NEGOTIATED_NS: a
pause is none."""
NEGOTIATED_NS = 10.0 * MILLISECOND
"""A begin is heard of some 4 ms after it; a decision is in force after 2, and what others sent
before it has gone after 4 more."""
DEVIATION_NS = 2.0 * MILLISECOND
"""How far a prediction is off in the mean, at first."""
MOST = 0.25
"""Part of a computation that the margin is at most."""
_NAMES = 4096  # of jobs that are remembered


class Expected(NamedTuple):
    """Of F flows."""

    due: Floats
    """In how long it begins to send; inf: nothing is known, or it sends."""
    margin: Floats
    """So long before and after that it may well begin."""


@dataclass(slots=True)
class _Seen:
    """`begun`: so often it did, after an end. `ended`: when its last byte had gone; None: it sends,
    or never did. `said`: when its first flow was to begin, by its daemons. `off`: mean deviations
    of what the daemons say, and of the last end and computation."""

    turn: int
    begun: int = 0
    ended: float | None = None
    said: float = np.inf
    computes: float = 0.0
    off_said: float = DEVIATION_NS
    off_measured: float = DEVIATION_NS

    def begins(self, at: float) -> None:
        """It has begun to send."""
        if self.ended is None:
            return
        sample = max(at - self.ended, 0.0)
        if self.said < np.inf:
            self.off_said += SMOOTHING * (self._error(at - self.said) - self.off_said)
        self.begun += 1
        if self.begun > FIRST:
            error = self._error(sample - self.computes)
            self.off_measured += SMOOTHING * (error - self.off_measured)
            most = LONGER * max(self.computes, NEGOTIATED_NS)
            more = min(sample, most) - self.computes
            sample = self.computes + SMOOTHING * more
        self.computes, self.ended, self.said = sample, None, np.inf

    def _error(self, off: float) -> float:
        return min(abs(off), max(self.computes, DEVIATION_NS))

    @property
    def measured(self) -> bool:
        """The last end and a computation say more than the daemons do."""
        return self.begun >= FIRST and self.off_measured <= self.off_said

    @property
    def margin(self) -> float:
        """See Expected."""
        margin = NEGOTIATED_NS + (self.off_measured if self.measured else self.off_said)
        return min(margin, MOST * self.computes) if self.computes > 0 else margin


class Returns:
    """Of the jobs that are asked about. `look` at every allocation."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def look(self, state: AllocationState, now: Nanos, jobs: Bools) -> Expected:
        """What is to be expected of the flows of `jobs`, bool[J]."""
        due, margin = np.full(len(state.job), np.inf), np.zeros(len(state.job))
        for j in np.flatnonzero(jobs).tolist():
            mine = state.job == j
            known = mine & (state.period_ns > 0) & (state.next_bytes > 0)
            seen = self._of(state, j)
            active = mine & (state.remaining > 0)
            if active.any():
                seen.begins(float(now - state.wait_ns[active].max()))
            else:
                idle = float(state.idle_ns[mine].min())
                seen.ended = now - idle if idle < np.inf else None
                seen.said = float(now + state.due_ns[known].min()) if known.any() else np.inf
            margin[mine] = seen.margin
            waits = known & ~active
            if seen.measured and active.any():  # who has not begun, as others of its flows have
                begun = state.wait_ns[active].max()
                due[waits & (state.idle_ns > begun)] = -begun
            elif seen.measured and seen.ended is not None:
                due[waits] = seen.ended + seen.computes - now
            else:
                due[waits] = state.due_ns[waits]
        return Expected(due, margin)

    def _of(self, state: AllocationState, j: int) -> _Seen:
        name, turn = state.job_names[j], int(state.jobs.turns[j])
        seen = self._seen.get(name)
        if seen is None or seen.turn != turn:
            if len(self._seen) >= _NAMES:
                self._seen.clear()
            seen = self._seen[name] = _Seen(turn)
        return seen
