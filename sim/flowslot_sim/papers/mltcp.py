# SPDX-License-Identifier: Apache-2.0
"""MLTCP, section 1.2 of the thesis on CASSINI and MLTCP: what it states, on the fluid network.

Its own chapter is not in the text that we have: jobs, links and what is compared with what are
ours (PAIRS), declared before anything was run. Reno is taken for ideal max-min sharing (`fair`).
Where a queue would overflow, that it is offered more than it carries is a stand-in for packets that
are dropped or marked: OVERLAP, part of the time in which jobs compete for the link.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from flowslot.model.units import Nanos
from flowslot.policy.mltcp import Aggressiveness
from flowslot_sim.network import FlowSpec
from flowslot_sim.papers.cells import Cell, compare, interval
from flowslot_sim.runner import STANDARD, control
from flowslot_sim.simulation import Simulation
from flowslot_sim.world import SimJob, World

ITERATIONS = 60
CONVERGED = 1.02
"""Of Ideal: from the first iteration on after which all stay below this, jobs take turns."""
CLOSE = 0.05
"""The simulator follows weights in steps: so much of the model's shift may differ."""
LINK = 1e9
"""Payload bytes/s; only the ratio of bytes to it counts."""


@dataclass(frozen=True, slots=True)
class Jobs:
    """`count` equal jobs of `period_s` alone on the link, `share` of which they send; they begin
    `apart` of their sending after each other. `jitter`: of computations."""

    count: int
    share: float
    period_s: float = 0.5
    apart: float = 0.1
    jitter: float = 0.01


PAIRS = {
    "two jobs, each half the time": Jobs(2, 0.49),
    "three jobs, each a third": Jobs(3, 0.32),
    "six jobs, each a sixth": Jobs(6, 0.16),
}


