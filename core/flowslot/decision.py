# SPDX-License-Identifier: Apache-2.0
"""What a host policy decides. Every system in the papers is a policy through these three."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flowslot.model.schedule import Schedule
from flowslot.model.units import Nanos


@dataclass(frozen=True, slots=True, eq=False)
class Pace:
    """Send each of N flows at its rate of the schedule; with top-up up to its ceiling.

    `guaranteed`: an arbiter holds capacity for it on every link of its path, so that loss is no
    reason to slow down. Otherwise the rate is only an upper bound for congestion control.
    """

    flows: NDArray[np.uint64]  # [N]
    schedule: Schedule  # of N flows
    ceilings: NDArray[np.float64]  # [N], payload bytes/s
    guaranteed: NDArray[np.bool_]  # [N]


class Hold(NamedTuple):
    """Do not start `target` (a job's name, or a flow) before `until_ns` (monotonic)."""

    target: str | int
    until_ns: Nanos


class Weigh(NamedTuple):
    """Let the congestion control of `flow` be this aggressive (1.0 = standard)."""

    flow: int
    aggressiveness: float


Decision = Pace | Hold | Weigh
