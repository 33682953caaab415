# SPDX-License-Identifier: Apache-2.0
"""Negotiation latency: real daemons' clients and real switch processes on this machine.

Every daemon has `flows` flows in 4 jobs, which all hosts of a group share, and which go from each
of these hosts to each other one. With one switch process all hosts are one group: with 5 daemons of
100 flows that is 16 aggregates each. With several, each holds the links of as many hosts, a rack; a
group has as many hosts of each rack (`ranks` hosts in all), and paths to another rack have two
arbiters, and count as granted when both have granted. 8 daemons of 100 flows on 2 with jobs of 4
ranks: 12 aggregates each, 8 of them to the other rack. Jobs on all 8 hosts: `--ranks 8`.

What becomes active has no grant (nothing stands for it), so that each time is a full negotiation:
demand, decision, grant; where others must give way first, their acknowledgements are in it. Each of
its flows counts. Flows take as long as they would alone: what is granted too little, the kernel
tops up. Arbiters hear of their progress as from daemons (core's Aggregate), and grants are given
back as a job's phase ends. Patterns:
- `phases`: jobs become active at times of their own, on all their hosts within 2 ms; they
  communicate a fifth of their time, so that their links are busy for four fifths of it;
- `turns`: jobs of a group communicate one after the other, as scheduled jobs do: nobody has to give
  way;
- `contended`: as `phases`, but for half of their time: always someone must give way;
- `aligned`: all flows of all hosts of a group become active at the same slot boundary.
As in the lab, no processor sleeps meanwhile, where the kernel allows that to be asked for: hosts
with jobs to run do not sleep either, and a virtual processor takes long to wake up.
Beside it, right after it, what two bare rounds over plain TCP take among the hosts of one job
(`floor_...`, see bench.grpc_floor): on few processors, waking that many processes decides. So the
negotiation's time has no bound.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import psutil

from bench import grpc_floor, wire
from bench.negotiation_client import BUSY, topology_text
from flowslot_lab.describe import ask
from flowslot_lab.processors import awake
from flowslot_proto import flowslot_pb2 as pb
from flowslot_proto.grpcio import grpc


class Load(NamedTuple):
    """What is run: so many daemons of so many flows each, on so many switch processes; `ranks`:
    each job on so many of the hosts, 0: on all."""

    daemons: int = 5
    ranks: int = 0
    flows: int = 100
    switches: int = 1
    pattern: str = "phases"
    seconds: float = 6.0


ONE = Load()
TWO = Load(daemons=8, ranks=4, switches=2)
SIX = Load(daemons=6)


def measure() -> dict[str, Any]:
    """For bench.run: `phases` and `turns_...` on one switch process, `two_switches_...` of both,
    and what TCP alone takes on one and on two; the bandwidth of six daemons."""
    with awake():
        parts = {
            "": {**run_once(ONE), **floor(ONE), **measure_bandwidth()},
            "turns_": run_once(ONE._replace(pattern="turns")),
            "two_switches_": {**run_once(TWO), **floor(TWO)},
            "two_switches_turns_": run_once(TWO._replace(pattern="turns")),
        }
    return {f"{part}{name}": value for part, d in parts.items() for name, value in d.items()}


def floor(load: Load) -> dict[str, float]:
    """What TCP alone takes when the hosts of one job talk to all switch processes."""
    daemons = load.ranks or load.daemons
    measured = grpc_floor.measure("tcp", daemons=daemons, servers=load.switches)
    return {f"floor_{name}": value for name, value in measured.items()}


def measure_bandwidth(load: Load = SIX) -> dict[str, Any]:
    """Both ways between these daemons and the switch, see bench.wire. Needs root."""
    command = ["-m", "bench.negotiation", "--traffic", *_options(load)]
    return wire.per_second(wire.alone(command), load.seconds)


def _options(load: Load) -> list[str]:
    return [text for name, value in load._asdict().items() for text in (f"--{name}", str(value))]


def run_once(load: Load = ONE) -> dict[str, Any]:
    """Run it; latencies in ms over all flows of all daemons, processor time."""
    return run(load)[0]


def run(load: Load) -> tuple[dict[str, Any], list[int]]:
    """As run_once, and all the latencies, ns."""
    with contextlib.ExitStack() as stack:
        topology = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "topology.toml"
        ports = grpc_floor.free_ports(load.switches)
        topology.write_text(topology_text(load.daemons, ports))
        switches = [_switch(stack, topology, f"s{n}") for n in range(1, load.switches + 1)]
        before, cpu = [_describe(port) for port in ports], _cpu_s(switches)
        with Stalls() as stalls:
            outputs = _run_clients(topology, load)
        after, cpu_after = [_describe(port) for port in ports], _cpu_s(switches)
        latencies = [x for o in outputs for x in o["latency_ns"]]
        busiest = max(b - a for a, b in zip(cpu, cpu_after, strict=True))
        return {
            **percentiles(latencies),
            **_of_daemons(outputs, load.seconds),
            **_of_switches(before, after, load.seconds),
            "switch_cpu_share": round(busiest / load.seconds, 3),
            "machine_stall_max_ms": round(stalls.worst_s * 1e3, 1),
        }, latencies


def _switch(stack: contextlib.ExitStack, topology: Path, name: str) -> subprocess.Popen[bytes]:
    program = Path(sys.executable).with_name("flowslot-switch")
    process = subprocess.Popen(
        [program, "--topology", topology, "--name", name], stderr=subprocess.DEVNULL
    )
    stack.callback(process.wait, timeout=10)
    stack.callback(process.terminate)
    return process


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


def _run_clients(topology: Path, load: Load) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "bench.negotiation_client", "--topology", str(topology)]
    command += ["--hosts", str(load.daemons), "--flows", str(load.flows)]
    command += ["--seconds", str(load.seconds), "--pattern", load.pattern]
    command += ["--ranks", str(load.ranks or load.daemons)]
    started = [
        subprocess.Popen([*command, "--host", str(i)], stdout=subprocess.PIPE)
        for i in range(load.daemons)
    ]
    try:
        return [json.loads(p.communicate(timeout=load.seconds + 30)[0]) for p in started]
    finally:
        for p in started:
            p.kill()
            p.wait()


def _describe(port: int) -> pb.DescribeReply:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        return ask(channel)


def _cpu_s(processes: Iterable[subprocess.Popen[bytes]]) -> list[float]:
    times = (psutil.Process(process.pid).cpu_times() for process in processes)
    return [t.user + t.system for t in times]


def _of_daemons(outputs: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    return {
        "round_trip_p50_ms": round(max(o["round_trip"]["p50_us"] for o in outputs) / 1e3, 2),
        "round_trip_p90_ms": round(max(o["round_trip"]["p90_us"] for o in outputs) / 1e3, 2),
        "unanswered": sum(o["unanswered"] for o in outputs),
        "leases_lost": sum(o["expired"] for o in outputs),
        "errors": sorted({o["error"] for o in outputs if o["error"]}),
        "client_cpu_share": round(max(o["cpu_s"] for o in outputs) / seconds, 3),
        "client_cpu_us_per_message": round(
            sum(o["cpu_s"] for o in outputs) / sum(o["messages"] for o in outputs) * 1e6
        ),
    }


def _of_switches(
    before: Sequence[pb.DescribeReply], after: Sequence[pb.DescribeReply], seconds: float
) -> dict[str, Any]:
    """Of all switch processes together."""

    def grown(name: str) -> int:
        pairs = zip(before, after, strict=True)
        return sum(getattr(b.counters, name) - getattr(a.counters, name) for a, b in pairs)

    steps = grown("steps")
    return {
        "granted": grown("granted"),
        "preempted": grown("preempted"),
        "switch_messages_per_s": round((grown("messages_in") + grown("messages_out")) / seconds),
        "switch_steps_per_s": round(steps / seconds),
        "switch_step_us": round(grown("step_ns") / steps / 1e3),
    }


def percentiles(samples_ns: Sequence[int]) -> dict[str, float]:
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
    parser.add_argument("--seconds", type=float, default=ONE.seconds)
    parser.add_argument("--hosts", "--daemons", dest="daemons", type=int, default=ONE.daemons)
    parser.add_argument("--flows", type=int, default=ONE.flows, help="per daemon")
    parser.add_argument("--switches", type=int, default=ONE.switches, help="switch processes")
    parser.add_argument("--ranks", type=int, default=ONE.ranks, help="hosts of each job; 0: all")
    parser.add_argument("--pattern", choices=BUSY, default=None)
    parser.add_argument("--bandwidth", action="store_true", help="measure that instead (root)")
    parser.add_argument("-o", "--output", choices=("json", "text"), default="text")
    parser.add_argument("--traffic", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    patterns = [args.pattern] if args.pattern else list(BUSY)
    loads = [
        Load(args.daemons, args.ranks, args.flows, args.switches, p, args.seconds) for p in patterns
    ]
    if args.ranks and (args.ranks == 1 or args.daemons % args.ranks or args.ranks % args.switches):
        parser.error("--ranks: more than 1, must divide --daemons, and be a multiple of --switches")
    if args.traffic:
        (load,) = loads
        wire.tell(lambda: run_once(load))
        return
    with awake():
        result = {
            load.pattern: measure_bandwidth(load)
            if args.bandwidth
            else run_once(load) | floor(load)
            for load in loads
        }
    if args.output == "json":
        print(json.dumps(result, indent=2))
    else:
        for pattern, values in result.items():
            if not args.bandwidth:
                both = (values.get("p90_ms"), values["floor_two_rounds_p90_ms"])
                print("{}, p90: {} ms, two bare rounds over TCP {} ms".format(pattern, *both))
            print(*(f"  {key}: {value}" for key, value in values.items()), sep="\n")


if __name__ == "__main__":
    main()