def world(jobs: Jobs, seed: int) -> World:
    """One link."""
    send_s = jobs.share * jobs.period_s
    volume, compute_s = send_s * LINK, jobs.period_s - send_s
    made = []
    for k in range(jobs.count):
        draw = np.random.default_rng([seed, k])
        factors = np.maximum(1 + jobs.jitter * draw.standard_normal(4096), 0.0)

        def compute(n: int, factors: np.ndarray = factors, s: float = compute_s) -> int:
            return round(s * 1e9 * float(factors[n % len(factors)]))

        flow = FlowSpec(f"host{k}", (0,), total=volume)
        start = Nanos(round(k * jobs.apart * send_s * 1e9))
        made.append(SimJob(f"job{k}", (flow,), compute, start, jobs.period_s))
    hosts = tuple(f"host{k}" for k in range(jobs.count))
    return World(("link",), (LINK,), hosts, tuple(made))


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one run. `slow`: iteration time / Ideal, float64[jobs, ITERATIONS]. `converged`: after how
    many iterations (ITERATIONS: never). `overlap`: s of each iteration, from the tenth last on, in
    which at least two jobs sent."""

    slow: np.ndarray
    converged: int
    overlap: float


def measure(name: str, policy: str, seed: int) -> Figures:
    """One run."""
    jobs = PAIRS[name]
    made = world(jobs, seed)
    sim = Simulation(made, control(policy, STANDARD, seed))
    busy: list[tuple[int, int]] = []

    def account(now: Nanos, elapsed: Nanos) -> None:
        if int(np.count_nonzero(sim.network.rows["active"])) > 1:
            busy.append((now, elapsed))

    sim.accounts.append(account)
    sim.run(iterations=ITERATIONS)
    ends = np.array([progress.ends[:ITERATIONS] for progress in sim.progress])
    began = np.array([progress.began[:ITERATIONS] for progress in sim.progress])
    slow = (ends - began) / 1e9 / jobs.period_s
    above = np.flatnonzero(slow.mean(axis=0) > CONVERGED)
    converged = int(above[-1]) + 1 if len(above) else 0
    last = int(began[:, -10].min())
    until = int(ends[:, -1].min())
    late = sum(min(at + length, until) - max(at, last) for at, length in busy
               if at + length > last and at < until)  # fmt: skip
    return Figures(slow, converged, late / 1e9 / 10)


# --- the model of two equal jobs


def shift(d: float, period: float, comm: float, f: Aggressiveness) -> float:
    """By how much the later of two equal jobs falls back further in an iteration, s.

    Jobs send for `comm` s alone in every `period`; one begins `d` s after the other, 0 <= d <=
    comm. External: the thesis has no such formula in the text that we have. With a T = comm,
    Shift(D) = Slope D (a T - D) / (a T Intercept + Slope D).
    """
    return f.slope * d * (comm - d) / (comm * f.intercept + f.slope * d)


def measured_shift(d: float, jobs: Jobs, f: Aggressiveness) -> float:
    """The same in the simulator, without jitter: how much further apart the two begin next."""
    send_s = jobs.share * jobs.period_s
    plain = Jobs(2, jobs.share, jobs.period_s, d / send_s, 0.0)
    sim = Simulation(world(plain, 0), control("mltcp", STANDARD, 0))
    sim.run(iterations=3)
    began = np.array([progress.began[:3] for progress in sim.progress]) / 1e9
    gaps = began[1] - began[0]
    return float(gaps[2] - gaps[1])


def gap_after_one(d: float, jobs: Jobs) -> float:
    """How far apart they are after the first iteration, from which `measured_shift` starts."""
    send_s = jobs.share * jobs.period_s
    plain = Jobs(2, jobs.share, jobs.period_s, d / send_s, 0.0)
    sim = Simulation(world(plain, 0), control("mltcp", STANDARD, 0))
    sim.run(iterations=2)
    began = np.array([progress.began[:2] for progress in sim.progress]) / 1e9
    return float(began[1][1] - began[0][1])


# --- cells

Gain = tuple[str, float, Callable[[Figures], float]]
GAINS: tuple[Gain, ...] = (
    ("mean", 1.9, lambda run: float(run.slow[:, 30:].mean())),
    ("p99", 2.7, lambda run: float(np.percentile(run.slow[:, 30:], 99))),
)
"""Of iterations from the 30th on."""

Runs = Mapping[tuple[str, str], Sequence[Figures]]
"""By jobs and policy, of each seed."""


def cells(runs: Runs) -> list[Cell]:
    """What section 1.2 states."""
    found: list[Cell] = []
    for name in PAIRS:
        ours, plain = runs[name, "mltcp"], runs[name, "fair"]
        turns = [float(run.converged) for run in ours]
        mean, sd, told = interval(turns)
        found.append(
            Cell("1.2", f"{name}: iterations until they take turns", 30.0, mean, sd, len(turns),
                 None, f'published: "about 30", no bound; other jobs and links; {told}')
        )  # fmt: skip
        for what, published, figure in GAINS:
            gain = [figure(b) / figure(a) for a, b in zip(ours, plain, strict=True)]
            most = [figure(b) for b in plain]
            why = (
                f"published: up to so much, on a testbed of its own; {interval(gain)[2]}; "
                f"fair is {np.mean(most):.2f} of Ideal here: no schedule gains more"
            )
            cell = compare("1.2", f"{name}: {what} iteration, fair / mltcp", published, gain, why)
            found.append(cell)
        marks = [a.overlap for a in ours]
        beside = [b.overlap for b in plain]
        fewer = [b / max(a, 1e-4) for a, b in zip(marks, beside, strict=True)]
        why = (
            "stand-in: s per iteration in which jobs compete, "
            f"{np.mean(beside):.3f} and {np.mean(marks):.4f}; published: up to 28.87 times fewer"
        )
        what = f"{name}: s in which jobs compete for the link, fair / mltcp"
        # Not what was counted there: nothing to agree with.
        found.append(compare("1.2", what, None, fewer, why))
    return found + model()


def model() -> list[Cell]:
    """Shift(D) of two equal jobs, as the formula has it and as the simulator does."""
    jobs, f = Jobs(2, 0.4), Aggressiveness()
    comm, found = jobs.share * jobs.period_s, []
    for part in (0.1, 0.3, 0.5, 0.7, 0.9):
        gap = gap_after_one(part * comm, jobs)
        says, does = shift(gap, jobs.period_s, comm, f), measured_shift(part * comm, jobs, f)
        why = f"external; the formula says {says * 1e3:.4g}; one run without jitter"
        cell = f"two equal jobs, D = {gap / comm:.3f} of their sending: Shift(D), ms"
        close = abs(does - says) <= CLOSE * says
        found.append(Cell("model", cell, None, does * 1e3, 0.0, 1, close, why))
    return found


EXTERNAL = ("slope 1.75 and intercept 0.25", "jobs and links", "Shift(D)", "overlap for marks")
