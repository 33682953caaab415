# SPDX-License-Identifier: Apache-2.0
import re

import numpy as np
import pytest
from rich.console import Console

from flowslot_lab.figure import draw, received_rate
from flowslot_lab.jobspec import Report, iteration_times
from flowslot_lab.runner import LiveRun, RunFailed, expected_bytes
from flowslot_lab.state import RunState
from flowslot_scenario.results import (
    Evidence,
    JobRun,
    Prediction,
    Results,
    Run,
    best_baseline,
    summarise,
)
from flowslot_scenario.scenario import load
from flowslot_scenario.table import print_result

from .conftest import SCENARIOS, TWO_EQUAL

MS = 1_000_000


def make_run(policy: str, repeat: int, factors: list[list[float]]) -> Run:
    """`factors`: slowdowns of each job."""
    jobs = []
    for job, slow in zip(TWO_EQUAL.jobs, factors, strict=True):
        ideal = TWO_EQUAL.ideal_s(job)
        trace = [(0.1 * i, 1000 * i) for i in range(60)]
        jobs.append(JobRun(job, ideal, np.array(slow) * ideal, {0: trace, 1: trace}))
    return Run(policy, repeat, Evidence(bytes_verified=1), jobs, 7, {"h1->s1": 0.5})


def test_iteration_ends_with_its_last_worker() -> None:
    reports = [
        Report(started=0, ends=[100 * MS, 210 * MS, 300 * MS]),
        Report(started=0, ends=[110 * MS, 200 * MS, 340 * MS]),
        Report(started=0),  # a server
    ]
    assert iteration_times(reports, 0) == pytest.approx([0.110, 0.100, 0.130])
    assert iteration_times(reports, 1) == pytest.approx([0.100, 0.130])


def test_summary_pools_repeats_and_jobs() -> None:
    runs = [
        make_run("cubic", 1, [[1.0, 1.2], [1.4, 1.6]]),
        make_run("cubic", 2, [[1.0, 1.0], [2.0, 2.0]]),
    ]
    summary = summarise("cubic", runs)
    assert summary.slowdown_mean == pytest.approx(1.4)
    assert summary.slowdown_p99 == pytest.approx(2.0)
    assert (summary.worst_job, summary.worst_job_name) == (pytest.approx(1.75), "b")
    assert summary.spread_mean == pytest.approx(0.2)
    assert summary.spread_p99 == pytest.approx(2.0 - 1.594)
    assert (summary.retransmits, summary.iterations) == (14, 8)


def test_a_run_that_was_given_up_has_no_numbers_but_a_reason() -> None:
    run = make_run("mlcc-literal", 1, [[1.0, 1.2], []])
    run.livelock = "livelock from slot 7 on"
    result = Results(TWO_EQUAL, [run], {})
    (summary,) = result.summaries()
    assert summary.worst_job_name == "b" and summary.slowdown_mean == pytest.approx(1.1)
    assert summary.to_json(None)["worst_job"] is None
    document = result.to_json()["runs"][0]
    assert document["livelock"] == run.livelock
    assert document["jobs"][1]["slowdown_p99"] is None and document["jobs"][1]["mean_s"] is None
    console = Console(width=120, record=True)
    print_result(result, console)
    assert "livelock from slot 7 on. Its numbers are of 2 iterations" in console.export_text()


def test_who_starves_shows_in_the_worst_ten_iterations_of_one_run() -> None:
    """Not in those around the end of a repeat."""
    late = [1.0] * 12 + [3.0] * 4
    runs = [make_run("cubic", 1, [late, [2.0, 1.0]]), make_run("cubic", 2, [late[::-1], [1.0]])]
    runs.append(make_run("reno", 1, [[1.0] * 5 + [2.0] * 10 + [5.0], []]))
    result = Results(TWO_EQUAL, runs, {})
    worst = {(row.policy, row.job): row.numbers[-1] for row in result.by_job()}
    assert worst["cubic", "a"] == pytest.approx(1.8), "four of ten, and not eight"
    assert worst["cubic", "b"] == pytest.approx(1.5), "fewer than ten: all of them"
    assert worst["reno", "a"] == pytest.approx(2.3) and np.isnan(worst["reno", "b"])
    shown = [[job["slowdown_worst_ten"] for job in run["jobs"]] for run in result.to_json()["runs"]]
    assert shown == [[1.8, 1.5], [1.8, 1.0], [2.3, None]]


