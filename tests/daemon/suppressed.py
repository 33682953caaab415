# SPDX-License-Identifier: Apache-2.0
"""A slot loop with jobs whose grants stand."""

from collections.abc import Callable, Sequence
from typing import Any

import slots as plain
from seen import at

from flowslot.model.topology import Topology
from flowslot.model.units import Nanos
from flowslot.protocol.grants import Granted
from flowslot.protocol.messages import Demand
from flowslotd.observe.observer import RARE_SLOTS

MB = 1_000_000
SLOT_MS = 60


def granted(flow: int, standing: bool) -> Granted:
    return Granted(flow, 1e6, 2e6, standing)


def word(job: Any) -> int:
    """`quiet` in the job's record."""
    quiet: int = job.record.quiet
    return quiet


class Watched:
    """A reader that counts how often it is looked into."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader
        self.looks = 0

    def look(self) -> None:
        self.looks += 1
        self._reader.look()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)


class Office(plain.Desk):
    """Hears small news in every slot, and needs nothing given back."""

    def beat(self, now: Nanos) -> bool:
        return True

    def give_back(self, flows: Sequence[int]) -> list[Granted]:
        return []


class Room:
    """The loop and all around it; `make_job` is the fixture."""

    def __init__(self, topology: Topology, make_job: Callable[..., Any]) -> None:
        self.desk: Any = Office()
        make: Any = plain.Setup
        self.all = make(topology, desk=self.desk)
        self.loop, self.observer, self.pacer = self.all.loop, self.all.observer, self.all.pacer
        self.table, self.events, self.grant = self.all.table, self.all.events, self.all.grant
        self._make_job = make_job
        self.n = -1

    def enlist(self, name: str, *cookies: int) -> tuple[Any, ...]:
        """A job with these flows; the job and the flows' writers."""
        job = self._make_job(name)
        job.reader = Watched(job.reader)
        flows = [job.flow(i, cookie=cookie) for i, cookie in enumerate(cookies)]
        self.all.jobs.append(job)
        return job, *flows

    def slot(self) -> None:
        """The next slot begins."""
        self.n += 1
        self.all.slot(self.n)

    def skip(self, job: Any) -> None:
        """Slots, until the next one would not look at the job."""
        for _ in range(RARE_SLOTS):
            if not self.observer.due(self.n + 1, [job]):
                return
            self.slot()
        raise AssertionError("it is looked at in every slot")

    def said(self) -> list[Demand]:
        """Demands since the last call."""
        said, self.desk.demands = self.desk.demands, []
        return [demand for demands in said for demand in demands]

    def suppressed(self, name: str = "train", *cookies: int) -> tuple[Any, ...]:
        """A job at work on 1 MB per flow; all grants stand, and it has been told so."""
        cookies = cookies or (7,)
        job, *flows = self.enlist(name, *cookies)
        for flow in flows:
            flow.begin(1, MB)
        self.slot()
        for flow in flows:
            flow.ready(MB)
        self.events(at(SLOT_MS * self.n), [job])
        self.grant(at(SLOT_MS * self.n + 1), *(granted(c, True) for c in cookies))
        self.slot()
        self.said()
        assert word(job) == 1
        return job, *flows
