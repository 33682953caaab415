# SPDX-License-Identifier: Apache-2.0
"""One of four sockets at a quarter of its rate: `python -m bench.nccl_slow_socket`. Needs root.

NCCL's own transport deals each message to its sockets in equal parts, so that the slowest one gates
it (NVIDIA/nccl#438, #450). Two namespaces with a cable; as soon as a way's four data sockets are
known by what they have sent, three have 200 Mbit/s each and one has 50. Our plugin and the stand-in
take turns. What counts is what comes after that, as a part of the sum of the four rates (in TCP
payload). Exit status 1 when flowslot's median is below 0.9.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .nccl_ranks import HARNESS, PLUGIN, Ranks, build
from .nccl_throughput import spread

WAYS = ("flowslot", "standin")
SOCKETS = 4
MBPS = (200, 200, 200, 50)
GOODPUT = 1448 / 1514
SIZE, REPEAT = 16_000_000, 20
SETTLED_S = 1.0
"""After the rates were set, until what is measured begins."""
DATA_SENT = 100_000
"""Bytes: a socket that has sent more carries data."""
LEAST = 0.9
ADDRESSES = ("10.9.0.1", "10.9.0.2")
SENT = re.compile(r"\S+:(\d+)\s+\S+:\d+\s*\n.*?\bbytes_sent:(\d+)")


def run(*words: str) -> str:
    """What a command prints."""
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


@contextmanager
def cable() -> Iterator[tuple[str, str]]:
    """Two namespaces; the first one's way out has four times the rate of a socket."""
    here, there = (f"nccl-{uuid.uuid4().hex[:8]}-{i}" for i in (1, 2))
    try:
        for name in (here, there):
            run("ip", "netns", "add", name)
        ends = f"eth0 netns {here} type veth peer name eth0 netns {there}"
        run("ip", "link", "add", *ends.split())
        for name, address in zip((here, there), ADDRESSES, strict=True):
            run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "eth0", "up")
        while any("state UP" not in run("ip", "-n", name, "link") for name in (here, there)):
            time.sleep(0.01)
        change(here, "qdisc", "root handle 1: htb default 9")
        limit(here, 9, SOCKETS * max(MBPS))
        yield here, there
    finally:
        for name in (here, there):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def change(space: str, kind: str, words: str) -> None:
    """One call of tc."""
    run("tc", "-n", space, kind, "add", "dev", "eth0", *words.split())


def limit(space: str, number: int, mbps: int) -> None:
    """A class with a short queue."""
    change(space, "class", f"parent 1: classid 1:{number} htb rate {mbps}mbit quantum 1514")
    change(space, "qdisc", f"parent 1:{number} handle {number}0: pfifo limit 100")


def data_ports(space: str) -> list[int]:
    """Of the sockets that carry data."""
    shown = run("ip", "netns", "exec", space, "ss", "-Htin", "state", "established")
    return [int(port) for port, sent in SENT.findall(shown) if int(sent) > DATA_SENT]


def hold(space: str, began: float) -> float:
    """Sets the rates once all data sockets are known: seconds after `began`."""
    while len(ports := data_ports(space)) < SOCKETS:
        if time.monotonic() - began > 20:
            raise RuntimeError(f"{SOCKETS} sockets were to carry data, found {len(ports)}")
        time.sleep(0.02)
    for number, (port, mbps) in enumerate(zip(ports, MBPS, strict=True), 1):
        limit(space, number, mbps)
        match = f"match ip sport {port} 0xffff flowid 1:{number}"
        change(space, "filter", f"parent 1: protocol ip prio {number} u32 {match}")
    return time.monotonic() - began


def start(folder: Path, way: str, spaces: tuple[str, str]) -> list["subprocess.Popen[str]"]:
    """The sender, then the receiver."""
    inside = [["ip", "netns", "exec", space] for space in spaces]
    environment = {
        "NCCL_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_NTHREADS": "0",
        "NCCL_NSOCKS_PERTHREAD": str(SOCKETS),
    }
    plugin, harness = folder / f"libnccl-net-{way}.so", folder / "nccl-harness"
    ranks = Ranks(plugin, harness, environment=environment, before=inside, root=ADDRESSES[0])
    options = ["--pattern", "stream", "--bytes", SIZE, "--iterations", REPEAT, "--idle-us", 50]
    return ranks.start(options)


def measure(folder: Path, way: str) -> float:
    """Throughput as a part of the sum of the sockets' rates."""
    with cable() as spaces:
        began = time.monotonic()
        processes = start(folder, way, spaces)
        try:
            held = hold(spaces[0], began)
            said = [process.communicate(timeout=120)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
    times: list[float] = json.loads(said[1])["iteration_s"]
    ends = [sum(times[: k + 1]) for k in range(len(times))]
    counted = [t for t, end in zip(times, ends, strict=True) if end - t > held + SETTLED_S]
    if len(counted) < 3:
        raise RuntimeError(f"{way}: too little was left after the rates were set")
    rate = SIZE * 8 * len(counted) / sum(counted)
    return rate / (sum(MBPS) * 1e6 * GOODPUT)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    options = parser.parse_args()
    folder = build(HARNESS)
    build(PLUGIN)
    found: dict[str, list[float]] = {way: [] for way in options.ways}
    for k in range(options.turns):
        for way in options.ways[:: -1 if k % 2 else 1]:
            found[way].append(measure(folder, way))
            print(f"{k + 1}/{options.turns}: {way} {found[way][-1]:.3f}", file=sys.stderr)
    print("way       part of the sum of rates")
    for way, parts in found.items():
        print(f"{way:<9} {spread(parts)}")
    return 0 if statistics.median(found.get("flowslot", [1.0])) >= LEAST else 1


if __name__ == "__main__":
    sys.exit(main())
