# SPDX-License-Identifier: Apache-2.0
"""Daemons and switch processes that negotiate by messages: the real protocol, simulated wires."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

import numpy as np

from flowslot.arbiter import COALESCE_NS, ArbiterConfig
from flowslot.model.slot import DEFAULT_SLOT
from flowslot.model.units import Nanos
from flowslot.policy.base import Allocator
from flowslot.policy.registry import PolicyOptions, beside_others
from flowslot.protocol.host import Host
from flowslot.protocol.loopback import Loopback
from flowslot.protocol.session import Session
from flowslot_scenario.results import Evidence
from flowslot_sim.observed import Observer
from flowslot_sim.plane.daemon import DaemonNode
from flowslot_sim.plane.kernel import FluidKernel
from flowslot_sim.plane.switch import SwitchNode
from flowslot_sim.plane.wire import Clock, Delays, Stream
from flowslot_sim.simulation import Control, Simulation

MakeAllocator = Callable[[PolicyOptions], Allocator]

ONE_MS = Delays()
_AT_ONCE = Nanos(0)


@dataclass(frozen=True, slots=True)
class Plant:
    """What the control plane is like.

    `skew_ppm`: clocks run fast or slow by up to so much, and show times that are up to an hour
    apart. `coalesce_ns`: as in ArbiterConfig. `kernel_top_up`: flows use what others leave without
    being told to. `look_ns`: from an event of a flow until its daemon has looked and says so.
    """

    delays: Delays = ONE_MS
    skew_ppm: float = 0.0
    coalesce_ns: Nanos = COALESCE_NS
    kernel_top_up: bool = True
    look_ns: Nanos = _AT_ONCE


class Messages(Control):
    """See Control. `switches`, by name, and `daemons`, by host, may be killed and begun anew."""

    def __init__(
        self,
        sim: Simulation,
        make_allocator: MakeAllocator,
        options: PolicyOptions,
        plant: Plant,
        seed: int,
    ) -> None:
        self.events = sim.events
        self.random = np.random.default_rng([seed, 7])
        self.observer = Observer(sim)
        self.kernel = FluidKernel(sim, self.observer, plant.kernel_top_up)
        self._world = world = sim.world
        self._plant = plant
        self.look_ns = plant.look_ns
        self._make_own = partial(make_allocator, replace(options, partial=True))
        self._numbers = count(1)  # of names and sessions
        self._config = ArbiterConfig(coalesce_ns=plant.coalesce_ns)
        links_of: dict[str, list[int]] = {}
        for link, switch in enumerate(world.switch_of or ("s1",) * len(world.links)):
            if switch is not None:
                links_of.setdefault(switch, []).append(link)
        make = partial(make_allocator, beside_others(options) if len(links_of) > 1 else options)
        self.switches = {
            name: SwitchNode(sim, self._clock(), links, self._config, make)
            for name, links in links_of.items()
        }
        self._mine: dict[str, list[int]] = {host: [] for host in world.hosts}
        for b, bunch in enumerate(self.observer.bunches):
            self._mine[bunch.host].append(b)
        self.daemons = {host: self._daemon(host) for host, mine in self._mine.items() if mine}

    # --- Control

    def start(self) -> None:
        """See Control. Everything is up before the jobs begin."""
        for host, daemon in self.daemons.items():
            daemon.start(self.events.now)
            first = int(self.random.integers(DEFAULT_SLOT))
            self.events.after(first, partial(self._slot, host))

    def began(self, now: Nanos, job: int, flows: Sequence[int]) -> None:
        """See Control."""
        self._tell(now, self.observer.began(now, flows))

    def ended(self, now: Nanos, flows: Sequence[int]) -> None:
        """See Control."""
        going_on = self.observer.going_on(flows)
        self._tell(now, self.observer.ended(now, flows))
        for b in going_on:
            self.kernel.share_out(b)

    def _tell(self, now: Nanos, bunches: Iterable[int]) -> None:
        by_host: dict[str, list[int]] = {}
        for b in bunches:
            by_host.setdefault(self.observer.bunches[b].host, []).append(b)
        # Once all that happens at this moment has happened.
        for host, its in by_host.items():
            self.events.at(now, partial(self._touch, host, its))

    def _touch(self, host: str, bunches: list[int], now: Nanos) -> None:
        self.daemons[host].touched(now, bunches)

    def _slot(self, host: str, now: Nanos) -> None:
        self.daemons[host].on_slot(now)
        self.events.after(DEFAULT_SLOT, partial(self._slot, host))

    # --- faults

    def restart_switch(self, name: str, now: Nanos) -> None:
        """A switch process that has forgotten everything."""
        if self.switches[name].alive:
            self.switches[name].kill(now)
        self.switches[name].start()

    def restart_daemon(self, host: str, now: Nanos) -> None:
        """A daemon that knows nothing of its predecessor, whose rates run out by themselves."""
        old = self.daemons[host]
        if old.alive:
            old.kill(now)
        new = self.daemons[host] = self._daemon(host)
        new.messages = old.messages
        new.start(now)
        new.touched(now, [b for b in self._mine[host] if self.observer.inc[b]])

    # --- evidence

    def evidence(self) -> Evidence:
        """See Control: of all arbiters (of daemons: in this life), and of all messages."""
        switches = [switch.counts() for switch in self.switches.values()]
        counts = [daemon.host.own_counts for daemon in self.daemons.values()]
        own = [[c.granted, c.refused, c.preempted, 0] for c in counts]
        granted, refused, preempted, expired = map(sum, zip(*switches, *own, strict=True))
        nodes: list[SwitchNode | DaemonNode] = [*self.switches.values(), *self.daemons.values()]
        return Evidence(
            granted=granted,
            refused=refused,
            preempted=preempted,
            expired=expired,
            rate_writes=self.kernel.writes,
            control_packets=sum(node.messages for node in nodes),
        )

    # --- how

    def _clock(self) -> Clock:
        hour, ppm = 3600 * 10**9, self._plant.skew_ppm
        return Clock(int(self.random.integers(hour)), float(self.random.uniform(-ppm, ppm)))

    def _daemon(self, host: str) -> DaemonNode:
        name = f"{host}-{next(self._numbers)}"
        crossed = {link for b in self._mine[host] for link in self.observer.bunches[b].links}
        switches = [s for s in self.switches.values() if not crossed.isdisjoint(s.links)]
        sessions = [
            Session(
                name,
                switch.links,
                switch.names,
                slot_ns=DEFAULT_SLOT,
                lease_ns=self._config.lease_ns,
                first_session=next(self._numbers) << 20,
            )
            for switch in switches
        ]
        made = Host(sessions, partial(self._own, host), DEFAULT_SLOT)
        return DaemonNode(self, self._clock(), self._mine[host], made, switches)

    def _own(self, host: str, now: Nanos) -> Loopback:
        return Loopback(
            now,
            self._world.egress(host),
            self._world.capacity,
            allocator=self._make_own(),
            config=ArbiterConfig(),
        )

    def stream(self) -> Stream:
        """A new one, between a daemon and a switch process."""
        return Stream(self.events, self.random, self._plant.delays)
