# SPDX-License-Identifier: Apache-2.0
"""Algorithm 2: the current slot's rate of a flow, after the other flows that it depends on.

F_i is what flow i has sent in this iteration when the current slot ends, as far as is planned. The
paper adds up rates; here F_i are bytes, which is the same times the length of a slot.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Dependency:
    """The flow j by which flow i goes, as its host knows it at the beginning of the current slot.

    In a ring, j is the flow from the worker before. Of a broadcast (server to worker) it is the
    slowest aggregation flow to that server; of an aggregation flow, the broadcast of that server
    that is furthest. `sent`: bytes of flow i in this iteration so far. `other`: F_j in bytes, the
    rate planned for the current slot included: without it no flow of a ring could begin. `lead`:
    bytes that flow i may send before j has (a worker's own chunk; the paper has none). An
    aggregation flow waits for nobody: inf.
    """

    sent: float
    other: float
    lead: float = 0.0


def adjusted(dependency: Dependency, rate: float, bound: float, seconds: float) -> float:
    """Lines 5 to 25, payload bytes/s. `rate`: of the initial schedule in the current slot, of which
    `seconds` are left; `bound`: B_i.

    A flow that is behind by delta = F_j - F_i is raised by that, up to B_i. B_i may be below
    `rate`, which the paper then lowers, even to nothing. A follower that is ahead is lowered, never
    below 0. The paper lets the sender tell the receiver's scheduler; it is computed where the
    follower starts, out of the same numbers.
    """
    delta = dependency.other - (dependency.sent + rate * seconds)
    if delta > 0.0:
        rate = min(rate + delta / seconds, bound)
    ahead = dependency.sent + rate * seconds - (dependency.other + dependency.lead)
    return rate - min(max(ahead, 0.0) / seconds, rate)


def may_send(dependency: Dependency) -> bool:
    """Whether there is anything that the flow could send, its predecessor's bytes considered."""
    return dependency.other + dependency.lead > dependency.sent
