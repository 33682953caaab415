# SPDX-License-Identifier: Apache-2.0
"""Progress records and the kernel's counters, looked at together, without a slot loop."""

from typing import Any

import numpy as np

from flowslot.model.topology import Topology
from flowslot.model.units import MILLISECOND, Nanos
from flowslotd.flows.counters import FlowCounters
from flowslotd.flows.flow_table import FlowTable
from flowslotd.observe.binding import Owns
from flowslotd.observe.observer import Observer

MS = MILLISECOND


def at(ms: float) -> Nanos:
    return Nanos(10**12 + round(ms * MS))


class Seen:
    """A host's flows; `seen["remaining"]` is a column of their rows."""

    def __init__(self, topology: Topology, owns: Owns = lambda pid, fd, cookie: None) -> None:
        self.table = FlowTable(topology, "h1")
        self.observer = Observer(self.table, owns)
        self.sent = FlowCounters.none()
        self.way = 0
        """So many of each flow's bytes are on their way."""

    def look(self, ms: float, *jobs: Any, **sent: int) -> None:
        """`c7=500`: the kernel has sent 500 bytes of flow 7; as before where none is given."""
        if sent:
            known = sorted((int(name[1:]), counter) for name, counter in sent.items())
            cookies, counters = zip(*known, strict=True)
            counted = np.array(counters, np.int64)
            self.sent = FlowCounters(np.array(cookies, np.uint64), counted, counted - self.way)
        self.observer.observe(at(ms), jobs, self.sent)

    def __getitem__(self, name: str) -> list[Any]:
        values: list[Any] = self.table.rows[name].tolist()
        return values

    @property
    def flows(self) -> list[int]:
        """Cookies, in the order of the rows."""
        return [info.cookie for info in self.table.infos if info.cookie]

    @property
    def notes(self) -> list[str]:
        """Of those that got no row."""
        return [info.note for info in self.observer.refused()]

    def gone(self) -> list[int]:
        return [info.cookie for info in self.table.take_gone()]
