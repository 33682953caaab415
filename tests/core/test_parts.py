# SPDX-License-Identifier: Apache-2.0
"""A domain falls into parts. Each gets what it would get if there were nothing else, and all
together what they get where everything is decided anew each time."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest

from flowslot.arbiter import Arbiter, ArbiterConfig, connected, rules
from flowslot.arbiter.ledger import Ledger
from flowslot.model.units import MILLISECOND, Nanos
from flowslot.policy.base import Allocator
from flowslot.policy.fair import FairAllocator
from flowslot.policy.stagger import StaggerAllocator
from flowslot.protocol.messages import Ack, Demand, Done, Grant, Held, Hello

LINK = 1e9
DAEMONS, FLOWS = 3, 12
SEEDS = pytest.mark.parametrize("seed", range(12))


class Told:
    """An arbiter of some of the links, and what daemons do with what it says."""

    def __init__(
        self, links: Sequence[int], allocator: Allocator | None = None, coalesce_ms: float = 0
    ) -> None:
        config = ArbiterConfig(coalesce_ns=Nanos(int(coalesce_ms * MILLISECOND)), recovery=False)
        self.arbiter = Arbiter(np.full(len(links), LINK), config, allocator or StaggerAllocator())
        # A job that is gone is remembered until another one needs its number. Here none does.
        ledger = self.arbiter._flows
        for group in range(6):
            for name in "abc":
                ledger.jobs.take(f"{group}-{name}")
        ledger.phases = np.full((len(ledger.jobs.names), 2), rules.NEVER)
        ledger._crossing = np.zeros((len(ledger.jobs.names), len(links) + 1), np.int64)
        self._index = {link: i for i, link in enumerate(links)}
        self.last: dict[tuple[int, int], Grant] = {}
        self.waiting: dict[tuple[int, int], Ack] = {}

    def say(self, now: Nanos, session: int, demand: Demand, *, gave_back: bool) -> None:
        if set(demand.links) <= self._index.keys():
            key = session, demand.flow
            seq = self.last[key].seq if gave_back and key in self.last else 0
            links = tuple(self._index[link] for link in demand.links)
            said = replace(demand, links=links, gave_back=seq)
            # Slots decide who is first in line. Those of ended flows are not used again here, so
            # that flows are in the same order in all arbiters.
            self.arbiter._flows._free.clear()
            assert self.arbiter.demand(now, session, [said]) == []

    def done(self, now: Nanos, session: int, flow: int, inc: int) -> None:
        self.arbiter.done(now, session, [Done(flow, inc)])
        self.last.pop((session, flow), None)
        self.waiting.pop((session, flow), None)

    def ack(self, now: Nanos, keys: Sequence[tuple[int, int]]) -> None:
        for key in keys:
            if key in self.waiting:
                self.arbiter.ack(now, key[0], [self.waiting.pop(key)])

    def step(self, now: Nanos) -> dict[tuple[int, int], Any]:
        """What is granted, without the numbers of the messages."""
        said: dict[tuple[int, int], Any] = {}
        for session, grants in self.arbiter.step(now).items():
            for grant in grants:
                key = session, grant.flow
                self.last[key] = grant
                if grant.must_ack:
                    self.waiting[key] = Ack(grant.flow, grant.inc, grant.seq)
                assert key not in said
                said[key] = (
                    grant.inc,
                    pytest.approx(grant.rate, rel=1e-9, abs=1e-3),
                    grant.ceiling,
                    grant.must_ack,
                    grant.standing,
                    grant.share,
                )
        return said


class Script:
    """Random news of flows. In each life a flow has a path of its own, out of `paths`; a job has
    flows on `of_group` paths that belong together."""

    def __init__(self, seed: int, groups: Sequence[Sequence[tuple[int, ...]]]) -> None:
        self.draw = random.Random(seed)
        self.now = Nanos(10**9)
        self._groups = groups
        self.flows: dict[tuple[int, int], Demand] = {}
        self._incs: dict[tuple[int, int], int] = {}

    def passes(self) -> None:
        self.now = Nanos(
            self.now + self.draw.choice((10**5, 10**6, 10**7)) + self.draw.randrange(10**6)
        )

    def news(self) -> tuple[int, Demand, bool]:
        key = self.draw.randrange(DAEMONS), self.draw.randrange(FLOWS)
        if key not in self.flows:
            group = self.draw.randrange(len(self._groups))
            self._incs[key] = self._incs.get(key, 0) + 1
            self.flows[key] = Demand(
                key[1],
                self._incs[key],
                f"{group}-{self.draw.choice('abc')}",
                self.draw.choice(self._groups[group]),
                0,
                period_ns=self.draw.choice((0, 300)) * MILLISECOND,
                next_bytes=self.draw.choice((0, 3_000_000 + self.draw.randrange(10**6))),
            )
        begins = self.draw.random() < 0.6
        self.flows[key] = replace(
            self.flows[key],
            remaining=self.draw.randrange(10**5, 10**7) if begins else 0,
            wait_ns=self.draw.randrange(10**8) if begins else 0,
            next_in_ns=self.draw.randrange(10**8),
            cap=self.draw.choice((np.inf, np.inf, np.inf, 0.0)),
        )
        return key[0], self.flows[key], not begins and self.draw.random() < 0.5

    def end(self) -> tuple[int, int, int] | None:
        """Session, flow and incarnation of one that ends."""
        if not self.flows:
            return None
        key = self.draw.choice(list(self.flows))
        return *key, self.flows.pop(key).inc


def play(script: Script, told: Sequence[Told], events: int = 150) -> list[list[dict[Any, Any]]]:
    """The same is said to all of these; what each one answers, event by event."""
    answers = []
    for session in range(DAEMONS):
        for one in told:
            one.arbiter.hello(script.now, Hello(f"h{session}", session))
    for k in range(events):
        script.passes()
        for session in range(DAEMONS):
            for one in told:
                assert one.arbiter.heartbeat(script.now, session)
        happen(script, told, k % 8 == 0)
        answers.append([one.step(script.now) for one in told])
    return answers


def happen(script: Script, told: Sequence[Told], ack_all: bool) -> None:
    """Some flows have news, or one ends, or some of what was lowered is acknowledged."""
    now, kind = script.now, script.draw.choices(("news", "end", "ack", "time"), (6, 1, 2, 2))[0]
    for _ in range(script.draw.randint(1, 4) if kind == "news" else 0):
        session, demand, gave_back = script.news()
        for one in told:
            one.say(now, session, demand, gave_back=gave_back)
    ended = script.end() if kind == "end" else None
    keys = sorted({key for one in told for key in one.waiting})
    if not ack_all:
        keys = script.draw.sample(keys, len(keys) // 2) if kind == "ack" else []
    for one in told:
        if ended is not None:
            one.done(now, *ended)
        one.ack(now, keys)


@SEEDS
def test_each_part_gets_what_it_would_get_from_an_arbiter_of_its_own(seed: int) -> None:
    """Also when others have news all the time."""
    groups = [[(2 * g,), (2 * g + 1,), (2 * g, 2 * g + 1)] for g in range(3)]
    apart = [Told((2 * g, 2 * g + 1)) for g in range(3)]
    for k, (got, *wanted) in enumerate(play(Script(seed, groups), [Told(range(6)), *apart])):
        assert got == {key: value for one in wanted for key, value in one.items()}, k


class Settled(Told):
    """Hears of everything at once, and decides until nothing is left to say."""

    whole = False
    most_parts = 0

    def step(self, now: Nanos) -> dict[tuple[int, int], Any]:
        """What all hold in the end."""
        for k in range(30):
            if self.whole:
                self.arbiter._flows.look_at_all()
            if not super().step(Nanos(now + k * 20_000)) and k > 6:
                break
            self.ack(now, list(self.waiting))
        else:
            raise AssertionError("it never ends")
        self.most_parts = max(self.most_parts, len(self.arbiter._flows._members))
        rows = self.arbiter._flows.rows
        rows = rows[rows["session"] >= 0]
        keys = zip(rows["session"].tolist(), rows["flow"].tolist(), strict=True)
        held = zip(rows["grant"].tolist(), rows["goal"].tolist(), strict=True)
        return dict(zip(keys, held, strict=True))


class Whole(Settled):
    """Looks at everything each time."""

    whole = True


@SEEDS
@pytest.mark.parametrize("coalesce_ms", [0, 0.05])
def test_in_the_end_all_hold_what_they_hold_where_all_is_decided_each_time(
    seed: int, coalesce_ms: float
) -> None:
    """Parts grow together and fall apart."""
    groups = [[(0,)], [(1,), (1, 2)], [(3,)], [(4,), (5,), (5, 6)], [(7,), (7, 0)], [(8,), (8, 4)]]
    told = [kind(range(9), FairAllocator(), coalesce_ms) for kind in (Settled, Whole)]
    for k, (got, wanted) in enumerate(play(Script(seed, groups), told)):
        assert got == wanted, k
        assert k < 50 or got, "somebody is there"
    assert 2 < told[0].most_parts < 7


@SEEDS
def test_the_parts_are_those_that_a_search_finds(seed: int) -> None:
    draw = random.Random(seed)
    ledger = Ledger(np.full(8, LINK))
    for flow in range(30):
        slot = ledger.add(1, flow, 1)
        if seed or flow % 11:
            path = tuple(draw.sample(range(8), draw.choice((1, 1, 2))))
            ledger.place(slot, draw.choice("abcdefgh"), path)
    for flow in draw.sample(range(30), draw.randint(0, 28)):
        ledger.remove(1, flow)
    label = np.zeros(ledger.n, np.intp)
    rows, n_jobs = ledger.rows, len(ledger.jobs.names)
    n = connected.parts(rows["session"], rows["job"], ledger.paths, 8, n_jobs, label)
    slots = sorted(ledger.slots.values())
    touches = {s: {*ledger.path(s), ledger.jobs.names[ledger.rows["job"][s]]} for s in slots}
    parts: list[set[int]] = []
    for s in slots:
        near = [p for p in parts if any(touches[s] & touches[t] for t in p)]
        if any(not ledger.path(t) for t in slots):
            near = parts
        parts = [p for p in parts if p not in near] + [{s}.union(*near)]
    parts.sort(key=min)
    assert [set(np.flatnonzero(label == k).tolist()) for k in range(n)] == parts
    assert set(np.flatnonzero(label < 0).tolist()) == set(range(ledger.n)) - set(slots)


def test_what_is_said_of_a_part_is_no_reason_to_look_at_another() -> None:
    class Asked(StaggerAllocator):
        seen: ClassVar[list[int]] = []

        def allocate(self, state: Any, now: Nanos) -> Any:
            self.seen += state.flow.tolist()
            return super().allocate(state, now)

    arbiter = Arbiter(np.full(2, LINK), ArbiterConfig(recovery=False), Asked())
    arbiter.hello(Nanos(0), Hello("h", 1))
    told = [Demand(flow, 1, f"j{flow}", (flow,), 10**9) for flow in (0, 1)]
    arbiter.demand(Nanos(0), 1, told)
    arbiter.step(Nanos(0))
    assert Asked.seen == [0, 1]
    arbiter.demand(Nanos(1), 1, told[1:])
    arbiter.step(Nanos(1))
    assert Asked.seen == [0, 1, 1]
    arbiter.hello(Nanos(2), Hello("g", 2, (Held(5, 1, 0.0),)))
    arbiter.step(Nanos(2))
    assert Asked.seen[3:] == [0, 1, 5], "it may be on any link"
