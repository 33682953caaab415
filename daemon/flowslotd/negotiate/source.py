# SPDX-License-Identifier: Apache-2.0
"""Where the rates of this host's flows come from.

The slot loop knows only this. `ArbiterRates` asks arbiters for grants, `PlannedRates` plans against
the load tables of switches, and `FixedRates` asks nobody.
"""

from collections.abc import Sequence
from typing import Any

from flowslot.model.units import Nanos
from flowslot.policy.base import Floats, HostPolicy, Pace, View
from flowslotd.flows.flow_info import FlowInfo
from flowslotd.metrics import Durations

NO_RESERVATIONS = {"granted": 0, "scheduled": 0, "refused": 0, "preempted": 0, "expired": 0}


class RateSource:
    """Decides nothing, and has nothing to ask. All methods run in the event loop's thread."""

    at_boundary = False
    """A pass has to come when a slot begins; otherwise any moment of the slot will do."""
    joint = False
    """It decides on all flows together: at events, it needs to know of all how far they are."""
    tops_up = False
    """A flow may send, if there is room, although it is granted nothing."""
    reports = False
    """Somebody waits for news of what flows do."""
    why_unpaced = "the policy leaves it alone"
    """Why a flow that could be paced is not."""

    def follow(self, now: Nanos, new: Sequence[FlowInfo], gone: Sequence[FlowInfo]) -> None:
        """Flows have come and gone."""

    def negotiate(self, now: Nanos, slot: int, *, moved: bool, small: bool) -> None:
        """Flows have been looked at. Say what others need to know; never waits.

        `moved`: some have done more than send. `small`: minor changes may be said, too.
        """

    def beat(self, now: Nanos) -> bool:
        """Once per slot, before `negotiate`: whether that has to follow, though no flow is looked
        at; small news may be said then."""
        return False

    @property
    def waiting(self) -> bool:
        """An answer asks for flows that nobody has looked at for a while: look at all."""
        return False

    def due(self, now: Nanos) -> set[int] | None:
        """Cookies of flows whose rates may be others than when this was asked last; None: all."""
        return set()

    def rates(self, now: Nanos, view: View) -> Pace | None:
        """What the flows of the view may send. Flows without a rate are left alone."""
        return None

    def covers(self, links: tuple[int, ...]) -> bool:
        """A live arbiter guarantees what flows of this path may send."""
        return False

    def deadline(self, now: Nanos) -> Nanos | None:
        """Until when rates may stay in force unheard; None: as long as the daemon shows life."""
        return None

    def tell(self, now: Nanos) -> None:
        """Once per slot, after it, and when plans have changed: let other hosts know."""

    # --- for `flowslot status` and `links`

    def describe(self) -> dict[str, Any]:
        """Keys of the status. A kind of source replaces what it knows.

        `domain`: the arbiters; `feedback`: the planner's rounds; `peers`: the other hosts;
        `grpc_connections`: open ones to switch processes; `reservations`: of whoever reserves for
        this daemon; `negotiation`: from the demand of a flow that has nothing to its first grant;
        `clock_offset_us`: wall clock of the switch minus ours, None unknown.
        """
        return {
            "domain": {"state": "none"},
            "feedback": None,
            "peers": None,
            "grpc_connections": 0,
            "reservations": NO_RESERVATIONS,
            "negotiation": Durations().summary(),
            "clock_offset_us": None,
        }

    async def load_table(self, now: Nanos) -> Floats | None:
        """Reserved rates, float64[L, K] over the topology's links; NaN: not known."""
        return None

    # --- life

    async def start(self) -> None:
        """Begin. Does not wait for switch processes."""

    async def close(self) -> None:
        """End it; what was reserved is given back as far as it can be."""


class FixedRates(RateSource):
    """A policy that asks nobody."""

    joint = True

    def __init__(self, policy: HostPolicy) -> None:
        self._policy = policy
        self._all = True

    def negotiate(self, now: Nanos, slot: int, *, moved: bool, small: bool) -> None:
        """See RateSource."""
        self._all |= moved

    def due(self, now: Nanos) -> set[int] | None:
        """See RateSource."""
        every, self._all = self._all, False
        return None if every else set()

    def rates(self, now: Nanos, view: View) -> Pace | None:
        """See RateSource."""
        return self._policy.decide(now, view)
