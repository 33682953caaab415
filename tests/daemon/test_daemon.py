# SPDX-License-Identifier: Apache-2.0
"""The real daemon as a process: real sockets, real kernel, two network namespaces."""

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from passive import PROGRAM, Unpatched, asked, congestion_control, node
from waiting import settle

from flowslot.arbiter import TARGET

from .conftest import HELD, TOPOLOGY

PROGRAMS = Path(sys.executable).parent
PORT = 7777
FLOWS = 4
SIZE = 200_000
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
def hosts(stack):
    return Hosts(stack)


class Job(Unpatched):
    """On h1, sending to h2. It reports itself where `runtime_dir` is given."""

    def __init__(self, hosts, runtime_dir=None, flows=FLOWS):
        receiver = hosts.start(2, sys.executable, PROGRAM, "receive", PORT, stdout=subprocess.PIPE)
        assert receiver.stdout.readline() == "ready\n"
        enter = ("nsenter", f"--net=/run/netns/{hosts.names[0]}")
        super().__init__(hosts.stack, flows, "10.78.0.2", PORT, prefix=enter, env=node(FROM=""))
        self.flows = flows
        if runtime_dir:
            self.do(f"register {runtime_dir}/register.sock")

    def until(self, check, seconds=40.0):
        """Train until that is so, and say what it says."""

        def train_and_check():
            time.sleep(0.08)
            self.do(f"begin {SIZE}")
            return check()  # while it sends

        return settle(train_and_check, seconds)

    def sockets(self, ask):
        """What its connections say."""
        found = []
        for fd in os.listdir(f"/proc/{self.pid}/fd"):
            with suppress(OSError):  # no connection
                found += asked(self.pid, [(int(fd), None)], ask)
        assert len(found) == self.flows
        return found

    def is_under(self, name):
        return set(self.sockets(congestion_control)) == {name}

    def is_paced(self, share=SHARE):
        """Each connection, at so many bytes/s."""
        return max(self.sockets(pacing_rate)) <= 1.1 * share

    def is_unpaced(self):
        return min(self.sockets(pacing_rate)) > 2 * SHARE


def pacing_rate(sock):
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    return struct.unpack_from("=Q", info, 104)[0]  # tcpi_pacing_rate


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


def test_enforcing_paces_flows_and_sigterm_restores_them(hosts, tmp_path):
    daemon = Daemon(hosts, tmp_path, mode="enforce", policy="static").start()
    status = daemon.ask("status")
    assert (status["mode"], status["backend"]) == ("enforce", "bpf")
    training = Job(hosts, daemon.runtime_dir)
    training.until(lambda: training.is_under(status["congestion_control"]))
    training.until(training.is_paced)

    flows = daemon.ask("flows")["flows"]
    assert len(flows) == FLOWS
    assert {f["job"] for f in flows} == {"patched"}
    assert {tuple(f["path"]) for f in flows} == {("h1->s1", "s1->h2")}
    assert {f["mode"] for f in flows} == {"capped"}  # nobody holds the links
    assert {f["owned"] for f in flows} == {True}
    assert {f["pid"] for f in flows} == {training.pid}
    assert [f["rate"] for f in flows] == pytest.approx([SHARE] * FLOWS)
    training.train(SIZE, 8)
    settle(lambda: daemon.ask("jobs")["jobs"][0]["period_s"] is not None)
    (job,) = daemon.ask("jobs")["jobs"]
    assert job["iteration_bytes"] == FLOWS * SIZE
    assert job["period_s"] > 0.05
    status = daemon.ask("status")
    assert status["rate_writes"] >= FLOWS
    assert status["flows"]["paced"] == FLOWS
    assert status["errors"] == {}
    assert status["grpc_connections"] == 0

    assert daemon.stop() == (0, "")
    assert list(daemon.runtime_dir.iterdir()) == []
    training.until(training.is_unpaced)
    assert daemon.cli("status").returncode == 3


