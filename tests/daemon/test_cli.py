# SPDX-License-Identifier: Apache-2.0
"""The command line: exit statuses and texts, with and without a daemon behind it."""

import json
import socket
import subprocess
import sys
import threading
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingUnixStreamServer

import pytest
import yaml

from flowslot_cli import render

from .conftest import HELD, TOPOLOGY

PROGRAMS = Path(sys.executable).parent
SCENARIOS = Path(__file__).parents[2] / "lab/scenarios"


def spread(*times):
    """Percentiles, in us."""
    return dict(zip(("p50_us", "p90_us", "p99_us", "max_us", "count"), times, strict=True))


STATUS = {
    "pid": 77, "host": "h1", "uptime_s": 12.3, "mode": "enforce", "policy": "stagger",
    "backend": "bpf", "congestion_control": "fs_h1_1a2b",
    "domain": {"state": "switch", "switch": "s1", "switch_pid": 99},
    "feedback": {"switches": [{"switch": "s2", "live": False}, {"switch": "s1", "live": True}],
                 "rounds": 9, "late": 1, "livelocks": 0, "starvations": 2},
    "reservations": {"granted": 4, "refused": 0, "preempted": 1, "expired": 0},
    "clock_offset_us": -120.0, "rate_writes": 12,
    "slot": {"number": 5, "slot_ms": 60.0, "missed": 0, "lateness": spread(500, 800, 900, 1e3, 9)},
    "decision": spread(300, 400, 450, 500, 9), "negotiation": spread(0, 0, 0, 0, 0),
    "flows": {"total": 2, "active": 1, "paced": 2, "unmapped": 0, "refused": 0},
    "records": {"registered": 1, "refused": 0, "faulty_slots": 0, "torn_slots": 0},
    "tls": {"mode": "loopback"},
    "unpatched": {"watching": True, "targets": [], "processes": 1, "connections": 4},
    "errors": {}, "last_error": "", "machine": ['field `host`: [x] is "h1", but none of its'],
    "config": {"file": "/etc/flowslot/flowslotd.toml", "error": "mode: x"},
}  # fmt: skip
STATUS_TEXT = """\
daemon         h1 (pid 77), up 12 s
mode           enforce
policy         stagger
pacing         bpf  fs_h1_1a2b
arbiter        switch s1 (pid 99)
reservations   granted 4  refused 0  preempted 1  expired 0
slot           5 of 60 ms, 0 missed
lateness       p50 0.50  p90 0.80  p99 0.90  max 1.00 ms (9)
decision time  p50 0.30  p90 0.40  p99 0.45  max 0.50 ms (9)
negotiation    -
clock offset   -0.120 ms
flows          total 2  active 1  paced 2  unmapped 0  refused 0
records        registered 1  refused 0  faulty_slots 0  torn_slots 0
unpatched      processes 1  connections 4
rate writes    12
errors         -
feedback       rounds 9  late 1  livelocks 0  starvations 2, without s2
machine        field `host`: [x] is "h1", but none of its
configuration  /etc/flowslot/flowslotd.toml
               not reloaded: mode: x
"""
FLOW = {
    "job": "vgg", "source": "10.78.0.1:5000", "destination": "10.78.0.2:6000",
    "path": ["h1->s1", "s1->h2"], "state": "active", "remaining_bytes": 1_250_000,
    "rate": 47_820_343.46, "ceiling": 47_820_343.46, "mode": "reserved", "note": "",
}  # fmt: skip
SENDS = {
    "role": "push", "rank": 9, "peer": 8, "channel": 0, "previous": None, "collective": None,
    "destination": "10.78.0.2:6000",
    "state": "active", "iteration": 3, "ready_bytes": 1_500_000, "sent_bytes": 1_300_000,
    "acked_bytes": 1_250_000, "iteration_bytes": 1_500_000, "remaining_bytes": 250_000,
    "rate": 11_955_085.9,
}  # fmt: skip
WAITS = {
    **SENDS, "role": "pull", "rank": 8, "peer": 9, "channel": 2, "state": "idle", "iteration": 0,
    "iteration_bytes": 0, "remaining_bytes": 0,
    **dict.fromkeys(("ready_bytes", "sent_bytes", "acked_bytes", "rate")),
}  # fmt: skip
JOB = {
    "job": "vgg", "flows": 1, "active": 1, "iteration": 3, "period_s": 0.25,
    "iteration_bytes": 1_500_000, "remaining_bytes": 250_000, "rate": 11_955_085.9,
    "progress": [
        SENDS, WAITS, {**WAITS, "rank": -1, "peer": -1, "channel": 0},
        {**WAITS, "role": "ring", "rank": 3, "peer": -1, "channel": -1},
        {**WAITS, "role": "ring", "rank": 3, "peer": 0, "previous": 2, "collective": "all-reduce"},
    ],
}  # fmt: skip
ANSWERS = {
    "status": STATUS,
    "flows": {"flows": [FLOW]},
    "jobs": {"jobs": [JOB]},
    "schedule": {
        "slot": 5, "slot_ms": 60.0, "horizon": 2,
        "flows": [{"job": "vgg", "cookie": 4660, "rates": [1_195_508.5866, 0.0]}],
    },
    "links": {
        "slot": 5, "slot_ms": 60.0, "horizon": 2,
        "links": [
            {"name": "h1->s1", "switch": "s1", "goodput": 47_820_343.46, "load": [0.0, 5e6]},
            {"name": "s1->h1", "switch": None, "goodput": 47_820_343.46, "load": None},
        ],
    },
}  # fmt: skip
FLOWS_TEXT = """\
job  source          destination     state   path           left     Mbit/s  ceiling  mode      note
vgg  10.78.0.1:5000  10.78.0.2:6000  active  h1->s1 s1->h2  1.25 MB  400     400      reserved
"""
JOBS_TEXT = """\
job  flows  active  iteration  period  of      left    Mbit/s
vgg  1      1       3          0.25 s  1.5 MB  250 kB  100

job  role  collective  ranks           destination     state   iteration  ready   sent    acked    of      left    Mbit/s
vgg  push  -           9 to 8          10.78.0.2:6000  active  3          1.5 MB  1.3 MB  1.25 MB  1.5 MB  250 kB  100
vgg  pull  -           8 to 9 #2       10.78.0.2:6000  idle    0          -       -       -        0 B     0 B     -
vgg  pull  -           - to -          10.78.0.2:6000  idle    0          -       -       -        0 B     0 B     -
vgg  ring  -           3 to -          10.78.0.2:6000  idle    0          -       -       -        0 B     0 B     -
vgg  ring  all-reduce  2 to 3 to 0 #2  10.78.0.2:6000  idle    0          -       -       -        0 B     0 B     -
"""  # noqa: E501
SCHEDULE_TEXT = """\
slot 5, Mbit/s in each of the next slots of 60 ms
job  cookie  +0    +1
vgg  1234    10.0  0.0
"""
LINKS_TEXT = """\
slot 5, Mbit/s reserved in each of the next slots of 60 ms
link    switch  Mbit/s  +0   +1
h1->s1  s1      400     0.0  41.8
s1->h1  -       400     -    -
"""


