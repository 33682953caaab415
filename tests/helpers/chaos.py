# SPDX-License-Identifier: Apache-2.0
"""Random worlds and faults for the protocol, and what must hold whatever happens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from flowslot.arbiter import ArbiterConfig
from flowslot.model.units import MILLISECOND, SECOND, Nanos
from flowslot.policy.registry import PolicyOptions, get
from flowslot_sim.network import FlowSpec
from flowslot_sim.plane.messages import Messages, Plant
from flowslot_sim.plane.wire import Delays
from flowslot_sim.simulation import Simulation
from flowslot_sim.world import SimJob, World

LINK = 50e6
"""Payload bytes/s of every link."""
RARELY_MS = 10
FAULTS = "hold", "cut", "freeze", "vanish", "restart daemon", "restart switch", "kill switch"


@dataclass(frozen=True)
class Fault:
    """`kind` befalls host or switch number `who` (modulo how many there are), for a while."""

    at_s: float
    kind: str
    who: int
    lasts_s: float


def plant(slowest_ms: float, twice: float = 0.1) -> Plant:
    """Messages take up to so long, one in a hundred RARELY_MS, each on its own; some come twice.
    Clocks differ."""
    delays = Delays(
        low=MILLISECOND // 10,
        high=round(slowest_ms * MILLISECOND),
        slow=RARELY_MS * MILLISECOND,
        rare=0.01,
        twice=twice,
    )
    # With it, flows would get on whatever arbiters do.
    return Plant(delays=delays, skew_ppm=200, kernel_top_up=False)


def star(seed: int, *, per_rack: bool = False) -> World:
    """Hosts at one switch, or in two racks with a switch process each; rings and fans of flows."""
    draw = np.random.default_rng([seed, 11])
    n = int(draw.integers(2, 6))
    racks = [i % 2 for i in range(n)] if per_rack else [0] * n
    links = [f"h{i}{way}" for i in range(n) for way in ("+", "-")]
    links += [f"r{r}{way}" for r in (0, 1) for way in ("+", "-")]
    switch_of = [f"s{racks[i]}" for i in range(n) for _ in "+-"] + ["s0", "s0"]
    switch_of += ["s1", "s1"] if per_rack else ["s0", "s0"]

    def path(a: int, b: int) -> tuple[int, ...]:
        middle = (2 * n + 2 * racks[a], 2 * n + 2 * racks[b] + 1) if racks[a] != racks[b] else ()
        return (2 * a, *middle, 2 * b + 1)

    jobs = []
    for k in range(int(draw.integers(1, 5))):
        places = draw.permutation(n)[: int(draw.integers(2, n + 1))].tolist()
        volume = float(draw.uniform(0.2e6, 8e6))
        if draw.random() < 0.5:
            m = len(places)
            flows = [
                FlowSpec(
                    f"h{p}",
                    path(p, places[(r + 1) % m]),
                    volume,
                    own=volume / m,
                    head=volume / m,
                    preds=((r - 1) % m,),
                )
                for r, p in enumerate(places)
            ]
        else:
            server, workers = places[0], places[1:]
            flows = [FlowSpec(f"h{w}", path(w, server), volume) for w in workers]
            every = tuple(range(len(workers)))
            flows += [FlowSpec(f"h{server}", path(server, w), volume, preds=every) for w in workers]
        compute = int(draw.uniform(0.02, 0.2) * SECOND)
        start = Nanos(int(draw.uniform(0, 0.3) * SECOND))
        jobs.append(SimJob(f"job{k}", tuple(flows), lambda _, c=compute: c, start, 1.0))
    hosts = tuple(f"h{i}" for i in range(n))
    return World(tuple(links), (LINK,) * len(links), hosts, tuple(jobs), tuple(switch_of))


class Chaos:
    """A run with faults; `check` is called after everything that happens."""

    def __init__(self, world: World, plant: Plant, faults: list[Fault], seed: int) -> None:
        make = get("stagger").allocator
        assert make is not None

        def control(sim: Simulation) -> Messages:
            return Messages(sim, make, PolicyOptions(), plant, seed)

        self.sim = Simulation(world, control)
        assert isinstance(self.sim.control, Messages)
        self.plane = self.sim.control
        self.limit = ArbiterConfig().target * LINK
        self.lease = ArbiterConfig().lease_ns
        for fault in faults:
            self.sim.events.at(round(fault.at_s * SECOND), self._befall(fault))

    def run(self, seconds: float, check: Callable[[], None]) -> None:
        """To this moment."""
        until = round(seconds * SECOND)
        if not self.sim.now:
            self.sim.run(until_ns=1)
        while self.sim.now < until:
            self.sim._step(until)
            check()

    def negotiating(self) -> bool:
        """All switch processes honour the grants of all daemons."""
        daemons = self.plane.daemons.values()
        return all(d.alive and all(session.live for session in d.host.sessions) for d in daemons)

    def never_too_much(self) -> None:
        """Neither what is in force nor what arbiters have committed exceeds any link."""
        used = float(self.plane.kernel.guaranteed().max())
        assert used <= self.limit * (1 + 1e-6), f"{used} in force at {self.sim.now / 1e9:.4f} s"
        for switch in self.plane.switches.values():
            if switch.alive and switch.arbiter.recovered(switch.time()):
                placed = float(switch.arbiter.commitments().max())
                # What Hello tells of flows that are not known yet counts on every link at first.
                rows = switch.arbiter._flows.rows
                unplaced = bool((rows["group"][rows["grant"] > 0] < 0).any())
                assert placed <= self.limit * (1 + 1e-6) or unplaced

    def _befall(self, fault: Fault) -> Callable[[Nanos], None]:
        plane, lasts = self.plane, round(fault.lasts_s * SECOND)
        hosts, switches = sorted(plane.daemons), sorted(plane.switches)
        host = hosts[fault.who % len(hosts)]
        switch = switches[fault.who % len(switches)]

        def strike(now: Nanos) -> None:
            over, daemon = Nanos(now + lasts), plane.daemons[host]
            match fault.kind:
                case "hold":
                    daemon.hold(over)
                case "cut":
                    daemon.cut(now)
                case "freeze":
                    daemon.freeze(over)
                case "vanish":
                    daemon.kill(now)
                    self.sim.events.at(over, lambda then: plane.restart_daemon(host, then))
                case "restart daemon":
                    plane.restart_daemon(host, now)
                case "restart switch":
                    plane.restart_switch(switch, now)
                case "kill switch":
                    plane.switches[switch].kill(now)
                    self.sim.events.at(over, lambda then: plane.restart_switch(switch, then))

        return strike