def test_best_baseline_is_per_metric() -> None:
    runs = [
        make_run("cubic", 1, [[1.1, 1.1], [1.1, 1.9]]),
        make_run("bbr", 1, [[1.4, 1.4], [1.4, 1.4]]),
        make_run("stagger", 1, [[1.0, 1.0], [1.0, 1.0]]),
    ]
    summaries = Results(TWO_EQUAL, runs, {}).summaries()
    assert best_baseline(summaries, "slowdown_mean") == ("cubic", pytest.approx(1.3))
    assert best_baseline(summaries, "slowdown_p99") == ("bbr", pytest.approx(1.4))
    assert best_baseline(summaries[2:], "slowdown_mean") is None


def test_a_run_that_learns_something_else_is_named() -> None:
    curves = [[[2.0, 1.0], [2.5, 1.5]], [[2.0, 1.0], [2.5, 1.5]], [[2.0, 1.0], [2.5, 1.6]]]
    runs = [make_run(policy, 1, [[1.0, 1.0]] * 2) for policy in ("cubic", "reno", "stagger")]
    for run, losses in zip(runs, curves, strict=True):
        run.jobs[1].losses = losses
    assert "losses" not in runs[0].to_json(TWO_EQUAL, {}, None)["jobs"][0]
    assert runs[0].to_json(TWO_EQUAL, {}, None)["jobs"][1]["losses"] == curves[0]
    for shown, differ in ((runs[:2], "the same, bit by bit"), (runs, "differ: stagger, 1 from it")):
        console = Console(width=200, record=True)
        print_result(Results(TWO_EQUAL, shown, {}), console)
        text = console.export_text()
        assert f"Losses of b, 2 iterations, in all runs: {differ}" in text
        assert "Losses of a" not in text
    assert Results(TWO_EQUAL, runs, {}).curves_apart("b") == {"stagger, 1": 1}


def test_json_has_the_documented_keys() -> None:
    run = make_run("stagger", 1, [[1.0, 1.5], [1.5, 1.5]])
    document = Results(TWO_EQUAL, [run], {"a": 0.25}).to_json()
    assert document["scenario"] == "two-equal"
    row = document["runs"][0]
    assert (row["policy"], row["repeat"], row["retransmits"]) == ("stagger", 1, 7)
    assert row["evidence"]["reservations"] == {
        "granted": 0, "scheduled": 0, "refused": 0, "preempted": 0, "expired": 0,
    }  # fmt: skip
    assert {"pids", "rate_writes", "bytes_verified"} <= set(row["evidence"])
    job = row["jobs"][0]
    assert (job["name"], job["iterations"], job["bytes"]) == ("a", 2, 5_000_000)
    assert (job["compute_s"], job["alone_s"]) == (0.125, 0.25)
    assert job["ideal_s"] == pytest.approx(TWO_EQUAL.ideal_s(TWO_EQUAL.jobs[0]), abs=1e-6)
    assert job["mean_s"] == pytest.approx(1.25 * job["ideal_s"], abs=1e-5)
    assert job["p50_s"] == pytest.approx(1.25 * job["ideal_s"], abs=1e-5)
    assert job["slowdown_mean"] == 1.25
    assert job["slowdown_p99"] == pytest.approx(1.495)
    assert row["links"] == [{"link": "h1->s1", "capacity_bps": 4e8, "utilisation": 0.5}]
    summary = document["summary"][0]
    assert summary["policy"] == "stagger"
    assert summary["slowdown_mean"] == 1.375
    assert summary["worst_job"] == 1.5
    assert job["predicted_mean_s"] is None
    assert summary["predicted_slowdown_mean"] is summary["predicted_policy"] is None


@pytest.fixture
def predicted() -> Results:
    """Each job takes 1.2 times Ideal, and was predicted to take 1.08 (b: 1.3) times."""
    runs = [make_run(name, 1, [[1.2], [1.2]]) for name in ("stagger", "static", "cubic")]
    ideal = TWO_EQUAL.ideal_s(TWO_EQUAL.jobs[0])
    by_policy = {
        policy: Prediction(simulated, 1.19, {"a": 1.08 * ideal, "b": 1.3 * ideal})
        for policy, simulated in (("stagger", "stagger"), ("static", "static"), ("cubic", "fair"))
    }
    return Results(TWO_EQUAL, runs, {}, by_policy)


