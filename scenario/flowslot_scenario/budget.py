# SPDX-License-Identifier: Apache-2.0
"""Where an iteration's time goes: what a job's busiest links do while the job waits for them.

A job waits for a link while one of its flows that cross it has bytes ready that have not arrived,
unless another link of its path is full and this one is not. Then the link carries the job's own
bytes, or others', or is idle, wholly or in part. Why it is idle is one of CAUSES; all are counted
in ms of link time per iteration of the job, as the mean over its busiest links. Two jobs that wait
for a link at the same moment are both charged for it.

The lab works this out from what was recorded, the simulator from its own flows: both with `charge`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from flowslot.model.units import goodput
from flowslot_scenario.job import Job
from flowslot_scenario.scenario import Scenario

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
CAUSES = {
    "others": "it carries other jobs' bytes",
    "not_granted": "no arbiter has granted this part of it to anybody",
    "not_in_force": "granted, and not in the kernel yet",
    "holder_idle": "in force for flows that have nothing to send, or are held up at another link",
    "receiver": "in force and not sent: the receiver's window is closed",
    "window": "in force and not sent: bytes wait in the kernel (window, pacing, lost packets)",
    "processor": "in force and not sent: the job's process has not handed its bytes over",
    "dependency": "the job has nothing ready: its bytes have to come from another host first",
}
"""In order: what is left of a link's idle part goes to the next one. `dependency` is counted while
the job does not wait."""
STEPS = ("asked", "granted", "in_force", "first_byte", "last_byte")
"""Of a phase, after its bytes are ready: ms, median over its flows."""


@dataclass(slots=True)
class JobBudget:
    """Of one job. `lost`: ms per iteration by CAUSES; `steps`: ms by STEPS, where known."""

    name: str
    iteration_ms: float
    ideal_ms: float
    lost: dict[str, float]
    steps: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As in the JSON of a run; `read` is the way back."""
        return {
            "name": self.name,
            "iteration_ms": round(self.iteration_ms, 3),
            "ideal_ms": round(self.ideal_ms, 3),
            "lost_ms": {cause: round(ms, 3) for cause, ms in self.lost.items()},
            "steps_ms": {step: round(ms, 3) for step, ms in self.steps.items()},
        }

    @classmethod
    def read(cls, data: dict[str, Any]) -> JobBudget:
        """Raises KeyError, TypeError or ValueError where it is none."""
        return cls(
            str(data["name"]),
            float(data["iteration_ms"]),
            float(data["ideal_ms"]),
            {cause: float(data["lost_ms"][cause]) for cause in CAUSES},
            {step: float(ms) for step, ms in data["steps_ms"].items()},
        )


@dataclass(frozen=True, slots=True)
class Link:
    """A link over T moments, float64[T] or float64[T, F] for the F flows that cross it, in parts
    of the link's capacity.

    `granted` is infinite where nobody grants. `open`: in a phase. `ready`: bytes are ready and have
    not arrived; `elsewhere`: and another link of the path is full, which this one is not.
    `at_receiver`: its receiver's window has no room for a segment; `in_process`: the kernel has
    sent all that it was given.
    """

    seconds: Floats
    unused: Floats
    granted: Floats
    job: npt.NDArray[np.intp]
    carried: Floats
    in_force: Floats
    open: Bools
    ready: Bools
    elsewhere: Bools
    at_receiver: Bools
    in_process: Bools


def busiest(scenario: Scenario, job: Job) -> list[str]:
    """The links that a job alone needs longest, to within 1 %."""
    links = scenario.directed_links()
    needs = {
        link: size / goodput(links[link].capacity_bps)
        for link, size in scenario.link_bytes(job).items()
    }
    return [link for link, need in needs.items() if need > 0.99 * max(needs.values())]


def charge(link: Link, job: int) -> Floats:
    """Seconds that a job (its number) loses at a link, by CAUSES."""
    mine = link.job == job
    held_up = link.ready & link.elsewhere
    waits = (link.ready & ~link.elsewhere)[:, mine].any(axis=1)
    others = np.minimum(link.carried[:, ~mine].sum(axis=1), 1.0)
    left = link.unused.copy()
    parts = [others * waits]

    def take(most: Floats) -> None:
        part = np.clip(most, 0.0, left)
        np.subtract(left, part, out=left)
        parts.append(part * waits)

    take(1.0 - link.granted)
    take(np.where(np.isinf(link.granted), 0.0, link.granted) - link.in_force.sum(axis=1))
    idle = ~link.ready | held_up
    take((np.maximum(link.in_force - link.carried, 0.0) * idle).sum(axis=1))
    at_work = link.ready & ~link.elsewhere
    could = at_work & ~link.at_receiver
    take(left * _part(at_work & link.at_receiver, at_work))
    take(left * _part(could & ~link.in_process, could))
    take(left)
    nothing = (link.open[:, mine].any(axis=1)) & ~link.ready[:, mine].any(axis=1)
    parts.append(link.unused * nothing)
    return np.asarray((np.stack(parts) * link.seconds).sum(axis=1), np.float64)


def _part(some: Bools, of: Bools) -> Floats:
    """That these are of those, at each moment; 0, where there are none."""
    return np.asarray(some.sum(axis=1) / np.maximum(of.sum(axis=1), 1), np.float64)


def settle(
    scenario: Scenario,
    iterations: Sequence[float],
    mean_s: Sequence[float],
    lost: Callable[[str, int], Floats],
) -> list[JobBudget]:
    """Of all jobs. `iterations`: of each job, in the time that `lost(link, job)` is about, which
    returns seconds by CAUSES; `mean_s`: how long they took."""
    budgets = []
    for j, job in enumerate(scenario.jobs):
        links = busiest(scenario, job)
        total = np.mean([lost(link, j) for link in links], axis=0) / iterations[j] * 1e3
        ideal_ms = scenario.ideal_s(job) * 1e3
        made = dict(zip(CAUSES, total.tolist(), strict=True))
        budgets.append(JobBudget(job.name, mean_s[j] * 1e3, ideal_ms, made))
    return budgets


Named = Sequence[tuple[str, list[JobBudget]]]


def print_budgets(title: str, budgets: Named, console: Console) -> None:
    """A table of lost times, and one of steps. `budgets`: of a policy, by what to call it."""
    table = Table(title=f"{title}: link time lost, ms per iteration", title_justify="left")
    steps = Table(title=f"{title}: a phase's steps, ms after it is ready", title_justify="left")
    for one in (table, steps):
        one.add_column("policy")
        one.add_column("job")
    for name in ("over\nIdeal", *(cause.replace("_", "\n") for cause in CAUSES)):
        table.add_column(name, justify="right")
    for name in STEPS:
        steps.add_column(name.replace("_", " "), justify="right")
    for name, jobs in budgets:
        for job in jobs:
            cells = [job.iteration_ms - job.ideal_ms, *(job.lost[cause] for cause in CAUSES)]
            table.add_row(name, job.name, *(f"{ms:.1f}" for ms in cells))
            if job.steps:
                known = (job.steps.get(step) for step in STEPS)
                cells_of = ("-" if ms is None else f"{ms:.1f}" for ms in known)
                steps.add_row(name, job.name, *cells_of)
    console.print(table)
    if steps.row_count:
        console.print(steps)
    console.print(
        "While a job waits for its busiest links: "
        + "; ".join(f"{cause.replace('_', ' ')}: {what}" for cause, what in CAUSES.items())
        + ".",
        highlight=False,
    )
