# SPDX-License-Identifier: Apache-2.0
"""How much a scheduler that knows everything gains on the draws of `lab mixes`, over fair sharing.

`python -m bench.lookahead [--count N] [--measured FILE] SEED...`: for each seed the geometric mean,
over its draws, of the mean slowdown in that under fair sharing. The model is fluid and free of
cost: no loss, no delay, no negotiation; computation takes always the same time. A job's phase goes
at one speed on all its links. The scheduler knows all of this. At every event, and every `STEP` s,
it plays each order of the jobs `AHEAD` longest iterations ahead, and takes the order with the best
mean slowdown. At the next `DEPTH` events of such a play the order may change, too.

FILE: what `lab mixes FOLDER -o json` printed of these draws. Then the scheduler's mean is shown in
parts of the best TCP's there, too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flowslot.model.units import goodput
from flowslot_scenario.mixes import draw
from flowslot_scenario.scenario import Scenario

STEP, AHEAD, DEPTH = 0.01, 3, 1
ITERATIONS, WARMUP = 40, 5
"""Of the job that comes round least often."""
MEMORY = 10
"""What counts of the past: as many longest iterations."""
NEVER, NOTHING = 1e9, 1e-9

Order = tuple[int, ...]


@dataclass
class Phase:
    """Where a job stands: s of computation, or the part of its bytes, that is left."""

    sends: bool
    left: float


class World:
    """A scenario's jobs, as loads of links. Times in s, loads in s of a link's capacity."""

    def __init__(self, scenario: Scenario) -> None:
        links = {name: goodput(x.capacity_bps) for name, x in scenario.directed_links().items()}
        sizes = [scenario.link_bytes(job) for job in scenario.jobs]
        self.loads = [{name: n / links[name] for name, n in by.items()} for by in sizes]
        self.sends = [max(load.values()) for load in self.loads]
        self.computes = [job.compute_s for job in scenario.jobs]
        self.alone = [a + b for a, b in zip(self.sends, self.computes, strict=True)]
        self.weights = [
            job.sockets / min(by.values()) for job, by in zip(scenario.jobs, sizes, strict=True)
        ]
        """What a job's sockets weigh on a link, by its bytes there."""
        self.start = [Phase(False, job.start_s) for job in scenario.jobs]
        self.orders = list(itertools.permutations(range(len(sizes))))
        self._speeds: dict[tuple[object, ...], list[float]] = {}

    def speeds(self, active: tuple[bool, ...], order: Order | None) -> list[float]:
        """Phases per second of each job: in turn, each as fast as it can; None: fair."""
        key = (active, order)
        if key not in self._speeds:
            found = self._fair(active) if order is None else self._in_turn(active, order)
            self._speeds[key] = found
        return self._speeds[key]

    def _in_turn(self, active: tuple[bool, ...], order: Order) -> list[float]:
        speeds, free = [0.0] * len(active), dict[str, float]()
        for job in order:
            if active[job]:
                load = self.loads[job]
                speeds[job] = max(min(free.get(x, 1.0) / load[x] for x in load), 0.0)
                self._take(free, job, speeds[job])
        return speeds

    def _fair(self, active: tuple[bool, ...]) -> list[float]:
        # A speed for all that grows until a link is full: those on it stay as they are.
        speeds, free = [0.0] * len(active), dict[str, float]()
        waiting = {job for job, sends in enumerate(active) if sends}
        while waiting:
            full, level = "", NEVER
            for link in {x for job in waiting for x in self.loads[job]}:
                grows = sum(self.weights[j] * self.loads[j].get(link, 0.0) for j in waiting)
                if free.get(link, 1.0) / grows < level:
                    full, level = link, free.get(link, 1.0) / grows
            for job in [j for j in waiting if full in self.loads[j]]:
                speeds[job] = level * self.weights[job]
                self._take(free, job, speeds[job])
                waiting.remove(job)
        return speeds

    def _take(self, free: dict[str, float], job: int, speed: float) -> None:
        for link, load in self.loads[job].items():
            free[link] = max(free.get(link, 1.0) - speed * load, 0.0)

    def go(self, at: list[Phase], done: list[float], order: Order | None, limit: float) -> float:
        """Up to the next event, or for `limit` s; adds to `done` what is done, in s of the job
        alone. Gives the s that passed."""
        speeds = self.speeds(tuple(x.sends for x in at), order)
        paces = [speed if x.sends else 1.0 for x, speed in zip(at, speeds, strict=True)]
        passed = limit
        for phase, pace in zip(at, paces, strict=True):
            passed = min(passed, phase.left / pace if pace > NOTHING else NEVER)
        for job, (phase, pace) in enumerate(zip(at, paces, strict=True)):
            phase.left -= pace * passed
            done[job] += pace * passed * (self.sends[job] if phase.sends else 1.0)
            if phase.left <= NOTHING:
                phase.sends = not phase.sends
                phase.left = 1.0 if phase.sends else self.computes[job]
        return passed


