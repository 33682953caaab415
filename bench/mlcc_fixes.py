# SPDX-License-Identifier: Apache-2.0
"""MLCC as published, and with one remedy after the other: `python -m bench.mlcc_fixes`.

In the simulator, messages of 1 ms. Rows: `fair` and `stagger-exact` to compare with; what the
paper says, by each reading; then `rhs` with remedies added in the order of the design, each on top
of those before; `mlcc` has them all. Columns: mean over jobs of their mean slowdowns; the slowdown
of the worst job; p99 of all iterations; `idle`, part of all slots in which bytes waited from the
slot's beginning and not one was sent; `crawl`, part of all slots in which bytes waited likewise, no
flow ended and no link carried 5 % of what it can, idle slots included; runs with a livelock, and
with flows that starved, of all.

An iteration that was not done in the end counts with its length so far if that is longer than all
that were: a lower bound. A run that was given up has no slowdowns, and idles for the rest.
"""

import argparse
import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np

from bench.worlds import WORLDS, IdleSlots, slowdowns
from flowslot.model.slot import DEFAULT_SLOT
from flowslot.model.units import MILLISECOND, SECOND
from flowslot.policy.mlcc import MlccOptions
from flowslot_scenario import scenario as scenarios
from flowslot_sim.plane.messages import Plant
from flowslot_sim.plane.mlcc import VARIANTS, Mlcc, Variant
from flowslot_sim.plane.wire import Delays
from flowslot_sim.runner import control
from flowslot_sim.simulation import Simulation
from flowslot_sim.stalls import Livelock, StallWatch
from flowslot_sim.world import World, from_scenario

ONE_MS = Plant(delays=Delays(low=MILLISECOND, high=MILLISECOND))
SCENARIOS = Path(__file__).parents[1] / "lab" / "scenarios"
TIMES = {
    "mix-a": (5.0, 45.0),
    "mix-c": (5.0, 45.0),
    "mix-d": (5.0, 65.0),
    "two-equal": (2.0, 14.0),
    "ps-plus-ring": (2.0, 14.0),
    "two-tier-mid": (5.0, 40.0),
}
"""By world: seconds of warm-up, and when a run ends."""
SEEDS_OF = {"two-tier-mid": 1}
SEEDS = 3
PLAIN = "fair", "stagger-exact"


def steps() -> dict[str, Variant]:
    """Ways to run MLCC, by name, in order."""
    made = {name: VARIANTS[name] for name in ("mlcc-strict", "mlcc-literal", "mlcc-rhs")}
    options = VARIANTS["mlcc-rhs"].options
    fixes = {
        "+ atomic": {"atomic": True},
        "+ release": {"release": True},
        "+ residual bound": {"bound": "residual"},
        "+ replan on events": {"replan_on_events": True},
        "+ top-up": {"top_up": True},
    }
    for name, fix in fixes.items():
        options = replace(options, **fix)  # type: ignore[arg-type]
        made[name] = Variant(options, count_links=options.bound == "residual")
    assert replace(options, order="shortest") == VARIANTS["mlcc"].options
    made["+ shortest = mlcc"] = VARIANTS["mlcc"]
    made["mlcc, literal cost"] = Variant(MlccOptions.repaired("literal"), count_links=True)
    return made


STEPS = steps()
POLICIES = (*PLAIN, *STEPS)


@dataclass(frozen=True)
class Outcome:
    """One run. `jobs`: mean slowdowns; None: it was given up."""

    jobs: list[float] | None
    p99: float
    idle: float
    crawl: float
    livelock: str
    starved: bool


def world_of(name: str, seed: int) -> World:
    if name in WORLDS:
        return WORLDS[name](seed)
    loaded = scenarios.load(SCENARIOS / f"{name}.toml", [])
    return from_scenario(loaded.model_copy(update={"seed": seed}))


