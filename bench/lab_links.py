# SPDX-License-Identifier: Apache-2.0
"""What the lab's emulated links carry of their rate when they are full.

The network of ps-incast: four hosts send 1.6 times as much UDP to h1 as its switch port carries,
and h1 sends 1.25 times as much to them as its NIC carries, through a queue of 120 ms. A wire would
carry its rate exactly; here a timer that comes late costs what does not fit the HTB's burst.
Senders are stopped by the processor as well, so queues are looked at 20 times, and the table says
how often one was found empty. NIC bursts that hold 160 us to 1 ms of the rate are measured in
turns (the port's hold a packet more, as in the lab), with the processors left alone and with three
processes that compute 40 % of their time. Needs root.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from flowslot_lab.net import TIMER_SLACK_US, Network, Port, carried, data_ip
from flowslot_lab.processors import awake
from flowslot_lab.state import RunState, clean_dead
from flowslot_lab.tools import run
from flowslot_scenario.scenario import load

SCENARIO = Path(__file__).parents[1] / "lab" / "scenarios" / "ps-incast.toml"
SLACKS_US = (160.0, 320.0, TIMER_SLACK_US, 1000.0)
SECONDS = 3.0
SEGMENT, SEGMENTS, HEADERS = 1448, 4, 42
UDP_SEGMENT, SO_SNDBUFFORCE = 103, 32
TO_PORT, TO_NIC = 1.6, 1.25  # times what they carry
LOOKS = 20

_SEND = f"""
import socket, sys, time
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.setsockopt(socket.IPPROTO_UDP, {UDP_SEGMENT}, {SEGMENT})
sock.setsockopt(socket.SOL_SOCKET, {SO_SNDBUFFORCE}, 1 << 24)
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


class Found(NamedTuple):
    """Share of its rate that a link carried; how often its queue was seen empty."""

    carried: float
    empty: int


def measure(slack_us: float, computing: int, seconds: float = SECONDS) -> dict[str, Found]:
    """The switch port to h1 and the NIC of h1."""
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
        for host in net.hosts:  # as TCP's: super-packets are cut up when they leave the switch
            port = net.ports[scenario.host(host).down]
            features = ["ethtool", "-K", port.device, "tx-udp-segmentation", "off"]
            run(["nsenter", f"--net=/run/netns/{port.space}", *features])
        packets = rate_bps / 8 / (SEGMENTS * (SEGMENT + HEADERS))
        addresses = ",".join(data_ip(i) for i in range(1, len(net.hosts)))
        _start(stack, net.hosts[server], _SEND, TO_NIC * packets, addresses)
        for host in others:
            _start(stack, net.hosts[host], _SEND, TO_PORT * packets / len(others), data_ip(0))
        for _ in range(computing):
            _start(stack, net.hosts[server], _COMPUTE)
        time.sleep(0.5)
        ends = scenario.host(server)
        links = {"port": net.ports[ends.down], "nic": net.ports[ends.up]}
        looks: dict[str, list[_Look]] = {link: [] for link in links}
        for _ in range(LOOKS):
            for link, where in links.items():
                looks[link].append(_look(where))
            time.sleep(seconds / LOOKS)
    return {link: _judge(looks[link], rate_bps) for link in links}


class _Look(NamedTuple):
    at_s: float
    sent_bytes: int
    waiting_packets: int


def _look(port: Port) -> _Look:
    """What a link has carried so far, and what waits for it."""
    before_s = time.monotonic()
    sent, waiting = carried(port.space, port.device)
    return _Look((before_s + time.monotonic()) / 2, sent, waiting)


def _judge(looks: list[_Look], rate_bps: float) -> Found:
    first, last = looks[0], looks[-1]
    bits = 8 * (last.sent_bytes - first.sent_bytes)
    empty = sum(look.waiting_packets == 0 for look in looks)
    return Found(bits / (last.at_s - first.at_s) / rate_bps, empty)


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


def compare(times: int, seconds: float) -> list[dict[str, Any]]:
    """All bursts, in turns."""
    clean_dead()
    found: dict[tuple[int, float], list[dict[str, Found]]] = {}
    for _ in range(times):
        for computing in (0, 3):
            for slack_us in SLACKS_US:
                one = measure(slack_us, computing, seconds)
                found.setdefault((computing, slack_us), []).append(one)
    return [
        {
            "computing": computing,
            "slack_us": slack_us,
            "of": link,
            "carried": [one[link].carried for one in repeats],
            "empty": sum(one[link].empty for one in repeats),
        }
        for (computing, slack_us), repeats in found.items()
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
    print("computing  burst (us)  link   carried: mean (min to max)   found empty")
    for row in rows:
        shares = row["carried"]
        mean, low, high = statistics.mean(shares), min(shares), max(shares)
        print(
            f"{row['computing']:9}  {row['slack_us']:10.0f}  {row['of']:5}  "
            f"{mean:.3f} ({low:.3f} to {high:.3f})   {row['empty']} of {LOOKS * len(shares)}"
        )


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
