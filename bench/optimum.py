# SPDX-License-Identifier: Apache-2.0
"""What no scheduler can do better: a few jobs on one link, in parts of fair sharing.

`python -m bench.optimum [--jobs N] [--ticks N] [--draws N] SEED...`: jobs with periods and duties
as `lab mixes` draws them. The model is free of cost; computation takes always the same time. All
goes in whole ticks, so many to the shortest period; jobs that share the link fairly have it in
turns, tick by tick. For each draw: the mean slowdown under fair sharing; under shortest remaining
first; and a bound for all schedulers, also for those that know everything, and leave the link idle
on purpose.

The bound. A job that makes progress in the part f of the time has the slowdown 1 / f. With weights
w a scheduler comes to the sum of w f. The most that is possible, h, is the gain of a Markov
decision process: its states are where all jobs stand, its actions are whom the link serves. For any
function V of the state, h is at most the largest value of TV - V, where T is the best step (Odoni,
1969); value iteration finds a good V. So the mean of 1 / f is at least its smallest value where the
sum of w f is h. The best of several weights counts.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from flowslot_scenario.mixes import DUTY, LOAD, PERIOD_S

SWEEPS, CLOSE = 4000, 1e-4
"""Value iteration ends after so many, or when h is known so well."""
WEIGHTS = 5
"""So many weights are tried, each from what the last one's optimum would be."""
ROUNDS = 1000
"""Iterations of the slowest job when a rule is played."""


@dataclass(frozen=True)
class Job:
    """Ticks of computation, then of sending."""

    computes: int
    sends: int

    @property
    def period(self) -> int:
        """Of an iteration alone, ticks."""
        return self.computes + self.sends


Rule = Callable[[dict[int, int]], int]
"""Whom the link serves, of several that want to send; the argument: ticks that are left, by job."""


def draw(seed: int, number: int, count: int, ticks: int) -> tuple[Job, ...]:
    """Jobs as those of `lab mixes` that share one link; the shortest takes so many ticks."""
    rng = np.random.default_rng([seed, number])
    while True:
        least, most = map(math.log, PERIOD_S)
        periods = np.exp(rng.uniform(least, most, size=count))
        duties = rng.uniform(*DUTY, size=count)
        if LOAD[0] <= duties.sum() <= LOAD[1]:
            break
    whole = np.rint(periods / periods.min() * ticks).astype(int)
    sends = np.maximum(np.rint(whole * duties), 1).astype(int)
    return tuple(Job(int(p - s), int(s)) for p, s in zip(whole, sends, strict=True))


def play(jobs: Sequence[Job], rule: Rule) -> list[float]:
    """Their slowdowns under a rule."""
    at, done = [job.period * k // len(jobs) for k, job in enumerate(jobs)], [0] * len(jobs)
    ticks = ROUNDS * max(job.period for job in jobs)
    for _ in range(ticks):
        left = {k: jobs[k].period - x for k, x in enumerate(at) if x >= jobs[k].computes}
        served = rule(left) if len(left) > 1 else None
        for k in range(len(jobs)):
            if k not in left or k == served or served is None:
                done[k] += 1
                at[k] = (at[k] + 1) % jobs[k].period
    return [ticks / x for x in done]


def fair() -> Rule:
    """Tick by tick in turns: whoever was served longest ago."""
    served: list[int] = []

    def rule(left: dict[int, int]) -> int:
        job = min(left, key=lambda k: served.index(k) if k in served else -1)
        served[:] = [k for k in served if k != job] + [job]
        return job

    return rule


def shortest(left: dict[int, int]) -> int:
    """Whoever has least left to send."""
    return min(left, key=lambda k: left[k])


class Link:
    """The decision process. States are numbered, the last job's position fastest."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        shape = tuple(job.period for job in jobs)
        at = np.indices(shape).reshape(len(jobs), -1)
        computes = at < np.array([[job.computes] for job in jobs])
        self._moves, self._next = [], []
        for served in range(len(jobs) + 1):  # the last one: nobody
            moves = computes.copy()
            if served < len(jobs):
                moves[served] = True
            after = (at + moves) % np.array(shape)[:, None]
            self._moves.append(moves.astype(float))
            self._next.append(np.ravel_multi_index(tuple(after), shape))

    def most(self, weights: Sequence[float]) -> float:
        """A bound of the sum of w f for all schedulers."""
        gains = [np.array(weights) @ moves for moves in self._moves]
        value, best = np.zeros(len(gains[0])), math.inf
        for _ in range(SWEEPS):
            step = gains[0] + value[self._next[0]]
            for gain, after in zip(gains[1:], self._next[1:], strict=True):
                np.maximum(step, gain + value[after], out=step)
            change = step - value
            best = min(best, float(change.max()))
            if best - change.min() < CLOSE:
                break
            value += change / 2  # half steps: nothing goes round for ever
            value -= value.min()
        return best


def bound(jobs: Sequence[Job]) -> float:
    """The mean slowdown is at least this."""
    link, found, weights = Link(jobs), 1.0, [1.0] * len(jobs)
    for _ in range(WEIGHTS):
        parts = _cheapest(weights, link.most(weights))
        found = max(found, statistics.mean(1 / x for x in parts))
        worth = [1 / x**2 for x in parts]  # what a little more progress gains
        weights = [w / statistics.mean(worth) for w in worth]
    return found


def _cheapest(weights: Sequence[float], total: float) -> list[float]:
    """Of all f with a sum of w f of `total`, at most 1 each: those of the least mean of 1 / f."""
    parts = dict.fromkeys(range(len(weights)), 1.0)
    free = set(parts)
    while free:
        left = total - sum(w for k, w in enumerate(weights) if k not in free)
        level = left / sum(math.sqrt(weights[k]) for k in free)
        parts |= {k: level / math.sqrt(weights[k]) for k in free}
        full = {k for k in free if parts[k] >= 1}
        if not full:
            break
        parts |= dict.fromkeys(full, 1.0)
        free -= full
    return list(parts.values())


def main(words: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("seeds", nargs="+", type=int, metavar="SEED")
    parser.add_argument("--jobs", type=int, default=2, help="on the link (2)")
    parser.add_argument("--ticks", type=int, default=40, help="of the shortest period (40)")
    parser.add_argument("--draws", type=int, default=24, help="of each seed (24)")
    asked = parser.parse_args(words)
    for seed in asked.seeds:
        turns, least = [], []
        for number in range(1, asked.draws + 1):
            jobs = draw(seed, number, asked.jobs, asked.ticks)
            shared = statistics.mean(play(jobs, fair()))
            turns.append(statistics.mean(play(jobs, shortest)) / shared)
            least.append(bound(jobs) / shared)
        print(
            f"seed {seed}: shortest first {statistics.geometric_mean(turns):.3f} of fair sharing, "
            f"no scheduler below {statistics.geometric_mean(least):.3f}"
        )


if __name__ == "__main__":
    main()