def simulate(name: str, policy: str, seed: int) -> Outcome:
    warm_up_s, end_s = TIMES[name]
    world = world_of(name, seed)
    if policy in PLAIN:
        sim = Simulation(world, control(policy, ONE_MS, seed))
        watch = StallWatch(sim)
        watch.start()
    else:
        sim = Simulation(world, lambda sim: Mlcc(sim, STEPS[policy], ONE_MS, seed))
        assert isinstance(sim.control, Mlcc)
        watch = sim.control.watch
    counted = IdleSlots(sim)
    given_up = False
    try:
        sim.run(until_ns=round(end_s * SECOND))
    except Livelock:
        given_up = True
    slots = int(end_s * SECOND) // DEFAULT_SLOT
    livelocks = [line for line in watch.report() if line.startswith("livelock")]
    starved = any(stall.kind == "starvation" for stall in watch.stalls)
    lost = slots - counted.slots if given_up else 0
    idle, crawl = (counted.idle + lost) / slots, (counted.crawled + lost) / slots
    first = livelocks[0] if livelocks else ""
    if given_up:
        return Outcome(None, np.nan, idle, crawl, first, starved)
    each = [
        slowdowns(job, progress, warm_up_s * SECOND, sim.now)
        for job, progress in zip(world.jobs, sim.progress, strict=True)
    ]
    each = [slow for slow in each if slow]
    p99 = float(np.percentile(np.concatenate(each), 99))
    means = [float(np.mean(slow)) for slow in each]
    return Outcome(means, p99, idle, crawl, first, starved)


@dataclass
class Row:
    world: str
    policy: str
    mean: float | None
    worst: float | None
    p99: float | None
    idle: float
    crawl: float
    livelocks: int
    starved: int
    runs: int
    first: str
    """What the first livelock of the first seed with one was."""


def summarise(world: str, policy: str, got: list[Outcome]) -> Row:
    jobs = [one.jobs for one in got if one.jobs is not None]
    whole = len(jobs) == len(got)
    return Row(
        world,
        policy,
        mean=float(np.mean([np.mean(slow) for slow in jobs])) if whole else None,
        worst=float(np.mean([max(slow) for slow in jobs])) if whole else None,
        p99=float(np.mean([one.p99 for one in got])) if whole else None,
        idle=float(np.mean([one.idle for one in got])),
        crawl=float(np.mean([one.crawl for one in got])),
        livelocks=sum(bool(one.livelock) for one in got),
        starved=sum(one.starved for one in got),
        runs=len(got),
        first=next((one.livelock for one in got if one.livelock), ""),
    )


def show(rows: list[Row]) -> None:
    """As Markdown."""
    print("| world | policy | mean | worst job | p99 | idle | crawl | livelock | starvation |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        numbers = [
            "given up" if value is None else f"{value:.3f}"
            for value in (row.mean, row.worst, row.p99)
        ]
        found = [f"{n} of {row.runs}" if n else "" for n in (row.livelocks, row.starved)]
        cells = [row.world, row.policy, *numbers, f"{row.idle:.1%}", f"{row.crawl:.1%}", *found]
        print(f"| {' | '.join(cells)} |")
    for row in rows:
        if row.first:
            print(f"{row.world}, {row.policy}: {row.first}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", default=",".join(TIMES))
    parser.add_argument("--seeds", type=int, default=SEEDS, help="two-tier: at most 1")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    args = parser.parse_args()
    began = time.monotonic()
    cases = [
        (world, policy, seed)
        for world, policy in product(args.worlds.split(","), POLICIES)
        for seed in range(min(args.seeds, SEEDS_OF.get(world, args.seeds)))
    ]
    with ProcessPoolExecutor(args.processes) as pool:
        done = list(pool.map(simulate, *zip(*cases, strict=True)))
    by_row: dict[tuple[str, str], list[Outcome]] = {}
    for (world, policy, _), outcome in zip(cases, done, strict=True):
        by_row.setdefault((world, policy), []).append(outcome)
    rows = [summarise(world, policy, got) for (world, policy), got in by_row.items()]
    show(rows)
    print(f"{time.monotonic() - began:.0f} s on {args.processes} processes")
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
