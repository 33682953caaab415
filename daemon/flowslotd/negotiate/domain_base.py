# SPDX-License-Identifier: Apache-2.0
"""What the rest of the daemon knows of those that negotiate for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from flowslot.model.units import Nanos
from flowslot.policy.base import Floats
from flowslot.protocol.grantbook import Granted
from flowslot.protocol.messages import Demand, Done
from flowslot.protocol.negotiator import News
from flowslotd.metrics import Durations, Summary

OnGrants = Callable[[Nanos, Sequence[Granted]], None]
"""Called in the loop's thread; the grants must be in force when it returns. A rate of NaN: nobody
has a say, leave the flow alone."""


@dataclass(slots=True)
class DomainStats:
    """What negotiation has brought, over the life of a domain."""

    granted: int = 0
    refused: int = 0
    preempted: int = 0
    expired: int = 0
    messages_out: int = 0
    messages_in: int = 0
    last_error: str = ""
    negotiation: Durations = field(default_factory=Durations)
    """From the demand of a flow that has nothing to its first grant."""
    round_trip: Durations = field(default_factory=Durations)
    """From a heartbeat to its echo."""

    def count(self, raised: int, lowered: int) -> None:
        """Take changes of grants into account."""
        self.granted += raised
        self.preempted += lowered

    def take(self, news: News) -> None:
        """Take what a message of an arbiter has brought into account."""
        self.count(len(news.changes.raised), len(news.changes.lowered))
        self.refused += len(news.refused)
        if news.refused:
            self.last_error = news.refused[-1]
        if news.round_trip_ns is not None:
            self.round_trip.add(news.round_trip_ns)
        if news.waited_ns is not None:
            self.negotiation.add(news.waited_ns)

    def describe(self) -> dict[str, object]:
        """Of all streams together, for `flowslot status`."""
        return {
            "messages_in": self.messages_in,
            "messages_out": self.messages_out,
            "round_trip": self.round_trip.summary(),
            "error": self.last_error,
        }

    def reservations(self) -> dict[str, int]:
        """Raises, refusals, lowers and lost leases, as this daemon saw them."""
        return {
            "granted": self.granted,
            "refused": self.refused,
            "preempted": self.preempted,
            "expired": self.expired,
        }


class Domain(Protocol):
    """A contention domain as the daemon sees it. Answers through OnGrants, now or later."""

    @property
    def lease_end(self) -> Nanos | None:
        """Until when the present grants may be enforced (monotonic); None: no end."""
        ...

    @property
    def grpc_connections(self) -> int:
        """Open connections to switch processes."""
        ...

    def demand(self, now: Nanos, demands: Sequence[Demand]) -> None:
        """These flows are new or have changed. `links` are indices into the topology."""
        ...

    def done(self, now: Nanos, dones: Sequence[Done]) -> None:
        """These flows are gone."""
        ...

    def give_back(self, flows: Iterable[int]) -> list[Granted]:
        """Stop using the grants of these flows, whose phase has ended; say so with their demands.

        Returns what they have now, to be put into force before anything is sent. An arbiter that
        answers at once needs no help: nothing changes.
        """
        ...

    def beat(self, now: Nanos) -> bool:
        """Once per slot: a sign of life, if one is due, travels with what is said now. True: small
        news may be said as well."""
        ...

    def grant(self, flow: int) -> Granted:
        """What the flow may send at present; NaN: nobody has a say (yet)."""
        ...

    def covers(self, links: tuple[int, ...]) -> bool:
        """A live arbiter holds every one of these links."""
        ...

    def describe(self) -> dict[str, object]:
        """For `flowslot status`."""
        ...

    def reservations(self) -> dict[str, int]:
        """For `flowslot status` and as evidence of a run."""
        ...

    def negotiation(self) -> Summary:
        """For `flowslot status`."""
        ...

    def clock_offset_us(self) -> float | None:
        """Wall clock of the switch minus ours; None: unknown."""
        ...

    async def load_table(self, now: Nanos) -> Floats | None:
        """Reserved rates, float64[L, K] over the topology's links; NaN: not known."""
        ...

    async def start(self) -> None:
        """Begin to negotiate."""
        ...

    async def close(self) -> None:
        """End it; nothing is called back any more."""
        ...
