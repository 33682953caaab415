# SPDX-License-Identifier: Apache-2.0
"""Hosts that plan at the same time: as published they evade each other until nobody sends."""

import numpy as np
import pytest
from mlcc_hosts import K, Summed, Switch, decide, settle, view_of

from flowslot.model.units import SECOND
from flowslot.policy.base import Floats
from flowslot.policy.mlcc import LivelockDetector, MlccOptions, MlccPolicy, Stall
from flowslot.policy.mlcc.plan import Reading

SLOTS = 500
BYTES = 1e6  # 10,000 slots alone: there is always something to send


def run(hosts: int, options: MlccOptions) -> tuple[int, list[Stall]]:
    """Slots in which the link idles although all hosts have bytes to send; what is reported.

    Every host plans from the load as it was when the slot began, at the same time as the others.
    """
    policies = [MlccPolicy(options, SECOND) for _ in range(hosts)]
    left = np.full(hosts, BYTES)
    summed, switch = Summed(), Switch()
    detector, idle = LivelockDetector(), 0
    stalls: list[Stall] = []
    for slot in range(SLOTS):
        switch.table.advance(slot)
        stale = switch.table.load([0]) if options.atomic else summed.load(slot)
        current: Floats = np.zeros(hosts)
        for i, policy in enumerate(policies):
            flows = {i: ((0,), float(left[i]))}
            if options.atomic:
                pace = settle(policy, switch, flows, stale)
            else:
                pace, _ = decide(policy, view_of(slot, flows, stale))
            current[i] = pace.schedule.at(slot)[0]
        for policy in policies if not options.atomic else ():
            for update in policy.updates:
                summed.update(update)
        assert not options.atomic or current.sum() <= 100.0
        left -= current / max(current.sum() / 100.0, 1.0)  # more than fits is shared
        idle += not current.any()
        stalls += detector.feed(slot, range(hosts), left, np.ones(hosts, np.bool_))
    return idle, stalls


@pytest.mark.parametrize("hosts", [2, 5])
def test_the_link_idles_and_the_livelock_is_reported(hosts: int) -> None:
    idle, stalls = run(hosts, MlccOptions())
    # All plan all slots, all evade all, all come back: after K slots of that, an even K leaves
    # every slot to the others at its turn. Only slots of the very first plan are ever used.
    assert idle == SLOTS - K // 2
    assert stalls == [Stall("livelock", tuple(range(hosts)), 9, 18)]


@pytest.mark.parametrize("cost", ["literal", "rhs"])
@pytest.mark.parametrize("hosts", [2, 5])
def test_atomic_reservation_removes_it(hosts: int, cost: Reading) -> None:
    idle, stalls = run(hosts, MlccOptions(cost=cost, atomic=True))
    assert idle == 0
    # Who comes first keeps every slot; that is another defect, and reported as what it is.
    assert stalls == [Stall("starvation", tuple(range(1, hosts)), 1, 50)]
