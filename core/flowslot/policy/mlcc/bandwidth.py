# SPDX-License-Identifier: Apache-2.0
"""What the paper estimates from the last four slots, and how it would have to be.

Two numbers come out of that window: B_i, the most that a flow can send (Algorithm 2), and u_l, the
most that a link has for flows that we control, next to traffic that we do not (section IV-B). Both
are the highest value seen. A flow that sent nothing for four slots, because it had nothing to send
or because a plan said so, has seen nothing, may send nothing, and so will never see anything else.
The remedy is the same for both: what was sent is no evidence of what could have been.

Shapes: L links, K slots, W slots of the window. Rates are payload bytes/s.
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
    `controlled`: float64[L], what all controlled flows together sent over each link, payload
    bytes/s; NaN: not seen. `carried`: float64[L], what the link carried in all, other traffic
    included. Without them, or where they are NaN, a link counts as free of other traffic.
    """

    slot: int
    sent: Mapping[int, float]
    controlled: Floats | None = None
    carried: Floats | None = None


def history_limit(controlled: Floats, capacity: Floats) -> Floats:
    """u_l as the paper has it, float64[L]: the highest load recorded in the window float64[W, L].

    "Recorded load" is read as that of the controlled flows: with all traffic in it, the estimate
    would leave none to the other traffic, which it is there to protect. A link without any record
    has its `capacity`. Section IV-B takes the load of a future slot off u_l; see `Links.free`.
    """
    recorded = np.where(np.isnan(controlled), -np.inf, controlled).max(axis=0, initial=-np.inf)
    limit: Floats = np.where(np.isneginf(recorded), capacity, np.minimum(recorded, capacity))
    return limit


def observed_limit(controlled: Floats, carried: Floats, capacity: Floats) -> Floats:
    """u_l that recovers, float64[L]: capacity less the most that the other traffic took.

    `controlled`, `carried`: float64[W, L], see Observed. The same as `history_limit` on a link that
    was full all the time. What controlled flows left unused stays available, and other traffic
    that has ended is forgotten when it leaves the window.
    """
    other = np.nan_to_num(carried - controlled, nan=0.0)
    limit: Floats = np.maximum(capacity - other.max(axis=0, initial=0.0), 0.0)
    return limit


def history_bound(rates: Floats, path_capacity: float) -> float:
    """B_i as in the paper: the highest rate that the flow sent at in the window float64[W].

    A flow that was never seen has what its path can carry, as it may begin at line rate.
    """
    return float(rates.max()) if len(rates) else path_capacity


def residual_bound(rate: float, residual: float) -> float:
    """B_i that recovers: what the flow has already, and what is free on its path."""
    return rate + max(residual, 0.0)


class History:
    """The last WINDOW observations."""

    def __init__(self) -> None:
        self._seen: deque[Observed] = deque(maxlen=WINDOW)

    def observe(self, observed: Observed) -> None:
        """Slots in ascending order; raises ValueError otherwise."""
        if self._seen and observed.slot <= self._seen[-1].slot:
            raise ValueError(f"slot {observed.slot} was observed after {self._seen[-1].slot}")
        self._seen.append(observed)

    def flow_rates(self, flow: int, slot_s: float) -> Floats:
        """Rates of the flow in the slots in which it was seen, at most WINDOW; payload bytes/s."""
        sent = [seen.sent[flow] for seen in self._seen if flow in seen.sent]
        return np.array(sent, dtype=np.float64) / slot_s

    def limits(self, capacity: Floats, *, history: bool) -> Floats:
        """u_l, float64[L], for links of `capacity` float64[L]; as in the paper with `history`."""
        unseen = np.full(len(capacity), np.nan)
        controlled = self._stack([seen.controlled for seen in self._seen], unseen)
        if history:
            return history_limit(controlled, capacity)
        carried = self._stack([seen.carried for seen in self._seen], unseen)
        return observed_limit(controlled, carried, capacity)

    def _stack(self, rows: list[Floats | None], unseen: Floats) -> Floats:
        """Float64[W, L]; nothing is known of a slot in which there were other links."""
        full = [unseen if r is None or r.shape != unseen.shape else r for r in rows]
        return np.array(full, dtype=np.float64).reshape(len(full), len(unseen))