class Lookahead:
    """The best order, by playing each."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.far = AHEAD * max(world.alone)

    def order(self, at: list[Phase], past: list[float], time: float) -> Order:
        """`past`, `time`: what was done, in s of a job alone, in how many s."""
        return self._best(at, past, time, self.far, DEPTH)[1]

    def _best(
        self, at: list[Phase], done: list[float], time: float, left: float, depth: int
    ) -> tuple[float, Order]:
        best, seen = (math.inf, self._world.orders[0]), set()
        active = tuple(x.sends for x in at)
        for order in self._world.orders:
            same = tuple(self._world.speeds(active, order))
            if depth and same in seen:
                continue
            seen.add(same)
            now, more = [Phase(x.sends, x.left) for x in at], list(done)
            rest = left
            while rest > NOTHING:
                rest -= self._world.go(now, more, order, rest)
                if depth and sum(x.sends for x in now) > 1:
                    break
            after = time + left - rest
            if rest > NOTHING:
                cost = self._best(now, more, after, rest, depth - 1)[0]
            else:
                cost = sum(after / max(x, NOTHING) for x in more)
            best = min(best, (cost, order))
        return best


def slowdowns(world: World, looks: bool) -> list[float]:
    """Each job's mean iteration, in its iteration alone; without `looks` under fair sharing."""
    at, ends = [Phase(x.sends, x.left) for x in world.start], [list[float]() for _ in world.start]
    plan, past, time, now = Lookahead(world), [0.0] * len(at), 0.0, 0.0
    while min(map(len, ends)) < ITERATIONS:
        order = None
        if looks and sum(x.sends for x in at) > 1:
            order = plan.order(at, past, time)
        sent = [x.sends for x in at]
        passed = world.go(at, past, order, STEP if looks else NEVER)
        now += passed
        fades = math.exp(-passed / (MEMORY * max(world.alone)))
        past, time = [x * fades for x in past], (time + passed) * fades
        for job, before in enumerate(sent):
            if before and not at[job].sends:
                ends[job].append(now)
    return [
        (x[-1] - x[WARMUP]) / (len(x) - 1 - WARMUP) / alone
        for x, alone in zip(ends, world.alone, strict=True)
    ]


def best_tcp(file: str) -> dict[str, float]:
    """The mean slowdown under the best TCP of each draw, by name. Raises ArgumentTypeError."""
    try:
        draws = json.loads(Path(file).read_text())["draws"]
        return {one["name"]: float(one["best_tcp"]["mean"]) for one in draws}
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"{file} is not what `lab mixes -o json` prints: {error!r}"
        raise argparse.ArgumentTypeError(problem) from None


def summary(ratios: Sequence[float]) -> str:
    """Geometric mean and range."""
    mean = statistics.geometric_mean(ratios)
    return f"{mean:.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


def main(words: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("seeds", nargs="+", type=int, metavar="SEED")
    parser.add_argument("--count", type=int, default=24, help="draws of each seed (24)")
    parser.add_argument(
        "--measured", type=best_tcp, default={}, metavar="FILE", help="what `lab mixes` printed"
    )
    asked = parser.parse_args(words)
    for seed in asked.seeds:
        fair, tcp = [], []
        for number in range(1, asked.count + 1):
            scenario = draw(seed, number)
            world = World(scenario)
            found = slowdowns(world, True)
            fair.append(sum(found) / sum(slowdowns(world, False)))
            if scenario.name in asked.measured:
                tcp.append(statistics.mean(found) / asked.measured[scenario.name])
        of_tcp = f"; {summary(tcp)} of the best TCP in {len(tcp)} draws" if tcp else ""
        print(f"seed {seed}: {summary(fair)} of fair{of_tcp}")


if __name__ == "__main__":
    main()
