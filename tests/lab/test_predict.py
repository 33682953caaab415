# SPDX-License-Identifier: Apache-2.0
"""What the simulator is asked, what becomes of its answers, and what if there is none."""

import ast
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from pytest import MonkeyPatch
from typer.testing import CliRunner

from flowslot_lab import cli, predict
from flowslot_lab.predict import NoPrediction, read
from flowslot_lab.runner import Options
from flowslot_lab.state import RunState, start_time
from flowslot_scenario.results import Prediction
from flowslot_scenario.scenario import Scenario, load

from .conftest import SCENARIOS, TWO_EQUAL

PATH = SCENARIOS / "two-equal.toml"
ALL = ("stagger", "static", "fair", "cubic", "reno", "bbr")


@pytest.fixture
def state(tmp_path: Path) -> RunState:
    return RunState.create(tmp_path / "runs")


def document(*policies: str) -> dict[str, Any]:
    jobs = [{"name": "a", "mean_s": 0.25, "p50_s": 0.2}, {"name": "b", "mean_s": 0.5}]
    return {
        "scenario": "two-equal",
        "runs": [{"policy": policy, "repeat": 1, "jobs": jobs} for policy in policies],
        "summary": [{"policy": policy, "slowdown_mean": 1.5} for policy in policies],
    }


def stand_in(monkeypatch: MonkeyPatch, program: str) -> None:
    """A Python program instead of `flowslot`."""
    monkeypatch.setattr(predict, "venv_program", lambda *_: [sys.executable, "-c", program])


def ask(state: RunState, *policies: str) -> dict[str, Prediction]:
    return predict.predict(PATH, [], TWO_EQUAL, Options(policies or ("stagger",)), state)


def test_the_simulator_is_asked_once_for_what_the_lab_measures(
    state: RunState, monkeypatch: MonkeyPatch, tmp_path: Path
) -> None:
    answer = tmp_path / "answer.json"
    answer.write_text(json.dumps(document("stagger", "static", "fair")))
    note = "import pathlib, sys; pathlib.Path(sys.argv[-1] + '.args').write_text(repr(sys.argv))"
    stand_in(monkeypatch, f"{note}; print(open({str(answer)!r}).read())")
    asked = tmp_path / "-odd name.toml"
    options = Options(ALL, repeat=3, iterations=7, use_switch=False)
    seeded = TWO_EQUAL.model_copy(update={"seed": 42})
    found = predict.predict(asked, ["jobs.bytes=6e6"], seeded, options, state)
    assert found["stagger"] == Prediction("stagger", 1.5, {"a": 0.25, "b": 0.5})
    assert not found["static"].of_ideal_tcp
    for name in ("fair", "cubic", "reno", "bbr"):
        assert found[name].simulated == "fair" and found[name].of_ideal_tcp
    args = ast.literal_eval(Path(f"{asked}.args").read_text())[1:]
    assert args == [
        "sim", "run", "--policy", "stagger,static,fair", "--seeds", "1", "-o", "json",
        "--iterations=21", "--seed=42", "--no-switch", "--switches=one", "--set=jobs.bytes=6e6",
        "--", str(asked),
    ]  # fmt: skip


