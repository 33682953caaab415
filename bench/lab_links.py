# SPDX-License-Identifier: Apache-2.0
"""What the lab's emulated links carry of their rate when they are full.

The network of ps-incast: four hosts send more UDP to h1 than its switch port carries (any policy's
incast), and h1 sends more to them than its NIC carries. Both queues always hold something, so a
wire would carry its rate exactly; here a timer that comes late costs what does not fit the HTB's
burst. Bursts that hold 160 us to 1 ms of the rate are measured in turns, with the processors left
alone and with three processes that compute 40 % of their time. Needs root.
"""

import argparse
import contextlib
import json
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from flowslot_lab.net import NIC, TIMER_SLACK_US, Network, data_ip, run
from flowslot_lab.processors import awake
from flowslot_lab.scenario import load
from flowslot_lab.state import RunState, clean_dead

SCENARIO = Path(__file__).parents[1] / "lab" / "scenarios" / "ps-incast.toml"
SLACKS_US = (160.0, 320.0, TIMER_SLACK_US, 1000.0)
SECONDS = 2.0
SEGMENT, SEGMENTS, HEADERS = 1448, 4, 42
UDP_SEGMENT = 103
EXCESS = 1.25  # times what the links carry

_SEND = f"""
import socket, sys, time
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.setsockopt(socket.IPPROTO_UDP, {UDP_SEGMENT}, {SEGMENT})
to = [(address, 9) for address in sys.argv[2].split(",")]
packet, rate = bytes({SEGMENT * SEGMENTS}), float(sys.argv[1])
began, sent = time.monotonic(), 0
while True:
    while sent < (time.monotonic() - began) * rate:
        sock.sendto(packet, to[sent % len(to)])
        sent += 1
    time.sleep(0.0005)
"""
_COMPUTE = """
import time
while True:
    until = time.perf_counter() + 0.0004
    while time.perf_counter() < until:
        pass
    time.sleep(0.0006)
"""
_SINK = """
import socket, time
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
sock.bind(("", 9))
print(flush=True)
time.sleep(600)
"""


def measure(slack_us: float, computing: int, seconds: float = SECONDS) -> dict[str, float]:
    """Shares of their rate that the switch port to h1 and the NIC of h1 carried."""
    scenario = load(SCENARIO)
    with contextlib.ExitStack() as stack:
        stack.enter_context(awake())
        state = RunState.create()
        stack.callback(state.clean)
        net = Network(scenario, state, slack_us)
        stack.callback(net.down)
        net.up()
        server, *others = net.hosts
        for host in net.hosts:
            sink = _start(stack, net.hosts[host], _SINK)
            assert sink.stdout is not None
            sink.stdout.readline()
        rate_bps = scenario.link_of(server).rate_mbps * 1e6
        packets = EXCESS * rate_bps / 8 / (SEGMENTS * (SEGMENT + HEADERS))
        addresses = ",".join(data_ip(i) for i in range(1, len(net.hosts)))
        _start(stack, net.hosts[server], _SEND, packets, addresses)
        for host in others:
            _start(stack, net.hosts[host], _SEND, packets / len(others), data_ip(0))
        for _ in range(computing):
            _start(stack, net.hosts[server], _COMPUTE)
        time.sleep(0.5)
        links = ((net.switch, f"d-{server}"), (net.hosts[server], NIC))
        before = [_sent(*link) for link in links]
        time.sleep(seconds)
        after = [_sent(*link) for link in links]
    carried = [
        8 * (more - less) / (until - since) / rate_bps
        for (since, less), (until, more) in zip(before, after, strict=True)
    ]
    return dict(zip(("port", "nic"), carried, strict=True))


def _sent(space: str, device: str) -> tuple[float, int]:
    """When, and how many bytes the link has carried until then."""
    at = time.monotonic()
    found = re.search(
        r"Sent (\d+) ", run(["tc", "-n", space, "-s", "class", "show", "dev", device])
    )
    assert found is not None
    return at, int(found[1])


def _start(
    stack: contextlib.ExitStack, space: str, program: str, *arguments: object
) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        ["nsenter", f"--net=/run/netns/{space}", sys.executable, "-c", program]
        + [str(argument) for argument in arguments],
        stdout=subprocess.PIPE,
    )
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


def compare(repeats: int, seconds: float) -> list[dict[str, Any]]:
    """All bursts, in turns."""
    clean_dead()
    shares: dict[tuple[int, float], list[dict[str, float]]] = {}
    for _ in range(repeats):
        for computing in (0, 3):
            for slack_us in SLACKS_US:
                found = measure(slack_us, computing, seconds)
                shares.setdefault((computing, slack_us), []).append(found)
    return [
        {
            "computing": computing,
            "slack_us": slack_us,
            "of": link,
            "carried": [f[link] for f in all_],
        }
        for (computing, slack_us), all_ in shares.items()
        for link in ("port", "nic")
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    options = parser.parse_args()
    rows = compare(options.repeat, options.seconds)
    if options.output == "json":
        print(json.dumps(rows, indent=2))
        return
    print("computing  burst (us)  link   carried: mean (min to max)")
    for row in rows:
        carried = row["carried"]
        mean, low, high = statistics.mean(carried), min(carried), max(carried)
        print(
            f"{row['computing']:9}  {row['slack_us']:10.0f}  {row['of']:5}  "
            f"{mean:.3f} ({low:.3f} to {high:.3f})"
        )


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
