# SPDX-License-Identifier: Apache-2.0
"""How fast the simulator is with 1000 servers and 1000 jobs: `python -m bench.engine_speed`.

Slots of 60 ms simulated per second of real time, one process, under ideal max-min sharing and under
`stagger` with exact information; and the memory that it takes.
"""

import argparse
import resource
import time

from bench.worlds import Size, on_two_tiers
from flowslot_sim.runner import STANDARD, control
from flowslot_sim.simulation import Simulation

LARGE = Size(racks=100, servers=10, jobs=1000)
SLOT_S = 0.06


def slots_per_s(policy: str, slots: int) -> float:
    """The first slots, in which jobs begin one after the other, are not timed."""
    sim = Simulation(on_two_tiers("mid", 1, LARGE), control(policy, STANDARD, 1))
    warm_up = 20 * SLOT_S
    sim.run(until_ns=round(warm_up * 1e9))
    begun = time.perf_counter()
    sim.run(until_ns=round((warm_up + slots * SLOT_S) * 1e9))
    return slots / (time.perf_counter() - begun)


def measure(slots: int = 20) -> dict[str, float]:
    """Slots per second under each policy, and GiB."""
    return {
        "fair_slots_per_s": slots_per_s("fair", slots),
        "stagger_slots_per_s": slots_per_s("stagger-exact", max(slots // 10, 1)),
        "memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slots", type=int, default=20)
    args = parser.parse_args()
    result = measure(args.slots)
    print(f"fair: {result['fair_slots_per_s']:.1f} slots/s")
    print(f"stagger, exact information: {result['stagger_slots_per_s']:.1f} slots/s")
    print(f"memory: {result['memory_gib']:.2f} GiB")


if __name__ == "__main__":
    main()
