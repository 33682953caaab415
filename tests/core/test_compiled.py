# SPDX-License-Identifier: Apache-2.0
"""The compiled loops do what their source says: both are run on the same random data."""

import importlib.util
import random
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from test_policies import NOW, state
from world import World

import flowslot.arbiter.flow_table
import flowslot.arbiter.issuer
import flowslot.arbiter.rules
import flowslot.policy.fair_reference
import flowslot.policy.fair_reference.fluid
import flowslot.policy.fill
import flowslot.policy.filling
import flowslot.policy.stagger
import flowslot.policy.stagger.gang_rates
from flowslot.arbiter import LEASE_SLOTS
from flowslot.model.units import MILLISECOND, Nanos
from flowslot.policy.base import AllocationState
from flowslot.policy.stagger import StaggerAllocator

USERS = {
    flowslot.policy.filling: (flowslot.policy.fill,),
    flowslot.policy.stagger.gang_rates: (flowslot.policy.stagger,),
    flowslot.policy.fair_reference.fluid: (flowslot.policy.fair_reference,),
    flowslot.arbiter.rules: (flowslot.arbiter.flow_table, flowslot.arbiter.issuer),
}
SEEDS = pytest.mark.parametrize("seed", range(30))


def plain(module: ModuleType) -> Any:
    """The source of a module, interpreted."""
    assert module.__spec__ is not None and module.__spec__.origin is not None
    folder, name = module.__spec__.origin.rsplit("/", 1)[0], module.__name__.rsplit(".", 1)[1]
    source = f"{folder}/{name}.py"
    spec = importlib.util.spec_from_file_location("plain_loops", source)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


PLAIN = {module: plain(module) for module in USERS}
for _name in ("crosses", "link_sum", "max_min"):  # which they import, compiled
    _same = getattr(PLAIN[flowslot.policy.filling], _name)
    setattr(PLAIN[flowslot.policy.stagger.gang_rates], _name, _same)


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
                "cap": rng.choice([np.inf, np.inf, 0.0, 1e5, 3e6]),
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
        allocator = StaggerAllocator(partial=partial)
        return [
            (allocator.allocate(s, now), allocator.standing(), allocator.next_change(s, now))
            for s, now in states
        ]

    compiled = run()
    interpret(monkeypatch)
    for one, other in zip(compiled, run(), strict=True):
        np.testing.assert_array_equal(one[0], other[0])
        np.testing.assert_array_equal(one[1], other[1])
        assert one[2] == other[2]


def history(seed: int) -> list[Any]:
    """All grants of an arbiter whose daemons do something at random, and what is committed."""
    rng, world, said = random.Random(seed), World(gathers=seed % 2 == 0), []
    world.exchange(LEASE_SLOTS - 1, 60)  # most of the recovery
    for _ in range(100):
        what, host = rng.random(), rng.randrange(3)
        if what < 0.35:
            cap = rng.choice([np.inf, np.inf, 0.0, 3e7])
            size = rng.choice([1000, 10**6, 10**8])
            world.demand(host, rng.randrange(5), size, rng.random() < 0.3, cap)
        elif what < 0.45:
            world.give_back(host, rng.randrange(5))
        elif what < 0.5:
            world.end(host, rng.randrange(5))
        elif what < 0.55:
            world.reconnect(host)
        elif what < 0.6:
            world.schedule(*[rng.randrange(3)] * 2, rng.choice([0.0, 3e7]), rng.randrange(8))
        elif what < 0.8:
            world.exchange(1, rng.choice([0.5, 5.0, 30.0]))
        elif what < 0.9:
            world.deliver_up(host)
        else:
            world.step()
        arbiter = world.processes[0].switch.arbiter
        counts = (arbiter.granted, arbiter.refused, arbiter.preempted, arbiter.expired)
        said.append(
            (
                list(world.decisions),
                counts,
                arbiter.next_wakeup(world.now),
                arbiter.commitments().tolist(),
            )
        )
    return said


@SEEDS
def test_arbiters_decide_in_the_same_way(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = history(seed)
    assert any(counts[0] for _, counts, _, _ in compiled)
    interpret(monkeypatch)
    assert history(seed) == compiled


def test_lowers_that_are_late_are_found_in_the_same_way() -> None:
    rows = np.zeros(9, flowslot.arbiter.flow_table.ROW)
    rows["pending_seq"][::2, 0] = 1
    rows["oldest_pending"] = np.arange(9)
    found = []
    for loops in (flowslot.arbiter.rules, PLAIN[flowslot.arbiter.rules]):
        late = np.zeros(9, np.intp)
        found.append(late[: loops.overdue(loops.table(rows), 5, late)].tolist())
    assert found == [[0, 2, 4]] * 2
