# SPDX-License-Identifier: Apache-2.0
"""What the paper estimates from the last four slots, and how it would have to be.

Two numbers come out of that window: B_i, the most that a flow can send (Algorithm 2), and u_l, the
most that a link has for flows that we control, next to traffic that we do not (section IV-B). Both
are the highest value seen. A flow that sent nothing for four slots, because it had nothing to send
or because a plan said so, has seen nothing, may send nothing, and so will never see anything else.
The remedy is the same for both: what was sent is no evidence of what could have been.

Rates are payload bytes/s; L links.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from flowslot.policy.base import Floats

WINDOW = 4
"""Slots that the paper looks back."""


@dataclass(frozen=True, slots=True, eq=False)
class Observed:
    """What a host saw of slot `slot`, which is over.

    `sent`: bytes of each of its flows in that slot; of a flow that is not named nothing is known.
    `loads`: what all controlled flows together sent over each link, and what the link carried in
    all, other traffic included, float64[L] each; None: links are not counted.
    """

    slot: int
    sent: Mapping[int, float]
    loads: tuple[Floats, Floats] | None = None


class History:
    """The last WINDOW observations."""

    def __init__(self) -> None:
        self._seen: deque[Observed] = deque(maxlen=WINDOW)

    def observe(self, observed: Observed) -> None:
        """Slots in ascending order; raises ValueError otherwise."""
        if self._seen and observed.slot <= self._seen[-1].slot:
            raise ValueError(f"slot {observed.slot} was observed after {self._seen[-1].slot}")
        self._seen.append(observed)

    def bound(self, flow: int, slot_s: float, path_capacity: float) -> float:
        """B_i as in the paper: the highest rate that the flow sent at in the window.

        A flow that was never seen has what its path can carry, as it may begin at line rate.
        """
        sent = [seen.sent[flow] / slot_s for seen in self._seen if flow in seen.sent]
        return max(sent, default=path_capacity)

    def limits(self, capacity: Floats) -> Floats:
        """u_l as in the paper, float64[L]: the highest load recorded in the window.

        "Recorded load" is read as that of the controlled flows: with all traffic in it, the
        estimate would leave none to the other traffic, which it is there to protect. Without any
        record, a link has its `capacity`. Section IV-B takes the load of a future slot off u_l; see
        `Links.free`.
        """
        loads = [controlled for controlled, _ in self._loads()]
        return np.minimum(np.max(loads, axis=0), capacity) if loads else capacity

    def recovering_limits(self, capacity: Floats) -> Floats:
        """u_l that recovers, float64[L]: capacity less the most that the other traffic took.

        The same as `limits` on a link that was full all the time. What controlled flows left unused
        stays available, and other traffic that has ended is forgotten when it leaves the window.
        """
        other = [carried - controlled for controlled, carried in self._loads()]
        limit: Floats = capacity - np.max([np.zeros(len(capacity)), *other], axis=0)
        return np.maximum(limit, 0.0)

    def _loads(self) -> list[tuple[Floats, Floats]]:
        return [seen.loads for seen in self._seen if seen.loads is not None]