def test_the_simulator_understands_what_it_is_asked(state: RunState) -> None:
    path = SCENARIOS / "ring4-two-jobs.toml"
    changes = ["jobs.bytes=8e5", "links.uplink_mbps=90"]
    scenario = load(path, changes)
    options = Options(("static", "stagger", "bbr"), repeat=2, iterations=5, per_rack=True)
    found = predict.predict(path, changes, scenario, options, state)
    assert list(found) == ["static", "stagger", "bbr"]
    ideal = scenario.ideal_s(scenario.jobs[0])
    for prediction in found.values():
        assert prediction.mean_s.keys() == {"a", "b"}
        assert 0.9 * ideal < prediction.mean_s["a"] < 3 * ideal


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda d: d.pop("runs"), "runs: Field required"),
        (lambda d: d["runs"][0]["jobs"][0].update(mean_s="x"), "runs.0.jobs.0.mean_s: "),
        (lambda d: d["runs"][0]["jobs"][0].update(mean_s=float("nan")), "runs.0.jobs.0.mean_s: "),
        (lambda d: d["runs"][0]["jobs"][1].update(mean_s=0.0), "runs.0.jobs.1.mean_s: "),
        (lambda d: d["summary"][0].update(slowdown_mean=None), "summary.0.slowdown_mean: "),
        (lambda d: d["runs"][0]["jobs"].pop(), "not all jobs under stagger"),
        (lambda d: d["runs"][0]["jobs"][0].update(name="z"), "not all jobs under stagger"),
        (lambda d: d["summary"].clear(), "not all jobs under stagger"),
        (lambda d: d["runs"][0].update(policy="static"), "not all jobs under stagger"),
    ],
)
def test_an_answer_without_what_is_needed_is_no_prediction(change: Any, problem: str) -> None:
    answer = document("stagger")
    assert read(json.dumps(answer).encode(), TWO_EQUAL, ["stagger"])["stagger"].mean_s["b"] == 0.5
    change(answer)
    with pytest.raises(NoPrediction, match=f"^the simulator's answer: {problem}"):
        read(json.dumps(answer).encode(), TWO_EQUAL, ["stagger"])


@pytest.mark.parametrize("answer", [b"", b"{", b"\xff", b"[]", b"[" * 100_000, b"7"])
def test_bad_json_is_one_line(answer: bytes) -> None:
    with pytest.raises(NoPrediction) as caught:
        read(answer, TWO_EQUAL, ["stagger"])
    assert len(str(caught.value).splitlines()) == 1 and len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("import sys; sys.exit('Usage: ...\\n\\nNo such command \\'sim\\'.')",
         "the simulator: status 1: No such command 'sim'."),
        ("import sys; sys.exit(3)", "the simulator: status 3: nothing said"),
        ("import os; os.kill(os.getpid(), 9)", "the simulator: status -9: nothing said"),
        ("print('{')", "the simulator's answer: JSON: "),
        ("", "/nowhere/flowslot"),
    ],
)  # fmt: skip
def test_a_simulator_that_fails_says_why(
    state: RunState, monkeypatch: MonkeyPatch, program: str, problem: str
) -> None:
    command = [sys.executable, "-c", program] if program else ["/nowhere/flowslot"]
    monkeypatch.setattr(predict, "venv_program", lambda *_: command)
    with pytest.raises(NoPrediction) as caught:
        ask(state)
    said = str(caught.value)
    assert problem in said and len(said.splitlines()) == 1
    monkeypatch.setenv("PATH", "/nowhere")  # not even what starts programs
    with pytest.raises(NoPrediction, match=r"^the simulator cannot be started: "):
        ask(state)


def test_a_simulator_that_takes_too_long_is_ended(
    state: RunState, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(predict, "LIMIT_S", 0.5)
    stand_in(monkeypatch, "import time; print('{', flush=True); time.sleep(60)")
    with pytest.raises(NoPrediction, match=r"^the simulator took longer than 0.5 s$"):
        ask(state)
    [[pid, started, name]] = [rest for kind, *rest in state.entries() if kind == "process"]
    assert name == "prediction" and start_time(int(pid)) != int(started)


@pytest.mark.parametrize("wanted", [True, False])
def test_the_lab_measures_without_predictions_too(
    monkeypatch: MonkeyPatch, tmp_path: Path, wanted: bool
) -> None:
    stand_in(monkeypatch, "import sys; sys.exit('it broke')")
    monkeypatch.setattr(cli, "ROOT", tmp_path / "runs")
    monkeypatch.setattr(cli, "clean_dead", list)
    monkeypatch.setattr(cli, "_need_root", lambda: None)
    measured = []

    def measure(scenario: Scenario, *_: Any) -> Any:
        measured.append(scenario.name)
        raise typer.Exit(0)

    monkeypatch.setattr(cli, "measure", measure)
    args = ["run", str(PATH), "--policy", "cubic", *([] if wanted else ["--no-predict"])]
    result = CliRunner().invoke(cli.app, args)
    assert (result.exit_code, measured) == (0, ["two-equal"])
    lines = [line for line in result.output.splitlines() if "flowslot lab:" in line]
    said = "flowslot lab: no predictions: the simulator: status 1: it broke"
    assert lines == ([said] if wanted else [])
