# SPDX-License-Identifier: Apache-2.0
"""What runs leave for people to look at: spans, use of links, timelines, figures."""

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from scenariofiles import SCENARIOS
from typer.testing import CliRunner

from flowslot.model.errors import FlowslotError
from flowslot_scenario import scenario as scenarios
from flowslot_sim.cli import app
from flowslot_sim.cluster.contest import Contest
from flowslot_sim.recording import record
from flowslot_sim.recording.record import BIN_NS, MOST, Recording, Use
from flowslot_sim.runner import Options, simulate


@pytest.mark.parametrize("last", [BIN_NS * 3 + 1, BIN_NS * MOST, BIN_NS * MOST * 37])
def test_no_byte_is_lost_among_bins(last: int) -> None:
    draw = np.random.default_rng(1)
    use, carried = Use(np.array([2.0, 5.0])), [np.zeros(2)]
    times = [0, *np.unique(draw.integers(1, last, 400)).tolist(), last]
    for now in times[1:]:
        carried.append(carried[-1] + draw.random(2))
        use.feed(now, carried[-1])
    edges, shares = use.shares()
    assert len(edges) == len(shares) + 1 and len(shares) <= MOST
    assert len(shares) >= MOST / 2 or last < BIN_NS * MOST
    assert last / 1e9 - edges[-1] < use.bin_ns / 1e9
    for link, capacity in enumerate(use.capacity):
        by_edge = np.interp(edges * 1e9, times, [each[link] for each in carried])
        in_bins = shares[:, link] * capacity * np.diff(edges)
        assert in_bins == pytest.approx(np.diff(by_edge), abs=1e-6)


