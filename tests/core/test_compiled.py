# SPDX-License-Identifier: Apache-2.0
"""The compiled loops do what their source says: both are run on the same random data."""

import math
import random
from typing import Any

import numpy as np
import pytest
from interpreted import plain
from scripts import ONE, TWO, play, some_events
from states import NOW, state

import flowslot.arbiter.batch
import flowslot.arbiter.connected
import flowslot.arbiter.ledger
import flowslot.arbiter.rules
import flowslot.policy.fair_reference
import flowslot.policy.fair_reference.fluid
import flowslot.policy.fair_reference.slowdown
import flowslot.policy.fill
import flowslot.policy.job_links
import flowslot.policy.stagger
import flowslot.policy.stagger.gang_rates
import flowslot.policy.stagger.packing
from flowslot.model.units import MILLISECOND, Nanos
from flowslot.policy.base import AllocationState
from flowslot.policy.stagger import StaggerAllocator

USERS = {
    flowslot.policy.fill: (),
    flowslot.policy.job_links: (),
    flowslot.policy.stagger.packing: (),
    flowslot.policy.stagger.gang_rates: (flowslot.policy.stagger,),
    flowslot.policy.fair_reference.fluid: (flowslot.policy.fair_reference,),
    flowslot.policy.fair_reference.slowdown: (flowslot.policy.fair_reference,),
    flowslot.arbiter.connected: (flowslot.arbiter.ledger,),
    flowslot.arbiter.rules: (flowslot.arbiter.ledger, flowslot.arbiter.batch),
}
SEEDS = pytest.mark.parametrize("seed", range(30))


PLAIN = {module: plain(module) for module in USERS}
for _module in PLAIN.values():  # which import some of these, compiled
    for _from, _names in (
        (flowslot.policy.fill, {"crosses", "link_sum", "max_min", "weighted"}),
        (flowslot.policy.job_links, {"JobLinks", "lasts"}),
        (flowslot.policy.fair_reference.fluid, {"meets"}),
        (flowslot.policy.stagger.packing, {"pack"}),
    ):
        for _name in _names & vars(_module).keys():
            setattr(_module, _name, getattr(PLAIN[_from], _name))


def interpret(patch: pytest.MonkeyPatch) -> None:
    """From now on, the interpreted loops are used."""
    for module, users in USERS.items():
        for user in users:
            patch.setattr(user, module.__name__.rsplit(".", 1)[1], PLAIN[module])


def test_the_loops_are_compiled_here() -> None:
    for module, same in PLAIN.items():
        assert module.COMPILED, "make setup compiles them"
        assert not same.COMPILED


def some_state(rng: random.Random) -> AllocationState:
    """Up to 20 flows; sizes and times from few values, so that ties and edges occur."""
    n_links = rng.randint(1, 5)
    flows: list[dict[str, Any]] = []
    for _ in range(rng.randint(1, 20)):
        active = rng.random() < 0.6
        flows.append(
            {
                "job": rng.choice("abc"),
                "links": rng.sample(range(n_links), rng.randint(1, min(3, n_links))),
                "left": rng.choice([1, 1e6, 1e7]) if active else 0.0,
                "cap": rng.choice([0.0, 1e6, math.inf, math.inf, math.inf]),
                "sockets": rng.choice([1, 1, 4, 16]),
                "wait": rng.choice([0, 10, 100]) if active else 0.0,
                "period": rng.choice([0, 100, 300]),
                "due": rng.choice([-300, -20, 0, 5, 10, 100]),
                "next": rng.choice([0, 1e6, 1e7, 1e7]),
                "idle": rng.choice([0, 5, 10, 100, np.inf]),
                "goal": rng.choice([0, 1e5, 5e6, 1e7]),
            }
        )
    return state(*flows, capacity=tuple(rng.choices([0.0, 1e7, 1e7, 2e7], k=n_links)))


@SEEDS
@pytest.mark.parametrize("partial", [False, True])
def test_allocations_are_the_same(
    seed: int, partial: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    states = [(some_state(rng), Nanos(NOW + k * 30 * MILLISECOND)) for k in range(30)]

    def run() -> list[Any]:
        allocator = StaggerAllocator(partial=partial, top_up=not partial)
        return [
            (allocator.allocate(s, now), allocator.terms().standing, allocator.next_change(s))
            for s, now in states
        ]

    compiled = run()
    interpret(monkeypatch)
    for one, other in zip(compiled, run(), strict=True):
        np.testing.assert_array_equal(one[0], other[0])
        np.testing.assert_array_equal(one[1], other[1])
        np.testing.assert_array_equal(one[2], other[2])


@SEEDS
def test_arbiters_decide_in_the_same_way(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    held, gathers = (ONE, TWO)[seed % 2], seed % 4 < 2
    compiled = play(some_events(seed), held, gathers=gathers)
    assert "must_ack=True" in str(compiled) and "must_ack=False" in str(compiled)
    interpret(monkeypatch)
    assert play(some_events(seed), held, gathers=gathers) == compiled
