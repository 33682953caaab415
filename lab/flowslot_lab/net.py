# SPDX-License-Identifier: Apache-2.0
"""The lab's network: hosts and switches as network namespaces.

- data network 10.78.0.0/16: each host's `eth0` is a veth to a bridge in the namespace of its
  switch: the only one, or that of its rack. The host end carries an HTB at link rate over a long
  queue, like a NIC (TCP sees its back pressure); the switch end carries an HTB at link rate over a
  `bfifo` of the port's buffer, where packets are lost. A rack's bridge and the one in the
  namespace `core` are joined by a veth, the uplink, whose two ends are such ports too. All is one
  broadcast domain and a tree.
- control network 10.77.0.0/16: `ctl0` on another, unshaped bridge, like the out-of-band
  management network of a cluster. It is in the namespace of the only switch, or of the core.

`gso_max_segs` is small. Linux builds super-packets of 64 kB for TCP, also with all offloads off,
and cuts them behind the queueing discipline, so that the "NIC" would throw 45 packets at the switch
port in no time, which no wire of this speed does. Here a super-packet is at most a tenth of the
smallest port buffer (4 packets for 64 kB, 8 for 128 kB), and at most what the slowest link carries
in `TIMER_SLACK_US`. The first switch port cuts it up when it sends it on, so that receivers see
packets; until then it is one thing to handle. Cut up in the NIC, its packets reach the port
together all the same, and the network needs a whole processor: what is measured is then the
processor (docs/adr/0011).
Received packets go to the network's own processors (RPS, by flow): otherwise each is handled where
its sender happened to run, and packets of one flow overtake each other, which TCP takes for loss.
A wire never pauses, but the timers that emulate it come late on busy processors, and what an HTB
could have sent meanwhile is lost beyond its burst. So bursts hold what a link carries in
`TIMER_SLACK_US` (docs/adr/0011), and no more: a wire has none, and a link that was idle would be
faster than a wire. HTB lets a packet go if what was sent before fits, so a super-packet need not
fit into a burst. Each port's burst is larger than the last one's by a packet, against rounding: of
two equal ones the second would be used up by the first, and never refilled.

A daemon that paces by queueing disciplines needs a NIC that has none: in a stacked network the
HTB that stands for the NIC's speed is one device below, so that its back pressure is still TCP's.

Everything is made inside the run's own namespaces: nothing appears in the host's, and
deleting the namespaces leaves nothing behind.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flowslot_lab import rivals
from flowslot_lab.delay import LongPath
from flowslot_lab.loss import LossyPath
from flowslot_lab.processors import Ticks, of_the_network, read_ticks
from flowslot_lab.rivals import CUBIC, Rival
from flowslot_lab.state import RunState, remove_netns, unregister
from flowslot_lab.tools import LabError, run
from flowslot_scenario.scenario import CORE, SWITCH, Link, Scenario, rack_down, rack_up

SWITCH_CONTROL_IP = "10.77.0.250"
KERNEL_RTO_MS = 200
"""Least retransmission timeout of Linux."""
NIC = "eth0"
WIRE = "wire0"
"""In a stacked network: the host's end of the veth, which is shaped; `NIC` is a macvlan on it."""
UPLINK = "uplink"
"""The device of a rack's switch that leads to the core."""
_MTU_BYTES = 1514
_MOST_SEGMENTS = 16
TIMER_SLACK_US = 600.0
"""So late may a timer come without a link losing time."""
_NIC_QUEUE_PACKETS = 1000


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


def super_packet(links: Iterable[Link]) -> int:
    """How many segments a NIC may send in one go, to ports of these links."""
    most = min(min(link.buffer_bytes / 10, _carries(link, TIMER_SLACK_US)) for link in links)
    return min(max(int(most / _MTU_BYTES), 1), _MOST_SEGMENTS)


def _carries(link: Link, us: float) -> float:
    """Bytes that a link carries in so long."""
    return link.capacity_bps / 8e6 * us


def control_ip(index: int) -> str:
    """Address of host number `index` (from 0) on the control network."""
    return f"10.77.0.{index + 1}"


def rack_control_ip(index: int) -> str:
    """Address of rack number `index` (from 0) on the control network, for its switch process."""
    return f"10.77.1.{index + 1}"


