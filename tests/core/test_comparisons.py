# SPDX-License-Identifier: Apache-2.0
"""The papers' comparisons as allocators: srpt, mcs, ccml, MLCC's prototype and MLCC for a fleet."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import plain
from states import NOW, state

from flowslot.model.slot import DEFAULT_SLOT
from flowslot.model.units import SECOND, Nanos
from flowslot.policy import gangs
from flowslot.policy.base import AllocationState
from flowslot.policy.ccml import CcmlAllocator, common_divisor
from flowslot.policy.mcs import McsAllocator
from flowslot.policy.mlcc import MlccOptions, fleet
from flowslot.policy.mlcc.fleet import FleetAllocator
from flowslot.policy.mlcc.plan import plan
from flowslot.policy.mlcc.prototype import K, PrototypeAllocator, lay
from flowslot.policy.srpt import SrptAllocator

SLOT_S = DEFAULT_SLOT / SECOND


def test_srpt_serves_who_has_least_left_and_never_anybody_else_first() -> None:
    flows = [{"job": "a", "left": 300, "wait": 1e4}, {"job": "b", "left": 200}]
    assert SrptAllocator().allocate(state(*flows), NOW).tolist() == [0.0, 100.0]
    two = [{"job": "b", "left": 50, "cap": 20.0}, {"job": "a", "left": 80}]
    assert SrptAllocator().allocate(state(*two), NOW).tolist() == [20.0, 80.0], "cap"


def test_a_gang_ends_together_and_others_get_what_it_leaves() -> None:
    flows = [
        {"job": "a", "links": (0,), "left": 100},
        {"job": "a", "links": (1,), "left": 50},
        {"job": "b", "links": (1,), "left": 500},
    ]
    rates = SrptAllocator().allocate(state(*flows, capacity=(100.0, 100.0)), NOW)
    assert rates.tolist() == [100.0, 50.0, 50.0]


def test_mcs_orders_by_ports_and_does_not_see_what_lies_between() -> None:
    """b's way is narrow in the middle, so that alone it needs longer; its ports do not say so."""
    flows = [
        {"job": "a", "links": (0, 1, 2), "left": 100},
        {"job": "b", "links": (0, 3, 2), "left": 90},
    ]
    capacity = (100.0, 100.0, 100.0, 10.0)
    assert SrptAllocator().allocate(state(*flows, capacity=capacity), NOW)[0] == 100.0
    rates = McsAllocator().allocate(state(*flows, capacity=capacity), NOW)
    assert rates.tolist() == [0.0, 10.0], "b first, and the network does not carry it"


def test_ccml_lets_compatible_jobs_take_turns_and_others_share() -> None:
    def rates(period: float, first: float = 400, **late: object) -> list[float]:
        both = [
            {"job": "a", "left": 200, "next": first, "period": 10_000.0, "wait": 50},
            {"job": "b", "left": 400, "next": 400, "period": period, **late},
        ]
        return CcmlAllocator().allocate(state(*both), NOW).tolist()

    assert rates(10_000.0) == [100.0, 0.0], "4 s and 4 s fit into 10 s: who began first goes on"
    assert rates(10_000.0, wait=60) == [0.0, 100.0]
    assert rates(10_150.0) == [100.0, 0.0], "measured periods are never equal"
    assert rates(13_000.0) == [50.0, 50.0], "no common divisor"
    assert rates(5_000.0) == [50.0, 50.0], "4 s and 4 s do not fit into 5 s"
    assert rates(0.0) == [50.0, 50.0], "nothing is known"
    assert rates(10_000.0, next=700) == [50.0, 50.0]
    assert rates(10_000.0, next=0) == rates(10_000.0, first=0) == [50.0, 50.0], "one is known"
    assert rates(10_000.0, first=0, next=0) == [50.0, 50.0], "only periods are"
    assert rates(0.0, first=0, next=0) == [50.0, 50.0], "of one not even that"
    ratios = common_divisor(np.array([12.0, 9.0, 10.0]), np.array([4.0, 6.0, 7.0]))
    assert ratios.tolist() == [4.0, 3.0, 0.0]


def test_the_prototype_plans_against_one_flow_of_its_host_and_gives_the_line_rate_at_last() -> None:
    assert lay(250.0, 100.0, [3.0, 0.0, 1.0, 2.0], 3) == [0.0, 100.0, 100.0, 50.0]
    allocator = PrototypeAllocator()
    volume = 50.0 * SLOT_S
    flows = [{"job": j, "left": volume, "next": volume} for j in "ab"]

    def rates(slot: int, left: float = volume) -> list[float]:
        now = Nanos(slot * DEFAULT_SLOT)
        flows[0]["left"] = flows[1]["left"] = left
        return allocator.allocate(state(*flows), now).tolist()

    first = rates(100)
    assert first == [80.0, 0.0], "1.6 times its bytes in this slot; b evades a"
    for slot in range(101, 100 + K - 1):
        rates(slot)
    assert rates(100 + K - 1) == [50.0, 50.0], "both the line rate, which is shared"
    flows.pop()
    flows.append({"job": "b", "left": 0.0, "next": volume})
    assert PrototypeAllocator().allocate(state(*flows), NOW)[1] == 0.0


