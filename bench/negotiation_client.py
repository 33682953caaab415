# SPDX-License-Identifier: Apache-2.0
"""One daemon of bench.negotiation: a process of its own, driven by the wall clock.

It is what a daemon negotiates with (FailoverDomain: a stream to each switch process, the least of
what they grant), without flows, kernel or policy. What it would grant itself while no switch
process is there does not count: its own arbiter holds a link here that no flow crosses.
"""

import argparse
import asyncio
import json
import random
import secrets
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil
import uvloop
from flowslot.protocol.grantbook import Granted
from flowslotd.negotiate.domain import FailoverDomain
from flowslotd.negotiate.domain_base import DomainStats, OnGrants
from flowslotd.negotiate.domain_local import LocalDomain

from flowslot.arbiter import LEASE_SLOTS, ArbiterConfig
from flowslot.model.topology import Topology, parse_topology
from flowslot.model.units import MILLISECOND, SECOND, Nanos
from flowslot.policy import registry
from flowslot.protocol.aggregate import Aggregate, ended
from flowslotd.clock import monotonic, own_moment
from flowslotd.negotiate.switch_client import SwitchClient

SLOT_NS = Nanos(60 * MILLISECOND)
PERIOD_S = (0.210, 0.290, 0.370, 0.430)  # of the jobs, no common divisor near a slot
JOBS = len(PERIOD_S)
BUSY = {"phases": 0.2, "turns": 0.2, "contended": 0.5, "aligned": 0.5}  # part of its period
SPREAD_S = 0.002


def rack(host: int, hosts: int, switches: int) -> int:
    """Which switch process holds the links of this host: each those of as many hosts."""
    return host * switches // hosts


def group(host: int, hosts: int, switches: int, ranks: int) -> int:
    """Hosts of one group have all their jobs together: `ranks` hosts, as many of each rack."""
    of_rack = hosts // switches
    return host % of_rack * (hosts // ranks) // of_rack


def peers(host: int, hosts: int, switches: int, ranks: int) -> list[int]:
    """The hosts that this one sends to: all others of its group."""
    mine = group(host, hosts, switches, ranks)
    return [j for j in range(hosts) if j != host and group(j, hosts, switches, ranks) == mine]


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
        SwitchClient(
            topology,
            switch,
            host=f"h{host}",
            daemon=daemon,
            slot_ns=SLOT_NS,
            lease_ns=Nanos(LEASE_SLOTS * SLOT_NS),
            stats=stats,
        )
        for switch in topology.switches.values()
    ]
    return FailoverDomain(remotes, nothing, on_grants, stats)


