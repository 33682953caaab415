# SPDX-License-Identifier: Apache-2.0
"""Classes of jobs that an administrator names: protected ones, floors, ceilings; beside any policy.

`ClassedAllocator` stands around the policy's allocator. In this order:
1. Ceilings: a job's active flows have at most this part of each link together, top-up included.
   An idle one has no rate meanwhile; it may top up to its part of what all of them would have.
2. Protected jobs come first: what they can use is theirs, from shortly before they are expected
   (`returns.py`). All others together keep `OTHERS` of each link, so that none stands still; there
   they do not top up meanwhile, as together they would take more than is left, nor begin faster.
3. Floors: an active job has this part of each of its links, as far as it can use it.
4. The policy shares out what is left, and sees of the jobs above what they still lack.
"""

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Annotated

import numpy as np
from pydantic import Field, FiniteFloat, model_validator

from flowslot.model.settings import Settings, Text
from flowslot.model.units import Nanos
from flowslot.policy.base import AllocationState, Allocator, Bools, Floats, Paths, Terms
from flowslot.policy.fill import link_sum, weighted
from flowslot.policy.returns import Expected, Returns

OTHERS = 0.01
"""Part of each link that protected jobs leave to all others."""
TRICKLE = 0.02
"""Part of each link up to which all others' sockets may send there together, whatever they have
been granted: a flow that has next to nothing sees too late that it may send again."""
Part = Annotated[FiniteFloat, Field(ge=0.001, le=1)]


class JobClass(Settings):
    """Jobs whose names match `jobs`, a pattern of the shell (`llm-*`). `floor`, `ceiling`: parts of
    each link, of every such job for itself."""

    jobs: Annotated[Text, Field(min_length=1, max_length=64)]
    protected: bool = False
    floor: Part | None = None
    ceiling: Part | None = None

    @model_validator(mode="after")
    def _makes_sense(self) -> "JobClass":
        if self.floor is not None and self.ceiling is not None and self.floor > self.ceiling:
            raise ValueError(f"floor {self.floor:g} must be at most ceiling {self.ceiling:g}")
        return self


class ClassedAllocator(Allocator):
    """See the module. Of several classes that a job's name matches, the first counts."""

    def __init__(self, inner: Allocator, classes: Sequence[JobClass]) -> None:
        self._inner = inner
        self._classes = tuple(classes)
        self._of: dict[str, JobClass | None] = {}
        self._returns = Returns()
        self._most: Floats | None = None
        self._first = self._bounded = np.zeros(0, np.bool_)
        self._floors = self._edges = np.zeros(0)
        self._seen: AllocationState

    def allocate(self, state: AllocationState, now: Nanos) -> Floats:
        """See Allocator."""
        classes = [self._class_of(name) for name in state.job_names]
        ceiling = np.array([1.0 if c is None else c.ceiling or 1.0 for c in classes])
        floor = np.array([0.0 if c is None else c.floor or 0.0 for c in classes])
        protected = np.array([c is not None and c.protected for c in classes], np.bool_)
        most = self._bound(state, ceiling)
        self._first = protected[state.job]
        expected = self._returns.look(state, now, protected)
        theirs, self._edges = _serve(state, self._first, expected, most)
        floors = _lay(state, floor, np.where(self._first, 0.0, most), state.capacity, theirs)
        self._floors, given = floors, np.zeros(len(state.capacity))
        link_sum(state.paths, theirs + floors, given)
        left = np.minimum(most, state.cap) - floors
        above = state.goal - floors
        # What is complete needs nothing more; a flow that asks for nothing is not there.
        hidden = self._first | (floors > 0) & (left <= 0)
        seen = replace(
            state,
            capacity=np.maximum(state.capacity - given, 0.0),
            remaining=np.where(hidden, 0.0, state.remaining),
            next_bytes=np.where(hidden, 0.0, state.next_bytes),
            cap=np.maximum(left, 0.0),
            goal=np.where(above > _IGNORED * state.goal, above, 0.0),
        )
        inner = np.where(hidden, 0.0, self._inner.allocate(seen, now))
        self._seen = seen
        self._quiet(state, theirs)
        rates: Floats = np.minimum(theirs + floors + inner, most)
        return rates

    def _quiet(self, state: AllocationState, theirs: Floats) -> None:
        """Others on links that protected jobs use have `TRICKLE` at most, and those that compute no
        more when they begin: else they would fill buffers until they are heard of."""
        n_links, active = len(state.goodput), state.remaining > 0
        used, sockets = np.zeros(n_links), np.zeros(n_links)
        link_sum(state.paths, theirs, used)
        used[-1] = 0.0
        here = used[state.paths] > 0
        beside = here.any(axis=1) & ~self._first
        if not beside.any():
            return
        link_sum(state.paths, np.where(beside & active, state.sockets, 0.0), sockets)
        joined = sockets[state.paths] + np.where(active, 0.0, state.sockets)[:, None]
        parts = np.where(here, state.goodput[state.paths] / np.maximum(joined, 1.0), np.inf)
        most = TRICKLE * parts.min(axis=1) * state.sockets
        bound = np.inf if self._most is None else self._most
        self._most = np.where(beside, np.minimum(most, bound), bound)

    def next_change(self, state: AllocationState) -> Floats:
        """See Allocator."""
        return np.minimum(self._inner.next_change(self._seen), self._edges)

    def terms(self) -> Terms:
        """See Allocator. What protected jobs, and those with a ceiling, have depends on phases."""
        terms = self._inner.terms()
        hold, standing = terms.hold, terms.standing
        if hold is not None:
            hold = np.where(self._first | (self._floors > 0), 0, hold)
        if standing is not None:
            standing = standing & ~(self._first | self._bounded)
        return Terms(standing, hold, self._most)

    def _class_of(self, name: str) -> JobClass | None:
        if name not in self._of:
            if len(self._of) >= _NAMES:
                self._of.clear()
            match = (c for c in self._classes if fnmatchcase(name, c.jobs))
            self._of[name] = next(match, None)
        return self._of[name]

    def _bound(self, state: AllocationState, ceiling: Floats) -> Floats:
        """Most that each flow may be given: its part of its job's ceiling; inf: no bound. While
        some of the job's flows are active, others are given nothing."""
        self._bounded = bounded = (ceiling < 1.0)[state.job]
        self._most = None
        unbounded = np.full(len(bounded), np.inf)
        if not bounded.any():
            return unbounded
        active = bounded & (state.remaining > 0) & (state.cap > 0)
        at_work = np.zeros(len(ceiling), np.bool_)
        at_work[state.job[active]] = True
        idle = _by_job(state, ceiling, bounded, unbounded, state.goodput)
        now = _by_job(state, ceiling, active, state.cap, state.goodput)
        self._most = np.where(bounded, np.where(active, now, idle), np.inf)
        most: Floats = np.where(at_work[state.job] & bounded & ~active, 0.0, self._most)
        return most


