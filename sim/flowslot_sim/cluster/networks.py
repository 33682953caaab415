# SPDX-License-Identifier: Apache-2.0
"""What jobs on several servers contend for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np

from flowslot.policy.base import Paths
from flowslot_sim.cluster.sharing import Contended, MaxMin, Sharing


class Network(Protocol):
    """L links, or servers where these are what is contended for."""

    @property
    def links(self) -> int:
        """L."""
        ...

    def width(self, servers: int) -> int:
        """Entries of the longest path of a job on so many servers."""
        ...

    def path(self, servers: Sequence[int]) -> list[int]:
        """The links of a job's transfers, one entry for each flow on a link; none on one server."""
        ...

    def bytes_per_flow(self, servers: int) -> float:
        """Of one byte to be all-reduced."""
        ...

    def sharing(self, paths: Paths, flows: Paths) -> Sharing:
        """Who gets which rate."""
        ...


@dataclass(frozen=True, slots=True)
class Servers:
    """Transfers slow each other down at servers (see Contended). `b`, `eta`: seconds per byte."""

    links: int
    b: float
    eta: float

    def width(self, servers: int) -> int:
        """See Network."""
        return servers

    def path(self, servers: Sequence[int]) -> list[int]:
        """See Network."""
        return list(servers) if len(servers) > 1 else []

    def bytes_per_flow(self, servers: int) -> float:
        """See Network: a transfer is as long as its message."""
        return 1.0

    def sharing(self, paths: Paths, flows: Paths) -> Sharing:
        """See Network."""
        return Contended(paths, flows, self.links, self.b, self.eta)


@dataclass(frozen=True, slots=True)
class Racks:
    """Rings of flows over servers in racks, shared max-min. Each server and each rack has a link up
    and one down, of `nic` and `uplink` payload bytes/s."""

    racks: int
    servers_per_rack: int
    nic: float
    uplink: float

    @property
    def links(self) -> int:
        """See Network."""
        return 2 * (self.racks * self.servers_per_rack + self.racks)

    def width(self, servers: int) -> int:
        """See Network."""
        return 4 * servers

    def path(self, servers: Sequence[int]) -> list[int]:
        """See Network: from each server to the next, and from the last to the first."""
        if len(servers) < 2:
            return []
        path = []
        for a, b in pairwise([*servers, servers[0]]):
            rack_a, rack_b = (x // self.servers_per_rack for x in (a, b))
            first = self.racks * self.servers_per_rack
            between = [2 * (first + rack_a), 2 * (first + rack_b) + 1] if rack_a != rack_b else []
            path += [2 * a, *between, 2 * b + 1]
        return path

    def bytes_per_flow(self, servers: int) -> float:
        """See Network: reduce-scatter and all-gather."""
        return 2 * (servers - 1) / servers

    def sharing(self, paths: Paths, flows: Paths) -> Sharing:
        """See Network."""
        hosts = 2 * self.racks * self.servers_per_rack
        capacity = np.full(self.links + 1, self.nic)
        capacity[hosts:], capacity[-1] = self.uplink, np.inf
        return MaxMin(paths, flows, capacity)
