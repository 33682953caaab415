# SPDX-License-Identifier: Apache-2.0
"""What the simulator says of what the lab is about to measure: `flowslot sim run`, a process like
all others of a run, and not needed for any measurement.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from flowslot.policy.registry import get, names
from flowslot_lab.procs import start, stop, venv_program
from flowslot_lab.runner import Options, kind
from flowslot_lab.state import RunState
from flowslot_scenario.budget import JobBudget
from flowslot_scenario.results import FAIR, Prediction
from flowslot_scenario.scenario import Scenario

LIMIT_S = 120.0
"""A hundred iterations take it a second or two."""
_SIMULATED = {name: name for name in names() if get(name).needs_arbiter} | {
    "static": "static",
    "mltcp": "mltcp",
    "mltcp-cubic": "mltcp",
}
"""The policies that it models; all others are TCP, of which it knows the ideal only: also `fair`,
whose daemons only watch."""
_UNKNOWN = ("mlcc", "mlcc-literal")
"""Policies that are neither modelled nor TCP."""
_REASON_LENGTH = 200
_Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class NoPrediction(Exception):
    """There is none; says why, in one line."""


class _Job(BaseModel):
    name: str
    mean_s: _Positive


class _Run(BaseModel):
    policy: str
    jobs: list[_Job]
    budget: list[dict[str, Any]] = []


class _Summary(BaseModel):
    policy: str
    slowdown_mean: _Positive


class _Document(BaseModel):
    """What of the simulator's JSON is needed."""

    runs: list[_Run]
    summary: list[_Summary]


def predict(
    path: Path, changes: list[str], scenario: Scenario, options: Options, state: RunState
) -> dict[str, Prediction]:
    """A prediction for every policy of the options, but for those that the simulator has not.

    `path` and `changes` are what the scenario was loaded from, but for its seed. Raises
    NoPrediction: the simulator is missing, fails, takes longer than LIMIT_S, or answers nonsense.
    """
    simulated = {
        policy: _SIMULATED.get(kind(policy), FAIR)
        for policy in options.policies
        if kind(policy) not in _UNKNOWN
    }
    if not simulated:
        return {}
    if scenario.losses:
        raise NoPrediction("the simulator loses no packets, this scenario does")
    if scenario.delays:
        raise NoPrediction("the simulator has no long paths, this scenario has")
    policies = list(dict.fromkeys(simulated.values()))
    answer = _ask(_command(path, changes, scenario, options, policies), state)
    found = read(answer, scenario, policies)
    return {policy: found[name] for policy, name in simulated.items()}


def _command(
    path: Path, changes: list[str], scenario: Scenario, options: Options, policies: list[str]
) -> list[str]:
    return [
        *venv_program("flowslot", "flowslot_cli.main"),
        *("sim", "run", "--policy", ",".join(policies), "--seeds", "1", "-o", "json"),
        f"--iterations={options.measured(scenario) * options.repeat}",
        f"--seed={scenario.seed}",
        "--switch" if options.use_switch else "--no-switch",
        f"--switches={'per-rack' if options.per_rack else 'one'}",
        *(["--budget"] if options.budget else []),
        *(f"--set={change}" for change in changes),
        *("--", str(path)),
    ]


def _ask(command: list[str], state: RunState) -> bytes:
    """Standard output of the simulator. Raises NoPrediction."""
    try:
        process = start(state, "prediction", None, command, pipes=True)
    except OSError as error:
        raise NoPrediction(f"the simulator cannot be started: {error}") from None
    try:
        answer: bytes = process.popen.communicate(timeout=LIMIT_S)[0]
    except subprocess.TimeoutExpired:
        raise NoPrediction(f"the simulator took longer than {LIMIT_S:g} s") from None
    finally:
        stop([process])
    if process.popen.returncode != 0:
        said = process.tail(1)[:_REASON_LENGTH] or "nothing said"
        raise NoPrediction(f"the simulator: status {process.popen.returncode}: {said}")
    return answer


def read(answer: bytes, scenario: Scenario, policies: list[str]) -> dict[str, Prediction]:
    """Predictions by the simulator's policies, from its JSON, which has one run of each.

    Raises NoPrediction: it is not such a document, or says nothing of a policy or a job.
    """
    try:
        document = _Document.model_validate_json(answer)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, problem["loc"])) or "JSON"
        reason = f"{where}: {problem['msg']}"[:_REASON_LENGTH]
        raise NoPrediction(f"the simulator's answer: {reason}") from None
    slowdown = {summary.policy: summary.slowdown_mean for summary in document.summary}
    means = {run.policy: {job.name: job.mean_s for job in run.jobs} for run in document.runs}
    jobs = {job.name for job in scenario.jobs}
    for policy in policies:
        if policy not in slowdown or means.get(policy, {}).keys() != jobs:
            raise NoPrediction(f"the simulator's answer: not all jobs under {policy}")
    try:
        budgets = {run.policy: [JobBudget.read(job) for job in run.budget] for run in document.runs}
    except (KeyError, TypeError, ValueError) as error:
        raise NoPrediction(f"the simulator's answer: budget: {error!r}") from None
    return {
        policy: Prediction(policy, slowdown[policy], means[policy], budgets[policy])
        for policy in policies
    }