def flowslot(*arguments, env=None):
    return subprocess.run(
        [str(PROGRAMS / "flowslot"), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=env,
    )


class Answer(StreamRequestHandler):
    def handle(self):
        command = json.loads(self.rfile.readline())["cmd"]
        answer = json.dumps({"ok": True, "result": ANSWERS.get(command)})
        self.wfile.write((self.server.special or answer).encode() + b"\n")


@pytest.fixture
def ask(tmp_path):
    """`flowslot`, with a daemon that answers from the table above, or with the line `answer`."""

    def ask(*arguments, answer=None):
        server.special = answer
        return flowslot(*arguments, "--runtime-dir", tmp_path)

    with ThreadingUnixStreamServer(str(tmp_path / "control.sock"), Answer) as server:
        server.special = None
        threading.Thread(target=server.serve_forever, args=(0.02,)).start()
        yield ask
        server.shutdown()


def lines(text):
    return "".join(line.rstrip() + "\n" for line in text.splitlines())


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("status", STATUS_TEXT),
        ("flows", FLOWS_TEXT),
        ("schedule", SCHEDULE_TEXT),
        ("links", LINKS_TEXT),
        ("jobs", JOBS_TEXT),
    ],
)
def test_tables(ask, command, text):
    run = ask(command)
    assert (run.returncode, run.stderr) == (0, "")
    assert lines(run.stdout) == text


STREAMS = [{"switch": f"s{i}", "live": i != 2} for i in (1, 2, 3)]


