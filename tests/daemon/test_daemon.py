# SPDX-License-Identifier: Apache-2.0
"""The real daemon as a process: real sockets, real kernel, two network namespaces."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from .conftest import HELD, TOPOLOGY

PROGRAMS = Path(sys.executable).parent
TRAINING = Path(__file__).with_name("training.py")
PORT = 7777
FLOWS = 4
SHARE = 0.2e9 / 8 * 1448 / 1514 / FLOWS  # of s1->h2, payload bytes/s

pytestmark = pytest.mark.root


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class Hosts:
    """Namespaces h1 and h2 with a cable between them."""

    def __init__(self, stack):
        self.stack = stack
        self.names = [f"fst{os.getpid()}-{host}" for host in ("h1", "h2")]
        for name in self.names:
            ip("netns", "add", name)
            stack.callback(ip, "netns", "del", name)
            ip("-n", name, "link", "set", "lo", "up")
        here, there = self.names
        peer = ("peer", "name", "eth0", "netns", there)
        ip("-n", here, "link", "add", "eth0", "type", "veth", *peer)
        for i, name in enumerate(self.names, 1):
            ip("-n", name, "addr", "add", f"10.78.0.{i}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")

    def start(self, host, *command, **options):
        process = subprocess.Popen(
            ["nsenter", f"--net=/run/netns/{self.names[host - 1]}", *map(str, command)],
            text=True,
            **options,
        )
        self.stack.callback(process.wait)
        self.stack.callback(process.kill)
        return process


@pytest.fixture
def hosts():
    with ExitStack() as stack:
        yield Hosts(stack)


class Training:
    """A sender on h1 and a receiver on h2."""

    def __init__(self, hosts, runtime_dir):
        python = (sys.executable, TRAINING)
        receiver = hosts.start(2, *python, "receive", PORT, stdout=subprocess.PIPE)
        assert receiver.stdout.readline() == "ready\n"
        register = runtime_dir / "register.sock"
        self.sender = hosts.start(
            1, *python, "send", "10.78.0.2", PORT, register, FLOWS, 200_000,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def until(self, condition, what):
        """The first report of an iteration for which `condition` holds."""
        for _ in range(400):
            line = self.sender.stdout.readline()
            assert line, "the job has ended"
            report = json.loads(line)
            if condition(report):
                return report
        raise AssertionError(f"never seen: {what}; last: {report}")

    def end(self):
        self.sender.stdin.close()
        assert self.sender.wait(20) == 0


class Daemon:
    """A flowslotd on h1."""

    def __init__(self, hosts, directory, topology=TOPOLOGY, **settings):
        self.hosts = hosts
        self.directory = directory
        self.runtime_dir = directory / "run"
        self.file = directory / "flowslotd.toml"
        (directory / "topology.toml").write_text(topology)
        self.settings = {"host": "h1", "runtime_dir": str(self.runtime_dir), **settings}
        self.configure()

    def configure(self, **settings):
        self.settings |= settings
        lines = [f"{key} = {json.dumps(value)}" for key, value in self.settings.items()]
        self.file.write_text("\n".join(lines))

    def start(self, **environment):
        self.process = self.hosts.start(
            1, PROGRAMS / "flowslotd", "--config", self.file,
            stderr=subprocess.PIPE, env={**os.environ, **environment},
        )  # fmt: skip
        assert "ready" in self.process.stderr.readline()
        return self

    def ask(self, command):
        run = self.cli(command, "-o", "json")
        assert run.returncode == 0, run.stderr
        return json.loads(run.stdout)

    def cli(self, *arguments):
        return subprocess.run(
            [str(PROGRAMS / "flowslot"), *arguments, "--runtime-dir", str(self.runtime_dir)],
            capture_output=True,
            text=True,
            check=False,
        )

    def stop(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        status = self.process.wait(20)
        return status, self.process.stderr.read()


def paced(report):
    return all(rate <= 1.1 * SHARE for _, rate in report["sockets"])


def unpaced(report):
    return all(rate > 2 * SHARE for _, rate in report["sockets"])


def ours(name):
    return lambda report: {cc for cc, _ in report["sockets"]} == {name}


def settle(check, seconds=10.0):
    """Wait for something that follows from a signal or an event elsewhere."""
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, "it never came about"
        time.sleep(0.02)


def test_enforcing_paces_flows_and_sigterm_restores_them(hosts, tmp_path):
    daemon = Daemon(hosts, tmp_path, mode="enforce", policy="static").start()
    status = daemon.ask("status")
    assert (status["mode"], status["backend"]) == ("enforce", "bpf")
    training = Training(hosts, daemon.runtime_dir)
    training.until(ours(status["congestion_control"]), "our congestion control")
    training.until(paced, "pacing")

    flows = daemon.ask("flows")["flows"]
    assert len(flows) == FLOWS
    assert {f["job"] for f in flows} == {"train"}
    assert {tuple(f["path"]) for f in flows} == {("h1->s1", "s1->h2")}
    assert {f["mode"] for f in flows} == {"capped"}  # nobody holds the links
    assert {f["owned"] for f in flows} == {True}
    assert {f["pid"] for f in flows} == {training.sender.pid}
    assert [f["rate"] for f in flows] == pytest.approx([SHARE] * FLOWS)
    training.until(lambda report: report["iteration"] > 8, "iterations")
    settle(lambda: daemon.ask("jobs")["jobs"][0]["period_s"] is not None)
    (job,) = daemon.ask("jobs")["jobs"]
    assert job["iteration_bytes"] == FLOWS * 200_000
    assert job["period_s"] > 0.05
    status = daemon.ask("status")
    assert status["rate_writes"] >= FLOWS
    assert status["flows"]["paced"] == FLOWS
    assert status["errors"] == {}
    assert status["grpc_connections"] == 0

    assert daemon.stop() == (0, "")
    assert list(daemon.runtime_dir.iterdir()) == []
    training.until(unpaced, "flows that are let go")
    assert daemon.cli("status").returncode == 3
    training.end()


def test_observing_leaves_sockets_alone_and_a_reload_switches_to_enforcing_and_back(
    hosts, tmp_path
):
    daemon = Daemon(hosts, tmp_path, policy="static").start()
    status = daemon.ask("status")
    assert (status["mode"], status["backend"]) == ("observe", "none")
    assert status["congestion_control"] == ""
    training = Training(hosts, daemon.runtime_dir)
    report = training.until(lambda r: r["registered"] and r["iteration"] > 5, "registration")
    default = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    assert ours(default)(report)
    # Nobody waits for news of it, so it is looked at now and then only.
    settle(lambda: [j["iteration_bytes"] for j in daemon.ask("jobs")["jobs"]] == [FLOWS * 200_000])
    (job,) = daemon.ask("jobs")["jobs"]
    assert job["flows"] == FLOWS
    assert {f["note"] for f in daemon.ask("flows")["flows"]} == {"not paced: mode is observe"}
    assert daemon.ask("status")["rate_writes"] == 0

    daemon.configure(mode="enforce")
    assert daemon.cli("reload").returncode == 0
    name = daemon.ask("status")["congestion_control"]
    training.until(lambda r: ours(name)(r) and paced(r), "pacing")
    daemon.configure(mode="observe")
    assert daemon.cli("reload").returncode == 0
    training.until(unpaced, "flows that are let go")
    status = daemon.ask("status")
    assert (status["backend"], status["errors"]) == ("none", {})
    training.end()
    settle(lambda: daemon.ask("flows")["flows"] == [])


def test_a_bad_reload_keeps_the_last_good_configuration(hosts, tmp_path):
    daemon = Daemon(hosts, tmp_path, mode="enforce", policy="static").start()
    training = Training(hosts, daemon.runtime_dir)
    training.until(paced, "pacing")
    topology = tmp_path / "topology.toml"
    topology.write_text(TOPOLOGY.replace("capacity_gbps = 0.2", "capacity_gbps = -1"))
    problem = "field `links[3].capacity_gbps`: must be greater than or equal to 0.001, got -1"
    error = f"{topology}: {problem}"
    run = daemon.cli("reload")
    assert (run.returncode, run.stderr) == (2, f"flowslot: {error}\n")
    daemon.process.send_signal(signal.SIGHUP)
    assert daemon.process.stderr.readline().strip().endswith(f"not reloaded: {error}")
    status = daemon.ask("status")
    assert status["config"]["error"] == error
    assert status["flows"]["paced"] == FLOWS
    training.until(paced, "pacing, still")

    topology.write_text(TOPOLOGY.replace("capacity_gbps = 0.2", "capacity_gbps = 0.1"))
    assert daemon.cli("reload").returncode == 0
    assert daemon.ask("status")["config"]["error"] == ""
    half = 1.1 * SHARE / 2
    training.until(lambda r: all(rate <= half for _, rate in r["sockets"]), "the new rate")


def test_without_a_switch_process_the_daemon_shares_out_its_own_nics(hosts, tmp_path):
    daemon = Daemon(hosts, tmp_path, topology=HELD, mode="enforce", use_switch=False).start()
    training = Training(hosts, daemon.runtime_dir)
    training.until(lambda r: r["iteration"] > 8, "iterations")
    status = daemon.ask("status")
    assert status["domain"]["state"] == "local"
    assert status["grpc_connections"] == 0
    assert status["reservations"]["granted"] > 0
    assert status["rate_writes"] > 0
    assert status["errors"] == {}
    flows = daemon.ask("flows")["flows"]
    assert {f["mode"] for f in flows} == {"capped"}  # s1->h2 is beyond this host
    load = {link["name"]: link["load"] for link in daemon.ask("links")["links"]}
    assert load["s1->h2"] is None
    assert 0 < load["h1->s1"][0] <= 0.4e9 / 8 * 1448 / 1514
    plan = daemon.ask("schedule")["flows"]
    assert {len(flow["rates"]) for flow in plan} == {10}
    training.end()
    assert daemon.stop() == (0, "")


def test_flows_are_granted_by_the_switch(hosts, tmp_path):
    daemon = Daemon(hosts, tmp_path, topology=HELD, mode="enforce").start()
    switch = hosts.start(
        1, PROGRAMS / "flowslot-switch", "--name", "s1", "--topology", tmp_path / "topology.toml"
    )
    settle(lambda: daemon.ask("status")["domain"]["state"] == "switch")
    training = Training(hosts, daemon.runtime_dir)
    settle(lambda: daemon.ask("status")["reservations"]["granted"] > 0)
    training.until(lambda r: r["iteration"] > 8, "iterations")
    status = daemon.ask("status")
    assert status["domain"]["switch_pid"] == switch.pid
    assert status["grpc_connections"] == 1
    assert abs(status["clock_offset_us"]) < 50_000
    flows = daemon.ask("flows")["flows"]
    assert {f["mode"] for f in flows} == {"reserved"}
    bottleneck = 0.2e9 / 8 * 1448 / 1514
    assert sum(f["rate"] for f in flows) <= 0.97 * bottleneck
    load = {link["name"]: link["load"] for link in daemon.ask("links")["links"]}
    assert 0 < load["s1->h2"][0] <= 0.97 * bottleneck
    assert status["errors"] == {}
    training.end()
    assert daemon.stop()[0] == 0
