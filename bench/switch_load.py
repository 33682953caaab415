# SPDX-License-Identifier: Apache-2.0
"""64 daemons in one process, for bench.switch_cost: core's sessions over gRPC, without flows."""

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import psutil
import uvloop

from bench.negotiation import percentiles
from flowslot.model.units import MILLISECOND, SECOND, Nanos
from flowslot.protocol.messages import Demand
from flowslot.protocol.session import Session
from flowslot_proto import flowslot_pb2 as pb
from flowslot_proto import methods
from flowslot_proto.convert import read_arbiter, write_daemon
from flowslot_proto.grpcio import grpc

DAEMONS, SLOT_NS, RATE = 64, Nanos(60 * MILLISECOND), 1.17e9
SPREAD_S, BUSY, JOIN_S = 0.002, 0.8, 0.01


class Load(NamedTuple):
    """`jobs` on each group of `ranks` hosts, each with a phase in `period_s` and `each` flows from
    every host to each of so many others."""

    ranks: int
    jobs: int
    period_s: float
    others: int
    each: int = 1


LOADS = {
    "racks": Load(ranks=4, jobs=11, period_s=1.1, others=3, each=3),
    "wide": Load(ranks=64, jobs=4, period_s=0.4, others=25),
    "few": Load(ranks=4, jobs=11, period_s=17.6, others=3, each=3),
}


def address(host: int) -> str:
    """Of its own: a switch process lets an address have some sessions only."""
    return f"127.0.1.{host + 1}"


