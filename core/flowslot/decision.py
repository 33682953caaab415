# SPDX-License-Identifier: Apache-2.0
"""What a host policy decides. Every system in the papers is a policy through these three."""

from typing import NamedTuple

from flowslot.schedule import Schedule
from flowslot.units import Nanos, Rate

# Named tuples: immutable, and five times cheaper to make than frozen dataclasses. A policy
# makes one for every flow at every slot.


class Pace(NamedTuple):
    """Send `flow` at the schedule's rate; with top-up up to `ceiling` (payload bytes/s).

    `guaranteed`: an arbiter holds capacity for it on every link of its path, so that loss is no
    reason to slow down. Otherwise the rate is only an upper bound for congestion control.
    """

    flow: int
    schedule: Schedule
    ceiling: Rate
    guaranteed: bool


class Hold(NamedTuple):
    """Do not start `target` (a job's name, or a flow) before `until_ns` (monotonic)."""

    target: str | int
    until_ns: Nanos


class Weigh(NamedTuple):
    """Let the congestion control of `flow` be this aggressive (1.0 = standard)."""

    flow: int
    aggressiveness: float


Decision = Pace | Hold | Weigh