def carried(space: str, dev: str) -> tuple[int, int]:
    """Bytes that have left a link's queue, and packets that wait in it.

    As on the wire: the device would count the headers of a super-packet once. LabError.
    """
    shown = run(["tc", "-n", space, "-s", "class", "show", "dev", dev, "classid", "1:1"])
    sent, waiting = re.search(r"Sent (\d+) bytes", shown), re.search(r"backlog \w+ (\d+)p", shown)
    if sent is None or waiting is None:
        raise LabError(f"`tc` shows no counters of {dev} in {space}: {shown!r}")
    return int(sent[1]), int(waiting[1])


def _mask(processors: Iterable[int]) -> str:
    """A set of processors as sysfs wants it: groups of 32 bits."""
    mask = f"{sum(1 << cpu for cpu in processors):x}"
    groups = [mask[max(0, end - 8) : end] for end in range(len(mask), 0, -8)]
    return ",".join(reversed(groups))


def _bridge(name: str) -> list[str]:
    """Lines for `ip`: a bridge."""
    return [
        f"link add name {name} type bridge stp_state 0 mcast_snooping 0",
        f"link set {name} up",
    ]


def _veth(port: str, bridge: str, peer: str, space: str) -> list[str]:
    """Lines for `ip`: a port of a bridge, and its other end, `peer`, in the namespace `space`."""
    return [
        f"link add name {port} type veth peer name {peer} netns {space}",
        f"link set {port} master {bridge} up",
    ]


@dataclass(frozen=True, slots=True)
class Port:
    """The sending end of a directed link: a device in a network namespace. `hop`: how many others
    a packet may have left by before; 0 is a host's NIC."""

    space: str
    device: str
    hop: int