def test_what_is_carried_evenly_is_shown_evenly() -> None:
    use = Use(np.array([10.0]))
    use.feed(BIN_NS * MOST * 3 // 2, np.array([5.0 * BIN_NS * MOST * 1.5 / 1e9]))
    assert use.shares()[1] == pytest.approx(0.5)


def by_track(recording: Recording, group: str) -> dict[str, list[record.Span]]:
    found = defaultdict(list)
    for span in recording.spans:
        if span.group == group:
            found[span.track].append(span)
    return {
        track: sorted(spans, key=lambda x: (x.begins, -x.ends)) for track, spans in found.items()
    }


def nested(spans: list[record.Span]) -> bool:
    open_until: list[int] = []
    for span in spans:
        while open_until and open_until[-1] <= span.begins:
            open_until.pop()
        if open_until and span.ends > open_until[-1]:
            return False
        open_until.append(span.ends)
    return True


def test_a_recorded_scenario_is_the_same_and_its_spans_fill_the_iterations() -> None:
    loaded = scenarios.load(SCENARIOS / "two-equal.toml", [])
    options = Options(("stagger", "cassini", "fair"), iterations=8)
    recordings: dict[str, Recording] = {}
    recorded, plain = simulate(loaded, options, recordings), simulate(loaded, options)
    for policy, recording in recordings.items():
        for job in loaded.jobs:
            times = recorded.times(policy, job.name)
            assert np.array_equal(times, plain.times(policy, job.name))
            spans = by_track(recording, "jobs")[job.name]
            assert nested(spans)
            whole = [x for x in spans if x.name.startswith("iteration")]
            some = whole[loaded.warmup : loaded.warmup + 8]
            assert [(x.ends - x.begins) / 1e9 for x in some] == pytest.approx(times)
            parts = sum(x.ends - x.begins for x in spans if x not in whole)
            assert parts == sum(x.ends - x.begins for x in whole)
        flows = [x for host in ("host h1", "host h2") for x in by_track(recording, host).values()]
        assert flows and all(nested(spans) for spans in flows)
        run = next(x for x in recorded.runs if x.policy == policy)
        means = recording.use.shares()[1].mean(axis=0)
        assert means == pytest.approx([run.utilisation[x] for x in recording.links], abs=0.02)
    held = {p: sum(x.name == "held back" for x in r.spans) for p, r in recordings.items()}
    assert held["stagger"] and held["cassini"] and not held["fair"]


@pytest.mark.parametrize("policy", ["fair", "srsf1"])
def test_a_recorded_cluster_is_the_same_and_its_spans_fill_the_jobs(policy: str) -> None:
    point = Contest(policy, servers=4, jobs=12, load=0.5)
    recording, run = point.recorded(), point.built().go_on(1e5)
    tracks = by_track(recording, "jobs")
    for job, jct_s in zip(run.jobs, run.jct_s.tolist(), strict=True):
        spans = tracks[job.name]
        assert sum(x.ends - x.begins for x in spans) / 1e9 == pytest.approx(jct_s)
        assert all(a.ends == b.begins for a, b in pairwise(spans))
    names = {x.name for spans in tracks.values() for x in spans}
    assert names == {"queued", "computes", "sends"} | (
        {"held back"} if policy == "srsf1" else set()
    )
    busy = sum(x.ends - x.begins for x in recording.spans if x.track.startswith("GPU"))
    assert busy == sum(job.compute_ns * job.workers for job in run.jobs)
    assert recording.use.shares()[1].max() == pytest.approx(1.0, abs=0.05)
    assert recording.use.shares()[1].max() < 1 + 1e-6


def invoke(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def test_timelines_are_what_chrome_reads(tmp_path: Path) -> None:
    file = tmp_path / "new" / "t.json"
    small = ["--set", "servers=4", "--set", "jobs=6", "--timeline", str(file)]
    assert invoke("sweep", str(tmp_path / "runs"), *small).exit_code == 0
    events = json.loads(file.read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "C"}
    named = {(x["pid"], x["tid"]) for x in events if x["name"] == "thread_name"}
    assert {(x["pid"], x["tid"]) for x in events if x["ph"] == "X"} == named
    links = {x["name"] for x in events if x["ph"] == "C"}
    assert links <= {f"{x} {k} {way}" for x in ("server", "rack", "group") for k in range(4)
                     for way in ("up", "down")}  # fmt: skip
    assert all(0 <= x["args"]["%"] <= 101 for x in events if x["ph"] == "C") and links
    result = invoke("sweep", str(tmp_path / "runs"), *small, "--set", "seed=1,2")
    assert "--timeline: is of one run, not of 2" in str(result.exception)


def test_figures_are_drawn_and_bad_names_stop_before_anything_runs(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    scenario = str(SCENARIOS / "two-equal.toml")
    run = ["run", scenario, "--iterations", "3", "--policy", "fair"]
    sweep = ["sweep", str(tmp_path / "runs"), "--set", "servers=4", "--set", "jobs=6"]
    trace = tmp_path / "t.csv"
    trace.write_text("j1,worker,2.0,Terminated,1000.0,1060.0,60.0,29.3,50.0,MISC\n")
    for k, command in enumerate(
        (run, [*sweep, "--set", "load=1,2"], ["trace", str(trace), "--servers", "4"])
    ):
        file = tmp_path / f"{k}.svg"
        result = invoke(*command, "--figure", str(file))
        assert result.exit_code == 0, result.output
        assert "</svg>" in file.read_text()
    full = tmp_path / "full.png"
    full.symlink_to("/dev/full")
    found = invoke(*run, "--figure", str(full))
    assert isinstance(found.exception, FlowslotError)
    assert str(found.exception) == f"--figure {full}: No space left on device"
    for option, name, says in (
        ("--figure", "x.bmp", "must end in one of"),
        ("--figure", "runs/x.png", "must be a file in a directory"),
        ("--timeline", "runs/x.json", "must be a file in a directory"),
    ):
        result = invoke("sweep", str(tmp_path / "other"), option, str(tmp_path / name))
        assert says in str(result.exception) and not (tmp_path / "other").exists()