def test_json_has_what_was_predicted_and_by_whom(predicted: Results) -> None:
    document = predicted.to_json()
    for run in document["runs"]:
        for job, slowdown in zip(run["jobs"], (1.08, 1.3), strict=True):
            expected = slowdown * job["ideal_s"]
            assert job["predicted_mean_s"] == pytest.approx(expected, abs=1e-5)
    rows = [(s["predicted_slowdown_mean"], s["predicted_policy"]) for s in document["summary"]]
    assert rows == [(1.19, "stagger"), (1.19, "static"), (1.19, "fair")]


def test_how_far_off_a_prediction_was_is_said_only_where_it_is_a_model(predicted: Results) -> None:
    ratios = predicted.predicted_over_measured()
    assert list(ratios) == ["stagger", "static"]
    assert ratios["stagger"] == {"a": pytest.approx(0.9), "b": pytest.approx(1.3 / 1.2)}


def test_tables_show_predictions_and_mark_those_of_ideal_tcp(predicted: Results, capsys) -> None:
    print_result(predicted, Console(width=120))
    text = capsys.readouterr().out
    rows = {tuple(re.split("[│┃ ]+", line.strip("│┃ "))) for line in text.splitlines()}
    assert ("stagger", "1.200", "1.190", "1.200") in {row[:4] for row in rows}
    assert ("cubic", "1.200", "1.190*", "1.200") in {row[:4] for row in rows}
    assert ("stagger", "a", "0.2755", "0.2480", "0.2755") in {row[:5] for row in rows}
    assert ("cubic", "a", "0.2755", "0.2480*", "0.2755") in {row[:5] for row in rows}
    assert ("stagger", "a", "1.2000", "1.2000", "1.2000") in {row[:2] + row[-3:] for row in rows}
    assert "simulated on ideal links. * cubic: max-min sharing; no loss, no timeouts." in text
    assert "iteration of a job: stagger 0.90 to 1.08, static 0.90 to 1.08\n" in text
    assert "best stock TCP" in text and "worst 10" in text and "…" not in text


@pytest.mark.parametrize(
    ("policy", "changes", "missing"),
    [
        ("stagger", {"granted": 0}, "no reservation was granted"),
        ("stagger", {"rate_writes": 0}, "no rate was written"),
        ("static", {"rate_writes": 0}, "no rate was written"),
        ("stagger", {"bytes_verified": 41}, "received bytes verified"),
        ("cubic", {"bytes_verified": 0}, "received bytes verified"),
        ("stagger", {"grpc_connections": 1}, "1 gRPC connections"),
        ("stagger", {"control_packets": 3}, "3 packets on the control network"),
    ],
)
def test_a_run_without_its_evidence_fails(
    tmp_path, policy: str, changes: dict[str, int], missing: str
) -> None:
    run_state = RunState.create(tmp_path)
    live = LiveRun(TWO_EQUAL, run_state, policy, 5, use_switch=False)
    expected = expected_bytes(TWO_EQUAL, TWO_EQUAL.warmup + 5)
    good = {"granted": 1, "rate_writes": 1, "bytes_verified": expected}
    live.check(Evidence(**good))
    with pytest.raises(RunFailed, match=missing):
        live.check(Evidence(**{**good, **changes}))


def test_every_byte_is_expected() -> None:
    assert expected_bytes(TWO_EQUAL, 3) == 3 * 2 * 2 * 5_000_000
    assert expected_bytes(load(SCENARIOS / "ps-incast.toml"), 3) == 3 * 2 * 6_400_000


def test_bandwidth_comes_from_the_receivers_on_that_link() -> None:
    run = make_run("cubic", 1, [[1.0], [1.0]])
    rate = received_rate(run.jobs[0], "s1->h2", 1.0, 2.0)
    assert rate == pytest.approx(10_000)
    assert received_rate(run.jobs[0], "s1->h7", 1.0, 2.0) is None


def test_table_and_figure(tmp_path, capsys) -> None:
    runs = [
        make_run(policy, 1, [[1.0, slow], [1.0, slow]])
        for policy, slow in (("stagger", 1.1), ("cubic", 1.5), ("bbr", 1.6))
    ]
    result = Results(TWO_EQUAL, runs, {"a": 0.24, "b": 0.24})
    print_result(result, Console(width=120))
    text = capsys.readouterr().out
    assert "1.250 cubic" in text
    assert "predicted" not in text and "…" not in text
    assert "5 MB / (400 Mbit/s x 1448/1514)" in text
    draw(result, tmp_path / "deep" / "figure.png")
    assert (tmp_path / "deep" / "figure.png").read_bytes().startswith(b"\x89PNG")
