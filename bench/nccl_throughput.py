# SPDX-License-Identifier: Apache-2.0
"""How fast messages go by the NCCL plugin, and at which cost: `python -m bench.nccl_throughput`.

One process sends to another on loopback, each on its half of the processors as hosts would be, in
messages of 1 MiB, at most 8 at once, by three ways that take turns:

  flowslot   our plugin, driven by nccl-harness as NCCL drives it
  standin    the stand-in for NCCL's own transport, with as many data sockets, driven likewise
  plain      as many sockets and no messages at all: one epoll on each side

Throughput is the receiver's. The progress thread never sleeps, as NCCL's: so CPU time is taken from
runs of their own, in which it sleeps for 50 us when nothing moves. Ratios are taken turn by turn:
median, least and most. Exit status 1 when flowslot's median is below 0.95 of plain's throughput,
below 0.97 of the stand-in's, or above 1.2 of plain's CPU time per byte.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from .nccl_ranks import HARNESS, LOOPBACK, PLUGIN, Ranks, build, free_port

WAYS = ("flowslot", "standin", "plain")
IDLE_US = 50
BOUNDS = {("rate", "plain"): 0.95, ("rate", "standin"): 0.97}
MOST_CPU = 1.2
"""Of plain's, per byte."""


class Turn(NamedTuple):
    """GB/s; CPU seconds per GB, of both processes."""

    rate: float
    cpu: float


class Load(NamedTuple):
    """What each run sends: `repeat` times `size` bytes, over `sockets`, the first not counted."""

    size: int
    repeat: int
    sockets: int
    threads: int


def halves() -> list[list[str]]:
    """What the sender's and the receiver's command begins with."""
    mine = sorted(os.sched_getaffinity(0))
    middle = len(mine) // 2
    parts = (mine[:middle], mine[middle:]) if middle else (mine, mine)
    return [["taskset", "-c", ",".join(map(str, part))] for part in parts]


def messages(folder: Path, way: str, load: Load, **more: str) -> Turn:
    """By a plugin; `more`: of the environment."""
    environment = more | {
        "NCCL_SOCKET_NTHREADS": str(load.threads),
        "NCCL_NSOCKS_PERTHREAD": str(load.sockets // max(load.threads, 1)),
    }
    plugin, harness = folder / f"libnccl-net-{way}.so", folder / "nccl-harness"
    ranks = Ranks(plugin, harness, environment=environment, before=halves())
    options = ["--pattern", "stream", "--bytes", load.size, "--iterations", load.repeat + 1]
    fast, cheap = (ranks.run([*options, "--idle-us", sleep]) for sleep in (0, IDLE_US))
    for one in (*fast, *cheap):
        if one.status:
            raise RuntimeError(f"{way}: {one.report or one.said}")
    seconds = sum(fast[1].report["iteration_s"][1:])
    cpu = sum(one.report["busy_cpu_s"] for one in cheap)
    moved = load.size / 1e9
    return Turn(moved * load.repeat / seconds, cpu / (moved * (load.repeat + 1)))


def plain(folder: Path, load: Load) -> Turn:
    """By nothing but sockets."""
    rest = [LOOPBACK, str(free_port()), str(load.sockets), str(load.size), str(load.repeat + 1)]
    started = [
        subprocess.Popen(
            [*half, folder / "nccl-plain", role, *rest], stdout=subprocess.PIPE, text=True
        )
        for half, role in zip(halves(), ("send", "receive"), strict=True)
    ]
    sender, receiver = (json.loads(process.communicate()[0]) for process in started)
    moved = load.size / 1e9
    rate = moved * load.repeat / sum(receiver["seconds"][1:])
    return Turn(rate, (receiver["cpu_s"] + sender["cpu_s"]) / (moved * (load.repeat + 1)))


def measure(load: Load, turns: int) -> dict[str, list[Turn]]:
    """By way: one turn after the other, and nobody is always the first."""
    folder = build(HARNESS)
    build(PLUGIN)
    found: dict[str, list[Turn]] = {way: [] for way in WAYS}
    for k in range(turns):
        for way in WAYS[:: -1 if k % 2 else 1]:
            print(f"{k + 1}/{turns}: {way}", file=sys.stderr, flush=True)
            one = plain(folder, load) if way == "plain" else messages(folder, way, load)
            found[way].append(one)
    return found


def ratios(found: dict[str, list[Turn]], field: str, to: str) -> list[float]:
    """Of flowslot to another way, turn by turn."""
    pairs = zip(found["flowslot"], found[to], strict=True)
    return [getattr(mine, field) / getattr(theirs, field) for mine, theirs in pairs]


def spread(values: list[float]) -> str:
    """Median, least and most."""
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--sockets", type=int, default=4)
    parser.add_argument("--threads", type=int, default=0, help="helpers of each side")
    parser.add_argument("--bytes", type=int, default=1 << 30, help="at a time")
    parser.add_argument("--repeat", type=int, default=3, help="times, after one that is left out")
    options = parser.parse_args()
    load = Load(options.bytes, options.repeat, options.sockets, options.threads)
    found = measure(load, options.turns)
    print(f"{load.sockets} sockets, {load.threads} threads")
    print("way       GB/s                     CPU s per GB")
    for way, turns in found.items():
        rate, cpu = (spread([getattr(turn, field) for turn in turns]) for field in Turn._fields)
        print(f"{way:<9} {rate:<24} {cpu}")
    good = True
    for field in Turn._fields:
        for to in ("plain", "standin"):
            each = ratios(found, field, to)
            print(f"{field:<4} of flowslot to {to:<8} {spread(each)}")
            middle = statistics.median(each)
            good &= middle >= BOUNDS.get((field, to), 0.0)
            good &= field != "cpu" or to != "plain" or middle <= MOST_CPU
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
