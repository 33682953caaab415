# SPDX-License-Identifier: Apache-2.0
"""Random scenarios, one after the other: how often ours is worse than the best TCP, and how much.

A folder holds the scenario file of each draw (`lab run` takes it), and its results, as `lab run -o
json` prints them, once it was measured. What is there is not measured again, so a run that was
broken off goes on. The table is made from these files alone.

Where processors were busy most of the time under a policy that the simulator models, they may be
what was measured, and no prediction knows of them. Such a draw is measured once more under these
policies, SLOWER times slower, and its predictions are compared with that; not where the draws are
slower already, or nothing was predicted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from flowslot.model.errors import ConfigError
from flowslot_lab.predict import NoPrediction, predict
from flowslot_lab.progress import Bar
from flowslot_lab.runner import Options, measure, planned
from flowslot_lab.state import RunState
from flowslot_lab.tools import LabError
from flowslot_scenario.budget import JobBudget, print_budgets
from flowslot_scenario.mixes import as_toml, draw, load
from flowslot_scenario.results import BASELINES
from flowslot_scenario.scenario import Scenario, parse
from flowslot_scenario.table import BUSY

OURS = "stagger"
PREDICTED = (OURS, "static")
SLOWER = 3.0
_SHARES = ("network_busy", "programs_busy")
MOST_MEAN, MOST_WORST, MOST_OFF = 1.02, 1.05, 0.08
"""A draw is won when mean and worst job are at most so many times those of the best TCP; predicted
when no job's mean is further off."""


@dataclass(frozen=True, slots=True)
class Draw:
    """One draw with its results; `slower`: those of the same, SLOWER times slower."""

    scenario: Scenario
    document: dict[str, Any]
    slower: dict[str, Any] | None = None

    def of(self, policy: str, metric: str) -> float:
        """A number of a policy's summary; inf: it has none."""
        for summary in self.document["summary"]:
            if summary["policy"] == policy:
                return float(summary[metric] or math.inf)
        return math.inf

    def best(self, metric: str) -> tuple[float, str]:
        """The lowest number of any TCP, and which one's it is."""
        return min((self.of(policy, metric), policy) for policy in BASELINES)

    def ratio(self, metric: str) -> float:
        """Ours to the best TCP's; inf: one of them has none."""
        best = self.best(metric)[0]
        return self.of(OURS, metric) / best if best < math.inf else math.inf

    @property
    def won(self) -> bool:
        """Ours is not worse than the best TCP."""
        mean, worst = self.ratio("slowdown_mean"), self.ratio("worst_job")
        return mean <= MOST_MEAN and worst <= MOST_WORST

    def off(self) -> float:
        """How far the simulator's mean of a job is off at most, as a part of what was measured,
        in any run under PREDICTED policies, slower if that was measured; NaN: nothing was
        predicted."""
        return off(self.document if self.slower is None else self.slower)

    @property
    def to_slow_down(self) -> bool:
        """Its predictions are to be compared with slower runs."""
        predicted = not math.isnan(off(self.document))
        return predicted and self.scenario.slower == 1 and busy(self.document) >= BUSY


def busy(document: dict[str, Any]) -> float:
    """The largest part of the time for which the network's processors, or the others, were busy
    under PREDICTED policies."""
    return max(
        float(run["evidence"][of])
        for run in document["runs"]
        if run["policy"] in PREDICTED
        for of in _SHARES
    )


def off(document: dict[str, Any]) -> float:
    """See Draw.off; of one document."""
    parts = [
        abs(job["predicted_mean_s"] / job["mean_s"] - 1)
        for run in document["runs"]
        if run["policy"] in PREDICTED
        for job in run["jobs"]
        if job["predicted_mean_s"]
    ]
    return max(parts, default=math.nan)


def files(seed: int, count: int, slower: float) -> list[str]:
    """Scenario files of the draws 1 to `count` of a seed, so many times slower than drawn."""
    drawn = (draw(seed, number + 1) for number in range(count))
    return [as_toml(one.model_copy(update={"slower": slower})) for one in drawn]


