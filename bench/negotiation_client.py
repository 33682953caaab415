# SPDX-License-Identifier: Apache-2.0
"""One daemon of bench.negotiation: a process of its own, driven by the wall clock.

It is what a daemon negotiates with (FailoverDomain: a stream to each switch process, the least of
what they grant), without flows, kernel or policy. What it would grant itself while no switch
process is there does not count: its own arbiter holds a link here that no flow crosses.
"""

import argparse
import asyncio
import json
import math
import random
import secrets
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
import uvloop

from flowslot.arbiter import LEASE_SLOTS, ArbiterConfig
from flowslot.grantbook import Granted
from flowslot.messages import Demand
from flowslot.policy import registry
from flowslot.topology import Topology, parse_topology
from flowslot.units import MILLISECOND, Nanos
from flowslotd.clock import own_moment
from flowslotd.domain import FailoverDomain
from flowslotd.domain_base import DomainStats, OnGrants
from flowslotd.domain_grpc import GrpcDomain
from flowslotd.domain_local import LocalDomain

SLOT_NS = Nanos(60 * MILLISECOND)
PERIOD_S = (0.210, 0.290, 0.370, 0.430)  # of the jobs, no common divisor near a slot
JOBS = len(PERIOD_S)
BUSY = {"phases": 0.2, "turns": 0.2, "contended": 0.5, "aligned": 0.5}  # part of its period
SPREAD_S = 0.002
FLOW_BYTES = 400_000


def rack(host: int, hosts: int, switches: int) -> int:
    """Which switch process holds the links of this host: each those of as many hosts."""
    return host * switches // hosts


def peers(host: int, hosts: int, switches: int) -> list[int]:
    """The hosts that this one sends to. With one switch process all others; with more all of its
    rack and as many outside, each host's share, so that half of its paths have two arbiters."""
    mine = rack(host, hosts, switches)
    racks = [rack(j, hosts, switches) for j in range(hosts)]
    near = [j for j in range(hosts) if j != host and racks[j] == mine]
    far = [j for j in range(hosts) if racks[j] != mine]
    turn = host % max(len(far), 1)
    return near + (far[turn:] + far[:turn])[: len(near)]


def topology_text(hosts: int, ports: Sequence[int]) -> str:
    """A topology file: a switch process at each of these ports, with its hosts' links."""
    text = ""
    for n, port in enumerate(ports, 1):
        text += f'[[switches]]\nname = "s{n}"\naddress = "127.0.0.1:{port}"\n'
    for i in range(hosts):
        switch = f"s{rack(i, hosts, len(ports)) + 1}"
        up, down = f"h{i}->{switch}", f"{switch}->h{i}"
        text += (
            f'[[hosts]]\nname = "h{i}"\n[[hosts.nics]]\nname = "eth0"\n'
            f'addresses = ["10.78.0.{i + 1}"]\nup = "{up}"\ndown = "{down}"\n'
        )
        for link in (up, down):
            text += f'[[links]]\nname = "{link}"\ncapacity_gbps = 10.0\nswitch = "{switch}"\n'
    return text


def open_domain(
    topology: Topology, host: int, on_grants: OnGrants, stats: DomainStats
) -> FailoverDomain:
    """A daemon's domain, with a stream to every switch process of the topology."""
    allocator = registry.get("stagger").allocator
    assert allocator is not None

    def nothing(_: OnGrants) -> LocalDomain:
        return LocalDomain(
            (len(topology.links),),
            [*topology.capacity(), 1.0],
            allocator=allocator(registry.PolicyOptions(partial=True)),
            config=ArbiterConfig(slot_ns=SLOT_NS),
            on_grants=lambda now, grants: None,
            stats=DomainStats(),
        )

    daemon = f"h{host}-{secrets.token_hex(4)}"
    remotes = [
        GrpcDomain(
            topology,
            switch,
            daemon=daemon,
            slot_ns=SLOT_NS,
            lease_ns=Nanos(LEASE_SLOTS * SLOT_NS),
            stats=stats,
        )
        for switch in topology.switches.values()
    ]
    return FailoverDomain(remotes, nothing, on_grants, stats)


class Bundle(NamedTuple):
    """Flows of one job on one path."""

    job: int
    links: tuple[int, int]
    flows: int