_IGNORED = 0.1
"""A smaller part of a goal above the floor may be a change of the floor that was not worth a
message, and no rate of the policy's."""
_NAMES = 4096  # of jobs whose class is remembered


def _serve(
    state: AllocationState, first: Bools, expected: Expected, most: Floats
) -> tuple[Floats, Floats]:
    """Rates of protected flows, and when these change though nothing is reported, ns."""
    edges, rates = np.full(len(first), np.inf), np.zeros(len(first))
    if not first.any():
        return rates, edges
    active, (due, margin) = state.remaining > 0, expected
    far = due > margin
    near = ~far & (due > -margin)
    edges[far], edges[near] = (due - margin)[far], (due + margin)[near] + 1
    others = (~first & active).any()
    limit = np.where(first & (active | near), np.minimum(state.cap, most), 0.0)
    capacity = state.capacity * (1 - OTHERS if others else 1.0)
    weighted(state.paths, capacity, limit, state.sockets, rates)
    return rates, edges


def _lay(
    state: AllocationState, floor: Floats, most: Floats, capacity: Floats, taken: Floats
) -> Floats:
    """Floors of the active flows, float64[F]; less, in proportion, where they do not all fit."""
    asks = (floor > 0)[state.job] & (state.remaining > 0) & (most > 0)
    none: Floats = np.zeros(len(asks))
    if not asks.any():
        return none
    limit = np.where(asks, np.minimum(most, state.cap), 0.0)
    rates = _by_job(state, floor, asks, limit, state.goodput)
    used, room = np.zeros(len(capacity)), np.zeros(len(capacity))
    link_sum(state.paths, rates, used)
    link_sum(state.paths, taken, room)
    room = np.maximum(capacity - room, 0.0)
    fits = np.divide(room, used, out=np.ones(len(used)), where=used > room)
    scaled: Floats = rates * fits[state.paths].min(axis=1)
    return scaled


def _by_job(
    state: AllocationState, part: Floats, flows: Bools, limit: Floats, goodput: Floats
) -> Floats:
    """Max-min rates of these flows, bool[F], where each job has `part`, float64[J], of every link
    for itself: float64[F], others have none."""
    n_links, rows = len(goodput) - 1, np.flatnonzero(flows)
    paths = state.paths[rows]
    of = state.job[rows, None] * n_links + np.minimum(paths, n_links - 1)
    pairs, at = np.unique(of, return_inverse=True)
    own = np.append(part[pairs // n_links] * goodput[pairs % n_links], np.inf)
    mine: Paths = np.where(paths < n_links, at.reshape(paths.shape), len(pairs)).astype(np.int32)
    rates, found = np.zeros(len(rows)), np.zeros(len(flows))
    weighted(np.ascontiguousarray(mine), own, limit[rows], state.sockets[rows], rates)
    found[rows] = rates
    return found
