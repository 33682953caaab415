# SPDX-License-Identifier: Apache-2.0
"""The mixes and the two-tier network in the simulator, seed by seed: `python -m bench.mixes`.

Policies: `fair`, ideal max-min sharing; `stagger` with messages of 1 ms; `stagger-exact`, the same
policy with exact information and no messages. For each: mean over jobs of their mean slowdown, with
the 95 % confidence interval over seeds; p99 of all iterations; the slowdown of the worst job; and
`r`, the largest ratio of a job's mean to its own under fair. Exit status 1 when a bound is broken.
"""

import argparse
import json
import math
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.worlds import WORLDS, slowdowns
from flowslot.model.units import MILLISECOND
from flowslot_sim.plane.messages import Plant
from flowslot_sim.plane.wire import Delays
from flowslot_sim.runner import control
from flowslot_sim.simulation import Simulation

POLICIES = "fair", "stagger", "stagger-exact"
ONE_MS = Plant(delays=Delays(low=MILLISECOND, high=MILLISECOND))
T95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}
"""Student's t for the 95 % confidence interval of so many seeds."""
EQUAL = "mix-a", "mix-b"
MOST_OF_IDEAL, MOST_OF_EXACT = 1.03, 1.04
WORST_JOB, WORST_JOB_TIERS = 1.05, 1.15


@dataclass(frozen=True)
class Outcome:
    """One world under one policy: slowdowns; messages per host and slot."""

    jobs: list[float]
    p99: float
    messages: float


def times(world: str) -> tuple[float, float]:
    """Seconds of warm-up, and when the run ends."""
    return (50.0, 250.0) if world.startswith("two-tier") else (20.0, 100.0)


def simulate(world: str, policy: str, seed: int) -> Outcome:
    made = WORLDS[world](seed)
    sim = Simulation(made, control(policy, ONE_MS, seed))
    warm_up, end = times(world)
    sim.run(until_ns=round(end * 1e9))
    slow = [
        np.array(slowdowns(job, progress, warm_up * 1e9, sim.now))
        for job, progress in zip(made.jobs, sim.progress, strict=True)
    ]
    sent = sim.control.evidence().control_packets
    slots = end / 0.06 * len(made.hosts)
    p99 = float(np.percentile(np.concatenate(slow), 99))
    return Outcome([float(each.mean()) for each in slow], p99, sent / slots)


def interval(values: list[float]) -> tuple[float, float]:
    """Mean, and half of the width of its 95 % confidence interval."""
    n = len(values)
    half = T95.get(n, 2.0) * float(np.std(values, ddof=1)) / math.sqrt(n) if n > 1 else math.inf
    return float(np.mean(values)), half


@dataclass
class Row:
    world: str
    policy: str
    mean: float
    interval: float
    p99: float
    worst: float
    r: float
    messages: float
    broken: str = ""


def summarise(world: str, outcomes: dict[tuple[str, str, int], Outcome], seeds: int) -> list[Row]:
    rows = {}
    fair = [outcomes[world, "fair", seed] for seed in range(seeds)]
    for policy in POLICIES:
        got = [outcomes[world, policy, seed] for seed in range(seeds)]
        mean, half = interval([float(np.mean(one.jobs)) for one in got])
        rows[policy] = Row(
            world,
            policy,
            mean,
            half,
            p99=float(np.mean([one.p99 for one in got])),
            worst=float(np.mean([max(one.jobs) for one in got])),
            r=max(
                a / b
                for ours, theirs in zip(got, fair, strict=True)
                for a, b in zip(ours.jobs, theirs.jobs, strict=True)
            ),
            messages=float(np.mean([one.messages for one in got])),
        )
    ours = [outcomes[world, "stagger", seed] for seed in range(seeds)]
    worse, doubt = interval(
        [float(np.mean(a.jobs) - np.mean(b.jobs)) for a, b in zip(ours, fair, strict=True)]
    )
    row = rows["stagger"]
    limit = WORST_JOB_TIERS if world.startswith("two-tier") else WORST_JOB
    broken = {
        "mean worse than fair's": worse > doubt,
        f"mean above {MOST_OF_IDEAL} of Ideal": world in EQUAL and row.mean > MOST_OF_IDEAL,
        "mean too far from exact's": row.mean > MOST_OF_EXACT * rows["stagger-exact"].mean,
        f"a job above {limit} of its time under fair": row.r > limit,
    }
    broken["a job has not finished an iteration"] = not math.isfinite(row.mean)
    row.broken = "; ".join(name for name, is_so in broken.items() if is_so)
    return list(rows.values())


def show(rows: list[Row]) -> None:
    table = Table()
    for title in ("world", "policy", "mean", "p99", "worst job", "r", "messages", ""):
        table.add_column(title, no_wrap=title == "world")
    for row in rows:
        table.add_row(
            row.world,
            row.policy,
            f"{row.mean:.3f} ± {row.interval:.3f}",
            f"{row.p99:.2f}",
            f"{row.worst:.3f}",
            f"{row.r:.3f}",
            f"{row.messages:.1f}" if row.messages else "",
            row.broken and f"BROKEN: {row.broken}",
            end_section=row.policy == POLICIES[-1],
        )
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", default=",".join(WORLDS))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    args = parser.parse_args()
    worlds = args.worlds.split(",")
    cases = list(product(worlds, POLICIES, range(args.seeds)))
    with ProcessPoolExecutor(args.processes) as pool:
        done = pool.map(simulate, *zip(*cases, strict=True))
        outcomes = dict(zip(cases, done, strict=True))
    rows = [row for world in worlds for row in summarise(world, outcomes, args.seeds)]
    show(rows)
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 1 if any(row.broken for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
