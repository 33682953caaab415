# SPDX-License-Identifier: Apache-2.0
"""What programs that talk over loopback would put on a wire, by the kernel's counters.

They run in a network namespace of their own, so that nobody else's packets are counted, over a
loopback made like Ethernet: an MTU of 1500 and no packets larger than that (no segmentation
offload), so that every packet has its headers. `/proc/net/dev` counts IP packets there, all of
both directions: payload, gRPC's and HTTP/2's frames, TCP and IP headers, acknowledgements, and
setting connections up. What Ethernet adds to each packet (header, checksum, preamble and gap) is
added here. Needs root.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ETHERNET_BYTES = 14 + 4 + 8 + 12


class Traffic(NamedTuple):
    """IP packets of both directions, and their bytes."""

    size: int
    packets: int


def alone(arguments: Sequence[str]) -> Traffic:
    """Run Python with these arguments in a network namespace of its own, where it calls tell()."""
    command = ["unshare", "--net", sys.executable, *arguments]
    return Traffic(*json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))


def tell(work: Callable[[], Any]) -> None:
    """In that namespace: do the work, and print what it has put on the wire."""
    subprocess.run(
        ["ip", "link", "set", "lo", "up", "mtu", "1500", "gso_max_segs", "1"], check=True
    )
    before = of_loopback(Path("/proc/net/dev").read_text())
    work()
    after = of_loopback(Path("/proc/net/dev").read_text())
    print(json.dumps([after.size - before.size, after.packets - before.packets]))


def of_loopback(proc_net_dev: str) -> Traffic:
    """What loopback has received, which is all that was sent over it."""
    line = next(x for x in proc_net_dev.splitlines() if x.strip().startswith("lo:"))
    size, packets, *_ = line.split(":")[1].split()
    return Traffic(int(size), int(packets))


def per_second(traffic: Traffic, seconds: float) -> dict[str, float]:
    """Mbit/s on an Ethernet wire, and of IP packets alone."""
    size, packets = traffic
    return {
        "bandwidth_mbps": round((size + packets * ETHERNET_BYTES) * 8 / seconds / 1e6, 3),
        "bandwidth_ip_mbps": round(size * 8 / seconds / 1e6, 3),
        "bandwidth_packets_per_s": round(packets / seconds),
    }
