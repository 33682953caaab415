# SPDX-License-Identifier: Apache-2.0
"""Sweeps: what is run, what is kept, and what a killed one goes on with."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench import contest
from flowslot.model.errors import ConfigError, FlowslotError
from flowslot_sim.cli import app
from flowslot_sim.cluster.contest import Contest
from flowslot_sim.cluster.slotted import Slotted

SMALL = ["--set", "servers=4", "--set", "jobs=6"]


def sweep(out: Path, *more: str):
    return CliRunner().invoke(app, ["sweep", str(out), *SMALL, *more])


def rows(out: Path) -> list[dict]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_a_killed_sweep_goes_on_where_it_was(tmp_path: Path) -> None:
    out = tmp_path / "runs"
    seeds = "seed=" + ",".join(map(str, range(12)))
    program = "from flowslot_sim.cli import app; app()"
    command = [sys.executable, "-c", program, "sweep", str(out), *SMALL]
    process = subprocess.Popen(
        [*command, "--set", seeds, "--processes", "1"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    while not out.exists() or out.read_bytes().count(b"\n") < 2:
        assert process.poll() is None
        time.sleep(0.005)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    before = out.read_bytes()
    n = before.count(b"\n")
    assert 2 <= n < 12 and children
    out.write_bytes(before + b'{"policy": "fa')  # what the kernel had taken of one more
    result = sweep(out, "--set", seeds, "-o", "json")
    assert result.exit_code == 0, result.output
    assert out.read_bytes().startswith(before[: before.rfind(b"\n") + 1])
    found = rows(out)
    assert sorted(row["seed"] for row in found) == list(range(12))
    for child in children:  # its workers ended with it
        state = Path(f"/proc/{child}/stat")
        assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"
    fresh = tmp_path / "fresh"
    sweep(fresh, "--set", "seed=0,11")
    kept = {row["seed"]: row for row in found}
    assert all(kept[row["seed"]] == row for row in rows(fresh))


def test_combinations_from_a_file_and_the_command_line(tmp_path: Path) -> None:
    file, out = tmp_path / "sweep.toml", tmp_path / "runs"
    file.write_text('policy = ["fair", "srsf1"]\nplacement = "lwf1"\nseed = [7, 8]\n')
    result = sweep(out, "--file", str(file), "--set", "seed=3", "-o", "csv")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].startswith("policy,placement,servers,jobs,seed,load,host,gpus,mean_s,p99_s")
    assert [line.split(",")[:5] for line in lines[1:]] == [
        ["fair", "lwf1", "4", "6", "3"],
        ["srsf1", "lwf1", "4", "6", "3"],
    ]


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("polcy=fair", '"polcy" is unknown: did you mean "policy"?'),
        ("policy=fare", 'policy: "fare" is unknown: did you mean "fair"?'),
        ("seed=x", "seed: must be of type int, not x"),
        ("placement=near", 'placement: "near" is unknown'),
        ("servers=0", "servers: must be from 1 to 100000"),
        ("load=0", "load: must be more than 0"),
        ("seed", "--set: must be NAME=VALUE"),
        ("jobs=7", "jobs: is set twice"),
    ],
)
def test_what_cannot_be_run_is_one_error(tmp_path: Path, setting: str, says: str) -> None:
    name = setting.partition("=")[0]
    small = SMALL if name != "servers" else []
    result = CliRunner().invoke(app, ["sweep", str(tmp_path / "runs"), *small, "--set", setting])
    assert result.exit_code != 0 and says in str(result.exception)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("text", ["something else\n", '{"my":"notes"}', "\nx", '{"policy": 1}'])
def test_a_foreign_file_is_left_alone(tmp_path: Path, text: str) -> None:
    out = tmp_path / "runs"
    out.write_text(text)
    result = sweep(out)
    assert result.exit_code != 0 and "line 1 is no run of a sweep" in str(result.exception)
    assert out.read_text() == text


@pytest.mark.parametrize("value", ["1" + "0" * 400, "[" * 5000, "1" * 5000, "true", "nan"])
def test_a_file_that_cannot_be_run_is_one_error(tmp_path: Path, value: str) -> None:
    file = tmp_path / "sweep.toml"
    file.write_text(f"load = {value}\n")
    assert isinstance(sweep(tmp_path / "runs", "--file", str(file)).exception, ConfigError)


@pytest.mark.parametrize("name", ["slots", "stalled", "p99_s", "load"])
def test_a_line_without_a_column_is_one_error(tmp_path: Path, name: str) -> None:
    out = tmp_path / "runs"
    assert sweep(out).exit_code == 0
    (row,) = rows(out)
    for changed in {k: v for k, v in row.items() if k != name}, row | {name: None}:
        out.write_text(json.dumps(changed) + "\n")
        assert "line 1 is no run of a sweep" in str(sweep(out).exception)


def test_a_failed_run_does_not_take_the_others(tmp_path: Path, monkeypatch) -> None:
    def fails(self: Contest) -> Slotted:
        if self.seed == 2:
            raise ZeroDivisionError("no")
        return built(self)

    built = Contest.built
    monkeypatch.setattr(Contest, "built", fails)  # and so in its workers, which are forked
    out = tmp_path / "runs"
    result = sweep(out, "--set", "seed=2,1,3", "--processes", "1")
    assert isinstance(result.exception, FlowslotError)
    assert "1 runs failed" in str(result.exception)
    assert "jobs=6, seed=2, load=1.0, host=shortest, gpus=8: ZeroDivisionError: no" in str(
        result.exception
    )
    assert sorted(row["seed"] for row in rows(out)) == [1, 3]


def test_a_killed_process_is_one_error(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(Contest, "built", lambda self: os._exit(9))
    result = sweep(tmp_path / "runs", "--processes", "1")
    assert "a process was killed" in str(result.exception)


def test_rows_are_compared_by_the_same_seeds() -> None:
    names = ("policy", "placement", "seed")
    ran = [("fair", "list", 1), ("fair", "list", 2), ("srpt", "list", 2)]
    kept, seeds = contest.complete([dict(zip(names, x, strict=True)) for x in ran])
    assert seeds == [2] and [tuple(x.values()) for x in kept] == ran[1:]


def test_two_sweeps_do_not_write_one_file(tmp_path: Path) -> None:
    out = tmp_path / "runs"
    hold = "import fcntl, sys; f = open(sys.argv[1], 'wb'); fcntl.lockf(f, fcntl.LOCK_EX)"
    command = [sys.executable, "-c", f"{hold}; print(flush=True); sys.stdin.read()", str(out)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        assert "another sweep writes this file" in str(sweep(out).exception)
        other.stdin.close()
    assert sweep(out).exit_code == 0


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_a_sweep_on_ray_finds_the_same(tmp_path: Path) -> None:
    for out, more in (tmp_path / "here", []), (tmp_path / "ray", ["--ray", "local"]):
        assert sweep(out, "--set", "seed=1,2,3", *more).exit_code == 0
    by_seed = [sorted(rows(tmp_path / x), key=lambda row: row["seed"]) for x in ("here", "ray")]
    assert by_seed[0] == by_seed[1]


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_a_ray_cluster_that_is_not_there_is_one_error(tmp_path: Path) -> None:
    error = sweep(tmp_path / "runs", "--ray", "nonsense").exception
    assert isinstance(error, ConfigError) and "--ray: nonsense: " in str(error)