class Client:
    """The bundles of one host, driven by the wall clock; times every first grant."""

    def __init__(self, topology: Path, host: int, hosts: int, flows: int, pattern: str) -> None:
        parsed = parse_topology(topology.read_text(), str(topology))
        self.stats = DomainStats()
        self.domain = open_domain(parsed, host, self._on_grants, self.stats)
        self.latency_ns: list[int] = []
        self.unanswered = 0
        self._pattern = pattern
        self._moment = own_moment(host, SLOT_NS)
        self._asked: dict[int, int] = {}
        self._inc = [1] * JOBS
        self._active = [False] * JOBS
        self._random = random.Random(host)
        others = peers(host, hosts, len(parsed.switches))
        # As daemons do: flows of a job on one path are one reservation.
        bundles = Counter((f % JOBS, others[f // JOBS % len(others)]) for f in range(flows))
        link, nics = parsed.link_index, [parsed.hosts[f"h{j}"].nics[0] for j in range(hosts)]
        self._bundles = {
            i: Bundle(job, (link[nics[host].up], link[nics[other].down]), size)
            for i, ((job, other), size) in enumerate(bundles.items(), host * 100_000)
        }

    @property
    def waiting(self) -> int:
        """Bundles that are active and have nothing yet."""
        return len(self._asked)

    async def run(self, seconds: float) -> None:
        await self.domain.start()
        end = time.time() + seconds
        await asyncio.gather(self._slots(end), *(self._job(j, end) for j in range(JOBS)))
        await self.domain.close()

    async def _slots(self, end: float) -> None:
        while time.time() < end:
            await asyncio.sleep((SLOT_NS - (time.time_ns() - self._moment) % SLOT_NS) / 1e9)
            self.domain.beat(Nanos(time.monotonic_ns()))
            self._say([j for j, active in enumerate(self._active) if active])

    async def _job(self, job: int, end: float) -> None:
        aligned, turns = self._pattern == "aligned", self._pattern == "turns"
        period = 4 * SLOT_NS / 1e9 if aligned else PERIOD_S[0 if turns else job]
        spread = 0.0 if aligned else SPREAD_S
        offset = job / JOBS * period if turns else 0.0
        self._turn(job, False)
        while time.time() < end:
            start = ((time.time() - offset) // period + 1) * period + offset
            start += self._random.uniform(0, spread)
            await asyncio.sleep(start - time.time())
            self._inc[job] += 1
            self._turn(job, True)
            await asyncio.sleep(BUSY[self._pattern] * period)
            self._turn(job, False)

    def _turn(self, job: int, active: bool) -> None:
        self._active[job] = active
        if not active:  # as daemons do when a job's phase has ended
            self.domain.give_back([i for i, bundle in self._bundles.items() if bundle.job == job])
        now = time.monotonic_ns()
        for i, bundle in self._bundles.items():
            if bundle.job == job:
                asked = self._asked.pop(i, None)
                if asked is not None:  # not granted in all its phase: it took at least so long
                    self.unanswered += 1
                    self.latency_ns += [now - asked] * bundle.flows
                if active and not self.domain.grant(i).rate > 0:
                    self._asked[i] = now
        self._say([job])

    def _say(self, jobs: Sequence[int]) -> None:
        now = Nanos(time.monotonic_ns())
        demands = [
            Demand(
                i,
                self._inc[job],
                f"job{job}",
                links,
                flows * FLOW_BYTES if self._active[job] else 0,
                math.inf,
                0,
                int(PERIOD_S[job] * 1e9),
            )
            for i, (job, links, flows) in self._bundles.items()
            if job in jobs
        ]
        if demands:
            self.domain.demand(now, demands)

    def _on_grants(self, now: Nanos, grants: Sequence[Granted]) -> None:
        for i, rate, *_ in grants:
            if rate > 0 and i in self._asked:
                self.latency_ns += [now - self._asked.pop(i)] * self._bundles[i].flows


async def report(args: argparse.Namespace) -> None:
    one = Client(args.topology, args.host, args.hosts, args.flows, args.pattern)
    before = psutil.Process().cpu_times()
    await one.run(args.seconds)
    after = psutil.Process().cpu_times()
    stats = one.stats
    json.dump(
        {
            "latency_ns": one.latency_ns,
            "round_trip": stats.round_trip.summary(),
            "unanswered": one.unanswered + one.waiting,
            "cpu_s": sum(after[:2]) - sum(before[:2]),
            "messages": stats.messages_in + stats.messages_out,
            "expired": stats.expired,
            "error": stats.last_error,
        },
        sys.stdout,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--topology", type=Path, required=True)
    parser.add_argument("--host", type=int, required=True)
    parser.add_argument("--hosts", type=int, required=True)
    parser.add_argument("--flows", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--pattern", choices=BUSY, required=True)
    uvloop.run(report(parser.parse_args()))


if __name__ == "__main__":
    main()
