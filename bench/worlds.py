# SPDX-License-Identifier: Apache-2.0
"""Mixes of jobs on one link, and on a network of two tiers: worlds from a name and a seed.

Iteration times and volumes are those that the design of the default policy was tried with: sizes
of well-known models, on links where the jobs fit in well, hardly, or not at all.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from flowslot.model.slot import DEFAULT_SLOT
from flowslot.model.units import SECOND, Nanos
from flowslot.policy.mlcc.peers import Group
from flowslot_scenario.job import compute_ns
from flowslot_sim.network import FlowSpec
from flowslot_sim.simulation import Progress, Simulation
from flowslot_sim.world import SimJob, World

MODEL_MB = {"vgg19": 549, "vgg16": 528, "resnet50": 98, "gpt2": 1200, "bert": 450}
JITTER = 0.02


@dataclass(frozen=True, slots=True)
class Mix:
    """Jobs on one link of `gbps`: (model, iteration time alone in ms); `factor`: of the volumes."""

    gbps: float
    factor: float
    jobs: tuple[tuple[str, float], ...]


MIXES = {
    "A": Mix(50, 1.5, (("vgg19", 329), ("vgg16", 329))),
    "B": Mix(50, 1.5, (("vgg19", 329), ("vgg16", 329), ("resnet50", 164.5))),
    "C": Mix(25, 1.0, (("vgg19", 600), ("bert", 430), ("resnet50", 170))),
    "D": Mix(10, 1.0, (("gpt2", 2400), ("vgg19", 1300), ("resnet50", 400))),
    "E": Mix(25, 1.0, (("vgg19", 1200), ("vgg16", 1300), ("bert", 1000), ("resnet50", 300))),
    "F": Mix(25, 1.0, (("vgg19", 300), ("bert", 240))),
    "G": Mix(10, 1.0, (("vgg16", 512), ("resnet50", 141))),
    "H": Mix(
        25,
        1.0,
        (
            ("vgg19", 600),
            ("vgg16", 500),
            ("bert", 430),
            ("resnet50", 170),
            ("gpt2", 1000),
            ("vgg16", 700),
        ),
    ),
}
LOADS = {"lo": (0.03, 0.08), "mid": (0.05, 0.14), "hi": (0.08, 0.20)}
"""Each job's communication, as a part of its iteration alone on the two tiers."""
GPUS, NIC_GBPS, UPLINK_GBPS = 8, 10.0, 20.0


@dataclass(frozen=True, slots=True)
class Size:
    """How many racks, servers in each, and jobs on all of them."""

    racks: int = 4
    servers: int = 5
    jobs: int = 30


SMALL = Size()


def rate(gbps: float) -> float:
    """Bytes/s."""
    return gbps * 1e9 / 8


def on_one_link(name: str, seed: int) -> World:
    """A mix; jobs start at random within an iteration."""
    mix = MIXES[name]
    jobs = []
    for k, (model, period_ms) in enumerate(mix.jobs):
        flow = FlowSpec(f"h{k}", (0,), MODEL_MB[model] * 1e6 * mix.factor)
        ideal_s = period_ms / 1e3
        compute_s = ideal_s - flow.total / rate(mix.gbps)
        jobs.append(_job(f"{model}-{k}", (flow,), (compute_s, ideal_s), seed))
    hosts = tuple(f"h{k}" for k in range(len(jobs)))
    return World(("link",), (rate(mix.gbps),), hosts, tuple(jobs))


def _job(name: str, flows: tuple[FlowSpec, ...], times: tuple[float, float], seed: int) -> SimJob:
    """`times`: of the computation, and of an iteration alone, s. Starts within the first one."""
    compute_s, ideal_s = times
    draw = np.random.default_rng([seed, zlib.crc32(name.encode())])
    start = Nanos(int(draw.uniform(0, ideal_s) * SECOND))
    return SimJob(name, flows, partial(_compute_ns, seed, name, compute_s), start, ideal_s)


def _compute_ns(seed: int, name: str, compute_s: float, iteration: int) -> int:
    return compute_ns(seed, name, compute_s, JITTER, iteration)


class _Tiers:
    """Servers in racks; each has a link up and one down, and so has each rack."""

    def __init__(self, size: Size) -> None:
        self.links: list[str] = []
        self.capacity: list[float] = []
        self._servers = size.servers
        self.hosts = tuple(f"h{i}" for i in range(size.racks * size.servers))
        for host in range(len(self.hosts)):
            rack = host // size.servers
            self._add(f"h{host}->r{rack}", f"r{rack}->h{host}", NIC_GBPS)
        for rack in range(size.racks):
            self._add(f"r{rack}->core", f"core->r{rack}", UPLINK_GBPS)
        self._index = {link: i for i, link in enumerate(self.links)}

    def _add(self, up: str, down: str, gbps: float) -> None:
        self.links += [up, down]
        self.capacity += [rate(gbps)] * 2

    def path(self, src: int, dst: int) -> tuple[int, ...]:
        """Links between two hosts."""
        a, b = src // self._servers, dst // self._servers
        middle = [f"r{a}->core", f"core->r{b}"] if a != b else []
        return tuple(self._index[x] for x in (f"h{src}->r{a}", *middle, f"r{b}->h{dst}"))

    def alone_s(self, flows: tuple[FlowSpec, ...]) -> float:
        """Seconds that the busiest link needs."""
        load = np.zeros(len(self.links))
        for flow in flows:
            load[list(flow.links)] += flow.total
        return float((load / np.array(self.capacity)).max())


