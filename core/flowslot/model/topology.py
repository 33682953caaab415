# SPDX-License-Identifier: Apache-2.0
"""The cluster's network: hosts, directed links, and which links a flow crosses."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flowslot.model.settings import parse_toml
from flowslot.model.topology_file import (
    Checker,
    NicSettings,
    TopologySettings,
    normal_ip,
    remarks,
)
from flowslot.model.units import Rate, goodput


@dataclass(frozen=True, slots=True)
class Link:
    """A directed link. `goodput`: payload bytes/s. `switch`: the process that holds it, if any."""

    name: str
    capacity_bps: float
    goodput: Rate
    buffer_bytes: int
    switch: str | None

    @property
    def queue_us(self) -> float:
        """How long its buffer lasts at its rate."""
        return self.buffer_bytes * 8e6 / self.capacity_bps


class Topology:
    """An indexed, checked view of a topology file."""

    def __init__(self, settings: TopologySettings, source: str) -> None:
        Checker(settings, source).check()
        self.settings = settings
        self.remarks = remarks(settings)
        self.switches = {s.name: s for s in settings.switches}
        self.hosts = {h.name: h for h in settings.hosts}
        self.links = tuple(
            Link(
                name=link.name,
                capacity_bps=link.capacity_gbps * 1e9,
                goodput=goodput(link.capacity_gbps * 1e9),
                buffer_bytes=int(link.buffer_kb * 1000),
                switch=link.switch,
            )
            for link in settings.links
        )
        self._capacity = np.array([link.goodput for link in self.links], dtype=np.float64)
        self._capacity.flags.writeable = False
        self.link_index = {link.name: i for i, link in enumerate(self.links)}
        self._nics = {
            address: (host.name, nic)
            for host in settings.hosts
            for nic in host.nics
            for address in nic.addresses
        }
        self._routes = {(r.from_rack, r.to_rack): self._indices(r.links) for r in settings.routes}
        self._paths = {(p.src, p.dst): self._indices(p.links) for p in settings.paths}

    def path(self, src_ip: str, dst_ip: str, nic: str = "") -> tuple[int, ...] | None:
        """Indices of the links from one address to another, in order. `nic`: the one of the same
        host that it leaves by, where that is not the one with the first address.

        None: not mapped (unknown address, no route between the racks, same host); such a flow is
        observed but never paced. Raises ValueError when an argument is not an IP address.
        """
        src, dst = normal_ip(src_ip), normal_ip(dst_ip)
        if nic and src in self._nics:
            host, _ = self._nics[src]
            (mine,) = (one.addresses for one in self.hosts[host].nics if one.name == nic)
            src = next((one for one in mine if (one, dst) in self._paths), mine[0])
        if (src, dst) in self._paths:
            return self._paths[src, dst]
        if src not in self._nics or dst not in self._nics:
            return None
        (src_host, src_nic), (dst_host, dst_nic) = self._nics[src], self._nics[dst]
        return None if src_host == dst_host else self._between(src_nic, dst_nic)

    def _between(self, src: NicSettings, dst: NicSettings) -> tuple[int, ...] | None:
        middle = self._middle(src.rack, dst.rack)
        if middle is None:
            return None
        return (self.link_index[src.up], *middle, self.link_index[dst.down])

    def _middle(self, src: str | None, dst: str | None) -> tuple[int, ...] | None:
        """The links between two racks. None: there is no route."""
        if src != dst and src and dst:
            return self._routes.get((src, dst))
        return ()

    def nic_of(self, ip: str) -> NicSettings | None:
        """The NIC that has this address."""
        found = self._nics.get(normal_ip(ip))
        return found[1] if found else None

    def host_of(self, ip: str) -> str | None:
        """Name of the host that has this address."""
        found = self._nics.get(normal_ip(ip))
        return found[0] if found else None

    def capacity(self) -> NDArray[np.float64]:
        """Goodput of each link, payload bytes/s, float64[L], for reading only."""
        return self._capacity

    def host_links(self, host: str) -> tuple[int, ...]:
        """Links on which the host sends, one for each NIC. KeyError: no such host."""
        return tuple(dict.fromkeys(self.link_index[nic.up] for nic in self.hosts[host].nics))

    def links_crossed(self, host: str) -> frozenset[int]:
        """All links that flows from this host may cross. KeyError: no such host."""
        mine = self.hosts[host].nics
        addresses = {address for nic in mine for address in nic.addresses}
        crossed = set(self.host_links(host))
        crossed.update(*(path for (src, _), path in self._paths.items() if src in addresses))
        ends: dict[str | None, set[int]] = {}  # links to other hosts, by the rack at their end
        for other in self.hosts.values():
            if other.name != host:
                for nic in other.nics:
                    ends.setdefault(nic.rack, set()).add(self.link_index[nic.down])
        for src in {nic.rack for nic in mine}:
            for dst, downs in ends.items():
                middle = self._middle(src, dst)
                if middle is not None:
                    crossed.update(middle, downs)
        return frozenset(crossed)

    def switch_links(self, switch: str) -> tuple[int, ...]:
        """Indices of the links held by one switch process."""
        return tuple(i for i, link in enumerate(self.links) if link.switch == switch)

    def _indices(self, names: tuple[str, ...]) -> tuple[int, ...]:
        return tuple(self.link_index[name] for name in names)


def parse_topology(text: str, source: str) -> Topology:
    """Read a topology from TOML. Raises ConfigError for the first thing that is wrong."""
    return Topology(parse_toml(text, source, TopologySettings), source)
