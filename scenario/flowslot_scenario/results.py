# SPDX-License-Identifier: Apache-2.0
"""Statistics of runs, in the lab or in the simulator, and their JSON form.

Slowdown = measured iteration time / `ideal_s`. All statistics are over iterations after the
warm-up; the summary pools the slowdowns of all repeats and jobs of a policy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from flowslot_scenario.budget import JobBudget
from flowslot_scenario.job import Job
from flowslot_scenario.scenario import Scenario

STOCK = ("cubic", "reno", "bbr")
"""TCP as it comes."""
TUNED = ("cubic+rto5", "reno+rto5", "dctcp", "cubic+fq", "prio")
"""TCP as a user would tune it (lab/flowslot_lab/rivals.py)."""
BASELINES = (*STOCK, *TUNED)
FAIR, MLTCP = "fair", "mltcp"
"""The simulator's max-min sharing: what TCP would do in the ideal; and what MLTCP would."""
IN_A_ROW = 10
"""A job that starves has so many slow iterations in a row."""
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the simulator says of a policy that the lab measures. `simulated`: the policy that it
    took for it; `slowdown_mean`: over all jobs, as a summary's; `mean_s`: mean iteration time (s)
    of each job, by name."""

    simulated: str
    slowdown_mean: float
    mean_s: dict[str, float]
    budget: list[JobBudget] = field(default_factory=list)

    @property
    def of_ideal_tcp(self) -> bool:
        """It knows no loss and no timeouts: what is measured differs by these at least."""
        return self.simulated in (FAIR, MLTCP)


def mean(values: Floats) -> float:
    """NaN when there are none."""
    return float(values.mean()) if values.size else math.nan


def percentiles(values: Floats) -> tuple[float, float]:
    """The median and the 99th percentile; NaN when there are no values."""
    if not values.size:
        return math.nan, math.nan
    p50, p99 = np.percentile(values, (50, 99))
    return float(p50), float(p99)


def worst_in_a_row(values: Floats) -> float:
    """The largest mean of IN_A_ROW, or of all where there are fewer; NaN when there are none."""
    if not values.size:
        return math.nan
    rows = np.lib.stride_tricks.sliding_window_view(values, min(IN_A_ROW, values.size))
    return float(rows.mean(axis=1).max())


def _number(value: float, digits: int = 4) -> float | None:
    """For JSON, which has no NaN."""
    return None if math.isnan(value) else round(value, digits)


@dataclass(frozen=True, slots=True)
class Relayed:
    """What became of the frames of a long path. `round_trip_us`: at the start, measured; `late_us`,
    `most_late_us`: beyond the delay; `tardy`: frames that were late by more than 1 ms."""

    round_trip_us: float
    frames: int
    dropped: int
    late_us: float
    most_late_us: float
    tardy: int


@dataclass(slots=True)
class Evidence:
    """What the processes of a run say that they did; zeros where a policy has none of it."""

    pids: dict[str, int] = field(default_factory=dict)
    granted: int = 0
    scheduled: int = 0
    """Explicit schedules that the switch processes accepted (MLCC's reservations)."""
    refused: int = 0
    preempted: int = 0
    expired: int = 0
    rate_writes: int = 0
    bytes_verified: int = 0
    grpc_connections: int = 0
    control_packets: int = 0
    errors: list[str] = field(default_factory=list)
    """The last error of each process that has had one."""
    cpu: dict[str, float] = field(default_factory=dict)
    """Processor time / elapsed time of each process while the jobs ran."""
    marked: int = 0
    unmarked: int = 0
    """Packets that met a long queue at a switch that marks (DCTCP): those that bore no ECN, too."""
    losses: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Of each path that loses packets: those that came, and those of them that were lost."""
    delays: dict[str, Relayed] = field(default_factory=dict)
    """Of each long path."""
    queues: int = 0
    """The most flows that had a queue of their own at a port (cubic+fq)."""
    protected_bytes: int = 0
    """What the ports have sent of protected jobs, ahead of all others (prio)."""
    learnt: int = 0
    """Iterations of flows that began when MLTCP knew their bytes."""
    network_busy: float = 0.0
    """Part of the time in which the processors that emulate the network were busy."""
    programs_busy: float = 0.0
    """The same of the other processors, on which daemons, the switch process and jobs run."""
    stolen: float = 0.0
    """Part of the processors' time that the hypervisor gave to other machines (/proc/stat)."""

    def to_json(self) -> dict[str, Any]:
        """As in the JSON of a run."""
        return {
            "pids": self.pids,
            "reservations": {
                "granted": self.granted,
                "scheduled": self.scheduled,
                "refused": self.refused,
                "preempted": self.preempted,
                "expired": self.expired,
            },
            "rate_writes": self.rate_writes,
            "bytes_verified": self.bytes_verified,
            "grpc_connections": self.grpc_connections,
            "control_packets": self.control_packets,
            "errors": self.errors,
            "ecn": {"marked": self.marked, "unmarked": self.unmarked},
            "losses": {
                path: {"packets": came, "lost": lost} for path, (came, lost) in self.losses.items()
            },
            "delays": {path: asdict(relayed) for path, relayed in self.delays.items()},
            "queues": self.queues,
            "protected_bytes": self.protected_bytes,
            "learnt": self.learnt,
            "network_busy": round(self.network_busy, 4),
            "programs_busy": round(self.programs_busy, 4),
            "stolen": round(self.stolen, 4),
            "cpu": {name: round(share, 4) for name, share in self.cpu.items()},
        }


@dataclass(slots=True)
class JobRun:
    """One job in one run: its iteration times in seconds, and per process the trace of
    (seconds since the start line, bytes received). `losses`: of each rank, of all iterations, the
    warm-up too; empty where nothing was trained."""

    job: Job
    ideal_s: float
    times: Floats
    traces: dict[int, list[tuple[float, int]]]
    losses: list[list[float]] = field(default_factory=list)

    @property
    def slowdowns(self) -> Floats:
        """Iteration times in units of the physical limit."""
        return self.times / self.ideal_s

    def to_json(self, alone_s: float | None, predicted_s: float | None) -> dict[str, Any]:
        """As in the JSON of a run."""
        p50_s, p99_s = percentiles(self.times)
        return {
            "name": self.job.name,
            "iterations": int(self.times.size),
            "compute_s": self.job.compute_s,
            "bytes": self.job.sent_bytes,
            "mean_s": _number(mean(self.times), 6),
            "p50_s": _number(p50_s, 6),
            "p99_s": _number(p99_s, 6),
            "ideal_s": round(self.ideal_s, 6),
            "alone_s": None if alone_s is None else round(alone_s, 6),
            "predicted_mean_s": None if predicted_s is None else round(predicted_s, 6),
            "slowdown_mean": _number(mean(self.slowdowns)),
            "slowdown_p99": _number(p99_s / self.ideal_s),
            "slowdown_worst_ten": _number(worst_in_a_row(self.slowdowns)),
            **({"losses": self.losses} if any(self.losses) else {}),
        }


@dataclass(slots=True)
class Run:
    """One policy, once. `livelock`: why it was given up before its iterations were done, for
    people; "": it was not."""

    policy: str
    repeat: int
    evidence: Evidence
    jobs: list[JobRun]
    retransmits: int
    utilisation: dict[str, float]
    livelock: str = ""
    budget: list[JobBudget] = field(default_factory=list)
    """Of each job; empty where it was not asked for."""

    def to_json(
        self, scenario: Scenario, alone: dict[str, float], predicted: Prediction | None
    ) -> dict[str, Any]:
        """As in the JSON of the results."""
        predicted_s = {} if predicted is None else predicted.mean_s
        return {
            "policy": self.policy,
            "repeat": self.repeat,
            "livelock": self.livelock or None,
            "evidence": self.evidence.to_json(),
            "jobs": [
                job.to_json(alone.get(job.job.name), predicted_s.get(job.job.name))
                for job in self.jobs
            ],
            "retransmits": self.retransmits,
            **_budgets_to_json(self.budget, predicted),
            "links": [
                {
                    "link": link,
                    "capacity_bps": scenario.capacity_bps(link),
                    "utilisation": round(used, 4),
                }
                for link, used in self.utilisation.items()
            ],
        }


def _budgets_to_json(
    budget: list[JobBudget], predicted: Prediction | None
) -> dict[str, list[dict[str, Any]]]:
    """What of a run there is only where it was asked for."""
    both = {"budget": budget, "predicted_budget": predicted.budget if predicted else []}
    return {name: [job.to_json() for job in jobs] for name, jobs in both.items() if jobs}


@dataclass(frozen=True, slots=True)
class Summary:
    """A policy over all its repeats. `spread_*`: largest minus smallest over the repeats.

    NaN where there is no iteration; the worst job is one without any, if there is such a job.
    """

    policy: str
    slowdown_mean: float
    slowdown_p50: float
    slowdown_p99: float
    worst_job: float
    worst_job_name: str
    spread_mean: float
    spread_p99: float
    retransmits: int
    iterations: int

    def to_json(self, predicted: Prediction | None) -> dict[str, Any]:
        """As in the JSON of the results; `worst_job` is the mean slowdown of the worst job."""
        own = {
            name: _number(value) if isinstance(value, float) else value
            for name in self.__slots__
            for value in (getattr(self, name),)
        }
        return own | {
            "predicted_slowdown_mean": round(predicted.slowdown_mean, 4) if predicted else None,
            "predicted_policy": predicted.simulated if predicted else None,
        }


def summarise(policy: str, runs: list[Run]) -> Summary:
    """Pool the runs of one policy."""
    names = [job.job.name for job in runs[0].jobs]
    by_job = {
        name: np.concatenate([j.slowdowns for r in runs for j in r.jobs if j.job.name == name])
        for name in names
    }
    pooled = np.concatenate(list(by_job.values()))
    per_run = [np.concatenate([job.slowdowns for job in run.jobs]) for run in runs]
    means = [mean(values) for values in per_run]
    tails = [percentiles(values)[1] for values in per_run]
    by_mean = {name: mean(values) for name, values in by_job.items()}
    worst = max(names, key=lambda name: math.inf if math.isnan(by_mean[name]) else by_mean[name])
    p50, p99 = percentiles(pooled)
    return Summary(
        policy=policy,
        slowdown_mean=mean(pooled),
        slowdown_p50=p50,
        slowdown_p99=p99,
        worst_job=by_mean[worst],
        worst_job_name=worst,
        spread_mean=max(means) - min(means),
        spread_p99=max(tails) - min(tails),
        retransmits=sum(run.retransmits for run in runs),
        iterations=int(pooled.size),
    )


@dataclass(frozen=True, slots=True)
class JobRow:
    """One job under one policy, repeats pooled. `numbers`: mean, p50, p99, ideal (s), slowdown
    mean and p99, and the worst IN_A_ROW of any repeat. `predicted_s`: the mean that was
    predicted."""

    policy: str
    job: str
    numbers: tuple[float, ...]
    predicted_s: float | None


@dataclass(slots=True)
class Results:
    """Everything that `lab run` measured, or `sim run` worked out. `predicted`: by policy; empty
    where nothing was. `stalled`: policies under which a job stopped for good, and what was seen of
    it; those have no run from there on."""

    scenario: Scenario
    runs: list[Run]
    alone: dict[str, float]
    predicted: dict[str, Prediction] = field(default_factory=dict)
    stalled: dict[str, str] = field(default_factory=dict)

    def policies(self) -> list[str]:
        """In the order of their first run."""
        return list(dict.fromkeys(run.policy for run in self.runs))

    def summaries(self) -> list[Summary]:
        """One per policy."""
        return [
            summarise(policy, [run for run in self.runs if run.policy == policy])
            for policy in self.policies()
        ]

    def repeats(self, policy: str, job: str) -> list[Floats]:
        """Iteration times (s) of a job under a policy, repeat by repeat."""
        runs = [run.jobs for run in self.runs if run.policy == policy]
        return [one.times for jobs in runs for one in jobs if one.job.name == job]

    def times(self, policy: str, job: str) -> Floats:
        """All of these, one after the other."""
        return np.concatenate(self.repeats(policy, job))

    def slowdowns(self, policy: str) -> Floats:
        """Iteration times of all jobs under a policy, as multiples of Ideal."""
        jobs = self.scenario.jobs
        return np.concatenate([self.times(policy, j.name) / self.scenario.ideal_s(j) for j in jobs])

    def by_job(self) -> list[JobRow]:
        """Every job under every policy."""
        rows = []
        for policy in self.policies():
            prediction = self.predicted.get(policy)
            for job in self.scenario.jobs:
                times, ideal = self.times(policy, job.name), self.scenario.ideal_s(job)
                (p50, p99), typical = percentiles(times), mean(times)
                runs = [one for one in self.repeats(policy, job.name) if one.size]
                worst = max(map(worst_in_a_row, runs), default=math.nan) / ideal
                numbers = (typical, p50, p99, ideal, typical / ideal, p99 / ideal, worst)
                predicted_s = prediction.mean_s.get(job.name) if prediction else None
                rows.append(JobRow(policy, job.name, numbers, predicted_s))
        return rows

    def predicted_over_measured(self) -> dict[str, dict[str, float]]:
        """Predicted / measured mean iteration time of each job, by policy and job: of the policies
        that the simulator models, and not of those for which it shows an ideal."""
        return {
            policy: {
                job: mean_s / float(self.times(policy, job).mean())
                for job, mean_s in prediction.mean_s.items()
            }
            for policy, prediction in self.predicted.items()
            if not prediction.of_ideal_tcp
        }

    def budgets(self) -> list[tuple[str, list[JobBudget]]]:
        """Of each run that has one, what to call it; and of each prediction."""
        found = []
        for run in self.runs:
            if run.budget:
                found.append((f"{run.policy}, {run.repeat}", run.budget))
        for policy, prediction in self.predicted.items():
            if prediction.budget:
                star = "*" if prediction.of_ideal_tcp else ""
                found.append((f"{policy}, predicted{star}", prediction.budget))
        return sorted(found, key=lambda pair: self.policies().index(pair[0].partition(",")[0]))

    def curves_apart(self, job: str) -> dict[str, int]:
        """The runs in which a job that trains has learnt something else than in the first one, and
        from which iteration on: any bit of a loss. A schedule only moves bytes."""
        apart = {}
        of = {f"{r.policy}, {r.repeat}": j for r in self.runs for j in r.jobs if j.job.name == job}
        first, *_ = curves = [list(zip(*one.losses, strict=True)) for one in of.values()]
        for run, curve in zip(of, curves, strict=True):
            differ = (i for i, (a, b) in enumerate(zip(first, curve, strict=True)) if a != b)
            if (at := next(differ, None)) is not None:
                apart[run] = at
        return apart

    def to_json(self) -> dict[str, Any]:
        """The document that `-o json` prints."""
        return {
            "scenario": self.scenario.name,
            "seed": self.scenario.seed,
            "slower": self.scenario.slower,
            "runs": [
                run.to_json(self.scenario, self.alone, self.predicted.get(run.policy))
                for run in self.runs
            ],
            "summary": [
                summary.to_json(self.predicted.get(summary.policy)) for summary in self.summaries()
            ],
            "stalled": self.stalled,
        }


def best_baseline(
    summaries: list[Summary], metric: str, among: Sequence[str] = BASELINES
) -> tuple[str, float] | None:
    """The baseline with the lowest value of `metric`, and that value; None: there is none."""
    values = [(s.policy, float(getattr(s, metric))) for s in summaries if s.policy in among]
    return min(values, key=lambda pair: pair[1]) if values else None