@pytest.mark.parametrize(
    ("command", "answer", "line"),
    [
        ("jobs", {"jobs": []}, "no job has registered on this host"),
        ("status", {"state": "switch", "switch": "s1, s3"}, "switch s1, s3, without s2"),
        ("status", {"state": "fallback", "switch": "s1, s2, s3"}, "fallback s1, s2, s3"),
        (
            "status",
            {"state": "switch", "switch": "s1", "policy": "adadual"},
            "switch s1, deciding by adadual, without s2",
        ),
    ],
)
def test_what_is_missing_is_said(ask, command, answer, line):
    if command == "status":
        answer = {**STATUS, "domain": {**answer, "switches": STREAMS}}
        line = f"arbiter        {line}"
    run = ask(command, answer=json.dumps({"ok": True, "result": answer}))
    assert f"{line}\n" in lines(run.stdout)


def test_policies_are_shown_and_set(ask):
    told = {
        "process": "daemon of h1",
        "policy": "stagger",
        "switches": [{"switch": "s1", "policy": "adadual", "live": True},
                     {"switch": "s2", "policy": None, "live": False}],
    }  # fmt: skip
    answer = json.dumps({"ok": True, "result": told})
    text = "daemon of h1: stagger\n  switch process s1: adadual\n"
    text += "  switch process s2: not known, not live\n"
    assert ask("policy", "show", answer=answer).stdout == text
    assert ask("policy", "set", "stagger", answer=answer).stdout == text
    assert json.loads(ask("policy", "show", "-o", "json", answer=answer).stdout) == told
    bad = '{"ok": false, "kind": "config", "error": "f.toml: field `policy`: no"}'
    run = ask("policy", "set", "x", answer=bad)
    assert (run.returncode, run.stderr) == (2, "flowslot: f.toml: field `policy`: no\n")
    assert ask("policy", "set").returncode == 2


def test_json_and_yaml_carry_everything(ask):
    as_json, as_yaml = (ask("status", "-o", form).stdout for form in ("json", "yaml"))
    assert json.loads(as_json) == yaml.safe_load(as_yaml) == STATUS


@pytest.mark.usefixtures("ask")
def test_the_runtime_directory_may_come_from_the_environment(tmp_path):
    assert flowslot("status", env={"FLOWSLOT_RUNTIME_DIR": str(tmp_path)}).returncode == 0


@pytest.mark.parametrize(
    ("answer", "status", "error"),
    [
        ('{"ok": false, "kind": "config", "error": "a.toml: no"}', 2, "a.toml: no\n"),
        ('{"ok": false, "kind": "permission", "error": "is for root"}', 1, "is for root\n"),
        ("}{", 3, "no daemon at "),
    ],
)
def test_refusals_and_garbage_are_one_line_and_a_status(ask, answer, status, error):
    run = ask("reload", answer=answer)
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (status, "", 1)
    assert run.stderr.startswith(f"flowslot: {error}")


ADVICE = "Try `systemctl status flowslotd`, `flowslot doctor`, or --runtime-dir DIR.\n"


def test_no_daemon_is_status_3_and_says_what_was_tried(tmp_path):
    path = tmp_path / "control.sock"
    run = flowslot("status", "--runtime-dir", tmp_path)
    why = "there is no such socket: the daemon is not running, or uses another runtime directory"
    assert (run.returncode, run.stdout) == (3, "")
    assert run.stderr == f"flowslot: no daemon at {path}: {why}. {ADVICE}"

    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    run = flowslot("jobs", "--runtime-dir", tmp_path)
    why = "nobody listens there any more: the daemon has ended"
    assert run.returncode == 3
    assert run.stderr == f"flowslot: no daemon at {path}: {why}. {ADVICE}"


@pytest.mark.parametrize(
    "arguments",
    [["status", "--nope"], ["nonsense"], ["status", "-o", "xml"],
     ["status", "--watch", "-o", "json"]],
)  # fmt: skip
def test_wrong_usage_is_status_2(ask, arguments):
    run = ask(*arguments)
    assert run.returncode == 2
    assert "Traceback" not in run.stderr


def test_help_names_all_commands():
    run = flowslot("--help")
    assert run.returncode == 0
    for name in (
        *("status", "jobs", "flows", "schedule", "links", "policy", "reload", "doctor", "lab"),
    ):
        assert f"\n  {name} " in run.stdout


