# SPDX-License-Identifier: Apache-2.0
"""Hosts that plan at the same time: as published they evade each other until nobody sends."""

import math
from dataclasses import replace

import numpy as np
import pytest
from mlcc_hosts import K, Switch, decide, settle, view_of

from flowslot.model.units import SECOND
from flowslot.policy.mlcc import (
    Dependency,
    LivelockDetector,
    MlccOptions,
    MlccPolicy,
    Observed,
    Stall,
)
from flowslot.policy.mlcc.plan import Reading

SLOTS = 500
BYTES = 1e6
"""10,000 slots alone: there is always something to send."""
ATOMIC = MlccOptions(atomic=True, bound="residual")


def run(
    hosts: int, options: MlccOptions, volume: float, chunk: float = math.inf, *, informed: bool
) -> tuple[float, int, list[Stall]]:
    """`hosts` on one link send `volume` bytes each. Bytes left, slots in which the link idles while
    there are some, and what is reported.

    Every host plans from the load as it was when the slot began, at the same time as the others.
    `chunk`: they are a ring, and pass on what has come, so many bytes behind; those that reserve
    do so one after the other. `informed`: of what their predecessors have sent.
    """
    policies = [MlccPolicy(options, SECOND) for _ in range(hosts)]
    sent, idle = np.zeros(hosts), 0
    detector = LivelockDetector()
    switch = Switch(capacity=100.0 if options.atomic else math.inf)
    stalls: list[Stall] = []
    for slot in range(SLOTS):
        begins = switch.load(slot)
        scheduled, moved = 0.0, np.zeros(hosts)
        for i, policy in enumerate(policies):
            flows = {i: ((0,), float(volume - sent[i]))}
            if informed:
                policy.dependencies = {i: Dependency(sent[i], sent[i - 1], lead=chunk)}
            if options.atomic:
                pace = settle(policy, switch, flows, begins if math.isinf(chunk) else None)
            else:
                pace, _ = decide(policy, view_of(slot, flows, begins))
            rate = pace.schedule.at(slot)[0]
            scheduled += rate
            moved[i] = min(rate, min(sent[i - 1] + chunk, volume) - sent[i])
        for policy in policies if not options.atomic else ():
            switch.send(policy.updates)
        assert not options.atomic or scheduled <= 100.0 * (1 + 1e-9)
        moved /= max(moved.sum() / 100.0, 1.0)  # more than fits is shared
        idle += not moved.any() and sent.min() < volume
        sent += moved
        for i, policy in enumerate(policies):
            policy.observe(Observed(slot, {i: float(moved[i])}))
        stalls += detector.feed(slot, range(hosts), volume - sent, np.ones(hosts, np.bool_))
    return float((volume - sent).sum()), idle, stalls


@pytest.mark.parametrize("hosts", [2, 5])
def test_the_link_idles_and_the_livelock_is_reported(hosts: int) -> None:
    _, idle, stalls = run(hosts, MlccOptions(), BYTES, informed=False)
    # All plan all slots, all evade all, all come back: after K slots of that, an even K leaves
    # every slot to the others at its turn. Only slots of the very first plan are ever used.
    assert idle == SLOTS - K // 2
    assert stalls == [Stall("livelock", tuple(range(hosts)), 9, 18)]


@pytest.mark.parametrize("cost", ["literal", "rhs"])
@pytest.mark.parametrize("hosts", [2, 5])
def test_atomic_reservation_removes_it(hosts: int, cost: Reading) -> None:
    _, idle, stalls = run(hosts, MlccOptions(cost=cost, atomic=True), BYTES, informed=False)
    assert idle == 0
    # Who comes first keeps every slot; that is another defect, and reported as what it is.
    assert stalls == [Stall("starvation", tuple(range(1, hosts)), 1, 50)]


@pytest.mark.parametrize(
    ("options", "volume", "informed", "left"),
    [
        (MlccOptions(), 600.0, True, None),
        (MlccOptions.repaired("literal"), 600.0, True, 0.0),
        (MlccOptions.repaired("rhs"), 600.0, True, 0.0),
        # More bytes than the horizon holds: one host reserves every slot, sends its first chunk,
        # and waits for the last host, which has no slot. What helps is either to release slots, or
        # to tell it what it waits for.
        (ATOMIC, 3000.0, False, 9000.0 - 60.0),
        (replace(ATOMIC, release=True), 3000.0, False, 0.0),
        (ATOMIC, 3000.0, True, 0.0),
    ],
)
def test_a_ring_stops_as_published_and_ends_when_repaired(
    options: MlccOptions, volume: float, informed: bool, left: float | None
) -> None:
    remains, _, stalls = run(3, options, volume, 60.0, informed=informed)
    ends = left == 0.0
    assert [stall.kind for stall in stalls] == ([] if ends else ["livelock"])
    assert remains > 0.0 if left is None else remains == pytest.approx(left, abs=1e-6)
