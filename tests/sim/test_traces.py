# SPDX-License-Identifier: Apache-2.0
"""Readers of public traces, with samples made by hand in their schemas."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flowslot_sim.cli import app
from flowslot_sim.traces import TracedJob, arrivals, read, to_jobs
from flowslot_sim.traces.rows import TraceError

GOOGLE = """time,type,collection_id,scheduling_class,collection_type,priority,user
0,0,11,2,0,200,u
600000000,0,12,2,0,200,u
602500000,SUBMIT,13,2,0,200,u
603000000,4,12,2,0,200,u
601000000,0,14,2,0,200,u
"""
PAI = """j1,worker,2.0,Terminated,1000.0,1600.0,600.0,29.3,50.0,MISC
j1,ps,1.0,Terminated,990.0,1600.0,600.0,29.3,,MISC
j2,tensorflow,4.0,Terminated,1100.0,1200.0,600.0,29.3,100.0,V100
j3,tensorflow,4.0,Failed,1100.0,1200.0,600.0,29.3,100.0,V100
j4,tensorflow,4.0,Running,1100.0,,600.0,29.3,100.0,V100
"""
ACME = """job_id,user,node_num,gpu_num,type,state,submit_time,start_time,duration,queue,gpu_time
a,u1,1,8,Other,FAILED,2023-03-01 00:18:22+08:00,2023-03-01 00:18:54+08:00,117,32,936.0
b,u1,1,0,Other,COMPLETED,2023-03-01 00:20:00+08:00,,10,0,0
c,u1,2,16,Other,COMPLETED,2023-03-01 01:18:22+09:00,,60,0,960
"""


def server(n: int) -> dict[str, object]:
    return {"ip": "m1", "gpus": [f"gpu{k}" for k in range(n)]}


PHILLY: list[dict[str, object]] = [
    {
        "status": "Pass", "vc": "v", "jobid": "app_1", "user": "u",
        "submitted_time": "2017-10-07 01:11:39",
        "attempts": [
            {"start_time": "2017-10-07 01:12:00", "end_time": "2017-10-07 01:13:00",
             "detail": [server(8)]},
            {"start_time": "2017-10-07 01:14:00", "end_time": "2017-10-07 01:15:30",
             "detail": [server(8), server(4)]},
            {"start_time": "2017-10-07 01:16:00", "end_time": None, "detail": [server(8)]},
        ],
    },
    {"status": "Killed", "vc": "v", "jobid": "app_2", "user": "u", "attempts": [],
     "submitted_time": "2017-10-07 01:11:40"},
]  # fmt: skip


def written(folder: Path, text: str, name: str = "t.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_each_schema_is_known_by_its_columns(tmp_path: Path) -> None:
    assert read(written(tmp_path, GOOGLE)) == [
        TracedJob("12", 0.0), TracedJob("14", 1.0), TracedJob("13", 2.5)
    ]  # fmt: skip
    assert read(written(tmp_path, PAI)) == [
        TracedJob("j1", 0.0, 1, 600.0), TracedJob("j2", 100.0, 4, 100.0)
    ]  # fmt: skip
    assert read(written(tmp_path, ACME)) == [
        TracedJob("a", 0.0, 8, 117.0),
        TracedJob("c", 0.0, 16, 60.0),
    ]
    assert read(written(tmp_path, json.dumps(PHILLY), "log")) == [
        TracedJob("app_1", 0.0, 12, 150.0)
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (GOOGLE.replace("602500000", "x"), r't\.csv:4: time: "x" is no number'),
        (PAI.replace("1600.0", "900.0", 1), r"t\.csv:1: end_time: 900 is before start_time"),
        (PAI.replace("j2,tensorflow,4", "j2,tensorflow,x"), r't\.csv:3: inst_num: "x\.0" is no'),
        (PAI.replace(",V100\nj3", "\nj3"), r"t\.csv:3: 9 cells, 10 are needed"),
        (ACME.replace("00:18:22+08:00", "noon", 1), r't\.csv:2: submit_time: "2023-03-01 noon"'),
        (ACME.replace("a,u1,1,8", "a,u1,1,-8"), r't\.csv:2: gpu_num: "-8" is no number from 0'),
        ("a,b\n1,2\n", r"t\.csv:1: no trace that is known"),
        ('[{"jobid": 3}]', r"t\.csv: job 1: attempts: must be a list"),
        ("[" * 100_000, r"t\.csv:1:1: is no JSON"),
        ("[" + "1" * 5000 + "]", r"t\.csv:1:1: is no JSON"),
        (json.dumps([PHILLY[0] | {"jobid": "\ud800"}]), r"job 1: jobid: must be of printable"),
        ("[{", r"t\.csv:1:3: is no JSON"),
        (ACME[: ACME.index("\n") + 1], "has no jobs with GPUs that ran"),
        ("\x00\xff,\n" * 3, r"t\.csv:1: no trace"),
        ("", r"t\.csv:1: no trace"),
    ],
)  # fmt: skip
def test_a_bad_row_is_one_error_that_says_where(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(TraceError, match=problem):
        read(written(tmp_path, text))
    with pytest.raises(TraceError, match="No such file"):
        read(tmp_path / "none.csv")


def test_jobs_last_as_long_as_in_the_trace_when_they_are_alone(tmp_path: Path) -> None:
    traced = read(written(tmp_path, PAI))
    jobs = to_jobs(traced, {"m": (100e6, 400.0)}, 1e9, gpus=2, per_server=1)
    assert [(job.workers, job.iterations, job.arrival_ns) for job in jobs] == [
        (1, 1500, 0), (2, 200, 100 * 10**9)
    ]  # fmt: skip
    assert jobs[1].phases[0].volume == 100e6
    with pytest.raises(TraceError, match="GPUs and duration are needed"):
        to_jobs(read(written(tmp_path, GOOGLE)), {"m": (1e6, 1.0)}, 1e9, gpus=2, per_server=1)
    assert arrivals(written(tmp_path, GOOGLE), 3, 5.0) == (0, 2 * 10**9, 5 * 10**9)
    with pytest.raises(TraceError, match="has 3 jobs, 4 are needed"):
        arrivals(written(tmp_path, GOOGLE), 4, 5.0)


def test_the_command_simulates_a_trace(tmp_path: Path) -> None:
    path = str(written(tmp_path, PAI))
    done = CliRunner().invoke(
        app, ["trace", path, "--servers", "10", "--policy", "fair,srpt", "-o", "json"]
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [run["policy"] for run in found["runs"]] == ["fair", "srpt"] and found["jobs"] == 2
    assert found["runs"][0]["jct_mean_s"] == pytest.approx(350, rel=0.1)
    bad = CliRunner().invoke(app, ["trace", str(written(tmp_path, "a,b\n", "bad.csv"))])
    assert bad.exit_code != 0 and "no trace that is known" in str(bad.exception)


@pytest.mark.parametrize("gpus", [8, 100, 900])
def test_a_job_alone_lasts_as_long_as_in_the_trace(tmp_path: Path, gpus: int) -> None:
    row = f"u,1,{gpus},Other,COMPLETED,2023-03-01 00:00:00,,600,0,0\n"
    late = row.replace("2023", "2022").replace(f",{gpus},", ",1,")  # a year without a job: skipped
    text = ACME.splitlines(keepends=True)[0] + f"a,{row}b,{late}"
    run = ["trace", str(written(tmp_path, text)), "--policy", "fair,adadual", "-o", "json"]
    done = CliRunner().invoke(app, run)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["cut"] == (gpus > 800)
    for policy in found["runs"]:
        near = 0.02 if policy["policy"] == "fair" else 0.15
        assert policy["jct_mean_s"] == pytest.approx(600, rel=near) and not policy["stalled"]
