# SPDX-License-Identifier: Apache-2.0
"""Negotiation latency: real daemons' clients and a real switch process on this machine.

Every daemon has `flows` flows in 4 jobs that all daemons share, from every host to every other one:
with 5 daemons of 100 flows 16 bundles each. What becomes active has no grant (nothing stands for
it), so that each time is a full negotiation: demand, decision, grant; where others must give way
first, their acknowledgements are in it. Each of its flows counts. Demands of all that is active are
repeated in every slot, at the daemon's own moment in it, and grants are given back as a job's phase
ends, as daemons do. Patterns:
- `phases`: jobs become active at times of their own, on all hosts within 2 ms; they communicate a
  fifth of their time, so that their links are busy for four fifths of it;
- `turns`: jobs communicate one after the other, as scheduled jobs do: nobody has to give way;
- `contended`: as `phases`, but for half of their time: always someone must give way;
- `aligned`: all flows of all hosts become active at the same slot boundary.
As in the lab, no processor sleeps meanwhile, where the kernel allows that to be asked for: hosts
with jobs to run do not sleep either, and a virtual processor takes long to wake up.
Beside it, right after it, what gRPC alone takes (`floor_...`, see bench.grpc_floor).
"""

import argparse
import asyncio
import json
import math
import random
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import grpc
import numpy as np
import psutil
import uvloop

from bench import grpc_floor
from flowslot.arbiter import LEASE_SLOTS
from flowslot.grantbook import Granted
from flowslot.messages import Demand
from flowslot.topology import parse_topology
from flowslot.units import MILLISECOND, Nanos
from flowslot_lab.processors import awake
from flowslot_proto import flowslot_pb2 as pb
from flowslot_proto.flowslot_pb2_grpc import EmulatedSwitchStub
from flowslotd.clock import own_moment
from flowslotd.domain_base import DomainStats
from flowslotd.domain_grpc import GrpcDomain

SLOT_NS = Nanos(60 * MILLISECOND)
PERIOD_S = (0.210, 0.290, 0.370, 0.430)  # of the jobs, no common divisor near a slot
JOBS = len(PERIOD_S)
BUSY = {"phases": 0.2, "turns": 0.2, "contended": 0.5, "aligned": 0.5}  # part of its period
SPREAD_S = 0.002
FLOW_BYTES = 400_000


def topology_text(hosts: int, port: int) -> str:
    text = f'[[switches]]\nname = "s1"\naddress = "127.0.0.1:{port}"\n'
    for i in range(hosts):
        text += (
            f'[[hosts]]\nname = "h{i}"\n[[hosts.nics]]\nname = "eth0"\n'
            f'addresses = ["10.78.0.{i + 1}"]\nup = "h{i}->s1"\ndown = "s1->h{i}"\n'
        )
        for link in (f"h{i}->s1", f"s1->h{i}"):
            text += f'[[links]]\nname = "{link}"\ncapacity_gbps = 10.0\nswitch = "s1"\n'
    return text


# --- one daemon


class Bundle(NamedTuple):
    """Flows of one job on one path."""

    job: int
    links: tuple[int, int]
    flows: int


