# SPDX-License-Identifier: Apache-2.0
"""What is simulated: links, and jobs with their flows. Made from a scenario file, or by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flowslot.model.units import SECOND, Nanos, goodput
from flowslot.policy.mlcc.peers import Group
from flowslot_scenario.job import Job
from flowslot_scenario.scenario import Scenario
from flowslot_sim.network import FlowSpec


@dataclass(frozen=True, slots=True)
class Worker:
    """A process that computes, and then begins to send by some flows of its job. When its sockets
    have taken all of that, and the flows that it awaits have brought everything, it computes again.
    Places in the job's `flows`."""

    begins: tuple[int, ...]
    awaits: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SimJob:
    """A training job: computes, then its flows send, again and again.

    `flows`: their `preds` are places in this tuple. `compute_ns`: length of the computation phase
    of an iteration, by its number. `latency_ns`: from the last byte of an iteration to its end.
    `ideal_s`: iteration time alone on the network. `host`s of flows are names. `workers`: nobody
    waits for all others, so they may fall out of step; flows that none of them begins, a server's,
    begin once all have begun. None: all flows begin together, and are waited for together.
    """

    name: str
    flows: tuple[FlowSpec, ...]
    compute_ns: Callable[[int], int]
    start_ns: Nanos
    ideal_s: float
    latency_ns: int = 0
    workers: tuple[Worker, ...] = ()


@dataclass(frozen=True, slots=True)
class Background:
    """Traffic of no job, which yields to none: `rate`, payload bytes/s, on a link (its index) from
    `begins_ns` until `ends_ns`. What comes and goes is several of these."""

    link: int
    rate: float
    begins_ns: int = 0
    ends_ns: int = 1 << 62


@dataclass(frozen=True, slots=True)
class World:
    """`capacity`: goodput of each link, payload bytes/s. `hosts`: every one that has a daemon.
    `switch_of`: which switch process holds each link; None: there is none. `background`: in no
    scenario file, as the lab has none. `queue_us`: how long each link's buffer lasts at its rate;
    none: kernels top up at once."""

    links: tuple[str, ...]
    capacity: tuple[float, ...]
    hosts: tuple[str, ...]
    jobs: tuple[SimJob, ...]
    switch_of: tuple[str | None, ...] = ()
    background: tuple[Background, ...] = ()
    queue_us: tuple[float, ...] = ()

    def background_at(self, now: int) -> list[float]:
        """Rate of all of it on each link, payload bytes/s."""
        rates = [0.0] * len(self.links)
        for one in self.background:
            if one.begins_ns <= now < one.ends_ns:
                rates[one.link] += one.rate
        return rates

    def egress(self, host: str) -> tuple[int, ...]:
        """The links by which the host's flows leave it."""
        first = {f.links[0]: None for job in self.jobs for f in job.flows if f.host == host}
        return tuple(first)


def from_scenario(scenario: Scenario, use_switch: bool = True, per_rack: bool = False) -> World:
    """A scenario's network and jobs. `use_switch`: with switch processes; `per_rack`: one for each
    rack."""
    seed, links = scenario.seed, tuple(scenario.directed_links())
    holder = scenario.held_by(per_rack)
    switch_of = tuple(holder[link] if use_switch else None for link in links)
    index = {link: i for i, link in enumerate(links)}
    capacity = tuple(goodput(scenario.capacity_bps(link)) for link in links)

    def path(src: str, dst: str) -> tuple[int, ...]:
        return tuple(index[link] for link in scenario.path(src, dst))

    jobs = tuple(_job(scenario, job, path, seed) for job in scenario.jobs)
    hosts = tuple(host.name for host in scenario.hosts)
    resolved = scenario.directed_links().values()
    queue_us = tuple(link.buffer_bytes * 8e6 / link.capacity_bps for link in resolved)
    return World(links, capacity, hosts, jobs, switch_of, queue_us=queue_us)


Path = Callable[[str, str], tuple[int, ...]]


def _job(scenario: Scenario, job: Job, path: Path, seed: int) -> SimJob:
    flows = ring(job, path) if job.is_ring else servers(job, path)
    return SimJob(
        name=job.name,
        flows=tuple(flows),
        compute_ns=lambda iteration: job.compute_ns(seed, iteration),
        start_ns=Nanos(round(job.start_s * SECOND)),
        ideal_s=scenario.ideal_s(job),
        latency_ns=round(job.rounds * scenario.rtt_us * 1000),
        workers=tuple(_worker(flows, rank) for rank in range(job.workers)),
    )


def _worker(flows: list[FlowSpec], rank: int) -> Worker:
    groups = [(k, flow.group) for k, flow in enumerate(flows) if flow.group is not None]
    return Worker(
        begins=tuple(k for k, group in groups if group.rank == rank),
        awaits=tuple(k for k, group in groups if group.peer == rank),
    )


def ring(job: Job, path: Path) -> list[FlowSpec]:
    """Each rank has its own chunk; of the others it forwards slice by slice what the rank before
    it has sent."""
    chunk = job.slice_bytes * job.slices
    flows = []
    for rank, host in enumerate(job.hosts):
        peer = (rank + 1) % job.workers
        to = job.hosts[peer]
        for channel in range(job.flows):
            before = (rank - 1) % job.workers * job.flows + channel
            flows.append(
                FlowSpec(
                    host,
                    path(host, to),
                    total=2 * (job.workers - 1) * chunk,
                    own=chunk,
                    head=chunk - job.slice_bytes,
                    preds=(before,),
                    to=to,
                    group=Group(job.name, "ring", rank, peer, channel),
                )
            )
    return flows


def servers(job: Job, path: Path) -> list[FlowSpec]:
    """Every worker pushes; the sums of a key go back when all have pushed it (with a barrier: when
    all have pushed everything)."""
    share = float(job.slice_bytes * job.slices // len(job.server_hosts))
    behind = -float("inf") if job.barrier else -float(job.slice_bytes)
    workers = [(r, host, c) for r, host in enumerate(job.hosts) for c in range(job.sockets)]
    flows: list[FlowSpec] = []
    for at, server in enumerate(job.server_hosts, start=job.workers):
        every = tuple(range(len(flows), len(flows) + len(workers)))
        flows += [
            FlowSpec(
                host,
                path(host, server),
                share,
                to=server,
                group=Group(job.name, "push", rank, at, channel),
            )
            for rank, host, channel in workers
        ]
        flows += [
            FlowSpec(
                server,
                path(server, host),
                share,
                head=behind,
                preds=every,
                to=host,
                group=Group(job.name, "pull", at, rank, channel),
            )
            for rank, host, channel in workers
        ]
    return flows
