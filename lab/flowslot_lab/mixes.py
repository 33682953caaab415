# SPDX-License-Identifier: Apache-2.0
"""Random scenarios, one after the other: how often ours is worse than the best TCP, and how much.

A folder holds the scenario file of each draw (`lab run` takes it), and its results, as `lab run -o
json` prints them, once it was measured. What is there is not measured again, so a run that was
broken off goes on. The table is made from these files alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
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

OURS = "stagger"
MOST_MEAN, MOST_WORST, MOST_OFF = 1.02, 1.05, 0.08
"""A draw is won when mean and worst job are at most so many times those of the best TCP; predicted
when no job's mean is further off."""


@dataclass(frozen=True, slots=True)
class Draw:
    """One draw with its results."""

    scenario: Scenario
    document: dict[str, Any]

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
        under the policies that it models; NaN: nothing was predicted."""
        parts = [
            abs(job["predicted_mean_s"] / job["mean_s"] - 1)
            for run in self.document["runs"]
            if run["policy"] in {OURS, "static"}
            for job in run["jobs"]
            if job["predicted_mean_s"]
        ]
        return max(parts, default=math.nan)

    @property
    def busy(self) -> float:
        """The largest part of the time for which the network's processors were busy."""
        return max(float(run["evidence"]["network_busy"]) for run in self.document["runs"])


def files(seed: int, count: int, slower: float) -> list[str]:
    """Scenario files of the draws 1 to `count` of a seed, so many times slower than drawn."""
    drawn = (draw(seed, number + 1) for number in range(count))
    return [as_toml(one.model_copy(update={"slower": slower})) for one in drawn]


def run(files: list[str], folder: Path, options: Options, state: RunState) -> list[Draw]:
    """Measure the scenario files that the folder has no results of yet; returns all.

    Raises ConfigError when what is there was measured otherwise; what `measure` raises.
    """
    folder.mkdir(parents=True, exist_ok=True)
    scenarios = {file: parse(file, "draw") for file in files}
    found = {file: _read(folder, file, one, options) for file, one in scenarios.items()}
    missing = [file for file in files if found[file] is None]
    total = sum(planned(scenarios[file], options) for file in missing)
    with Bar("mixes", total) as bar:
        for file in missing:
            bar.prefix = f"{scenarios[file].title} ({len(missing)} to measure)"
            found[file] = _measure(folder, file, options, state, bar)
    return [Draw(scenarios[file], found[file] or {}) for file in files]


def _read(folder: Path, file: str, scenario: Scenario, options: Options) -> dict[str, Any] | None:
    """What was measured. None: nothing was."""
    results = folder / f"{scenario.name}.json"
    if not results.exists():
        return None
    try:
        document: dict[str, Any] = json.loads(results.read_text())
        asked = document["asked"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(str(results), "", f"is no result of `lab mixes`: {error}") from None
    if asked != _asked(file, scenario, options):
        problem = f"was measured with other options, {asked}: name another folder"
        raise ConfigError(str(results), "asked", problem)
    return document


def _asked(file: str, scenario: Scenario, options: Options) -> dict[str, Any]:
    return {
        "scenario": file,
        "policies": list(options.policies),
        "iterations": options.measured(scenario),
        "repeat": options.repeat,
    }


def _measure(
    folder: Path, file: str, options: Options, state: RunState, bar: Bar
) -> dict[str, Any]:
    scenario = parse(file, "draw")
    path, results = folder / f"{scenario.name}.toml", folder / f"{scenario.name}.json"
    path.write_text(file)
    document = {
        "asked": _asked(file, scenario, options),
        **_results(folder, scenario, options, state, bar),
    }
    scratch = results.with_suffix(".new")
    scratch.write_text(json.dumps(document, indent=1))
    scratch.replace(results)
    return document


def _results(
    folder: Path, scenario: Scenario, options: Options, state: RunState, bar: Bar
) -> dict[str, Any]:
    """Of a draw whose file is in the folder."""
    bar.begin("prediction", 0)
    try:
        predicted = predict(folder / f"{scenario.name}.toml", [], scenario, options, state)
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
                    document = _results(folder, one.scenario, again, state, bar)
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
                "prediction_off": None if math.isnan(one.off()) else round(one.off(), 4),
                "network_busy": one.busy,
            }
            for one in draws
        ],
        **{key: round(value, 4) for key, value in _sums(draws).items()},
    }


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
        cells += [f"{one.ratio('worst_job'):.3f}", f"{one.off():.0%}", f"{one.busy:.0%}"]
        table.add_row(*cells, style=None if one.won else "bold")
    sums = _sums(draws)
    console.print(table)
    console.print(
        f"not worse (mean at most {MOST_MEAN}, worst job at most {MOST_WORST} of the best TCP): "
        f"{sums['won']} of {len(draws)}; geometric mean of the means {sums['geometric_mean']:.3f}; "
        f"every job predicted within {MOST_OFF:.0%}: {sums['predicted']}",
        highlight=False,
    )


def _what(scenario: Scenario) -> Iterator[str]:
    """In a few words."""
    racks = f" in {len(scenario.racks)} racks" if scenario.racks else ""
    yield f"{len(scenario.hosts)} hosts{racks},"
    yield f"{scenario.links.rate_mbps:.0f} Mbit/s, {scenario.links.buffer_kb:.0f} kB:"
    for job in scenario.jobs:
        yield f"{job.kind}{len(job.hosts)}x{job.sockets}"