class Client:
    """The aggregates of one host, driven by the wall clock; times every first grant.

    Its flows need as long as they would alone, as if all that is granted too little were topped up:
    what happens does not hang on how quick the negotiation is. What the arbiters hear of it, and
    when, is core's business.
    """

    def __init__(
        self, topology: Path, host: int, hosts: int, *, ranks: int, flows: int, pattern: str
    ) -> None:
        parsed = parse_topology(topology.read_text(), str(topology))
        self.stats = DomainStats()
        self.domain = open_domain(parsed, host, self._on_grants, self.stats)
        self.latency_ns: list[int] = []
        self.unanswered = 0
        self._pattern = pattern
        self._moment = own_moment(host, SLOT_NS)
        self._asked: dict[int, int] = {}
        self._random = random.Random(host)
        others = peers(host, hosts, len(parsed.switches), ranks)
        self._group = group(host, hosts, len(parsed.switches), ranks)
        self._shift = self._group * ranks / hosts  # groups do not begin together
        # As daemons do: flows of a job on one path are one reservation.
        aggregates = Counter((f % JOBS, others[f // JOBS % len(others)]) for f in range(flows))
        link, nics = parsed.link_index, [parsed.hosts[f"h{j}"].nics[0] for j in range(hosts)]
        busy, goodput = BUSY[pattern], parsed.capacity()[link[nics[host].up]]
        self._aggregates = {
            i: Aggregate(
                i,
                self._name(job),
                (link[nics[host].up], link[nics[other].down]),
                inc=1,
                flows=size,
                # So many that the job, alone on its links, needs that part of its period.
                target=busy * self._period_s(job) * goodput * size * JOBS / flows,
                period=int(self._period_s(job) * SECOND),
            )
            for i, ((job, other), size) in enumerate(aggregates.items(), host * 100_000)
        }

    @property
    def waiting(self) -> int:
        """Aggregates that are active and have nothing yet."""
        return len(self._asked)

    async def run(self, seconds: float) -> None:
        await self.domain.start()
        end = time.time() + seconds
        await asyncio.gather(self._slots(end), *(self._job(j, end) for j in range(JOBS)))
        await self.domain.close()

    # --- when

    def _name(self, job: int) -> str:
        return f"job{self._group}-{job}"

    def _period_s(self, job: int) -> float:
        if self._pattern == "aligned":
            return 4 * SLOT_NS / SECOND
        return PERIOD_S[0 if self._pattern == "turns" else job]

    async def _slots(self, end: float) -> None:
        while time.time() < end:
            await asyncio.sleep((SLOT_NS - (time.time_ns() - self._moment) % SLOT_NS) / SECOND)
            self._pass(small=self.domain.beat(monotonic()))

    async def _job(self, job: int, end: float) -> None:
        period = self._period_s(job)
        spread = 0.0 if self._pattern == "aligned" else SPREAD_S
        turns = self._pattern == "turns"
        offset = period * ((job + self._shift) / JOBS if turns else self._shift)
        aggregates = [
            aggregate for aggregate in self._aggregates.values() if aggregate.job == self._name(job)
        ]
        while time.time() < end:
            start = ((time.time() - offset) // period + 1) * period + offset
            start += self._random.uniform(0, spread)
            await asyncio.sleep(start - time.time())
            now = monotonic()
            for aggregate in aggregates:
                aggregate.active, aggregate.onset = True, now
                if not self.domain.grant(aggregate.id).rate > 0:
                    self._asked[aggregate.id] = now
            self._pass()
            await asyncio.sleep(BUSY[self._pattern] * period)
            self._end(aggregates)
            self._pass()

    # --- what flows do

    def _end(self, aggregates: Iterable[Aggregate]) -> None:
        now = monotonic()
        for aggregate in aggregates:
            aggregate.active = False
            asked = self._asked.pop(aggregate.id, None)
            if asked is not None:  # not granted in all its phase: it took at least so long
                self.unanswered += 1
                self.latency_ns += [now - asked] * aggregate.flows

    def _pass(self, *, small: bool = False) -> None:
        """Give back what jobs have that are done, and say what is new."""
        now, aggregates = monotonic(), self._aggregates.values()
        for aggregate in aggregates:
            part = (now - aggregate.onset) / (BUSY[self._pattern] * aggregate.period)
            aggregate.remaining = (
                aggregate.target * max(1.0 - part, 0.0) if aggregate.active else 0.0
            )
        self._take(self.domain.give_back([aggregate.id for aggregate in ended(aggregates)]))
        demands = [
            aggregate.demand(now) for aggregate in aggregates if aggregate.has_news(now, small)
        ]
        if demands:
            self.domain.demand(now, demands)

    # --- what is granted

    def _on_grants(self, now: Nanos, grants: Sequence[Granted]) -> None:
        self._take(grants)
        for i, rate, *_ in grants:
            if rate > 0 and i in self._asked:
                self.latency_ns += [now - self._asked.pop(i)] * self._aggregates[i].flows
        if any(aggregate.told is None for aggregate in self._aggregates.values()):
            self._pass()

    def _take(self, grants: Iterable[Granted]) -> None:
        for grant in grants:
            self._aggregates[grant.flow].take(grant)


async def report(args: argparse.Namespace) -> None:
    work = {"ranks": args.ranks, "flows": args.flows, "pattern": args.pattern}
    one = Client(args.topology, args.host, args.hosts, **work)
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
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--flows", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--pattern", choices=BUSY, required=True)
    uvloop.run(report(parser.parse_args()))


if __name__ == "__main__":
    main()
