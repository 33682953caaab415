# SPDX-License-Identifier: Apache-2.0
"""The lab on the real kernel: networks, runs, and that nothing is left of them."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml
from leftovers import Host
from pytest import MonkeyPatch
from waiting import settle

from flowslot_lab.net import Network, super_packet
from flowslot_lab.processors import of_the_network
from flowslot_lab.procs import start, stop
from flowslot_lab.runner import PACED_RTO_MS, LiveRun, Options, measure, planned
from flowslot_lab.state import RunState, clean_dead, start_time
from flowslot_lab.tools import LabError, run
from flowslot_scenario.scenario import Link, load, parse

from .conftest import LEAVES_NOTHING, NOTHING, SCENARIOS, TWO_HOSTS, Flowslot, Quiet, begin, traces

pytestmark = pytest.mark.root


@pytest.mark.parametrize(
    ("rate_mbps", "buffer_bytes", "segments"),
    [
        (400, 64_000, 4),
        (400, 1_000_000, 16),
        (100, 1_000_000, 4),
        (6, 1_000_000, 1),
        (400, 5_000, 1),
    ],
)
def test_a_super_packet_is_short_beside_a_buffer_and_in_time(
    rate_mbps: float, buffer_bytes: int, segments: int
) -> None:
    link = Link(rate_mbps=rate_mbps, buffer_bytes=buffer_bytes)
    assert super_packet([Link(rate_mbps=1000, buffer_bytes=10_000_000), link]) == segments


@LEAVES_NOTHING
def test_network_has_the_asked_rates_and_buffers_and_leaves_nothing(state: RunState) -> None:
    net = Network(load(SCENARIOS / "ps-incast.toml"), state)
    began = time.monotonic()
    net.up()
    assert time.monotonic() - began < 10  # 0.3 s where it was written
    ports = run(["tc", "-n", net.switches["s1"], "qdisc", "show"])
    assert ports.count("qdisc htb 1: dev d-") == 5
    assert ports.count("limit 64000b") + ports.count("limit 62500b") == 5
    classes = run(["tc", "-n", net.hosts["h1"], "class", "show", "dev", "eth0"])
    assert "rate 400Mbit ceil 400Mbit burst 30000b" in classes  # 600 us
    offloads = run(["nsenter", f"--net=/run/netns/{net.switches['s1']}", "ethtool", "-k", "d-h5"])
    for feature in ("tcp-segmentation", "generic-segmentation", "generic-receive"):
        assert f"{feature}-offload: off" in offloads
    nic = run(["ip", "-n", net.hosts["h5"], "-details", "link", "show", "dev", "eth0"])
    assert "gso_max_segs 4 " in nic
    # Super-packets travel whole to the port, and receivers see packets (ADR 11).
    offloads = run(["nsenter", f"--net=/run/netns/{net.hosts['h5']}", "ethtool", "-k", "eth0"])
    assert "tcp-segmentation-offload: on" in offloads
    assert "generic-receive-offload: off" in offloads
    port = run(["tc", "-n", net.switches["s1"], "class", "show", "dev", "d-h1"])
    assert re.search(r"burst 31[45]\d\db", port)  # the NIC's, and a packet against rounding
    # A super-packet need not fit: what may pass at once is a burst and that.
    assert set(net.bursts.values()) == {30_000 + 4 * 1514, 30_000 + 5 * 1514}
    command = ["ip", "netns", "exec", net.hosts["h5"], "cat"]
    mask = run([*command, "/sys/class/net/eth0/queues/rx-0/rps_cpus"]).strip()
    assert int(mask.replace(",", ""), 16) == sum(1 << cpu for cpu in of_the_network())
    counters = net.counters()
    assert set(counters.link_bytes) == {
        f"{a}->{b}" for i in range(1, 6) for a, b in ((f"h{i}", "s1"), ("s1", f"h{i}"))
    }
    assert counters.retransmits == counters.control_packets == 0
    assert "rto_min" not in run(["ip", "-n", net.hosts["h1"], "route"])
    net.down()
    net.down()
    assert traces(state.id)["namespaces"] == []


@pytest.mark.parametrize(
    ("changes", "policy", "ms"),
    [
        (["rto_min_ms=20"], "cubic", 20),
        (["rto_min_ms=20"], "cubic+rto5", 5),
        (["slower=3"], "cubic", 600),
        (["slower=3"], "stagger", 60),
        (["slower=3"], "stagger@htb", 600),
        (["slower=3"], "fair", 600),
        (["slower=3", "rto_min_ms=50"], "stagger", 150),
        (["slower=3"], "reno+rto5", 15),
    ],
)
def test_a_least_retransmission_timeout_is_that_of_all_hosts(
    state: RunState, changes: list[str], policy: str, ms: int
) -> None:
    scenario = load(SCENARIOS / "two-equal.toml", changes)
    net = LiveRun(scenario, state, policy, 1, use_switch=False).net
    net.up()
    for space in net.hosts.values():
        (route,) = run(["ip", "-n", space, "route", "show", "10.78.0.0/16"]).splitlines()
        assert f"rto_min lock {ms}ms" in route
    net.down()


def test_paced_sockets_have_the_timeout_that_the_kernel_program_sets() -> None:
    constants = (Path(__file__).parents[2] / "bpf" / "consts.h").read_text()
    assert f"#define FS_RTO_MIN_US {PACED_RTO_MS * 1000}\n" in constants


@LEAVES_NOTHING
def test_baseline_run_verifies_bytes_and_measures(state: RunState) -> None:
    scenario = parse(TWO_HOSTS, "small.toml")
    options, watch = Options(("cubic", "reno"), repeat=2, iterations=5), Quiet()
    result = measure(scenario, options, state, watch)
    assert watch.total == planned(scenario, options) == 4 * (1 + 5)
    assert [(r.policy, r.repeat) for r in result.runs] == [
        ("cubic", 1), ("reno", 1), ("cubic", 2), ("reno", 2),
    ]  # fmt: skip
    for measured in result.runs:
        assert measured.evidence.bytes_verified == 6 * 2 * 500_000
        assert measured.evidence.rate_writes == 0
        assert len(measured.jobs[0].times) == 5
        used = measured.utilisation
        assert all(0 < share < 1.05 for share in used.values())
        # All that leaves the port to the other host has left a NIC, with as many headers.
        assert used["h1->s1"] >= 0.99 * used["s1->h2"]
        assert measured.jobs[0].slowdowns.min() > 0.95  # nothing beats the physical limit
    assert set(result.alone) == {"a"}


def test_jobs_alone_are_measured_once_per_kind(state: RunState) -> None:
    text = TWO_HOSTS + TWO_HOSTS[TWO_HOSTS.index("[[jobs]]") :].replace('"a"', '"b"')
    scenario, options, watch = parse(text, "f"), Options(("cubic",), iterations=3), Quiet()
    result = measure(scenario, options, state, watch)
    assert watch.total == planned(scenario, options) == 1 + 3 + 13
    assert result.alone["a"] == result.alone["b"] > 0.01
    folders = sorted(path.name for path in state.path.iterdir() if path.is_dir())
    assert folders == ["01-small-cubic", "02-small-cubic"]


@LEAVES_NOTHING
def test_a_job_that_dies_fails_the_run(state: RunState) -> None:
    live = LiveRun(parse(TWO_HOSTS, "f"), state, "cubic", 1000, use_switch=False)
    with pytest.raises(LabError, match=r"job-a-. ended with status"), live:
        for done in live.follow(Quiet()):
            if done >= 2:
                live.jobs.workers[0].process.signal(signal.SIGKILL)


@pytest.mark.parametrize(
    ("number", "policy", "status"),
    [
        (signal.SIGINT, "cubic", 130),
        (signal.SIGTERM, "cubic", 143),
        (signal.SIGINT, "stagger", 130),
    ],
)
def test_an_interrupted_run_leaves_nothing(
    host: Host, flowslot: Flowslot, number: signal.Signals, policy: str, status: int
) -> None:
    process, run_id = begin(flowslot, "--policy", policy)
    process.send_signal(number)
    process.communicate(timeout=30)
    assert traces(run_id) == NOTHING
    assert host.left() == {}
    assert process.returncode == status


@pytest.mark.parametrize(
    ("scenario", "policy"),
    [("nccl-ring-loss", "cubic"), ("two-equal", "stagger"), ("ring4-two-jobs", "stagger")],
)
def test_after_kill_the_next_start_is_clean(
    host: Host, flowslot: Flowslot, scenario: str, policy: str
) -> None:
    process, run_id = begin(flowslot, "--policy", policy, scenario=scenario)
    relays = [command for command in traces(run_id)["processes"] if "lab/relay" in command]
    assert len(relays) == (scenario == "nccl-ring-loss")
    process.kill()
    process.communicate()
    settle(lambda: not traces(run_id)["processes"])  # they die with the lab, before anyone cleans
    parts = ["core", "h1", "h2", "h3", "h4", "r1", "r2"]
    if scenario == "two-equal":
        parts = ["h1", "h2", "s1"]
    elif scenario == "nccl-ring-loss":
        parts = ["h1", "h2", "h3", "h4", "s1"]
    assert traces(run_id)["namespaces"] == [f"fl{run_id}-{part}" for part in parts]
    other, other_id = begin(flowslot, "--policy", "cubic")
    assert traces(run_id) == NOTHING
    assert flowslot("lab", "clean").wait(30) == 0
    assert traces(other_id)["namespaces"] != []  # a live run is not touched
    other.send_signal(signal.SIGINT)
    other.communicate(timeout=30)
    assert traces(other_id) == NOTHING
    assert host.left() == {}


def test_who_is_started_as_the_lab_dies_does_not_run(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    state = RunState.create(tmp_path)
    state.begin("x")
    live = start(state, "live", None, ["sleep", "60"])
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 1)  # the parent that it finds is another one
        late = start(state, "late", None, ["sleep", "60"])
    try:
        assert late.popen.wait(10) == 1
        assert live.popen.poll() is None
    finally:
        stop([live])


def test_clean_kills_only_what_the_dead_run_started(tmp_path: Path) -> None:
    dead = RunState.create(tmp_path)
    dead.begin("x")
    process = start(dead, "sleeper", None, ["sleep", "60"])
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        dead.note("process", bystander.pid, 12345, "an-id-that-was-used-again")
        assert clean_dead(tmp_path) == []  # its owner, this process, lives
        journal = dead.path / "journal"
        owner = f"owner {os.getpid()} {start_time(os.getpid())}"
        journal.write_text(journal.read_text().replace(owner, f"owner {os.getpid()} 1"))
        removed = clean_dead(tmp_path)
        assert removed == [f"process {process.pid} (run {dead.id})"]
        assert process.popen.wait(5) == -signal.SIGKILL
        assert bystander.poll() is None
        assert list(tmp_path.iterdir()) == []
    finally:
        stop([process])
        bystander.kill()
        bystander.wait()


def test_json_alone_on_standard_output(flowslot: Flowslot, tmp_path: Path) -> None:
    scenario = tmp_path / "small.toml"
    scenario.write_text(TWO_HOSTS)
    process = flowslot(
        "lab", "run", str(scenario), "--policy", "cubic", "--iterations", "5", "-o", "json",
        "--figure", str(tmp_path / "f.png"), "--keep-logs", str(tmp_path / "logs"),
    )  # fmt: skip
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    job = json.loads(out)["runs"][0]["jobs"][0]
    assert job["iterations"] == 5
    # Alone on the network, nothing is left to TCP that could be other than ideal.
    assert job["predicted_mean_s"] == pytest.approx(job["ideal_s"], rel=0.1)
    assert (tmp_path / "f.png").stat().st_size > 1000
    assert (tmp_path / "logs/01-small-cubic/job-a-0.json").exists()


@pytest.mark.parametrize(("switch", "output"), [("--switch", "json"), ("--no-switch", "yaml")])
def test_stagger_run_is_real(host: Host, flowslot: Flowslot, switch: str, output: str) -> None:
    scenario = str(SCENARIOS / "two-equal.toml")
    process = flowslot(
        "lab", "run", scenario, "--policy", "stagger", "--iterations", "5", switch, "-o", output
    )
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    result = json.loads(out) if output == "json" else yaml.safe_load(out)
    assert out.startswith("{" if output == "json" else "scenario: two-equal\n")
    evidence = result["runs"][0]["evidence"]
    assert evidence["reservations"]["granted"] > 0
    assert evidence["rate_writes"] > 0
    assert evidence["bytes_verified"] == 10 * 4 * 5_000_000
    names = {"daemon-h1", "daemon-h2", "job-a-0", "job-a-1", "job-b-0", "job-b-1"}
    if switch == "--switch":
        assert set(evidence["pids"]) == names | {"switch"}
        assert evidence["grpc_connections"] == 2
    else:
        assert set(evidence["pids"]) == names
        assert evidence["grpc_connections"] == evidence["control_packets"] == 0
    assert host.left() == {}