def test_observing_leaves_sockets_alone_and_a_reload_switches_to_enforcing_and_back(
    hosts, tmp_path
):
    daemon = Daemon(hosts, tmp_path, policy="static").start()
    status = daemon.ask("status")
    assert (status["mode"], status["backend"]) == ("observe", "none")
    assert status["congestion_control"] == ""
    training = Job(hosts, daemon.runtime_dir)
    training.until(lambda: daemon.ask("status")["records"]["registered"])
    training.train(SIZE, 6)
    default = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    assert training.is_under(default)
    # Nobody waits for news of it, so it is looked at now and then only.
    settle(lambda: [j["iteration_bytes"] for j in daemon.ask("jobs")["jobs"]] == [FLOWS * SIZE])
    (job,) = daemon.ask("jobs")["jobs"]
    assert job["flows"] == FLOWS
    assert {f["note"] for f in daemon.ask("flows")["flows"]} == {"not paced: mode is observe"}
    assert daemon.ask("status")["rate_writes"] == 0

    daemon.configure(mode="enforce")
    assert daemon.cli("reload").returncode == 0
    name = daemon.ask("status")["congestion_control"]
    training.until(lambda: training.is_under(name) and training.is_paced())
    daemon.configure(mode="observe")
    assert daemon.cli("reload").returncode == 0
    training.until(training.is_unpaced)
    status = daemon.ask("status")
    assert (status["backend"], status["errors"]) == ("none", {})
    training.end()
    settle(lambda: daemon.ask("flows")["flows"] == [])


def test_only_what_the_congestion_control_has_met_is_shown_as_paced(hosts, tmp_path):
    daemon = Daemon(hosts, tmp_path, mode="enforce", policy="static").start()
    training = Job(hosts, daemon.runtime_dir)
    training.until(training.is_paced)
    training.until(lambda: daemon.ask("status")["flows"]["paced"] == FLOWS)
    training.do("use reno")  # registered, opted out
    name = daemon.ask("status")["congestion_control"]

    def others() -> list[dict]:
        return [flow for flow in daemon.ask("flows")["flows"] if flow["mode"] == "open"]

    (other,) = training.until(others)
    assert (other["rate"], other["note"]) == (None, f"not paced: its socket does not use {name}")
    assert daemon.ask("status")["flows"]["paced"] == FLOWS - 1
    (job,) = daemon.ask("jobs")["jobs"]
    assert [flow["rate"] is None for flow in job["progress"]].count(True) == 1
    assert job["rate"] == pytest.approx((FLOWS - 1) * SHARE, rel=0.01)
    assert other["cookie"] not in {f["cookie"] for f in daemon.ask("schedule")["flows"]}
    training.do(f"use {name}")
    training.until(lambda: not others())
    training.until(training.is_paced)


def test_a_bad_reload_keeps_the_last_good_configuration(hosts, tmp_path):
    daemon = Daemon(hosts, tmp_path, mode="enforce", policy="static").start()
    training = Job(hosts, daemon.runtime_dir)
    training.until(training.is_paced)
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
    training.until(training.is_paced)

    topology.write_text(TOPOLOGY.replace("capacity_gbps = 0.2", "capacity_gbps = 0.1"))
    assert daemon.cli("reload").returncode == 0
    assert daemon.ask("status")["config"]["error"] == ""
    training.until(lambda: training.is_paced(SHARE / 2))


def test_the_daemon_shares_out_its_own_nics_until_a_switch_process_grants(hosts, tmp_path):
    daemon = Daemon(hosts, tmp_path, topology=HELD, mode="enforce").start()
    training = Job(hosts, daemon.runtime_dir)
    training.train(SIZE, 8)
    status = daemon.ask("status")
    assert (status["domain"]["state"], status["grpc_connections"]) == ("fallback", 0)
    assert status["reservations"]["granted"] > 0 and status["rate_writes"] > 0
    assert {f["mode"] for f in daemon.ask("flows")["flows"]} == {"capped"}  # s1->h2 is elsewhere
    load = {link["name"]: link["load"] for link in daemon.ask("links")["links"]}
    assert load["s1->h2"] is None
    assert 0 < load["h1->s1"][0] <= 0.4e9 / 8 * 1448 / 1514
    assert {len(flow["rates"]) for flow in daemon.ask("schedule")["flows"]} == {10}

    switch = hosts.start(
        1, PROGRAMS / "flowslot-switch", "--name", "s1", "--topology", tmp_path / "topology.toml"
    )
    training.until(lambda: {f["mode"] for f in daemon.ask("flows")["flows"]} == {"reserved"})
    status = daemon.ask("status")
    assert (status["domain"]["state"], status["domain"]["switch_pid"]) == ("switch", switch.pid)
    assert (status["grpc_connections"], status["errors"]) == (1, {})
    assert abs(status["clock_offset_us"]) < 50_000
    bottleneck = 0.2e9 / 8 * 1448 / 1514
    assert sum(f["rate"] for f in daemon.ask("flows")["flows"]) <= 1.01 * TARGET * bottleneck
    load = {link["name"]: link["load"] for link in daemon.ask("links")["links"]}
    assert 0 < load["s1->h2"][0] <= 1.01 * TARGET * bottleneck
    assert daemon.stop()[0] == 0