@pytest.mark.parametrize("rhs", [False, True])
@given(
    st.lists(st.tuples(st.floats(0, 100), st.integers(0, 5)), min_size=1, max_size=10),
    st.floats(0, 900),
)
def test_a_fleet_plans_as_a_host_does(
    rhs: bool, slots: list[tuple[float, int]], need: float
) -> None:
    free = np.array([room for room, _ in slots])
    cost = np.array([load / 400 for _, load in slots])
    found, n = np.zeros(len(free)), len(free)
    fleet.plan_one(need, free, cost, np.zeros(n, np.intp), found, rhs)
    expected = plan(need * SLOT_S, free, cost, SLOT_S, "rhs" if rhs else "literal")
    value = (lambda rates: np.flatnonzero(rates).max(initial=0) + rates @ cost) if rhs else None
    assert found.sum() == pytest.approx(expected.sum(), rel=1e-9, abs=1e-9)
    if value is None or value(found) != pytest.approx(value(expected)):
        assert found == pytest.approx(expected, abs=1e-6)


def test_a_fleet_evades_itself_without_atomic_reservations_and_never_begins_to_the_letter() -> None:
    flows = [{"job": j, "left": 300 * SLOT_S, "wait": k} for k, j in enumerate("ab")]

    def sums(allocator: FleetAllocator, slots: int) -> list[float]:
        found = [allocator.allocate(state(*flows), Nanos(k * DEFAULT_SLOT)) for k in range(slots)]
        return [float(rates.sum()) for rates in found]

    literal = sums(FleetAllocator(MlccOptions()), 3)
    assert literal[0] == 100.0 and literal[1] == 0.0, "both wait for the slots that are empty"
    assert sums(FleetAllocator(MlccOptions.repaired()), 3) == [100.0] * 3
    strict = FleetAllocator(MlccOptions(), count_links=True)
    idle = [{"job": "a", "left": 0}]
    strict.allocate(state(*idle), Nanos(0))
    assert strict.allocate(state(*flows), Nanos(DEFAULT_SLOT)).tolist() == [0.0, 0.0]
    unseen = FleetAllocator(MlccOptions.repaired(), seen=np.array([False]))
    assert unseen.allocate(state(*flows), Nanos(0)).tolist() == [50.0, 50.0], "both all of it"


FLOW = st.fixed_dictionaries(
    {
        "job": st.sampled_from("abcd"),
        "links": st.sets(st.integers(0, 3), min_size=1, max_size=3).map(sorted),
        "left": st.one_of(st.just(0), st.floats(1e-3, 1e9)),
        "cap": st.sampled_from([0.0, 1e3, np.inf, np.inf]),
        "wait": st.floats(0, 1e4),
        "period": st.sampled_from([0.0, 10.0, 1e4]),
        "next": st.one_of(st.just(0), st.floats(1, 1e9)),
    }
)
MAKE = {
    "srpt": SrptAllocator,
    "mcs": McsAllocator,
    "ccml": CcmlAllocator,
    "prototype": PrototypeAllocator,
    "fleet": lambda: FleetAllocator(MlccOptions.repaired()),
    "literal": lambda: FleetAllocator(MlccOptions(), count_links=True),
}


@pytest.mark.parametrize("name", MAKE)
@settings(deadline=None, max_examples=40)
@given(
    flows=st.lists(FLOW, min_size=1, max_size=10),
    capacity=st.lists(st.sampled_from([0.0, 1e3, 1e7]), min_size=4, max_size=4),
)
def test_no_link_is_above_its_capacity(name: str, flows: list, capacity: list[float]) -> None:
    allocator = MAKE[name]()
    for slot in range(3):
        seen = state(*flows, capacity=capacity)
        rates = allocator.allocate(seen, Nanos(slot * DEFAULT_SLOT))
        assert (rates >= 0).all() and (rates <= seen.cap * (1 + 1e-9)).all()
        assert (rates[seen.remaining <= 0] == 0).all()
        load = np.zeros(5)
        np.add.at(load, seen.paths, rates[:, None])
        assert (load[:-1] <= np.array(capacity) * (1 + 1e-9)).all()


def drawn(seed: int) -> AllocationState:
    draw = np.random.default_rng(seed)
    flows = [
        {
            "job": "abcdef"[draw.integers(6)],
            "links": sorted(draw.choice(4, draw.integers(1, 4), replace=False).tolist()),
            "left": float(draw.uniform(0, 1e6)),
            "wait": float(draw.uniform(0, 1e3)),
        }
        for _ in range(draw.integers(1, 16))
    ]
    return state(*flows, capacity=draw.uniform(1e3, 1e6, 4).tolist())


@pytest.mark.parametrize("seed", range(12))
def test_compiled_loops_do_what_their_source_says(seed: int) -> None:
    assert gangs.COMPILED and fleet.COMPILED
    seen = drawn(seed)
    source = plain(gangs)
    key = gangs.seconds_alone(seen, seen.paths)
    assert source.seconds_alone(seen, seen.paths) == pytest.approx(key)
    assert source.in_turns(seen, seen.paths, key) == pytest.approx(
        gangs.in_turns(seen, seen.paths, key)
    )
    for options in (MlccOptions(), MlccOptions.repaired()):
        both = FleetAllocator(options), plain(fleet).FleetAllocator(options)
        for slot in range(3):
            compiled, interpreted = (a.allocate(seen, Nanos(slot * DEFAULT_SLOT)) for a in both)
            assert compiled == pytest.approx(interpreted)
