# SPDX-License-Identifier: Apache-2.0
"""The arbiter of a host's own links: decides at once, and about nothing else."""

import math

import pytest
from flowslot.protocol.ownlinks import OwnLinks
from hypothesis import given, settings
from hypothesis import strategies as st

from flowslot.arbiter import ArbiterConfig
from flowslot.model.units import MILLISECOND, Nanos
from flowslot.policy.stagger import StaggerAllocator
from flowslot.protocol.messages import Demand, Done

GOODPUT = [50e6, 100e6, 80e6]
LINKS = (2, 1)  # 0 is somebody else's


def own() -> OwnLinks:
    allocator = StaggerAllocator(partial=True)
    return OwnLinks(Nanos(0), LINKS, GOODPUT, allocator=allocator, config=ArbiterConfig())


def demand(flow: int, *links: int, remaining: int = 10**7, inc: int = 1) -> Demand:
    return Demand(flow, inc, f"job{flow % 3}", links, remaining)


def test_it_decides_at_once_and_about_its_own_links_only() -> None:
    one = own()
    assert one.load(Nanos(0), [demand(1, 2, 0), demand(2, 0)]) == []
    assert math.isnan(one.grant(1).rate), "only taken in"
    settled = one.settle(Nanos(0))
    [granted] = settled.changed
    assert granted == one.grant(1) and granted.rate == pytest.approx(0.96 * 80e6)
    assert (settled.raised, settled.lowered) == (1, 0)
    assert math.isnan(one.grant(2).rate), "crosses none of ours"
    assert one.settle(Nanos(0)).changed == []
    assert one.covers((2, 1)) and not one.covers((2, 0)) and not one.covers(())
    assert one.load_table(Nanos(0))[:, 0].tolist() == [pytest.approx(0.96 * 80e6), 0.0]
    one.done(Nanos(1), [Done(1, 1)])
    one.settle(Nanos(1))
    assert math.isnan(one.grant(1).rate) and not one.load_table(Nanos(1)).any()
    assert one.next_wakeup(Nanos(1)) > 1


def test_demands_that_make_no_sense_are_refused() -> None:
    [refusal] = own().load(Nanos(0), [demand(1, 2, 2)])
    assert refusal.flow == 1 and refusal.reason


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 10**7), st.booleans(), st.integers(0, 80)),
        max_size=40,
    )
)
def test_links_are_never_over_committed(events: list[tuple[int, int, bool, int]]) -> None:
    one, now, paths = own(), 0, ((2,), (1, 0), (2, 1))
    known: dict[int, int] = {}
    rates: dict[int, float] = {}
    for inc, (flow, remaining, gone, wait_ms) in enumerate(events, 1):
        now += wait_ms * MILLISECOND
        if gone and flow in known:
            one.done(Nanos(now), [Done(flow, known.pop(flow))])
            rates.pop(flow, None)
        else:
            known.setdefault(flow, inc)
            one.load(
                Nanos(now), [demand(flow, *paths[flow % 3], remaining=remaining, inc=known[flow])]
            )
        rates |= {g.flow: g.rate for g in one.settle(Nanos(now)).changed}
        for link in LINKS:
            load = sum(rate for f, rate in rates.items() if link in paths[f % 3])
            assert load <= 0.96 * GOODPUT[link] * (1 + 1e-9)
