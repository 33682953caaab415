# SPDX-License-Identifier: Apache-2.0
"""Daemons and switch processes that negotiate by messages: the real protocol, simulated wires."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from flowslot.arbiter import COALESCE_NS, LEASE_SLOTS, ArbiterConfig
from flowslot.model.slot import DEFAULT_SLOT
from flowslot.model.units import Nanos
from flowslot.policy.base import Allocator
from flowslot.policy.registry import PolicyOptions, beside_others
from flowslot.protocol.grants import Granted
from flowslot.protocol.host import Host
from flowslot.protocol.loopback import Loopback
from flowslot.protocol.session import Session
from flowslot_sim.events import Event
from flowslot_sim.observed import Observer
from flowslot_sim.plane.daemon import DaemonNode
from flowslot_sim.plane.switch import SwitchNode
from flowslot_sim.plane.wire import Clock, Delays, Stream
from flowslot_sim.simulation import Simulation

MakeAllocator = Callable[[PolicyOptions], Allocator]


ONE_MS = Delays()


@dataclass(frozen=True, slots=True)
class Plant:
    """What the control plane is like. Times in ns.

    `target`: part of the links that is given out. `skew_ppm`: clocks run fast or slow by up to so
    much, and show times that are up to an hour apart. `coalesce_ns`: as in ArbiterConfig.
    `kernel_top_up`: flows use what others leave without being told to.
    """

    delays: Delays = ONE_MS
    slot_ns: Nanos = DEFAULT_SLOT
    target: float = 0.96
    skew_ppm: float = 0.0
    coalesce_ns: Nanos = COALESCE_NS
    lease_slots: int = LEASE_SLOTS
    kernel_top_up: bool = True


class Messages:
    """See Control. `switches`, by name, and `daemons`, by host, may be killed and begun anew."""

    def __init__(
        self,
        sim: Simulation,
        make_allocator: MakeAllocator,
        options: PolicyOptions,
        plant: Plant,
        seed: int,
    ) -> None:
        self._sim = sim
        self._plant = plant
        self._make_own = partial(make_allocator, replace(options, partial=True))
        self._random = np.random.default_rng([seed, 7])
        self._session = 0
        self._names = 0
        self.observer = Observer(sim)
        self.kernel = FluidKernel(sim, self.observer, plant.kernel_top_up)
        world = sim.world
        held = world.switch_of or ("s1",) * len(world.links)
        links_of: dict[str, list[int]] = {}
        for link, switch in enumerate(held):
            if switch is not None:
                links_of.setdefault(switch, []).append(link)
        at_switches = beside_others(options) if len(links_of) > 1 else options
        config = ArbiterConfig(
            target=plant.target,
            slot_ns=plant.slot_ns,
            lease_ns=Nanos(plant.lease_slots * plant.slot_ns),
            ack_timeout_ns=Nanos(2 * plant.lease_slots * plant.slot_ns),
            coalesce_ns=plant.coalesce_ns,
        )
        self._config = config
        self.switches = {
            name: SwitchNode(
                events=sim.events,
                clock=self._clock(),
                links=links,
                capacity=world.capacity,
                make_allocator=partial(make_allocator, at_switches),
                config=config,
            )
            for name, links in links_of.items()
        }
        mine: dict[str, list[int]] = {host: [] for host in world.hosts}
        for b, bunch in enumerate(self.observer.bunches):
            mine[bunch.host].append(b)
        self._mine = mine
        self._messages = 0
        self.daemons = {host: self._daemon(host) for host in mine if mine[host]}

    # --- Control

    def start(self) -> None:
        """See Control. Everything is up before the jobs begin."""
        for host, daemon in self.daemons.items():
            daemon.start(self._sim.now)
            self._slot(host, self._sim.now + int(self._random.integers(self._plant.slot_ns)))

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
            self._sim.events.at(now, partial(self._touch, host, its))

    def _touch(self, host: str, bunches: list[int], now: Nanos) -> None:
        self.daemons[host].touched(now, bunches)

    def _slot(self, host: str, at: int) -> None:
        def tick(now: Nanos) -> None:
            self.daemons[host].on_slot(now)
            self._slot(host, now + self._plant.slot_ns)

        self._sim.events.at(at, tick)

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
        self._messages += old.messages
        self.daemons[host] = self._daemon(host)
        self.daemons[host].start(now)
        self.daemons[host].touched(now, [b for b in self._mine[host] if self.observer.inc[b]])

    # --- evidence

    def counts(self) -> list[int]:
        """Granted, refused, pre-empted and expired, of all arbiters (of daemons: in this life)."""
        switches = [switch.counts() for switch in self.switches.values()]
        counts = [daemon.host.own_counts for daemon in self.daemons.values()]
        own = [[c.granted, c.refused, c.preempted, 0] for c in counts]
        return [sum(each) for each in zip(*switches, *own, strict=True)]

    def messages(self) -> int:
        """Messages sent, in both directions."""
        up = self._messages + sum(daemon.messages for daemon in self.daemons.values())
        return up + sum(switch.messages for switch in self.switches.values())

    # --- how

    def _clock(self) -> Clock:
        hour, ppm = 3600 * 10**9, self._plant.skew_ppm
        return Clock(int(self._random.integers(hour)), float(self._random.uniform(-ppm, ppm)))

    def _daemon(self, host: str) -> DaemonNode:
        self._names += 1
        crossed = {link for b in self._mine[host] for link in self.observer.bunches[b].links}
        switches = [s for s in self.switches.values() if not crossed.isdisjoint(s.links)]
        sessions = []
        for switch in switches:
            self._session += 1 << 20
            sessions.append(
                Session(
                    f"{host}-{self._names}",
                    switch.links,
                    switch.names,
                    slot_ns=self._plant.slot_ns,
                    lease_ns=self._config.lease_ns,
                    first_session=self._session,
                )
            )
        return DaemonNode(
            events=self._sim.events,
            clock=self._clock(),
            observer=self.observer,
            mine=self._mine[host],
            kernel=self.kernel,
            host=Host(sessions, lambda now: self._own(host, now), self._plant.slot_ns),
            switches=switches,
            open_stream=self._stream,
            random=self._random,
        )

    def _own(self, host: str, now: Nanos) -> Loopback:
        world = self._sim.world
        return Loopback(
            now,
            world.egress(host),
            world.capacity,
            allocator=self._make_own(),
            config=replace(self._config, coalesce_ns=Nanos(0)),
        )

    def _stream(self) -> Stream:
        return Stream(self._sim.events, self._random, self._plant.delays)


@dataclass(slots=True)
class _Entry:
    """What the kernel of a host has in force for a bunch."""

    rate: float = math.nan
    covered: Sequence[int] = ()
    until: int = 0


class FluidKernel:
    """Rates in force, by bunch; one that is not renewed in time is void, as if never granted."""

    def __init__(self, sim: Simulation, observer: Observer, top_up: bool) -> None:
        self._sim = sim
        self._top_up = top_up
        self._observer = observer
        self._entries = [_Entry() for _ in observer.bunches]
        self._rows = [np.array(bunch.rows, np.intp) for bunch in observer.bunches]
        self._looks: list[Event | None] = [None] * len(self._entries)
        self.writes = 0
        """Rates put into force."""

    def put(self, now: Nanos, b: int, grant: Granted, covered: Sequence[int], until: Nanos) -> None:
        """Bunch b has this rate until then, unless it is renewed; NaN: it is left alone. `covered`:
        those of its links that live arbiters hold."""
        self.writes += 1
        self._entries[b] = _Entry(grant.rate, covered, until)
        self.share_out(b)
        self._watch(b)

    def renew(self, bunches: Iterable[int], until: Nanos) -> None:
        """What these have stays in force until then; what is void stays void."""
        for b in bunches:
            entry = self._entries[b]
            if entry.until > self._sim.now:
                entry.until = until
                self._watch(b)

    def share_out(self, b: int) -> None:
        """Divide a bunch's rate among its flows by what they have left."""
        rate, rows = self._entries[b].rate, self._rows[b]
        if math.isnan(rate):
            reserved: NDArray[np.float64] = np.zeros(len(rows))
        else:
            reserved = self._observer.split_one(b, rate)
        unbounded = self._top_up or math.isnan(rate)
        ceiling = np.full(len(rows), math.inf) if unbounded else reserved
        self._sim.network.pace(rows, reserved, ceiling)

    def in_force(self, b: int) -> bool:
        """An arbiter's rate, more than nothing, is in force for a bunch."""
        return self._entries[b].rate > 0

    def guaranteed(self) -> NDArray[np.float64]:
        """What flows are in force to send at by live arbiters' leave, on each link, float64[L]."""
        sums = np.zeros(len(self._sim.world.links))
        for entry in self._entries:
            if not math.isnan(entry.rate):
                sums[list(entry.covered)] += entry.rate
        return sums

    def _watch(self, b: int) -> None:
        """Void it when its time is over."""
        look, until = self._looks[b], Nanos(self._entries[b].until)
        if look is None or look.at > until:
            if look is not None:
                look.cancel()
            self._looks[b] = self._sim.events.at(until, lambda now: self._look(now, b))

    def _look(self, now: Nanos, b: int) -> None:
        entry = self._entries[b]
        self._looks[b] = None
        if math.isnan(entry.rate):
            return
        if entry.until <= now:
            self._entries[b] = _Entry()
            self.share_out(b)
        else:
            self._watch(b)
