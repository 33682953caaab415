# SPDX-License-Identifier: Apache-2.0
"""How fast the simulators are with 1000 servers and 1000 jobs: `python -m bench.engine_speed`.

Slots of 60 ms simulated per second of real time, one process, once all jobs have begun, and the
memory that it takes. Exits with 1 where a bound does not hold. The slot-stepped engine under ideal
max-min sharing, and under `stagger`, asked once a slot about the transfers that are ready.
`--events`: the event-driven one as well, under ideal max-min sharing and under `stagger` with exact
information, from the start; that takes minutes.
"""

import argparse
import resource
import sys
import time

from bench.worlds import Size, on_two_tiers
from flowslot.policy.stagger import StaggerAllocator
from flowslot_sim.cluster.worlds import Steps
from flowslot_sim.runner import STANDARD, control
from flowslot_sim.simulation import Simulation

LARGE = Size(racks=100, servers=10, jobs=1000)
SLOT_S = 0.06
LEAST = {"fair": 500, "stagger": 100}
"""Slots per second."""
MOST_GIB = 4
BEGUN_S = 45.0
"""By then all jobs have begun: none takes longer for an iteration."""


def steps_per_s(stagger: bool, slots: int) -> float:
    """Of the slot-stepped engine."""
    steps = Steps(on_two_tiers("mid", 1, LARGE), StaggerAllocator() if stagger else None)
    steps.run(round(BEGUN_S * 1e9))
    begun = time.perf_counter()
    steps.run(round((BEGUN_S + slots * SLOT_S) * 1e9))
    return slots / (time.perf_counter() - begun)


def slots_per_s(policy: str, slots: int) -> float:
    """Of the event-driven one. The first 20 slots are not timed; jobs still begin after them."""
    sim = Simulation(on_two_tiers("mid", 1, LARGE), control(policy, STANDARD, 1))
    warm_up = 20 * SLOT_S
    sim.run(until_ns=round(warm_up * 1e9))
    begun = time.perf_counter()
    sim.run(until_ns=round((warm_up + slots * SLOT_S) * 1e9))
    return slots / (time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slots", type=int, default=400)
    parser.add_argument("--events", action="store_true")
    args = parser.parse_args()
    broken = False
    for policy, least in LEAST.items():
        speed = steps_per_s(policy == "stagger", args.slots)
        broken |= speed < least
        print(f"{policy}: {speed:.0f} slots/s (bound {least}{', BROKEN' * (speed < least)})")
    if args.events:
        print(f"event-driven, fair: {slots_per_s('fair', 20):.1f} slots/s")
        exact = slots_per_s("stagger-exact", 2)
        print(f"event-driven, stagger, exact information: {exact:.1f} slots/s")
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"memory: {memory:.2f} GiB (bound {MOST_GIB}{', BROKEN' * (memory > MOST_GIB)})")
    sys.exit(broken or memory > MOST_GIB)


if __name__ == "__main__":
    main()
