# SPDX-License-Identifier: Apache-2.0
"""Which GPUs a job gets: policies of placement, pure.

A GPU holds several jobs if its memory is enough. `load`: what is left to be done on each GPU, s.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from flowslot.policy.base import Bools, Floats, Rows
from flowslot.policy.cassini.shifts import MOST_CANDIDATES


@dataclass(frozen=True, slots=True)
class Question:
    """A job called `name` wants `workers` of the GPUs that `fits`, bool[G]. `load`: float64[G].
    GPU g is in server `g // per_server`. `best`: which of several such choices suits the jobs best
    that run already, for those that ask."""

    name: str
    workers: int
    fits: Bools
    load: Floats
    per_server: int
    best: Callable[[Sequence[Rows]], int] = field(default=lambda _: 0, compare=False)


Placement = Callable[[Question], Rows | None]
"""The GPUs, intp[workers], worker by worker; None: the job has to wait."""


def _first(question: Question, order: Rows) -> Rows | None:
    """The first in this order that fit."""
    chosen = order[question.fits[order]][: question.workers]
    return chosen if len(chosen) == question.workers else None


def first_fit(question: Question) -> Rows | None:
    """The first that fit."""
    return _first(question, np.arange(len(question.fits)))


def list_scheduling(question: Question) -> Rows | None:
    """Those with the least load."""
    return _first(question, np.argsort(question.load, kind="stable"))


def at_random(seed: int, *more: int) -> Placement:
    """Any that fit; each job's draw is its own, whatever other jobs there are."""

    def place(question: Question) -> Rows | None:
        draw = np.random.default_rng([seed, *more, zlib.crc32(question.name.encode())])
        return _first(question, draw.permutation(len(question.fits)))

    return place


def cassini(seed: int) -> Placement:
    """CASSINI (thesis, section 4.3): of ten drawn at random that which goes best with the jobs that
    run. Simplified: a job is placed after the others, which stay where they are."""
    candidates = [at_random(seed, k) for k in range(MOST_CANDIDATES)]

    def place(question: Question) -> Rows | None:
        drawn = [found for each in candidates if (found := each(question)) is not None]
        return drawn[question.best(drawn)] if drawn else None

    return place


def lwf(kappa: int, *, all_servers: bool = False, by_load: bool = True) -> Placement:
    """LWF-kappa (Q. Wang et al., Communication Contention Aware Scheduling, Algorithm 1): jobs of
    at most `kappa` workers as by list scheduling; larger ones server by server, the least loaded
    first: of as many servers as the job can fill, or of `all_servers`. `by_load`: within a server
    the least loaded GPU first."""

    def place(question: Question) -> Rows | None:
        if question.workers <= kappa:
            return list_scheduling(question)
        load = question.load.reshape(-1, question.per_server)
        servers = np.argsort(load.sum(axis=1), kind="stable")
        if not all_servers:
            servers = servers[: -(-question.workers // question.per_server)]
        within = np.argsort(load, axis=1, kind="stable") if by_load else None
        places = np.arange(question.per_server) if within is None else within[servers]
        return _first(question, (servers[:, None] * question.per_server + places).ravel())

    return place
