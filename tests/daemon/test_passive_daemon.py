# SPDX-License-Identifier: Apache-2.0
"""The real daemon and a job that reports nothing, in two network namespaces."""

import signal

import pytest
from passive import congestion_control
from waiting import settle

from .test_daemon import SIZE, Daemon, Hosts, Job

FLOWS = 2
JOB = "pslite-10.0.0.9-9"
ON = {"unpatched.pslite": True}

pytestmark = pytest.mark.root


@pytest.fixture
def hosts(stack):
    return Hosts(stack)


def seen(daemon, n=FLOWS):
    """Flows that were found, if all are there."""
    flows = [flow for flow in daemon.ask("flows")["flows"] if flow["job"] == JOB]
    return flows if len(flows) == n else None


def test_flows_are_enlisted_learnt_and_paced_and_enlisted_again_after_a_restart(hosts, tmp_path):
    daemon = Daemon(hosts, tmp_path, mode="enforce", policy="static", **ON).start()
    name = daemon.ask("status")["congestion_control"]
    job = Job(hosts, flows=FLOWS)
    job.until(lambda: seen(daemon))
    assert job.is_under(name)
    flows = job.until(
        lambda: {f["iteration_bytes"] for f in seen(daemon)} == {SIZE} and seen(daemon)
    )
    assert {tuple(f["path"]) for f in flows} == {("h1->s1", "s1->h2")}
    assert {f["owned"] for f in flows} == {True}
    assert {f["pid"] for f in flows} == {job.pid}
    assert {f["mode"] for f in flows} == {"capped"}
    # The kernel's counter, as of the congestion control, and the record are of one mind.
    settle(lambda: all(f["remaining_bytes"] == 0 for f in seen(daemon)))
    status = daemon.ask("status")
    unpatched = {"watching": True, "targets": [], "processes": 1, "connections": FLOWS}
    assert status["unpatched"] == unpatched
    assert status["flows"]["paced"] == FLOWS
    assert status["errors"] == {}

    assert daemon.stop(signal.SIGKILL)[0] == -signal.SIGKILL
    job.train(SIZE, 3)  # ordinary TCP
    daemon.start()
    job.until(lambda: seen(daemon))
    again = daemon.ask("status")["congestion_control"]
    assert job.is_under(again) and again != name
    job.process.kill()
    settle(lambda: daemon.ask("flows")["flows"] == [])
    assert daemon.stop() == (0, "")


@pytest.mark.parametrize("backend", ["socket", "auto"])
def test_other_ways_of_pacing_reach_its_sockets_too(hosts, tmp_path, backend):
    pacing = {"pacing.backend": backend}
    daemon = Daemon(hosts, tmp_path, mode="enforce", policy="static", **ON, **pacing).start()
    job = Job(hosts, flows=FLOWS)
    job.until(lambda: seen(daemon))
    job.until(lambda: all(f["sent_total_bytes"] for f in seen(daemon)))
    assert {f["note"] for f in seen(daemon)} == {""}
    assert daemon.stop() == (0, "")


def test_a_reload_switches_it_on_and_off_and_observing_leaves_sockets_alone(hosts, tmp_path):
    daemon = Daemon(hosts, tmp_path).start()
    job = Job(hosts, flows=FLOWS)
    before = job.sockets(congestion_control)
    job.train(SIZE, 20)  # seconds
    assert daemon.ask("flows")["flows"] == []
    assert daemon.ask("status")["unpatched"]["watching"] is False
    daemon.configure(**ON)
    assert daemon.cli("reload").returncode == 0
    job.until(lambda: {f["iteration_bytes"] for f in seen(daemon) or ()} == {SIZE})
    assert job.sockets(congestion_control) == before
    daemon.configure(**{"unpatched.pslite": False})
    assert daemon.cli("reload").returncode == 0
    settle(lambda: daemon.ask("flows")["flows"] == [])
    assert daemon.stop()[0] == 0


def test_who_registers_takes_over_from_the_shadow_record(hosts, tmp_path):
    daemon = Daemon(hosts, tmp_path, mode="enforce", policy="static", **ON).start()
    job = Job(hosts, flows=FLOWS)
    job.until(lambda: seen(daemon))
    job.do(f"register {daemon.runtime_dir}/register.sock")

    def taken_over():
        flows = daemon.ask("flows")["flows"]
        return flows if {flow["job"] for flow in flows} == {"patched"} else None

    settle(taken_over)
    for _ in range(25):  # it stays so when processes are looked at again
        job.train(SIZE, 1)
        flows = daemon.ask("flows")["flows"]
        assert [(f["job"], f["rank"], f["note"]) for f in flows] == [("patched", 3, "")] * FLOWS
    assert daemon.ask("status")["unpatched"]["processes"] == 0
    assert daemon.stop() == (0, "")
