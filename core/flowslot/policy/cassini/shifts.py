# SPDX-License-Identifier: Apache-2.0
"""Time shifts of all jobs of a network, and which of several placements is best (thesis, section
4.4.2)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from flowslot.model.errors import FlowslotError
from flowslot.model.settings import shortened
from flowslot.policy.base import Floats
from flowslot.policy.cassini.affinity import loop_free, traverse
from flowslot.policy.cassini.circle import DEGREES, TOLERANCE, Circle, demand, unified
from flowslot.policy.cassini.profile import Profile
from flowslot.policy.cassini.rotate import STEPS, Search

MOST_CANDIDATES = 10


class Shift(NamedTuple):
    """`shift_ns`: by how much the start of the job's next iteration is delayed, if all jobs' next
    iterations would begin at the same moment; less than its period. `score`: the worst of the links
    that it shares. 1: nobody is in the way; may be negative."""

    shift_ns: int
    score: float


class Settings(NamedTuple):
    """`degrees`: an angle of the circle. `tolerance`: see circle.py. `steps`: of the search for the
    best rotations of each link, at most."""

    degrees: float = DEGREES
    tolerance: float = TOLERANCE
    steps: int = STEPS


DEFAULTS = Settings()


@dataclass(frozen=True, slots=True)
class Link:
    """What was found for a link that several jobs share. `weights`: of each of them, the shift that
    suits this link, ns. `score`: with these. `exact`: no rotations have a better one."""

    circle: Circle
    weights: dict[str, int]
    score: float
    exact: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """`links`: every shared one on which jobs can be in each other's way. `left_out`: those of them
    that would close a loop; shifts are not made for these. `scores`: of all shared links, with the
    shifts."""

    shifts: dict[str, Shift]
    links: dict[int, Link]
    left_out: tuple[int, ...]
    scores: dict[int, float]

    @property
    def score(self) -> float:
        """Mean over the shared links; 1 if there is none."""
        return float(np.mean(list(self.scores.values()))) if self.scores else 1.0


def shifts(
    profiles: Sequence[Profile], capacity: Mapping[int, float], settings: Settings = DEFAULTS
) -> dict[str, Shift]:
    """Of each job. `capacity`: payload bytes/s of each link. Raises FlowslotError: two jobs of one
    name, a link without a capacity."""
    return plan(profiles, capacity, settings).shifts


def plan(
    profiles: Sequence[Profile], capacity: Mapping[int, float], settings: Settings = DEFAULTS
) -> Plan:
    """The same with what it rests on."""
    jobs = _checked(profiles, capacity)
    shared = _shared(jobs)
    found = {
        link: fit(shared[link], link, capacity[link], settings) for link in _tight(shared, capacity)
    }
    # Where there is a loop, the links go first that are worst without their own shifts.
    gain = {
        link: one.score - score_with(shared[link], link, capacity[link], one.circle, {})
        for link, one in found.items()
    }
    order = sorted(found, key=lambda link: (-gain[link], link))
    kept = loop_free({link: found[link].weights for link in order})
    periods = {name: profile.period_ns for name, profile in jobs.items()}
    moved = traverse({link: found[link].weights for link in kept}, periods)
    scores = dict.fromkeys(sorted(shared), 1.0)
    for link in scores:
        on_it = shared[link]
        circle = unified([one.period_ns for one in on_it], *settings[:2])
        scores[link] = score_with(on_it, link, capacity[link], circle, moved)
    for link in kept:
        scores[link] = found[link].score
    worst = dict.fromkeys(jobs, 1.0)
    for link, score in scores.items():
        for one in shared[link]:
            worst[one.job] = min(worst[one.job], score)
    out = tuple(link for link in order if link not in set(kept))
    placed = {name: Shift(moved.get(name, 0), worst[name]) for name in jobs}
    return Plan(placed, found, out, scores)


def best(
    candidates: Sequence[Sequence[Profile]],
    capacity: Mapping[int, float],
    settings: Settings = DEFAULTS,
) -> tuple[int, Plan]:
    """Which of up to MOST_CANDIDATES placements of the same jobs has the best mean score, and its
    plan (Algorithm 2). Those with loops do not count; if all have some, all count, with what their
    links come to when some are left out: the thesis does not say. Ties: the first.
    FlowslotError: none, or too many."""
    if not 1 <= len(candidates) <= MOST_CANDIDATES:
        raise FlowslotError(
            f"candidates: from 1 to {MOST_CANDIDATES} placements, got {len(candidates)}"
        )
    plans = [plan(each, capacity, settings) for each in candidates]
    free = [k for k, each in enumerate(plans) if not each.left_out]
    top = max(free or range(len(plans)), key=lambda k: (plans[k].score, -k))
    return top, plans[top]


def fit(on_it: Sequence[Profile], link: int, capacity: float, settings: Settings) -> Link:
    """The rotations of the jobs on one link, and what they come to (Table 4.1)."""
    circle = unified([one.period_ns for one in on_it], *settings[:2])
    most = np.array([circle.rotations(j) for j in range(len(on_it))], np.intp)
    search = Search(_demands(on_it, link, circle), most, float(capacity), settings.steps)
    search.go()
    rotations = np.asarray(search.best).tolist()
    weights = {
        one.job: circle.ns(rotation) % one.period_ns
        for one, rotation in zip(on_it, rotations, strict=True)
    }
    score = 1 - _near_zero(search.least / (circle.angles * capacity))
    return Link(circle, weights, score, bool(search.exact))


def _near_zero(excess: float) -> float:
    """Without what is due to floating point."""
    return 0.0 if excess < 1e-9 else excess


def _demands(on_it: Sequence[Profile], link: int, circle: Circle) -> Floats:
    rows = zip(on_it, circle.turns, strict=True)
    return np.stack([demand(one, link, turns, circle) for one, turns in rows])


def score_with(
    on_it: Sequence[Profile], link: int, capacity: float, circle: Circle, moved: Mapping[str, int]
) -> float:
    """Of a link whose jobs are shifted by `moved`, ns; 0 where it says nothing."""
    total = np.zeros(circle.angles)
    for one, row in zip(on_it, _demands(on_it, link, circle), strict=True):
        total += np.roll(row, round(moved.get(one.job, 0) * circle.angles / circle.perimeter_ns))
    excess = np.maximum(total - capacity, 0.0).sum() / (circle.angles * capacity)
    return float(1 - _near_zero(excess))


def _checked(profiles: Sequence[Profile], capacity: Mapping[int, float]) -> dict[str, Profile]:
    jobs: dict[str, Profile] = {}
    for one in profiles:
        name = shortened(one.job)
        if one.job in jobs:
            raise FlowslotError(f'job "{name}": is there twice; each needs a name of its own')
        jobs[one.job] = one
        for link in one.links:
            if not 0 < capacity.get(link, 0.0) < math.inf:
                raise FlowslotError(
                    f'job "{name}": links[{link}] needs a capacity, finite and above 0 bytes/s'
                )
    return jobs


def _shared(jobs: Mapping[str, Profile]) -> dict[int, list[Profile]]:
    """Links that carry more than one job, and these, by name."""
    on: dict[int, list[Profile]] = {}
    for name in sorted(jobs):
        if jobs[name].phases:
            for link in jobs[name].links:
                on.setdefault(link, []).append(jobs[name])
    return {link: them for link, them in on.items() if len(them) > 1}


def _tight(shared: Mapping[int, Sequence[Profile]], capacity: Mapping[int, float]) -> list[int]:
    """Those on which jobs can be in each other's way; but for those where whatever suits another
    one suits them, too: it has less capacity, and the same jobs and more. So jobs that share both
    ends of all their paths are no loop."""
    wants = {
        link: {one.job: one.links[link] / capacity[link] for one in on_it}
        for link, on_it in shared.items()
        if sum(max(p.demand for p in one.phases) * one.links[link] for one in on_it)
        > capacity[link]
    }
    kept: list[int] = []
    on: dict[str, list[int]] = {}
    for link in sorted(
        wants, key=lambda link: (-len(wants[link]), -sum(wants[link].values()), link)
    ):
        mine = wants[link]
        rarest = min((on.get(job, []) for job in mine), key=len)
        if any(
            all(wants[other].get(job, 0) >= mine[job] * (1 - 1e-9) for job in mine)
            for other in rarest
        ):
            continue
        kept.append(link)
        for job in mine:
            on.setdefault(job, []).append(link)
    return kept
