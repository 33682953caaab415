# SPDX-License-Identifier: Apache-2.0
"""The lab's network: hosts and a switch as network namespaces.

- data network 10.78.0.0/16: each host's `eth0` is a veth to a bridge in the switch's
  namespace. The host end carries an HTB at link rate over a long queue, like a NIC (TCP
  sees its back pressure); the switch end carries an HTB at link rate over a `bfifo` of the
  port's buffer, where packets are lost.
- control network 10.77.0.0/16: `ctl0` on a second, unshaped bridge, like the out-of-band
  management network of a cluster.

`gso_max_segs` is small. Linux builds super-packets of 64 kB for TCP, also with all offloads off,
and cuts them behind the queueing discipline, so that the "NIC" would throw 45 packets at the switch
port in no time, which no wire of this speed does. Here a super-packet is at most a tenth of the
smallest port buffer: 4 packets for 64 kB, 8 for 128 kB. The switch port cuts it up when it sends it
on, so that receivers see packets; until then it is one thing to handle. Cut up in the NIC, its
packets reach the port together all the same, and the network needs a whole processor: what is
measured is then the processor (docs/adr/0011).
Received packets go to the network's own processors (RPS, by flow): otherwise each is handled where
its sender happened to run, and packets of one flow overtake each other, which TCP takes for loss.
A wire never pauses, but the timers that emulate it come late on busy processors, and what an HTB
could have sent meanwhile is lost beyond its burst. So bursts hold what a link carries in
`TIMER_SLACK_US` (docs/adr/0013). The NIC's burst plus one super-packet stay below the switch's
burst: a flow that has a port for itself is not shaped twice.

Everything is made inside the run's own namespaces: nothing appears in the host's, and
deleting the namespaces leaves nothing behind.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flowslot_lab.processors import Ticks, of_the_network, read_ticks
from flowslot_lab.state import RunState, remove_netns
from flowslot_scenario.scenario import SWITCH, Scenario, down, up

SWITCH_CONTROL_IP = "10.77.0.250"
NIC = "eth0"
_MTU_BYTES = 1514
_MOST_SEGMENTS = 16
TIMER_SLACK_US = 600.0
"""So late may a timer come without a link losing time."""
_NIC_QUEUE_PACKETS = 1000


class LabError(Exception):
    """The lab itself could not do something (a command failed, a process did not answer)."""


@dataclass(frozen=True, slots=True)
class Counters:
    """One moment of the network.

    `at_s`: CLOCK_MONOTONIC; all else counts from when the network came up: bytes sent per
    directed link, TCP segments retransmitted by all hosts, and packets that the hosts sent on
    the control network, where nothing but the daemons' gRPC travels.
    """

    at_s: float
    link_bytes: dict[str, int]
    retransmits: int
    control_packets: int
    ticks: Ticks


def data_ip(index: int) -> str:
    """Address of host number `index` (from 0) on the data network."""
    return f"10.78.0.{index + 1}"


def super_packet(buffers: Iterable[int]) -> int:
    """How many segments a NIC may send in one go, for port buffers of so many bytes."""
    return min(max(min(buffers) // (10 * _MTU_BYTES), 1), _MOST_SEGMENTS)


def control_ip(index: int) -> str:
    """Address of host number `index` (from 0) on the control network."""
    return f"10.77.0.{index + 1}"


def run(command: Sequence[str], stdin: str = "") -> str:
    """Run a network tool; LabError with its message when it fails."""
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LabError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout


def carried(space: str, dev: str) -> tuple[int, int]:
    """Bytes that have left a link's queue, and packets that wait in it.

    As on the wire: the device would count the headers of a super-packet once. LabError.
    """
    shown = run(["tc", "-n", space, "-s", "class", "show", "dev", dev])
    sent, waiting = re.search(r"Sent (\d+) bytes", shown), re.search(r"backlog \w+ (\d+)p", shown)
    if sent is None or waiting is None:
        raise LabError(f"`tc` shows no counters of {dev} in {space}: {shown!r}")
    return int(sent[1]), int(waiting[1])


def _mask(processors: Iterable[int]) -> str:
    """A set of processors as sysfs wants it: groups of 32 bits."""
    mask = f"{sum(1 << cpu for cpu in processors):x}"
    groups = [mask[max(0, end - 8) : end] for end in range(len(mask), 0, -8)]
    return ",".join(reversed(groups))


class Network:
    """Namespaces, links and queues of one scenario."""

    def __init__(
        self, scenario: Scenario, state: RunState, timer_slack_us: float = TIMER_SLACK_US
    ) -> None:
        self._slack_us = timer_slack_us
        self.scenario = scenario
        self.state = state
        self.switch = f"fl{state.id}-{SWITCH}"
        self.hosts = {host.name: f"fl{state.id}-{host.name}" for host in scenario.hosts}

    def up(self) -> None:
        """Build it: about 0.1 s for five hosts."""
        segments = super_packet(
            link.buffer_bytes for link in map(self.scenario.link_of, self.hosts)
        )
        more = (segments + 1) * _MTU_BYTES  # a super-packet, and a packet to spare
        spaces = [self.switch, *self.hosts.values()]
        for space in spaces:
            self.state.note("netns", space)
        run(["ip", "-batch", "-"], "".join(f"netns add {space}\n" for space in spaces))
        self._cable()
        for i, (name, space) in enumerate(self.hosts.items()):
            run(
                ["ip", "-n", space, "-batch", "-"],
                f"link set lo up\n"
                f"addr add {data_ip(i)}/16 dev {NIC}\n"
                f"addr add {control_ip(i)}/16 dev ctl0\n"
                f"link set {NIC} gso_max_segs {segments} addrgenmode none up\n"
                f"link set ctl0 addrgenmode none up\n",
            )
            if self.scenario.rto_min_ms is not None:
                net = f"10.78.0.0/16 dev {NIC} scope link src {data_ip(i)}"
                rto_min = f"rto_min {self.scenario.rto_min_ms}ms"
                run(["ip", "-n", space, "route", "replace", *net.split(), *rto_min.split()])
            self._tune(space, [NIC], "tso on gso on gro off")
            queue = f"pfifo limit {_NIC_QUEUE_PACKETS}"
            rate = self.scenario.link_of(name).rate_mbps
            self._shape(space, NIC, rate, self._burst(rate, more), queue)
        ports = [f"d-{name}" for name in self.hosts]
        self._tune(self.switch, ports, "tso off gso off gro off")
        self._bare_bridges()
        for name in self.hosts:
            link = self.scenario.link_of(name)
            queue = f"bfifo limit {link.buffer_bytes}"
            burst = self._burst(link.rate_mbps, more) + more
            self._shape(self.switch, f"d-{name}", link.rate_mbps, burst, queue)

    def _cable(self) -> None:
        lines = ["link set lo up"]
        for bridge in ("data", "ctl"):
            lines += [
                f"link add name {bridge} type bridge stp_state 0 mcast_snooping 0",
                f"link set {bridge} up",
            ]
        lines.append(f"addr add {SWITCH_CONTROL_IP}/16 dev ctl")
        for name, space in self.hosts.items():
            for prefix, nic, bridge in (("d", NIC, "data"), ("c", "ctl0", "ctl")):
                port = f"{prefix}-{name}"
                lines += [
                    f"link add name {port} type veth peer name {nic} netns {space}",
                    f"link set {port} master {bridge} up",
                ]
        run(["ip", "-n", self.switch, "-batch", "-"], "\n".join(lines) + "\n")

    def _tune(self, space: str, devices: Sequence[str], offloads: str) -> None:
        lines = []
        mask = _mask(of_the_network())
        for dev in devices:
            lines.append(f"ethtool -K {dev} {offloads}")
            lines.append(f"echo {mask} > /sys/class/net/{dev}/queues/rx-0/rps_cpus")
        # `ip netns exec`, for once: it mounts the /sys of this namespace.
        run(["ip", "netns", "exec", space, "sh", "-ec", "; ".join(lines)])

    def _bare_bridges(self) -> None:
        """No firewall hooks: a switch has none, and here every packet would go through them."""
        script = "cd /proc/sys/net/bridge 2>/dev/null || exit 0; for f in bridge-nf-call-*; do "
        run(["ip", "netns", "exec", self.switch, "sh", "-ec", script + "echo 0 > $f; done"])

    def _burst(self, rate_mbps: float, least: int) -> int:
        """Bytes that a link of this rate carries while its timer is late."""
        return max(round(rate_mbps / 8 * self._slack_us), least)

    def _shape(self, space: str, dev: str, rate_mbps: float, burst: int, queue: str) -> None:
        rate = f"{round(rate_mbps * 1e6)}bit"
        run(
            ["tc", "-n", space, "-batch", "-"],
            f"qdisc add dev {dev} root handle 1: htb default 1\n"
            f"class add dev {dev} parent 1: classid 1:1 htb rate {rate} "
            f"burst {burst} cburst {burst} quantum 1514\n"
            f"qdisc add dev {dev} parent 1:1 handle 10: {queue}\n",
        )

    def down(self) -> None:
        """Remove it. Idempotent."""
        for space in [*self.hosts.values(), self.switch]:
            remove_netns(space)

    def counters(self) -> Counters:
        """Read the kernel's counters of every link and host."""
        at = time.monotonic()
        ports = self._devices(self.switch)[0]
        links: dict[str, int] = {}
        retransmits = control = 0
        for name, space in self.hosts.items():
            devices, resent = self._devices(space)
            links[up(name)] = carried(space, NIC)[0]
            links[down(name)] = ports[f"d-{name}"][0]
            control += devices["ctl0"][1]
            retransmits += resent
        return Counters(at, links, retransmits, control, read_ticks())

    def _devices(self, space: str) -> tuple[dict[str, tuple[int, int]], int]:
        """(bytes, packets) sent by each device of a namespace, and TCP retransmissions."""
        files = ["/proc/net/dev", "/proc/net/snmp"]
        text = run(["nsenter", f"--net=/run/netns/{space}", "cat", *files])
        sent = {}
        for device, numbers in re.findall(r"^ *([^ :]+):((?: +\d+){16})$", text, re.M):
            fields = numbers.split()
            sent[device] = (int(fields[8]), int(fields[9]))
        names, values = re.findall(r"^Tcp: (.*)$", text, re.M)
        tcp = dict(zip(names.split(), values.split(), strict=True))
        return sent, int(tcp["RetransSegs"])
