# SPDX-License-Identifier: Apache-2.0
"""One daemon of bench.negotiation: a process of its own, driven by the wall clock.

It is what a daemon negotiates with (ArbiterRates: a stream to each switch process, the least of
what they grant), without flows, kernel or policy. What it grants itself while no switch process is
there does not count.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import psutil
import uvloop

from flowslot.model.topology import Topology
from flowslot.model.units import MILLISECOND, SECOND, Nanos
from flowslot.policy import registry
from flowslot.protocol.aggregate import Aggregate, report, take
from flowslot.protocol.grants import Granted
from flowslot.protocol.host import Host
from flowslotd import config
from flowslotd.clock import monotonic
from flowslotd.engine import open_source
from flowslotd.flows.flow_table import FlowTable
from flowslotd.negotiate.arbiter import ArbiterRates
from flowslotd.passes import own_moment

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


class Aggregates:
    """In the place of the daemon's, which are of its flow table: these are made up."""

    def __init__(self, aggregates: Iterable[Aggregate]) -> None:
        self.by_id = {aggregate.id: aggregate for aggregate in aggregates}

    def report(
        self,
        now: Nanos,
        host: Host,
        *,
        small: bool,
        lent: Callable[[], Collection[int]],
        tops_up: bool,
    ) -> None:
        report(now, host, self.by_id, small=small)

    def grant(self, grants: Sequence[Granted]) -> None:
        take(self.by_id, grants)

    def waiting(self) -> bool:
        return any(aggregate.reported is None for aggregate in self.by_id.values())


class Client:
    """The aggregates of one host, driven by the wall clock; times every first grant.

    Its flows need as long as they would alone, as if all that is granted too little were topped up:
    what happens does not hang on how quick the negotiation is. What the arbiters hear of it, and
    when, is core's business.
    """

    def __init__(
        self, topology: Path, host: int, hosts: int, *, ranks: int, flows: int, pattern: str
    ) -> None:
        name = f"h{host}"
        file = topology.with_name(f"{name}.toml")
        file.write_text(f'host = "{name}"\nmode = "enforce"\ntopology = "{topology.name}"\n')
        read = config.load(file)
        self.latency_ns: list[int] = []
        self.unanswered = 0
        self._pattern = pattern
        self._moment = own_moment(host, SLOT_NS)
        self._asked: dict[int, int] = {}
        self._random = random.Random(host)
        switches = len(read.topology.switches)
        self._peers = peers(host, hosts, switches, ranks)
        self._group = group(host, hosts, switches, ranks)
        self._shift = self._group * ranks / hosts  # groups do not begin together
        self._aggregates = Aggregates(self._make(read.topology, host, flows))
        made = open_source(
            read,
            registry.get("stagger"),
            FlowTable(read.topology, name),
            on_rates=self._on_rates,
            on_bug=self._on_bug,
        )
        self.source = cast(ArbiterRates, made)
        self.source._aggregates = cast(Any, self._aggregates)

    def _make(self, topology: Topology, host: int, flows: int) -> Iterable[Aggregate]:
        """As daemons do: flows of a job on one path are one reservation."""
        others, link, by_name = self._peers, topology.link_index, topology.hosts
        aggregates = Counter((f % JOBS, others[f // JOBS % len(others)]) for f in range(flows))
        up = link[by_name[f"h{host}"].nics[0].up]
        busy, goodput = BUSY[self._pattern], topology.capacity()[up]
        for i, ((job, other), size) in enumerate(aggregates.items(), host * 100_000):
            yield Aggregate(
                i,
                self._name(job),
                (up, link[by_name[f"h{other}"].nics[0].down]),
                inc=1,
                flows=size,
                # So many that the job, alone on its links, needs that part of its period.
                target=busy * self._period_s(job) * goodput * size * JOBS / flows,
                period=int(self._period_s(job) * SECOND),
            )

    def _on_bug(self, kind: str, error: BaseException) -> None:
        raise error

    @property
    def waiting(self) -> int:
        """Aggregates that are active and have nothing yet."""
        return len(self._asked)

    async def run(self, seconds: float) -> None:
        await self.source.start()
        end = time.time() + seconds
        await asyncio.gather(self._slots(end), *(self._job(j, end) for j in range(JOBS)))
        await self.source.close()

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
            self._pass(small=self.source.beat(monotonic()))

    async def _job(self, job: int, end: float) -> None:
        period = self._period_s(job)
        spread = 0.0 if self._pattern == "aligned" else SPREAD_S
        turns = self._pattern == "turns"
        offset = period * ((job + self._shift) / JOBS if turns else self._shift)
        mine = [a for a in self._aggregates.by_id.values() if a.job == self._name(job)]
        while time.time() < end:
            start = ((time.time() - offset) // period + 1) * period + offset
            start += self._random.uniform(0, spread)
            await asyncio.sleep(start - time.time())
            now = monotonic()
            for aggregate in mine:
                aggregate.active, aggregate.onset = True, now
                if self._is_negotiating and not aggregate.rate > 0:
                    self._asked[aggregate.id] = now
            self._pass()
            await asyncio.sleep(BUSY[self._pattern] * period)
            self._end(mine)
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
        now = monotonic()
        for aggregate in self._aggregates.by_id.values():
            part = (now - aggregate.onset) / (BUSY[self._pattern] * aggregate.period)
            aggregate.remaining = (
                aggregate.target * max(1.0 - part, 0.0) if aggregate.active else 0.0
            )
        self.source.negotiate(now, 0, moved=True, small=small)

    # --- what is granted

    @property
    def _is_negotiating(self) -> bool:
        return self.source.host.own is None

    def _on_rates(self, now: Nanos) -> None:
        for i in list(self._asked) if self._is_negotiating else ():
            aggregate = self._aggregates.by_id[i]
            if aggregate.rate > 0:
                self.latency_ns += [now - self._asked.pop(i)] * aggregate.flows
        if self.source.waiting:
            self._pass()


async def run(args: argparse.Namespace) -> None:
    """Print what came of it."""
    work = {"ranks": args.ranks, "flows": args.flows, "pattern": args.pattern}
    one = Client(args.topology, args.host, args.hosts, **work)
    before = psutil.Process().cpu_times()
    await one.run(args.seconds)
    after = psutil.Process().cpu_times()
    status = one.source.describe()
    said = status["domain"]
    json.dump(
        {
            "latency_ns": one.latency_ns,
            "round_trip": said["round_trip"],
            "unanswered": one.unanswered + one.waiting,
            "cpu_s": sum(after[:2]) - sum(before[:2]),
            "messages": said["messages_in"] + said["messages_out"],
            "expired": status["reservations"]["expired"],
            "error": said["error"],
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
    uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
