# SPDX-License-Identifier: Apache-2.0
"""Random scenarios: what is drawn, what is kept, and who has won."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flowslot_lab import mixes
from flowslot_lab.cli import app
from flowslot_lab.mixes import Draw, as_data
from flowslot_scenario.mixes import DUTY, LOAD, PERIOD_S, TOTAL_MBPS, as_toml, draw, load
from flowslot_scenario.results import Results
from flowslot_scenario.scenario import parse

from .conftest import TWO_EQUAL
from .test_results import make_run

DRAWS = [draw(seed, number) for seed in (1, 2) for number in range(1, 41)]


def test_draws_are_as_documented() -> None:
    for one in DRAWS:
        assert 2 <= len(one.hosts) <= 8 and 1 <= len(one.jobs) <= 4 and len(one.racks) != 1
        assert 60 <= one.links.rate_mbps <= min(400, TOTAL_MBPS / len(one.hosts) + 0.1)
        assert 32 <= one.links.buffer_kb <= 4000
        assert LOAD[0] <= load(one) <= LOAD[1]
        for job in one.jobs:
            period = one.ideal_s(job)
            assert PERIOD_S[0] * 0.95 <= period <= PERIOD_S[1] * 1.05
            assert DUTY[0] - 0.05 <= 1 - job.compute_s / period <= DUTY[1] + 0.05
            assert 1 <= job.sockets <= 4
    assert {len(one.hosts) for one in DRAWS} == set(range(2, 9))
    assert {len(one.racks) for one in DRAWS} == {0, 2, 3}
    assert {len(one.jobs) for one in DRAWS} == {1, 2, 3, 4}
    assert {job.kind for one in DRAWS for job in one.jobs} == {"ring", "ps"}


def test_a_draw_is_its_scenario_file() -> None:
    for one in DRAWS:
        assert parse(as_toml(one), "file") == one
    assert draw(1, 3) == DRAWS[2] and len({as_toml(one) for one in DRAWS}) == len(DRAWS)


@pytest.mark.parametrize(
    ("ours", "won", "mean", "worst"),
    [
        ([[1.2, 1.2], [1.2, 1.2]], True, 1.0, 1.2 / 1.3),
        ([[1.1, 1.1], [1.3, 1.3]], True, 1.0, 1.0),
        ([[1.2, 1.2], [1.3, 1.3]], False, 1.25 / 1.2, 1.0),
        ([[1.0, 1.0], [1.4, 1.4]], False, 1.0, 1.4 / 1.3),
    ],
)
def test_won_is_neither_mean_nor_worst_job_behind(
    ours: list[list[float]], won: bool, mean: float, worst: float
) -> None:
    runs = [
        make_run("stagger", 1, ours),
        make_run("cubic", 1, [[1.4, 1.4], [1.4, 1.4]]),
        make_run("reno+rto5", 1, [[1.1, 1.1], [1.3, 1.3]]),
        make_run("static", 1, [[1.0, 1.0], [1.0, 1.0]]),  # is no rival
    ]
    one = Draw(TWO_EQUAL, Results(TWO_EQUAL, runs, {}).to_json())
    assert one.best("slowdown_mean") == (pytest.approx(1.2), "reno+rto5")
    assert one.won == won
    assert one.ratio("slowdown_mean") == pytest.approx(mean)
    assert one.ratio("worst_job") == pytest.approx(worst)
    assert as_data([one])["won"] == won and as_data([one])["geometric_mean"] == pytest.approx(
        mean, abs=1e-4
    )


def run_of(
    policy: str, mean_s: float, predicted_s: float | None, network: float = 0.1, others: float = 0.1
) -> dict[str, Any]:
    """As much of a run as predictions are about."""
    evidence = {"network_busy": network, "programs_busy": others}
    job = {"mean_s": mean_s, "predicted_mean_s": predicted_s}
    return {"policy": policy, "evidence": evidence, "jobs": [job]}


def test_a_prediction_is_compared_with_what_was_measured_slower_if_that_was() -> None:
    as_drawn = [run_of("stagger", 1.0, 0.8), run_of("static", 1.0, 0.95), run_of("reno", 1.0, 0.5)]
    one = Draw(TWO_EQUAL, {"runs": as_drawn})
    assert one.off() == pytest.approx(0.2)
    again = replace(one, slower={"runs": [run_of("stagger", 3.0, 2.7)]})
    assert again.off() == pytest.approx(0.1)
    assert math.isnan(Draw(TWO_EQUAL, {"runs": [run_of("stagger", 1.0, None)]}).off())


@pytest.mark.parametrize(
    ("runs", "slower", "again"),
    [
        ([run_of("stagger", 1.0, 0.8, 0.79, 0.79)], 1, False),
        ([run_of("stagger", 1.0, 0.8, network=0.8)], 1, True),
        ([run_of("stagger", 1.0, 0.8, others=0.8)], 1, True),
        ([run_of("stagger", 1.0, 0.8), run_of("static", 1.0, 0.8, others=0.9)], 1, True),
        ([run_of("stagger", 1.0, 0.8), run_of("reno", 1.0, 0.8, network=0.9)], 1, False),
        ([run_of("stagger", 1.0, 0.8, network=0.9)], 2, False),
        ([run_of("stagger", 1.0, None, network=0.9)], 1, False),
    ],
)
def test_which_draws_are_measured_slower(
    runs: list[dict[str, Any]], slower: float, again: bool
) -> None:
    scenario = TWO_EQUAL.model_copy(update={"slower": slower})
    assert Draw(scenario, {"runs": runs}).to_slow_down == again


def test_without_a_rival_nothing_is_won() -> None:
    one = Draw(
        TWO_EQUAL, Results(TWO_EQUAL, [make_run("stagger", 1, [[1.0], [1.0]])], {}).to_json()
    )
    assert not one.won and one.ratio("slowdown_mean") == math.inf


@pytest.mark.root
@pytest.mark.timeout(200)
def test_what_keeps_processors_busy_is_measured_slower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every draw keeps them busy for more than no time at all."""
    monkeypatch.setattr(mixes, "BUSY", 0.0)
    command = ["mixes", str(tmp_path), "--seed", "2", "--policy", "stagger,cubic+rto5"]
    command += ["--iterations", "2", "--count", "1", "-o", "json"]

    def draws() -> list[dict[str, Any]]:
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
        found: list[dict[str, Any]] = json.loads(result.stdout)["draws"]
        return found

    (one,) = draws()
    kept = tmp_path / f"{one['name']}.slower.json"
    document, before = json.loads(kept.read_text()), kept.stat()
    (run,) = document["runs"]
    assert run["policy"] == "stagger" and run["evidence"]["programs_busy"] > 0
    drawn = json.loads((tmp_path / f"{one['name']}.json").read_text())["runs"][0]
    for job, as_drawn in zip(run["jobs"], drawn["jobs"], strict=True):
        assert job["ideal_s"] == pytest.approx(mixes.SLOWER * as_drawn["ideal_s"], rel=0.01)
        assert job["predicted_mean_s"] > 2 * as_drawn["predicted_mean_s"]
    assert one["slower"]["times"] == mixes.SLOWER
    assert one["prediction_off"] == round(mixes.off(document), 4)
    assert draws() == [one] and kept.stat() == before
    kept.write_text("{")
    assert CliRunner().invoke(app, command).exit_code == 2