def run(files: list[str], folder: Path, options: Options, state: RunState) -> list[Draw]:
    """Measure the scenario files that the folder has no results of yet, and those of them again,
    slower, whose processors are too busy for a prediction; returns all.

    Raises ConfigError when what is there was measured otherwise; what `measure` raises.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tasks = [_Task(folder, file, options) for file in files]
    draws = [
        Draw(task.scenario, document)
        for task, document in zip(tasks, _measure(tasks, "mixes", state), strict=True)
    ]
    policies = tuple(policy for policy in options.policies if policy in PREDICTED)
    which = [k for k, one in enumerate(draws) if one.to_slow_down]
    again = [_Task(folder, files[k], replace(options, policies=policies), SLOWER) for k in which]
    for k, document in zip(which, _measure(again, "mixes, slower", state), strict=True):
        draws[k] = replace(draws[k], slower=document)
    return draws


class _Task:
    """A scenario file to measure, and where that is kept. `slower`: than it says, if not 1; then
    the file says nothing of it."""

    def __init__(self, folder: Path, file: str, options: Options, slower: float = 1.0) -> None:
        drawn = parse(file, "draw")
        self.file, self.options = file, options
        self.changes = [] if slower == 1 else [f"slower={slower:g}"]
        self.scenario = parse(file, "draw", self.changes)
        self.path = folder / f"{drawn.name}.toml"
        self.results = folder / f"{drawn.name}{'' if slower == 1 else '.slower'}.json"
        self.asked = {
            "scenario": file,
            "policies": list(options.policies),
            "iterations": options.measured(drawn),
            "repeat": options.repeat,
            **({} if slower == 1 else {"slower": slower}),
        }

    def read(self) -> dict[str, Any] | None:
        """What was measured. None: nothing was. Raises ConfigError."""
        if not self.results.exists():
            return None
        try:
            document: dict[str, Any] = json.loads(self.results.read_text())
            asked = document["asked"]
            watched = all(of in run["evidence"] for run in document["runs"] for of in _SHARES)
        except (OSError, ValueError, KeyError, TypeError) as error:
            problem = f"is no result of `lab mixes`: {error}"
            raise ConfigError(str(self.results), "", problem) from None
        if asked != self.asked:
            problem = f"was measured with other options, {asked}: name another folder"
            raise ConfigError(str(self.results), "asked", problem)
        if not watched:
            problem = "was measured before all processors were watched: name another folder"
            raise ConfigError(str(self.results), "evidence", problem)
        return document

    def measure(self, state: RunState, bar: Bar) -> dict[str, Any]:
        """Measure, and keep that. What is kept of an earlier measurement goes."""
        self.path.write_text(self.file)
        if not self.changes:
            for old in ("slower", "budget"):
                self.results.with_suffix(f".{old}.json").unlink(missing_ok=True)
        found = _results(self.path, self.changes, self.scenario, self.options, state, bar)
        document = {"asked": self.asked, **found}
        scratch = self.results.with_suffix(".new")
        scratch.write_text(json.dumps(document, indent=1))
        scratch.replace(self.results)
        return document


def _measure(tasks: list[_Task], what: str, state: RunState) -> list[dict[str, Any]]:
    """Results of all; what is kept is read."""
    found = [task.read() for task in tasks]
    missing = [task for task, document in zip(tasks, found, strict=True) if document is None]
    with Bar(what, sum(planned(task.scenario, task.options) for task in missing)) as bar:
        for k, task in enumerate(tasks):
            if found[k] is None:
                bar.prefix = f"{task.scenario.title} ({len(missing)} to measure)"
                found[k] = task.measure(state, bar)
    return [document for document in found if document is not None]


def _results(  # noqa: PLR0917
    path: Path,
    changes: list[str],
    scenario: Scenario,
    options: Options,
    state: RunState,
    bar: Bar,
) -> dict[str, Any]:
    """Of a scenario, which the file at `path` says, with these changes."""
    bar.begin("prediction", 0)
    try:
        predicted = predict(path, changes, scenario, options, state)
    except NoPrediction:
        predicted = {}
    result = measure(scenario, options, state, bar)
    result.predicted = predicted
    return result.to_json()


def explain(
    draws: list[Draw], folder: Path, options: Options, state: RunState, console: Console
) -> None:
    """Measure the losing draws once more, ours and the best TCP, and print where the time goes.

    Kept in the folder, too. Raises RunFailed.
    """
    for one in draws:
        if one.won:
            continue
        kept = folder / f"{one.scenario.name}.budget.json"
        if not kept.exists():
            policies = (OURS, one.best("slowdown_mean")[1])
            again = Options(policies, 1, options.measured(one.scenario), alone=False, budget=True)
            with Bar("budgets", planned(one.scenario, again)) as bar:
                bar.prefix = one.scenario.title
                try:
                    path = folder / f"{one.scenario.name}.toml"
                    document = _results(path, [], one.scenario, again, state, bar)
                except LabError as error:
                    console.print(f"{one.scenario.title}: no budget: {error}", markup=False)
                    continue
            kept.write_text(json.dumps(document))
        print_budgets(one.scenario.title, _budgets(json.loads(kept.read_text())), console)


def _budgets(document: dict[str, Any]) -> list[tuple[str, list[JobBudget]]]:
    """Of results: of each run, and of what was predicted of it."""
    found = []
    for run in document["runs"]:
        for key, name in (("budget", ""), ("predicted_budget", ", predicted")):
            jobs = [JobBudget.read(job) for job in run.get(key, ())]
            if jobs:
                found.append((f"{run['policy']}{name}", jobs))
    return found


def as_data(draws: list[Draw]) -> dict[str, Any]:
    """For `-o json` and yaml."""
    return {
        "slower": draws[0].scenario.slower,
        "draws": [
            {
                "name": one.scenario.name,
                "load": round(load(one.scenario), 3),
                "mean": one.of(OURS, "slowdown_mean"),
                "best_tcp": dict(zip(("mean", "policy"), one.best("slowdown_mean"), strict=True)),
                "mean_ratio": round(one.ratio("slowdown_mean"), 4),
                "worst_job_ratio": round(one.ratio("worst_job"), 4),
                "won": one.won,
                "prediction_off": _number(one.off()),
                "busy": busy(one.document),
                "slower": None
                if one.slower is None
                else {
                    "times": one.slower["slower"],
                    "busy": busy(one.slower),
                    "prediction_off_as_drawn": _number(off(one.document)),
                },
            }
            for one in draws
        ],
        **{key: round(value, 4) for key, value in _sums(draws).items()},
    }


def _number(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 4)


def _sums(draws: list[Draw]) -> dict[str, float]:
    ratios = [one.ratio("slowdown_mean") for one in draws]
    return {
        "won": sum(one.won for one in draws),
        "predicted": sum(one.off() <= MOST_OFF for one in draws),
        "geometric_mean": math.exp(sum(map(math.log, ratios)) / len(ratios)),
    }


def show(draws: list[Draw], console: Console) -> None:
    """The table for people."""
    slower = draws[0].scenario.slower
    dilated = "" if slower == 1 else f", {slower:g} times slower"
    title = f"{OURS} against the best TCP, slowdowns{dilated}"
    table = Table(title=title, title_justify="left")
    for title in ("draw", "what"):
        table.add_column(title)
    for title in ("load", OURS, "best TCP", "", "mean", "worst job", "predicted", "busy"):
        table.add_column(title, justify="left" if not title else "right")
    for one in draws:
        best, policy = one.best("slowdown_mean")
        cells = [one.scenario.name, " ".join(_what(one.scenario))]
        cells += [f"{load(one.scenario):.2f}", f"{one.of(OURS, 'slowdown_mean'):.3f}"]
        cells += [f"{best:.3f}", policy, f"{one.ratio('slowdown_mean'):.3f}"]
        predicted, part = f"{off(one.document):.0%}", f"{busy(one.document):.0%}"
        if one.slower is not None:
            predicted, part = f"{predicted}, {one.off():.0%}", f"{part}, {busy(one.slower):.0%}"
        cells += [f"{one.ratio('worst_job'):.3f}", predicted, part]
        table.add_row(*cells, style=None if one.won else "bold")
    sums = _sums(draws)
    console.print(table)
    console.print(
        f"not worse (mean at most {MOST_MEAN}, worst job at most {MOST_WORST} of the best TCP): "
        f"{sums['won']} of {len(draws)}; geometric mean of the means {sums['geometric_mean']:.3f}; "
        f"every job predicted within {MOST_OFF:.0%}: {sums['predicted']}",
        highlight=False,
    )
    again = sum(one.slower is not None for one in draws)
    if again:
        console.print(
            f"{again} draws kept processors busy for at least {BUSY:.0%} of the time under "
            f"{' or '.join(PREDICTED)}: second figures are {SLOWER:g} times slower, and count for "
            "predictions.",
            highlight=False,
        )


def _what(scenario: Scenario) -> Iterator[str]:
    """In a few words."""
    racks = f" in {len(scenario.racks)} racks" if scenario.racks else ""
    yield f"{len(scenario.hosts)} hosts{racks},"
    yield f"{scenario.links.rate_mbps:.0f} Mbit/s, {scenario.links.buffer_kb:.0f} kB:"
    for job in scenario.jobs:
        yield f"{job.kind}{len(job.hosts)}x{job.sockets}"
