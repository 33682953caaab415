# SPDX-License-Identifier: Apache-2.0
"""CASSINI at an arbiter: the coordinator says how long a job's next iteration is to wait; until
then its flows are held (Terms.hold), and those that send share fairly.

A job begins when all of its flows have bytes to send that began together before, and ends when none
has any more. Who is early is not held, but has no rate until then: a rank that goes ahead of the
others ends no earlier with them, ends before them, and is as early in the next iteration, while it
is in another job's way. What is planned with is what the arbiter sees: bytes of an iteration, and
how long the job computes. A hold is about one iteration, and its end is said with it: if the
arbiter dies meanwhile, the flow begins.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from flowslot.model.units import MILLISECOND, SECOND, Nanos
from flowslot.policy.base import NO_TERMS, AllocationState, Allocator, Floats, Terms
from flowslot.policy.cassini.coordinator import MEASURING, Coordinator
from flowslot.policy.fair import share_fairly
from flowslot.policy.transfers import TransferView, look, patience_ns

NEGOTIATED_S = 0.006
"""A transfer occupies its links for so much longer than its bytes need: until its first grant is in
force, and from its last byte until that is known."""
TOGETHER = 0.1
"""Part of an iteration within which flows begin that began together, and for which they wait for
each other at most."""
LEAST_HOLD_NS = MILLISECOND
"""Less is not worth a message."""
GONE_NS = 60 * SECOND
"""A job that has neither begun nor ended for so long counts as gone."""
MOST_JOBS = 32
"""With more jobs nobody is held: plans would take longer than an arbiter may be silent."""
PLANNED = MEASURING._replace(steps=300_000)
"""For the same reason: some ms for each link."""


@dataclass(slots=True)
class _Job:
    """`seen`: when it was last looked at. `start`: of its present or last iteration, ns; `after`:
    its next one is to come so long after that, at the earliest; `until`: its iteration waits until
    then, if it `waits`, and `held`: it is held back. `gang`: its flows that begin together, by
    number of their aggregates, as far as is known of its last iteration; `late`: those that were
    waited for in vain."""

    turn: int
    links: frozenset[int]
    seen: int = 0
    start: int = 0
    after: int = 0
    until: int = 0
    works: bool = False
    waits: bool = False
    held: bool = False
    gang: set[int] = field(default_factory=set)
    joined: set[int] = field(default_factory=set)
    late: set[int] = field(default_factory=set)


class CassiniAllocator(Allocator):
    """See the module. `partial`: other arbiters decide about other links of the same jobs; shifts
    of several would add up, so nobody is held."""

    def __init__(self, *, partial: bool = False) -> None:
        self._partial = partial
        self._capacity: dict[int, float] = {}
        self._coordinator = Coordinator(self._capacity, PLANNED)
        self._jobs: dict[str, _Job] = {}
        self._change = np.zeros(0)
        self._terms = NO_TERMS

    def allocate(self, state: AllocationState, now: Nanos) -> Floats:
        """See Allocator."""
        view = look(state)
        waits, held = np.zeros((2, len(state.job_names)), np.bool_)
        until = np.zeros(len(waits), np.int64)
        if not self._partial:
            self._follow(state, view, now)
            for j, name in enumerate(state.job_names):
                job = self._jobs.get(name)
                if job is not None and job.waits:
                    waits[j], held[j], until[j] = True, job.held, job.until
        self._change = np.where(waits, np.maximum(until - now, 1), np.inf)[state.job]
        still = held[state.job] & (state.remaining > 0)
        self._terms = Terms(hold=np.where(still, until[state.job], 0)) if still.any() else NO_TERMS
        return share_fairly(state, view.ready & ~waits)

    def next_change(self, state: AllocationState) -> Floats:
        """See Allocator: waits end."""
        return self._change

    def terms(self) -> Terms:
        """See Allocator."""
        return self._terms

    def _follow(self, state: AllocationState, view: TransferView, now: Nanos) -> None:
        """Tell the coordinator what jobs have done since, and take its holds over."""
        sent = self._sent(state, view)
        self._forget(state, sent, now)
        active = _active(state)
        for j, name in enumerate(state.job_names):
            if sent[j]:
                new = _Job(int(state.jobs.turns[j]), frozenset(sent[j]))
                self._jobs.setdefault(name, new).seen = now
        if len(self._jobs) > MOST_JOBS:
            self._give_up()
            return
        for j, name in enumerate(state.job_names):
            if sent[j] and not active[j]:
                self._end(name, self._jobs[name], now)
        for name, after in self._coordinator.changed().items():
            if name in self._jobs:
                self._jobs[name].after = after
        ready = now - view.wait_ns.astype(np.int64)
        patience = patience_ns(view).astype(np.int64)
        for j, name in enumerate(state.job_names):
            if sent[j] and active[j]:
                times = now, int(ready[j]), int(patience[j])
                self._work(name, self._jobs[name], times, active[j], sent[j])

    def _work(
        self,
        name: str,
        job: _Job,
        times: Sequence[int],
        active: set[int],
        sent: dict[int, float],
    ) -> None:
        """It has bytes to send: it begins, waits, or goes on. `times`: now, since when, and for how
        long it waits at most. What others have done may have changed how long it is held."""
        now, ready, patience = times
        together = int(TOGETHER * patience)
        if job.works and not job.waits:
            if now - job.start <= together:
                job.joined |= active
            return
        hold = min(job.start + job.after, ready + patience) if job.after else 0
        job.held = hold - now >= (1 if job.held else LEAST_HOLD_NS)
        missing = job.gang - active
        gather = ready + together if missing else 0
        begins = now if job.works else ready
        job.until = max(hold if job.held else 0, gather)
        job.works, job.waits = True, job.held or gather > now
        if not job.waits:
            job.late |= missing
            job.joined = set(active)
            self._begin(name, job, begins, sent)

    def _sent(self, state: AllocationState, view: TransferView) -> list[dict[int, float]]:
        """Bytes of an iteration of each job, by link, as links are numbered in the domain."""
        numbers = state.link_numbers[view.link].tolist()
        sizes = (view.whole * state.goodput[view.link]).tolist()
        rooms = state.goodput[view.link].tolist()  # classes may leave a policy less for now
        sent: list[dict[int, float]] = [{} for _ in state.job_names]
        for j, number, size, room in zip(view.job.tolist(), numbers, sizes, rooms, strict=True):
            sent[j][number] = size + NEGOTIATED_S * room if size > 0 else 0.0
            self._capacity.setdefault(number, room)
        return sent

    def _give_up(self) -> None:
        """There are too many jobs: hold nobody, and measure anew once there are fewer."""
        self._coordinator = Coordinator(self._capacity, PLANNED)
        for job in self._jobs.values():
            job.works = job.waits = job.held = False
            job.after = 0

    def _begin(self, name: str, job: _Job, now: int, sent: dict[int, float]) -> None:
        """Its first byte leaves."""
        job.start, job.after = now, 0
        self._coordinator.started(name, now, sent)

    def _end(self, name: str, job: _Job, now: int) -> None:
        """Nothing is left to be sent."""
        if job.works and not job.waits:
            job.gang = job.joined - job.late
            self._coordinator.ended(name, now)
        job.works = job.waits = job.held = False

    def _forget(self, state: AllocationState, sent: list[dict[int, float]], now: Nanos) -> None:
        """Jobs that have gone: they crossed links of these flows, and are not among their jobs; or
        nobody has looked at them for long, as on links that they had for themselves."""
        links = {link for one in sent for link in one}
        turns = dict(zip(state.job_names, state.jobs.turns.tolist(), strict=True))
        gone = [
            name
            for name, job in self._jobs.items()
            if turns.get(name, job.turn) != job.turn
            or (name not in turns and not links.isdisjoint(job.links))
            or (name not in turns and now - job.seen > GONE_NS)
        ]
        for name in gone:
            del self._jobs[name]
            self._coordinator.gone(name)


def _active(state: AllocationState) -> list[set[int]]:
    """Of each job, the numbers of the aggregates that have bytes to send."""
    active: list[set[int]] = [set() for _ in state.job_names]
    at_work = np.flatnonzero(state.remaining > 0)
    numbers = state.aggregates.numbers[state.aggregate[at_work]].tolist()
    for j, number in zip(state.job[at_work].tolist(), numbers, strict=True):
        active[j].add(number)
    return active