def on_two_tiers(load: str, seed: int, size: Size = SMALL) -> World:
    """Half of the jobs are rings of 2 to 4 servers, half have 2 parameter servers and 2 workers."""
    tiers, low_high = _Tiers(size), LOADS[load]
    draw = np.random.default_rng([seed, 1000])
    free = np.full(len(tiers.hosts), GPUS)
    jobs = []
    for k in range(size.jobs):
        model = list(MODEL_MB)[draw.integers(len(MODEL_MB))]
        ring = k % 2 == 0
        members = int(draw.integers(2, 5)) if ring else 4
        places = draw.choice(np.flatnonzero(free > 0), members, replace=False).tolist()
        free[places] -= 1
        volume = MODEL_MB[model] * 1e6
        name = f"{'ring' if ring else 'ps'}-{model}-{k}"
        flows = tuple((_ring if ring else _servers)(tiers, name, places, volume))
        alone_s = tiers.alone_s(flows)
        ideal_s = alone_s / float(draw.uniform(*low_high))
        jobs.append(_job(name, flows, (ideal_s - alone_s, ideal_s), seed))
    return World(tuple(tiers.links), tuple(tiers.capacity), tiers.hosts, tuple(jobs))


def _ring(tiers: _Tiers, job: str, places: list[int], volume: float) -> list[FlowSpec]:
    n = len(places)
    return [
        FlowSpec(
            f"h{place}",
            tiers.path(place, places[(rank + 1) % n]),
            total=2 * (n - 1) / n * volume,
            own=volume / n,
            head=volume / n,
            preds=((rank - 1) % n,),
            to=f"h{places[(rank + 1) % n]}",
            group=Group(job, "ring", rank, (rank + 1) % n),
        )
        for rank, place in enumerate(places)
    ]


def _servers(tiers: _Tiers, job: str, places: list[int], volume: float) -> list[FlowSpec]:
    """Of every server: what it sends on is what all workers have pushed to it. Ranks are places."""
    servers, workers = places[:2], places[2:]
    pushes = [
        FlowSpec(
            f"h{worker}",
            tiers.path(worker, server),
            volume / 2,
            to=f"h{server}",
            group=Group(job, "push", worker, server),
        )
        for server in servers
        for worker in workers
    ]
    pulls = [
        FlowSpec(
            f"h{server}",
            tiers.path(server, worker),
            volume / 2,
            preds=tuple(range(s * len(workers), (s + 1) * len(workers))),
            to=f"h{worker}",
            group=Group(job, "pull", server, worker),
        )
        for s, server in enumerate(servers)
        for worker in workers
    ]
    return pushes + pulls


WORLDS: dict[str, Callable[[int], World]] = {
    **{f"mix-{name.lower()}": partial(on_one_link, name) for name in MIXES},
    **{f"two-tier-{load}": partial(on_two_tiers, load) for load in LOADS},
}


def slowdowns(job: SimJob, progress: Progress, since_ns: float, now: int) -> list[float]:
    """Of the iterations that began at `since_ns` or later; one that is not over by `now` counts,
    with what it has taken so far, if none has taken longer: a job that starves must show."""
    done = [
        (ended - began) / SECOND / job.ideal_s
        for began, ended in zip(progress.began, progress.ends, strict=False)
        if began >= since_ns
    ]
    if len(progress.began) > len(progress.ends):
        so_far = (now - progress.began[-1]) / SECOND / job.ideal_s
        if so_far > max([1.0, *done]):
            done.append(so_far)
    return done


CRAWL = 0.05
"""Of a link's capacity. In a slot that should have been idle, what an older plan has for the first
two messages' time of 1 ms, until the new one is made, is a thirtieth."""


class IdleSlots:
    """Counts slots in which links stood still although flows had bytes to send.

    `slots`: so many are over. `idle`: in so many of them bytes waited from the beginning on, and
    not one was sent. `crawled`: in so many of them, the idle ones included, no flow ended and no
    link carried CRAWL of what it can. Made before the simulation runs.
    """

    def __init__(self, sim: Simulation, slot_ns: Nanos = DEFAULT_SLOT) -> None:
        self.slots = self.idle = self.crawled = 0
        self._sim = sim
        self._slot_ns = slot_ns
        self._carried = np.zeros(len(sim.world.links))
        self._whole = np.array(sim.world.capacity) * (slot_ns / SECOND)
        self._active = np.zeros(len(sim.flows), np.bool_)  # when the slot began
        sim.events.after(slot_ns, self._tick)

    def _tick(self, now: Nanos) -> None:
        """A slot is over."""
        active = self._sim.network.rows["active"]
        carried = self._sim.network.carried[:-1].copy()
        lately = carried - self._carried
        waited = bool(self._active.any())
        crawls = waited and bool(active[self._active].all())
        self.slots += 1
        self.idle += waited and float(lately.max(initial=0.0)) < 1.0
        self.crawled += crawls and bool((lately < CRAWL * self._whole).all())
        self._carried, self._active = carried, active.copy()
        self._sim.events.after(self._slot_ns, self._tick)
