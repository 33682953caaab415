# SPDX-License-Identifier: Apache-2.0
"""Algorithm 2: the current slot's rate of a flow, after the other flows that it depends on.

F_i is what flow i has sent in this iteration when the current slot ends, as far as is planned. The
paper adds up rates; here F_i are bytes, which is the same times the length of a slot.
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["aggregation", "broadcast", "ring"]


@dataclass(frozen=True, slots=True)
class Dependency:
    """What flow i depends on, as its host knows it at the beginning of the current slot.

    `kind`: `aggregation`, worker to parameter server, `others` are the broadcast flows of that
    server; `broadcast`, server to worker, `others` are its aggregation flows; `ring`, `others` is
    the flow from the worker before. `sent`: bytes of flow i in this iteration so far. `others`:
    F_j in bytes, the rate planned for the current slot included: without it no flow of a ring
    could begin; empty: nothing to adjust to. `lead`: bytes that a broadcast or ring flow may send
    before its predecessors have (a worker's own chunk); the paper has none.
    """

    kind: Kind
    sent: float
    others: tuple[float, ...] = ()
    lead: float = 0.0


def increase(dependency: Dependency, rate: float, seconds: float) -> float:
    """Delta_i in payload bytes/s, lines 16 to 25: (F_b_max - F_i)+ for an aggregation flow,
    (F_a_min - F_i)+ for a broadcast flow, (F_pred - F_i)+ in a ring.

    `rate`: of the initial schedule in the current slot, payload bytes/s; `seconds` are left of it.
    """
    if not dependency.others:
        return 0.0
    pick = max if dependency.kind == "aggregation" else min
    behind = pick(dependency.others) - _sent_by_then(dependency, rate, seconds)
    return max(behind, 0.0) / seconds


def decrease(dependency: Dependency, rate: float, seconds: float) -> float:
    """By how much a follower's rate is lowered, payload bytes/s, lines 13 to 16: (F_j - F_a_min)+
    for a broadcast flow j, (F_j - F_pred)+ in a ring; never more than its rate.

    The paper lets the sender tell the receiver's scheduler. It is computed where the follower
    starts, out of the same numbers.
    """
    if not dependency.others or dependency.kind == "aggregation":
        return 0.0
    may = min(dependency.others) + dependency.lead
    ahead = _sent_by_then(dependency, rate, seconds) - may
    return min(max(ahead, 0.0) / seconds, rate)


def adjusted(rate: float, delta: float, bound: float) -> float:
    """Lines 5 to 12: `rate` without a delta; rate + delta below B_i, else B_i. Payload bytes/s.

    `bound`: B_i. It may be below `rate`, which the paper then lowers, even to nothing.
    """
    if delta <= 0.0:
        return rate
    return min(rate + delta, bound)


def may_send(dependency: Dependency) -> bool:
    """Whether there is anything that the flow could send, its predecessors' bytes considered."""
    if not dependency.others or dependency.kind == "aggregation":
        return True
    return min(dependency.others) + dependency.lead > dependency.sent


def _sent_by_then(dependency: Dependency, rate: float, seconds: float) -> float:
    """F_i in bytes."""
    return dependency.sent + rate * seconds
