# SPDX-License-Identifier: Apache-2.0
"""Servers in racks, racks in groups, groups below one switch; and which flows a job has there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from flowslot.model.units import goodput
from flowslot.policy.base import Floats, Paths
from flowslot_sim.cluster.jobs import JobSpec
from flowslot_sim.cluster.planned import Planned
from flowslot_sim.cluster.sharing import MaxMin, Sharing

WAYS = "up", "down"
HOPS = 6
"""Links on the longest way: up from a server, its rack and its group, and down again."""


@dataclass(frozen=True, slots=True)
class Tiers:
    """A Network. Each server, rack and group has a link up and one down, of `gbps` each (of the
    three tiers). `top_up`: transfers share what is not reserved for them max-min, see MaxMin.
    `private`: links more, of which each bounds one job, and whose capacity somebody else sets."""

    servers: int
    gbps: tuple[float, float, float] = (10.0, 20.0, 40.0)
    servers_per_rack: int = 10
    racks_per_group: int = 10
    top_up: bool = True
    private: int = 0

    @property
    def racks(self) -> int:
        """All of them."""
        return -(-self.servers // self.servers_per_rack)

    @property
    def groups(self) -> int:
        """All of them."""
        return -(-self.racks // self.racks_per_group)

    @property
    def links(self) -> int:
        """See Network."""
        return self.shared + self.private

    @property
    def shared(self) -> int:
        """Without the private ones, which come after them."""
        return 2 * (self.servers + self.racks + self.groups)

    @property
    def names(self) -> list[str]:
        """Of the links, without the private ones."""
        counts = {"server": self.servers, "rack": self.racks, "group": self.groups}
        return [f"{x} {k} {way}" for x, n in counts.items() for k in range(n) for way in WAYS]

    @property
    def capacity(self) -> Floats:
        """Payload bytes/s of each link, float64[L + 1], the last one inf."""
        counts = (2 * self.servers, 2 * self.racks, 2 * self.groups, self.private + 1)
        rates = [*(goodput(each * 1e9) for each in self.gbps), np.inf]
        return np.repeat(rates, counts)

    def width(self, servers: int) -> int:
        """See Network."""
        return HOPS * servers + 1

    def way(self, a: int, b: int) -> list[int]:
        """The links of a flow from server a to server b; none on one server."""
        if a == b:
            return []
        up, down = [2 * a], [2 * b + 1]
        racks = a // self.servers_per_rack, b // self.servers_per_rack
        if racks[0] != racks[1]:
            first = self.servers
            up.append(2 * (first + racks[0]))
            down.insert(0, 2 * (first + racks[1]) + 1)
            groups = racks[0] // self.racks_per_group, racks[1] // self.racks_per_group
            if groups[0] != groups[1]:
                first += self.racks
                up.append(2 * (first + groups[0]))
                down.insert(0, 2 * (first + groups[1]) + 1)
        return up + down

    def path(self, servers: Sequence[int]) -> list[int]:
        """See Network: of a ring."""
        pairs = zip(servers, [*servers[1:], servers[0]], strict=True) if len(servers) > 1 else ()
        return [link for a, b in pairs for link in self.way(a, b)]

    def bytes_per_flow(self, servers: int) -> float:
        """See Network: volumes are those of flows already."""
        return 1.0

    def sharing(self, paths: Paths, flows: Paths) -> Sharing:
        """See Network."""
        if not self.top_up:
            return Planned(paths, flows, self.links)
        return MaxMin(paths, flows, self.capacity, roughly=True)


Shape = Callable[[JobSpec], list[tuple[int, int]]]
"""The flows of a job: from which worker to which, by number; all carry the volume of its phase."""


def ring(job: JobSpec) -> list[tuple[int, int]]:
    """From each worker to the next."""
    n = job.workers
    return [(k, (k + 1) % n) for k in range(n)] if n > 1 else []
