# SPDX-License-Identifier: Apache-2.0
"""How MLCC is run: as the paper has it, or with the remedies for what was found wrong with it."""

from dataclasses import dataclass
from typing import Literal

from flowslot.policy.mlcc.plan import Reading

Bound = Literal["paper", "residual"]
Order = Literal["arrival", "shortest"]


@dataclass(frozen=True, slots=True)
class MlccOptions:
    """The defaults are the paper; `repaired()` has every remedy on."""

    cost: Reading = "literal"
    """What Algorithm 1 minimises, see `plan`."""
    atomic: bool = False
    """The caller reserves with updates that a switch refuses as a whole when they do not fit,
    says so with `MlccPolicy.refused`, and decides again with fresh feedback. Otherwise switches add
    up what hosts plan at the same time, so that hosts evade each other for ever."""
    release: bool = False
    """A flow that sent nothing in a slot in which it had a rate loses its reservations; it gets
    what is left of the current slot until it sends, or may send, or has paused long enough."""
    bound: Bound = "paper"
    """B_i of Algorithm 2 and the bandwidth next to other traffic, see `bandwidth`. `paper`:
    history alone, which is stuck at 0 after four slots without a byte."""
    replan_on_events: bool = False
    """Decide anew at every `decide`, not only when a slot begins."""
    top_up: bool = False
    """A flow may use what nobody has reserved of the current slot, beyond its rate; so its last
    bytes do not trickle through a whole slot."""
    order: Order = "arrival"
    """Which flow is planned first. `arrival`: first come, first served, in favour of elephants.
    `shortest`: by the time that the flow needs alone, shortened as it waits so that none starves.
    Across hosts it only holds if the caller sends updates by `Update.key`."""

    @staticmethod
    def repaired(cost: Reading = "rhs") -> "MlccOptions":
        """Every remedy on."""
        return MlccOptions(cost, True, True, "residual", True, True, "shortest")