def test_a_status_loads_nothing_heavy(tmp_path):
    code = (
        "import sys; sys.argv = ['flowslot', 'status', '--runtime-dir', sys.argv[1]]\n"
        "from flowslot_cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(sorted({'numpy', 'grpc', 'rich', 'yaml'} & set(sys.modules)))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert run.stdout == "[]\n"


# -- check-config


def test_check_config_recognises_what_a_file_is(tmp_path):
    (tmp_path / "topology.toml").write_text(TOPOLOGY)
    file = tmp_path / "flowslotd.toml"
    file.write_text('host = "h1"\nslot_ms = 20')
    run = flowslot("check-config", file)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout == f"{file}: daemon configuration, no problem found\n"
    run = flowslot("check-config", file, "--print-effective", "-o", "json")
    effective = json.loads(run.stdout)["effective"]
    assert (effective["slot_ms"], effective["mode"]) == (20.0, "observe")
    run = flowslot("check-config", tmp_path / "topology.toml")
    assert run.stdout.endswith("topology configuration, no problem found\n")


@pytest.mark.parametrize("name", ["topology.toml", "flowslotd.toml", "switch.toml"])
def test_check_config_says_what_a_topology_may_not_mean(tmp_path, name):
    routed = '[[routes]]\nfrom_rack = "r1"\nto_rack = "r7"\nlinks = ["h1->s1"]\n'
    (tmp_path / "topology.toml").write_text(HELD + routed)
    (tmp_path / "flowslotd.toml").write_text('host = "h1"\nuse_switch = false')
    (tmp_path / "switch.toml").write_text('name = "s1"')
    run = flowslot("check-config", tmp_path / name)
    said = "remark: no host is in these racks, so no flow takes their routes: r1, r7\n"
    assert run.returncode == 0 and run.stdout.endswith(f"no problem found\n{said}")
    assert json.loads(flowslot("check-config", tmp_path / name, "-o", "json").stdout)["remarks"]


def test_check_config_of_a_switch(tmp_path):
    (tmp_path / "topology.toml").write_text(HELD)
    file = tmp_path / "switch.toml"
    file.write_text('name = "s1"\n[arbiter]\ntarget = 0.9')
    run = flowslot("check-config", file, "--print-effective", "-o", "json")
    result = json.loads(run.stdout)
    assert (run.returncode, result["kind"]) == (0, "switch")
    assert result["effective"]["arbiter"]["target"] == 0.9
    file.write_text('name = "s1"\n[arbiter]\ntarget = 2')
    run = flowslot("check-config", file)
    error = "field `arbiter.target`: must be less than or equal to 1, got 2"
    assert (run.returncode, run.stderr) == (2, f"flowslot: {file}: {error}\n")


@pytest.mark.root
def test_doctor_reports_what_the_kernel_offers():
    run = flowslot("doctor", "-o", "json")
    report = json.loads(run.stdout)
    assert {finding["status"] for finding in report["findings"]} <= {"ok", "warn", "missing"}
    assert run.returncode == (1 if report["backend"] == "none" else 0)
    table = flowslot("doctor").stdout
    for finding in report["findings"]:
        assert f" {finding['name']} " in table


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("d.toml", 'host = "h1"\nmoed = "observe"',
         "field `moed`: unknown key; did you mean `mode`?"),
        ("t.toml", TOPOLOGY.replace("= 0.2", "= -1"),
         "field `links[3].capacity_gbps`: must be greater than or equal to 0.001, got -1"),
        ("x.toml", "host = [", "not valid TOML: Invalid value (at end of document)"),
        ("no.toml", None, "cannot be read: No such file or directory"),
        *[
            (f"{path.name}", path.read_text(),
             "field `jobs`: looks like a scenario; `flowslot lab` runs those")
            for path in sorted(SCENARIOS.glob("*.toml"))
        ],
    ],
)  # fmt: skip
def test_check_config_says_what_is_wrong_in_one_line(tmp_path, name, text, error):
    if text is not None:
        (tmp_path / name).write_text(text)
    run = flowslot("check-config", tmp_path / name)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == f"flowslot: {tmp_path / name}: {error}\n"


def test_channels_of_several_communicators_are_told_apart() -> None:
    """Their numbers begin at multiples of 1024, those of the first one at 0."""
    numbers = (1, 1024 * 977, 1024 * 977 + 1, 1024 * 5 + 1, 0, -1)
    flows = [{**SENDS, "channel": number} for number in numbers]
    known = render._communicators(flows)
    assert [render._ranks(flow, known).removeprefix("9 to 8") for flow in flows] == [
        " #1 of communicator 1", " #0 of communicator 3", " #1 of communicator 3",
        " #1 of communicator 2", " #0 of communicator 1", "",
    ]  # fmt: skip
