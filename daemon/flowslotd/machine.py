# SPDX-License-Identifier: Apache-2.0
"""This machine beside the configuration: whether it is the host that it is said to be, and by which
of its NICs the kernel sends what.

The topology says it by addresses. The kernel goes by its routes: the address may be on `lo`, and a
rule may send what one NIC's address is on by another NIC.
"""

import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from errno import EXDEV

from flowslot.model.settings import some
from flowslot.model.topology import Topology
from flowslot.model.topology_file import NicSettings
from flowslotd import sockets
from flowslotd.flows.flow_info import FlowInfo
from flowslotd.pace import devices
from flowslotd.pace.rtnetlink import choices, device_between, devices_between, packed

_PROTOCOLS = {"tcp": socket.IPPROTO_TCP, "udp": socket.IPPROTO_UDP}


@dataclass(frozen=True, slots=True)
class Detour:
    """Flows from the addresses of one NIC leave by another device."""

    nic: NicSettings
    device: str
    instead: NicSettings | None
    """Of this host, the NIC that this device is."""

    def __str__(self) -> str:
        flows = f"flows from {self.nic.name} ({', '.join(self.nic.addresses)})"
        if self.instead is None:
            return (
                f"{flows} leave by {self.device}, which is no NIC of this host in the topology; "
                f"they are counted on {self.nic.up}"
            )
        name = self.instead.name
        known = self.device if name == self.device else f"{self.device} (NIC {name})"
        return (
            f"{flows} leave by {known}, so says the routing table; they are counted on "
            f"{self.instead.up}, not on {self.nic.up}"
        )


class Machine:
    """One look at this machine's addresses and devices, in the network namespace of the thread."""

    def __init__(self, topology: Topology, host: str) -> None:
        """Raises OSError."""
        self._topology = topology
        self._host = topology.hosts[host]
        self._outlines = devices.outlines()
        self._holders = devices.holders()
        self._devices = {nic.name: self._of(nic) for nic in self._host.nics}

    def _of(self, nic: NicSettings) -> set[int]:
        """The devices that have a NIC's addresses; where only `lo` has them, that of its name."""
        wired = {index for index, one in self._outlines.items() if one.wired}
        found = set[int]().union(*(self._holders.get(one, set()) for one in nic.addresses))
        named = {index for index, one in self._outlines.items() if nic.name in one.names}
        return found & wired or named & wired

    def doubts(self, file: str) -> list[str]:
        """Why this may not be the host that the configuration in this file names."""
        mine = [address for nic in self._host.nics for address in nic.addresses]
        missing = [address for address in mine if address not in self._holders]
        host = self._host.name
        if missing != mine:
            return [
                f"{address}, an address of {host} in the topology, is not on this machine"
                for address in missing
            ]
        problem = f'is "{host}", but none of its addresses ({some(mine, 4)}) is on this machine'
        for address in self._holders:
            if other := self._topology.host_of(address):
                problem += f', which has {address}: did you mean "{other}"?'
                break
        return [f"{file}: field `host`: {problem}"]

    def detour(self, src: str, device: int) -> Detour | None:
        """What is to be said where a flow from this address leaves by this device; None: nothing,
        the topology has it so, or cannot tell."""
        nic = self._topology.nic_of(src)
        outline = self._outlines.get(device)
        if nic is None or outline is None or not outline.wired:
            return None
        own = self._devices.get(nic.name, set())
        if device in own:
            return None
        for other in self._host.nics:
            if device in self._devices[other.name]:
                return Detour(nic, outline.names[0], other)
        return Detour(nic, outline.names[0], None) if own else None

    def ways(self) -> Iterator[tuple[str, int]]:
        """From which address, by which device flows to the other hosts leave now. Slow: asks for
        each pair of addresses."""
        mine = [one for nic in self._host.nics for one in nic.addresses if one in self._holders]
        others = [host for host in self._topology.hosts.values() if host is not self._host]
        found = dict[tuple[str, int], None]()
        for address in (one for host in others for nic in host.nics for one in nic.addresses):
            for src in mine:
                here, there = packed(src), packed(address)
                if len(here) == len(there):
                    with suppress(OSError):  # no route
                        found |= dict.fromkeys((src, at) for at in devices_between(here, there))
        yield from found

    def strays(self) -> list[Detour]:
        """What `detour` says of `ways`."""
        found = (self.detour(src, device) for src, device in self.ways())
        return list(dict.fromkeys(one for one in found if one))


def detours(
    machine: Machine, flows: Iterable[FlowInfo], before: Mapping[int, Detour]
) -> dict[int, Detour]:
    """Which of these flows leave by another device than the topology says, by cookie. Asks the
    kernel for each flow's route; where it does not say, what was found `before` stands. Raises
    OSError."""
    found = {}
    with socket.socket() as own:
        namespace = sockets.namespace(own)
    for info in flows:
        try:
            detour = machine.detour(info.src, _device(info, namespace))
        except (OSError, ValueError):  # no address, no route, another network namespace
            detour = before.get(info.cookie)
        if detour:
            found[info.cookie] = detour
    return found


def _device(info: FlowInfo, namespace: int) -> int:
    """Where a flow's packets leave. Mark and device only where the socket can be had. Raises
    OSError."""
    mark = device = 0
    elsewhere = False
    with suppress(OSError):
        pidfd = os.pidfd_open(info.pid)
        try:
            with sockets.borrow(pidfd, info.fd, info.cookie) as sock:
                elsewhere = sockets.namespace(sock) != namespace
                mark, device = choices(sock)
        finally:
            os.close(pidfd)
    if elsewhere:
        raise OSError(EXDEV, "it is in another network namespace")
    ports = _PROTOCOLS[info.protocol], info.sport, info.dport
    return device_between(packed(info.src), packed(info.dst), ports, mark, device)