@pytest.mark.root
@pytest.mark.timeout(200)
def test_what_is_there_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mixes, "BUSY", 2.0)  # never

    def run(*more: str) -> tuple[int, str]:
        command = ["mixes", str(tmp_path), "--seed", "2", "--policy", "stagger,cubic+rto5"]
        result = CliRunner().invoke(app, [*command, *more])
        return result.exit_code, result.output

    assert run("--iterations", "2", "--count", "1")[0] == 0
    (kept,) = tmp_path.glob("*.json")
    document, before = json.loads(kept.read_text()), kept.stat()
    assert document["asked"]["scenario"] == as_toml(draw(2, 1))
    assert {run["policy"] for run in document["runs"]} == {"stagger", "cubic+rto5"}
    status, shown = run("--iterations", "2", "--count", "1")
    assert (status, kept.stat()) == (0, before) and "of 1;" in shown
    status, shown = run("--iterations", "3", "--count", "1")
    assert status == 2 and "was measured with other options" in shown and kept.stat() == before
    for run_ in document["runs"]:
        del run_["evidence"]["programs_busy"]
    kept.write_text(json.dumps(document))
    status, shown = run("--iterations", "2", "--count", "1")
    assert status == 2 and "before all processors were watched" in shown
    for broken in ("{", json.dumps({"asked": document["asked"]})):
        kept.write_text(broken)
        status, shown = run("--iterations", "2", "--count", "1")
        assert status == 2 and "is no result of" in shown
