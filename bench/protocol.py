# SPDX-License-Identifier: Apache-2.0
"""What delay, broken streams and forgetful switches cost, in the simulator: `python -m
bench.protocol`.

Each case runs `stagger` on a mix of one link and on the two tiers, some seeds each, beside ideal
max-min sharing and exact information. Mean slowdown over jobs, p99 of all iterations, `r`, the
largest ratio of a job's mean to its own under fair, and messages per host and slot.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.worlds import WORLDS, slowdowns
from flowslot.model.units import MILLISECOND, SECOND, Nanos
from flowslot.policy.registry import PolicyOptions
from flowslot_sim.plane.messages import Messages, Plant
from flowslot_sim.plane.wire import Delays
from flowslot_sim.runner import DEFAULTS, STANDARD, control
from flowslot_sim.simulation import Control, Simulation
from flowslot_sim.world import World

WARM_UP_S, END_S = 20.0, 100.0


@dataclass(frozen=True)
class Case:
    """`cut_s`, `forget_s`: so often a daemon's streams are cut, a switch process restarts."""

    plant: Plant = STANDARD
    options: PolicyOptions = DEFAULTS
    policy: str = "stagger"
    cut_s: float = 0.0
    forget_s: float = 0.0
    per_rack: bool = False


def delayed(ms: float) -> Plant:
    return Plant(delays=Delays(low=round(ms * MILLISECOND), high=round(ms * MILLISECOND)))


ONE = delayed(1.0)
UNSTEADY = Plant(delays=Delays(low=MILLISECOND // 3, high=MILLISECOND, rare=0.01))
CASES = {
    "fair": Case(policy="fair"),
    "exact information": Case(policy="stagger-exact"),
    "1 ms": Case(ONE),
    "0.1 ms": Case(delayed(0.1)),
    "5 ms": Case(delayed(5.0)),
    "20 ms": Case(delayed(20.0)),
    "50 ms": Case(delayed(50.0)),
    "0.3 to 1 ms and 1 % take 10": Case(UNSTEADY),
    "clocks 200 ppm apart": Case(replace(ONE, skew_ppm=200.0)),
    "a stream cut every second": Case(ONE, cut_s=1.0),
    "a switch that forgets every 5 s": Case(ONE, forget_s=5.0),
    "changes at once": Case(replace(ONE, coalesce_ns=Nanos(0))),
    "a switch process per rack": Case(ONE, per_rack=True),
    "a process per rack: with top-up": Case(ONE, PolicyOptions(top_up=True), per_rack=True),
    "no top-up by the arbiter": Case(ONE, PolicyOptions(top_up=False)),
    "no top-up in the kernel": Case(replace(ONE, kernel_top_up=False)),
    "no top-up at all": Case(replace(ONE, kernel_top_up=False), PolicyOptions(top_up=False)),
}


@dataclass(frozen=True)
class Outcome:
    jobs: list[float]
    p99: float
    messages: float


def by_rack(world: World) -> World:
    """A switch process for each rack of the two tiers; the one link of a mix stays as it is."""
    holders = [
        next((end for end in link.split("->") if end.startswith("r")), "s1") for link in world.links
    ]
    return replace(world, switch_of=tuple(holders))


def every(sim: Simulation, period_s: float, action: Callable[[Nanos], None]) -> None:
    """From now on, while the run lasts."""

    def act(now: Nanos) -> None:
        action(now)
        sim.events.after(round(period_s * SECOND), act)

    if period_s:
        sim.events.after(round(period_s * SECOND), act)


def simulate(name: str, world_name: str, seed: int) -> Outcome:
    case, world = CASES[name], WORLDS[world_name](seed)
    if case.per_rack:
        world = by_rack(world)
    make = control(case.policy, case.plant, seed, case.options)
    sim = Simulation(world, make)
    plane: Control = sim.control
    if isinstance(plane, Messages):
        messages, draw = plane, np.random.default_rng(seed)
        hosts = sorted(messages.daemons)

        def cut(now: Nanos) -> None:
            messages.daemons[str(draw.choice(hosts))].cut(now)

        every(sim, case.cut_s, cut)
        switch = sorted(messages.switches)[0]
        every(sim, case.forget_s, lambda now: messages.restart_switch(switch, now))
    sim.run(until_ns=round(END_S * SECOND))
    slow = [
        np.array(slowdowns(job, progress, WARM_UP_S * SECOND, sim.now))
        for job, progress in zip(world.jobs, sim.progress, strict=True)
    ]
    sent = plane.evidence().control_packets
    p99 = float(np.percentile(np.concatenate(slow), 99))
    slots = END_S / 0.06 * len(world.hosts)
    return Outcome([float(each.mean()) for each in slow], p99, sent / slots)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", default="mix-c,mix-h,two-tier-mid")
    parser.add_argument("--cases", default=",".join(CASES), help="all: %(default)s")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    args = parser.parse_args()
    worlds, seeds = args.worlds.split(","), range(args.seeds)
    cases = list(dict.fromkeys(["fair", *args.cases.split(",")]))
    wanted: list[tuple[str, Mapping[str, Any]]] = [(name, CASES) for name in cases]
    for name, known in [*wanted, *((name, WORLDS) for name in worlds)]:
        if name not in known:
            parser.error(f'"{name}" is none of: {", ".join(known)}')
    runs = list(product(cases, worlds, seeds))
    with ProcessPoolExecutor(args.processes) as pool:
        outcomes = dict(zip(runs, pool.map(simulate, *zip(*runs, strict=True)), strict=True))
    rows: list[dict[str, Any]] = []
    for world, name in product(worlds, cases):
        got = [outcomes[name, world, seed] for seed in seeds]
        fair = [outcomes["fair", world, seed] for seed in seeds]
        ratios = [
            a / b
            for ours, theirs in zip(got, fair, strict=True)
            for a, b in zip(ours.jobs, theirs.jobs, strict=True)
        ]
        numbers = {
            "mean": float(np.mean([np.mean(one.jobs) for one in got])),
            "p99": float(np.mean([one.p99 for one in got])),
            "r": max(ratios),
            "messages": float(np.mean([one.messages for one in got])),
        }
        rows.append({"world": world, "case": name, **numbers})
    table = Table("world", "case", "mean", "p99", "r", "messages")
    for row in rows:
        shown = f"{row['mean']:.3f}", f"{row['p99']:.2f}", f"{row['r']:.3f}"
        table.add_row(row["world"], row["case"], *shown, f"{row['messages']:.1f}")
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