class Network:
    """Namespaces, links and queues of one scenario.

    `hosts` and `switches`: their namespaces. `ports`: where each directed link is shaped;
    `bursts`: bytes that it carries at once after a pause.
    `control`: the namespace in which the control network's bridge is.
    """

    def __init__(
        self,
        scenario: Scenario,
        state: RunState,
        timer_slack_us: float = TIMER_SLACK_US,
        *,
        stacked: bool = False,
        rival: Rival = CUBIC,
        timeout_ms: int = KERNEL_RTO_MS,
    ) -> None:
        """`stacked`: leave the queueing of `NIC` to others. `rival`: how connections between hosts
        behave that do not choose a congestion control themselves. `timeout_ms`: the least
        retransmission timeout that jobs' sockets have where no route says another."""
        self._rival = rival
        self._congestion_control = rival.congestion_control
        self._registrations = rivals.registrations(rival.congestion_control, state.id)
        self._rto_min_ms = scenario.rto_min_ms
        if rival.rto_min_ms is not None:
            self._rto_min_ms = round(rival.rto_min_ms * scenario.slower)
        elif scenario.rto_min_ms is None and scenario.slower != 1:
            # A route's timeout outranks what a congestion control gives its sockets.
            self._rto_min_ms = round(timeout_ms * scenario.slower)
        self._slack_us = timer_slack_us
        self._wire = WIRE if stacked else NIC
        self.scenario = scenario
        self.state = state
        racks = scenario.racks
        self.hosts = {host.name: self._space(host.name) for host in scenario.hosts}
        # The core first: it is made with its ends of the uplinks, and with those in the racks.
        names = (CORE, *racks) if racks else (SWITCH,)
        self.switches = {name: self._space(name) for name in names}
        self.control = self.switches[names[0]]
        self.ports: dict[str, Port] = {}
        self.bursts: dict[str, int] = {}
        self.losses: list[LossyPath] = []
        self.delays: list[LongPath] = []
        for host in scenario.hosts:
            space = self.switches[host.switch]
            self.ports[host.up] = Port(self.hosts[host.name], self._wire, 0)
            self.ports[host.down] = Port(space, f"d-{host.name}", 3 if racks else 1)
        for rack in racks:
            self.ports[rack_up(rack)] = Port(self.switches[rack], UPLINK, 1)
            self.ports[rack_down(rack)] = Port(self.switches[CORE], f"u-{rack}", 2)

    def _space(self, name: str) -> str:
        return f"fl{self.state.id}-{name}"

    def up(self) -> None:
        """Build it: about 0.1 s for five hosts."""
        links = self.scenario.directed_links()
        segments = super_packet(links.values())
        spaces = [*self.switches.values(), *self.hosts.values()]
        for name in self._registrations:
            self.state.note("struct_ops", name)
        if self._registrations:
            self._congestion_control = rivals.register(
                self._rival.congestion_control, self.state.id, self.state.folder
            )
        for space in spaces:
            self.state.note("netns", space)
        run(["ip", "-batch", "-"], "".join(f"netns add {space}\n" for space in spaces))
        self._cable()
        for i, space in enumerate(self.hosts.values()):
            self._set_up_host(i, space, segments)
        for space in self.switches.values():
            ports = [port.device for port in self.ports.values() if port.space == space]
            self._tune(space, ports, "tso off gso off gro off")
            self._bare_bridges(space)
        for name, link in links.items():
            burst = self._shape(self.ports[name], link)
            self.bursts[name] = burst + segments * _MTU_BYTES
            if self.ports[name].hop and (self._marks or self._rival.fair_queues):
                self._add_program(self.ports[name], link)
        self._lengthen()
        for i, loss in enumerate(self.scenario.losses):
            source = data_ip(self.scenario.index(loss.from_host))
            end = self.hosts[loss.to_host], self._wire
            seed = (self.scenario.seed + i) % 2**32
            self.losses.append(LossyPath(loss, source, end, seed, self.state.folder))

    def _lengthen(self) -> None:
        """Before paths lose anything: they are measured."""
        scenario = self.scenario
        for i, delay in enumerate(scenario.delays):
            source = scenario.host(delay.from_host)
            end = self.switches[source.switch], f"d-{source.name}"
            to = data_ip(scenario.index(delay.to_host))
            rate = scenario.link_of(source.name).rate_mbps
            path = LongPath(i, delay, end, to, rate_mbps=rate, state=self.state)
            self.delays.append(path)
            space, device = path.receives
            self._tune(space, [device], "gro off")
        for path in self.delays:
            to = data_ip(scenario.index(path.delay.to_host))
            expected = scenario.round_trip_us(path.delay)
            path.measure(self.hosts[path.delay.from_host], to, expected)
        for path in self.delays:
            path.begin()

    @property
    def _marks(self) -> bool:
        return self._rival.congestion_control == "dctcp"

    def _cable(self) -> None:
        lines: dict[str, list[str]] = {}
        for space in self.switches.values():
            lines[space] = ["link set lo up", *_bridge("data")]
        control = lines[self.control]
        control += [*_bridge("ctl"), f"addr add {SWITCH_CONTROL_IP}/16 dev ctl"]
        for host in self.scenario.hosts:
            space = self.hosts[host.name]
            lines[self.switches[host.switch]] += _veth(f"d-{host.name}", "data", self._wire, space)
            control += _veth(f"c-{host.name}", "ctl", "ctl0", space)
        for k, rack in enumerate(self.scenario.racks):
            space = self.switches[rack]
            control += _veth(f"u-{rack}", "data", UPLINK, space)
            control.append(f"addr add {rack_control_ip(k)}/16 dev ctl")
            lines[space].append(f"link set {UPLINK} master data up")
        for space, batch in lines.items():
            run(["ip", "-n", space, "-batch", "-"], "\n".join(batch) + "\n")

    def _set_up_host(self, i: int, space: str, segments: int) -> None:
        above = ""
        if self._wire != NIC:
            above = (
                f"link set {self._wire} gso_max_segs {segments} addrgenmode none up\n"
                f"link add name {NIC} link {self._wire} type macvlan mode bridge\n"
            )
        run(
            ["ip", "-n", space, "-batch", "-"],
            f"link set lo up\n{above}"
            f"addr add {data_ip(i)}/16 dev {NIC}\n"
            f"addr add {control_ip(i)}/16 dev ctl0\n"
            f"link set {NIC} gso_max_segs {segments} addrgenmode none up\n"
            f"link set ctl0 addrgenmode none up\n",
        )
        # Of the route: in a namespace, sysctl refuses whatever the host has not opened to users.
        route = f"10.78.0.0/16 dev {NIC} scope link src {data_ip(i)}"
        route += f" congctl {self._congestion_control}"
        if self._rto_min_ms is not None:
            route += f" rto_min {self._rto_min_ms}ms"
        run(["ip", "-n", space, "route", "replace", *route.split()])
        self._tune(space, list({self._wire, NIC}), "tso on gso on gro off")

    def _tune(self, space: str, devices: Sequence[str], offloads: str) -> None:
        lines = []
        mask = _mask(of_the_network())
        for dev in devices:
            lines.append(f"ethtool -K {dev} {offloads}")
            lines.append(f"echo {mask} > /sys/class/net/{dev}/queues/rx-0/rps_cpus")
        # `ip netns exec`, for once: it mounts the /sys of this namespace.
        run(["ip", "netns", "exec", space, "sh", "-ec", "; ".join(lines)])

    def _bare_bridges(self, space: str) -> None:
        """No firewall hooks: a switch has none, and here every packet would go through them."""
        script = "cd /proc/sys/net/bridge 2>/dev/null || exit 0; for f in bridge-nf-call-*; do "
        run(["ip", "netns", "exec", space, "sh", "-ec", script + "echo 0 > $f; done"])

    def _shape(self, port: Port, link: Link) -> int:
        """Returns the burst of its HTB, bytes."""
        late = round(_carries(link, self._slack_us))
        burst = max(late, _MTU_BYTES) + port.hop * _MTU_BYTES
        nic, switch = f"pfifo limit {_NIC_QUEUE_PACKETS}", f"bfifo limit {link.buffer_bytes}"
        queue = switch if port.hop else nic
        rate = f"{round(link.capacity_bps)}bit"
        rival = self._rival
        lines = [
            f"qdisc add dev {port.device} root handle 1: htb "
            f"default {rivals.OTHERS if rival.priority else 1}",
            f"class add dev {port.device} parent 1: classid 1:1 htb rate {rate} "
            f"burst {burst} cburst {burst} quantum 1514",
        ]
        if rival.priority or (port.hop and rival.fair_queues):
            lines += rivals.queues(rival, port.device, rate, burst, queue)
        else:
            lines.append(f"qdisc add dev {port.device} parent 1:1 handle 10: {queue}")
        run(["tc", "-n", port.space, "-batch", "-"], "\n".join(lines) + "\n")
        return burst

    def _add_program(self, port: Port, link: Link) -> None:
        """What a rival needs of a switch's port."""
        made = rivals.port_program(self.state.folder, link.buffer_bytes, marks=self._marks)
        add = ["nsenter", f"--net=/run/netns/{port.space}", "tc", "filter", "add"]
        on = ["dev", port.device]
        run(["tc", "-n", port.space, "qdisc", "add", *on, "clsact"])
        run([*add, *on, "egress", "bpf", "da", "obj", str(made), "sec", "tc/mark"])
        if self._rival.fair_queues:
            spread = ["bpf", "da", "obj", str(made), "sec", "tc/spread", "classid", "1:"]
            run([*add, *on, "parent", "1:", *spread])

    def marked(self) -> tuple[int, int]:
        """Packets that met a long queue: marked, and those that could not be. LabError."""
        counts = [rivals.marked(space) for space in self.switches.values() if self._marks]
        return sum(a for a, _ in counts), sum(b for _, b in counts)

    def learnt(self) -> int:
        """How many iterations began whose bytes MLTCP knew. LabError."""
        return rivals.learnt(self.state.id) if self._rival.learns else 0

    def in_queues(self) -> tuple[int, int]:
        """The most flows' queues that a port has used, and the bytes that all have sent ahead of
        others. LabError."""
        if not (self._rival.fair_queues or self._rival.priority):
            return 0, 0
        every = [rivals.in_queues(port.space, port.device) for port in self.ports.values()]
        return max(used for used, _ in every), sum(ahead for _, ahead in every)

    def down(self) -> None:
        """Remove it. Idempotent."""
        for path in self.delays:
            path.stop()
        for space in [*self.hosts.values(), *self.switches.values()]:
            remove_netns(space)
        for name in self._registrations:
            unregister(name)

    def counters(self) -> Counters:
        """Read the kernel's counters of every link and host."""
        at = time.monotonic()
        switches = {space: self._devices(space)[0] for space in self.switches.values()}
        links: dict[str, int] = {}
        for name, port in self.ports.items():
            if port.space in switches:  # where super-packets are packets already
                links[name] = switches[port.space][port.device][0]
            else:
                links[name] = carried(port.space, port.device)[0]
        retransmits = control = 0
        for space in self.hosts.values():
            devices, resent = self._devices(space)
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