class Daemon:
    """One host's session."""

    def __init__(self, host: int, load: Load) -> None:
        group, here = divmod(host, load.ranks)
        peers = [group * load.ranks + (here + k) % load.ranks for k in range(1, load.others + 1)]
        # As the arbiter's host numbers links: first its own uplink, then all downlinks.
        names = [f"h{host}->s1", *(f"s1->h{peer}" for peer in peers)]
        self.session = Session(
            f"h{host}",
            range(len(names)),
            names,
            slot_ns=SLOT_NS,
            lease_ns=Nanos(5 * SLOT_NS),
            first_session=1000 * (host + 1),
        )
        self.latency_ns: list[int] = []
        self.unanswered = self.phases = self.lost = self.ended = 0
        self._host, self._load, self._group = host, load, group
        self._asked: dict[int, int] = {}
        self._wake = asyncio.Event()
        # So many bytes that a job alone would need its part of the time.
        alone = RATE * BUSY * load.period_s / load.jobs
        self._flows = [
            [
                Demand(
                    flow=(job * load.others + k) * load.each + n,
                    inc=1,
                    job=f"job{group}-{job}",
                    links=(0, 1 + k),
                    remaining=0,
                    period_ns=int(load.period_s * SECOND),
                    next_bytes=int(alone / load.others / load.each),
                )
                for k in range(load.others)
                for n in range(load.each)
            ]
            for job in range(load.jobs)
        ]

    async def run(self, port: int, seconds: float) -> None:
        """Until so many seconds have passed."""
        end = time.time() + seconds
        await asyncio.sleep(self._host * JOIN_S)  # a switch process lets in so many at once only
        async with grpc.aio.insecure_channel(f"{address(self._host)}:{port}") as channel:
            await channel.channel_ready()  # from then on the lease counts
            call = channel.stream_stream(methods.NEGOTIATE)()
            opening = self.session.connect(_now())
            self.session.demand(_now(), (d for flows in self._flows for d in flows))
            first = self.session.take_message(_now(), time.time_ns())
            assert first is not None
            index = {link: link for link in range(len(opening.links))}
            await call.write(write_daemon(first, index, opening).SerializeToString())
            tasks = [
                asyncio.create_task(work)
                for work in (self._read(call), self._write(call, index), self._beat())
            ]
            jobs = (self._job(job, end) for job in range(self._load.jobs))
            work = asyncio.create_task(_all(jobs))
            await asyncio.wait([work, *tasks], return_when=asyncio.FIRST_COMPLETED)
            if not work.done():  # the daemon would come back
                work.cancel()
                self.ended = 1
                print(
                    f"h{self._host}: {await call.code()}, {await call.details()}", file=sys.stderr
                )
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, call: Any) -> None:
        while isinstance(raw := await call.read(), bytes):
            message, now = pb.ArbiterMessage.FromString(raw), _now()
            news = self.session.received(now, read_arbiter(message))
            self.session.enforced(news)
            for flow in news.raised:
                if flow in self._asked and self.session.grant(flow).rate > 0:
                    self.latency_ns.append(now - self._asked.pop(flow))
            self._wake.set()

    async def _write(self, call: Any, index: dict[int, int]) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self.session.has_news:
                said = self.session.take_message(_now(), time.time_ns())
                if said is not None:
                    await call.write(write_daemon(said, index).SerializeToString())

    async def _beat(self) -> None:
        moment = self._host / DAEMONS
        while True:
            await asyncio.sleep((1 - (time.time_ns() / SLOT_NS - moment) % 1) * SLOT_NS / SECOND)
            self.session.beat(_now())
            self.lost += self.session.check(_now())
            self._wake.set()

    async def _job(self, job: int, end: float) -> None:
        period, draw = self._load.period_s, random.Random(self._host * 100 + job)
        offset = period * (job / self._load.jobs + self._group / DAEMONS)
        while True:
            begin = ((time.time() - offset) // period + 1) * period + offset
            if begin >= end:
                return
            await asyncio.sleep(begin + draw.uniform(0, SPREAD_S) - time.time())
            self._begin(self._flows[job])
            await asyncio.sleep(BUSY * period / self._load.jobs)
            self._end(self._flows[job])

    def _begin(self, flows: Sequence[Demand]) -> None:
        now, self.phases = _now(), self.phases + 1
        self._asked |= {d.flow: now for d in flows if not self.session.grant(d.flow).rate > 0}
        self.session.demand(now, (replace(d, remaining=d.next_bytes) for d in flows))
        self._wake.set()

    def _end(self, flows: Sequence[Demand]) -> None:
        self.unanswered += sum(self._asked.pop(d.flow, None) is not None for d in flows)
        self.session.give_back([d.flow for d in flows])
        part = 1 - BUSY / self._load.jobs
        idle = int(part * self._load.period_s * SECOND)
        self.session.demand(_now(), (replace(d, next_in_ns=idle) for d in flows))
        self._wake.set()


async def _all(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    await asyncio.gather(*works)


def _now() -> Nanos:
    return Nanos(time.monotonic_ns())


async def run(load: Load, port: int, seconds: float) -> None:
    """Print what came of it."""
    daemons = [Daemon(host, load) for host in range(DAEMONS)]
    before, began = psutil.Process().cpu_times(), time.monotonic()
    await asyncio.gather(*(daemon.run(port, seconds) for daemon in daemons))
    after, wall = psutil.Process().cpu_times(), time.monotonic() - began
    result = {
        **percentiles([x for daemon in daemons for x in daemon.latency_ns]),
        "unanswered": sum(daemon.unanswered for daemon in daemons),
        "leases_lost": sum(daemon.lost for daemon in daemons),
        "streams_ended": sum(daemon.ended for daemon in daemons),
        "daemon_phases_per_s": round(sum(daemon.phases for daemon in daemons) / wall),
        "load_cpu_share": round((sum(after[:2]) - sum(before[:2])) / wall, 3),
    }
    json.dump(result, sys.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("load", choices=LOADS)
    parser.add_argument("port", type=int)
    parser.add_argument("seconds", type=float)
    args = parser.parse_args()
    uvloop.run(run(LOADS[args.load], args.port, args.seconds))


if __name__ == "__main__":
    main()