class Client:
    """The bundles of one host, driven by the wall clock; times every first grant."""

    def __init__(self, topology: Path, host: int, hosts: int, flows: int, pattern: str) -> None:
        parsed = parse_topology(topology.read_text(), str(topology))
        self.domain = GrpcDomain(
            parsed,
            parsed.switches["s1"],
            daemon=f"h{host}-{secrets.token_hex(4)}",
            slot_ns=SLOT_NS,
            lease_ns=Nanos(LEASE_SLOTS * SLOT_NS),
            stats=DomainStats(),
        )
        self.domain.on_grants = self._on_grants
        self.latency_ns: list[int] = []
        self.unanswered = 0
        self._pattern = pattern
        self._moment = own_moment(host, SLOT_NS)
        self._asked: dict[int, int] = {}
        self._inc = [1] * JOBS
        self._active = [False] * JOBS
        self._random = random.Random(host)
        others = [j for j in range(hosts) if j != host]
        # As daemons do: flows of a job on one path are one reservation.
        bundles = Counter((f % JOBS, others[f // JOBS % len(others)]) for f in range(flows))
        link = parsed.link_index
        self._bundles = {
            i: Bundle(job, (link[f"h{host}->s1"], link[f"s1->h{other}"]), size)
            for i, ((job, other), size) in enumerate(bundles.items(), host * 100_000)
        }

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


async def client(args: argparse.Namespace) -> None:
    one = Client(args.topology, args.host, args.hosts, args.flows, args.pattern)
    before = psutil.Process().cpu_times()
    await one.run(args.seconds)
    after = psutil.Process().cpu_times()
    stats = one.domain._stats
    json.dump(
        {
            "latency_ns": one.latency_ns,
            "round_trip": stats.round_trip.summary(),
            "unanswered": one.unanswered + len(one._asked),
            "cpu_s": sum(after[:2]) - sum(before[:2]),
            "messages": stats.messages_in + stats.messages_out,
            "expired": stats.expired,
            "error": stats.last_error,
        },
        sys.stdout,
    )


# --- the bench


def measure() -> dict[str, Any]:
    """For bench.run: pattern `phases`, `turns_p90_ms`, and what gRPC alone takes."""
    with awake():
        turns = run_once(pattern="turns")["p90_ms"]
        return {**run_once(), "turns_p90_ms": turns, **grpc_floor.measure()}


def run_once(
    seconds: float = 6.0, daemons: int = 5, flows: int = 100, pattern: str = "phases"
) -> dict[str, Any]:
    """Run it; latencies in ms over all flows of all daemons, processor time, bandwidth."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        topology = Path(folder) / "topology.toml"
        topology.write_text(topology_text(daemons, port))
        switch = subprocess.Popen(
            [
                Path(sys.executable).with_name("flowslot-switch"),
                "--topology",
                topology,
                "--name",
                "s1",
            ],
            stderr=subprocess.PIPE,
        )
        try:
            before = _describe(port)
            cpu, sent = psutil.Process(switch.pid).cpu_times(), _loopback_bytes()
            with Stalls() as stalls:
                outputs = _run_clients(topology, seconds, daemons, flows, pattern)
            after = _describe(port)
            cpu_s = sum(psutil.Process(switch.pid).cpu_times()[:2]) - sum(cpu[:2])
            sent = _loopback_bytes() - sent
            return _report(outputs, before, after, seconds) | {
                "switch_cpu_share": round(cpu_s / seconds, 3),
                "bandwidth_mbit_s": round(sent * 8 / seconds / 1e6, 2),
                "machine_stall_max_ms": round(stalls.worst_s * 1e3, 1),
            }
        finally:
            switch.terminate()
            switch.communicate(timeout=10)


class Stalls:
    """How long this machine keeps an idle thread waiting: what no result can be better than."""

    def __enter__(self) -> Self:
        self.worst_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        step = 0.005
        before = time.monotonic()
        while not self._stop.wait(step):
            now = time.monotonic()
            self.worst_s = max(self.worst_s, now - before - step)
            before = now


def _run_clients(
    topology: Path, seconds: float, daemons: int, flows: int, pattern: str
) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "bench.negotiation", "--seconds", str(seconds)]
    command += ["--topology", str(topology), "--hosts", str(daemons), "--flows", str(flows)]
    started = [
        subprocess.Popen([*command, "--pattern", pattern, "--host", str(i)], stdout=subprocess.PIPE)
        for i in range(daemons)
    ]
    try:
        return [json.loads(p.communicate(timeout=seconds + 30)[0]) for p in started]
    finally:
        for p in started:
            p.kill()
            p.wait()


def _describe(port: int) -> pb.DescribeReply:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = EmulatedSwitchStub(channel)
        return stub.Describe(pb.DescribeRequest(), wait_for_ready=True, timeout=10)


def _loopback_bytes() -> int:
    line = next(x for x in Path("/proc/net/dev").read_text().splitlines() if "lo:" in x)
    return int(line.split(":")[1].split()[0])


def _report(
    outputs: list[dict[str, Any]],
    before: pb.DescribeReply,
    after: pb.DescribeReply,
    seconds: float,
) -> dict[str, Any]:
    a, b = after.counters, before.counters
    messages = a.messages_in + a.messages_out - b.messages_in - b.messages_out
    steps = a.steps - b.steps
    return {
        **_percentiles([x for o in outputs for x in o["latency_ns"]]),
        "round_trip_p50_ms": round(max(o["round_trip"]["p50_us"] for o in outputs) / 1e3, 2),
        "round_trip_p90_ms": round(max(o["round_trip"]["p90_us"] for o in outputs) / 1e3, 2),
        "unanswered": sum(o["unanswered"] for o in outputs),
        "leases_lost": sum(o["expired"] for o in outputs),
        "errors": sorted({o["error"] for o in outputs if o["error"]}),
        "granted": a.granted - b.granted,
        "preempted": a.preempted - b.preempted,
        "switch_pid": after.pid,
        "switch_messages_per_s": round(messages / seconds),
        "switch_steps_per_s": round(steps / seconds),
        "switch_step_us": round((a.step_ns - b.step_ns) / steps / 1e3),
        "client_cpu_share": round(max(o["cpu_s"] for o in outputs) / seconds, 3),
        "client_cpu_us_per_message": round(
            sum(o["cpu_s"] for o in outputs) / sum(o["messages"] for o in outputs) * 1e6
        ),
    }


def _percentiles(samples_ns: list[int]) -> dict[str, float]:
    if not samples_ns:
        return {"count": 0}
    p50, p90, p99 = np.percentile(samples_ns, (50, 90, 99)) / 1e6
    return {
        "count": len(samples_ns),
        "p50_ms": round(float(p50), 2),
        "p90_ms": round(float(p90), 2),
        "p99_ms": round(float(p99), 2),
        "max_ms": round(max(samples_ns) / 1e6, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--hosts", "--daemons", type=int, default=5)
    parser.add_argument("--flows", type=int, default=100, help="per daemon")
    parser.add_argument("--pattern", choices=BUSY, default=None)
    parser.add_argument("-o", "--output", choices=("json", "text"), default="text")
    parser.add_argument("--host", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--topology", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.host is not None:
        uvloop.run(client(args))
        return
    patterns = [args.pattern] if args.pattern else list(BUSY)
    with awake():
        result = {
            p: run_once(args.seconds, args.hosts, args.flows, p)
            | grpc_floor.measure(daemons=args.hosts)
            for p in patterns
        }
    if args.output == "json":
        print(json.dumps(result, indent=2))
    else:
        for pattern, values in result.items():
            print(pattern, *(f"  {key}: {value}" for key, value in values.items()), sep="\n")


if __name__ == "__main__":
    main()
