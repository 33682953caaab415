# SPDX-License-Identifier: Apache-2.0
"""What is known of a job: when in an iteration it sends, how fast, and over which links."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from flowslot.model.errors import FlowslotError
from flowslot.model.settings import shortened
from flowslot.model.units import SECOND

LONGEST_NS = 3600 * SECOND
"""No iteration that is longer is looked at."""


class Phase(NamedTuple):
    """An up phase: `start_ns` after the iteration begins, `length_ns` long, `demand` payload
    bytes/s. Between up phases the network is down."""

    start_ns: int
    length_ns: int
    demand: float


@dataclass(frozen=True, slots=True)
class Profile:
    """A job as it is alone on the network (thesis, section 4.5.1): an iteration of `period_ns`, its
    up phases in order, and on which links it sends.

    `links`: of each link, what it carries as a multiple of the phases' demand.
    Raises FlowslotError, which names the job and the field.
    """

    job: str
    period_ns: int
    phases: tuple[Phase, ...]
    links: Mapping[int, float]

    def __post_init__(self) -> None:
        name = shortened(self.job)
        if not _whole(self.period_ns, 1, LONGEST_NS):
            raise FlowslotError(
                f'job "{name}": period_ns must be a whole number from 1 to {LONGEST_NS}, got '
                f"{self.period_ns!r}"
            )
        over = 0
        for k, phase in enumerate(self.phases):
            problem = self._wrong(phase, over)
            if problem:
                raise FlowslotError(f'job "{name}": phases[{k}].{problem}')
            over = phase.start_ns + phase.length_ns
        for link, factor in self.links.items():
            if not _positive(factor):
                raise FlowslotError(
                    f'job "{name}": links[{link}] must be finite and above 0, got {factor!r}'
                )

    def _wrong(self, phase: Phase, over: int) -> str:
        """The phase's field and what would be right; empty: nothing is wrong."""
        if not _whole(phase.start_ns, over, self.period_ns - 1):
            return (
                f"start_ns must be a whole number from {over}, where the phase before it ends, to "
                f"{self.period_ns - 1}, within the period; got {phase.start_ns!r}"
            )
        most = self.period_ns - phase.start_ns
        if not _whole(phase.length_ns, 1, most):
            return (
                f"length_ns must be a whole number from 1 to {most}, where the period ends; got "
                f"{phase.length_ns!r}"
            )
        if not _positive(phase.demand):
            return f"demand must be finite and above 0 bytes/s, got {phase.demand!r}"
        return ""

    @property
    def peak(self) -> float:
        """Its largest demand, bytes/s."""
        return max((phase.demand for phase in self.phases), default=0.0)


def alone(
    job: str, idle_ns: int, sent: Mapping[int, float], capacity: Mapping[int, float]
) -> Profile | None:
    """The profile of a job of one up phase from what is measured while it contends with others: it
    computes for `idle_ns` after its last byte, and sends `sent[link]` bytes per iteration. What is
    measured of the up phase itself would show others' traffic, too. Starts with the up phase. None:
    it sends nothing over a link of known capacity (payload bytes/s)."""
    sends = {link: size for link, size in sent.items() if size > 0 and capacity.get(link, 0) > 0}
    slowest = max(sends, key=lambda link: (sends[link] / capacity[link], -link), default=None)
    if slowest is None:
        return None
    length = max(math.ceil(sends[slowest] / capacity[slowest] * SECOND), 1)
    most = max(sends.values())
    links = {link: size / most for link, size in sends.items()}
    up = Phase(0, length, most / length * SECOND)
    return Profile(job, max(idle_ns, 0) + length, (up,), links)


def _whole(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _positive(value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 < value < math.inf  # type: ignore[operator]
