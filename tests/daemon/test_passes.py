# SPDX-License-Identifier: Apache-2.0
"""The daemon around the slot loop: when it looks, and what stops it."""

import asyncio
import itertools
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from flowslot_shm.layout import Message
from flowslotd import config
from flowslotd.clock import own_moment
from flowslotd.daemon import Daemon
from flowslotd.flows.rows import ROW
from flowslotd.observe.observer import Ended
from flowslotd.pace.pacer import KernelEvent
from flowslotd.slotloop import SlotLoop

from .conftest import TOPOLOGY


def run_for(daemon, condition):
    """Run a daemon until `condition` holds."""

    async def both():
        running = asyncio.create_task(daemon.run())
        for _ in range(1000):
            await asyncio.sleep(0.005)
            if condition() or running.done():
                break
        daemon._stop.set()
        await asyncio.wait_for(running, 10)

    asyncio.run(both())


def test_fail_open_a_bug_in_a_pass_lets_flows_go_and_the_daemon_lives(
    write, tmp_path, monkeypatch, caplog
):
    released = []
    monkeypatch.setattr(SlotLoop, "on_slot", lambda *_: 1 / 0)
    monkeypatch.setattr(SlotLoop, "release", lambda self: released.append(1))
    daemon = Daemon(config.load(write(f'host = "h1"\nslot_ms = 5\nruntime_dir = "{tmp_path}"')))
    run_for(daemon, lambda: daemon.metrics.errors["slot"] >= 5)
    assert daemon.metrics.errors["slot"] >= 5
    assert daemon.metrics.last_error == "slot: ZeroDivisionError: division by zero"
    assert len(released) >= 5
    assert sum("slot failed" in line for line in caplog.messages) == 1  # not once per slot
    assert not (tmp_path / "control.sock").exists()


def test_what_had_ended_before_it_was_watched_is_heard_of_with_the_pass(
    write, tmp_path, monkeypatch
):
    """Nothing wakes the daemon for it: the pacer only finds out as it is asked to watch."""
    late, heard = [], []

    def watch(now, what):
        late.append(KernelEvent("drained", 7))

    daemon = Daemon(config.load(write(f'host = "h1"\nruntime_dir = "{tmp_path}"')))
    daemon.engine = SimpleNamespace(
        loop=SimpleNamespace(on_events=watch, on_grants=watch, on_drained=lambda: None),
        pacer=SimpleNamespace(events=lambda: [late.pop()] if late else []),
        tell=lambda now: None,
    )
    monkeypatch.setattr(daemon.observer, "drained", lambda flows: heard.extend(flows) or 0)
    daemon._at_events()
    daemon._on_grants(0, [])
    assert heard == [7, 7]


def test_as_a_job_ends_all_its_processes_here_are_looked_at(write, tmp_path, monkeypatch):
    daemon = Daemon(config.load(write(f'host = "h1"\nruntime_dir = "{tmp_path}"')))
    rows, ended, touched = np.zeros(2, ROW), [Ended.FLOWS, Ended.JOB], []
    rows["cookie"] = 7, 8

    def drained(flows):
        rows["drained"][np.isin(rows["cookie"], list(flows))] = True
        return ended.pop(0)

    events = [[KernelEvent("drained", 7)], [KernelEvent("drained", 8)]]
    daemon.engine = SimpleNamespace(
        loop=SimpleNamespace(on_drained=lambda: None),
        pacer=SimpleNamespace(events=lambda: events.pop(0)),
    )
    daemon.table.rows = rows
    monkeypatch.setattr(daemon.observer, "drained", drained)
    monkeypatch.setattr(daemon, "_soon", lambda lazy=False: None)
    monkeypatch.setattr(daemon, "_touch", lambda flows, lazy: touched.append((flows, lazy)))
    daemon._on_kernel()
    assert touched == [], "the other one goes on"
    daemon._on_kernel()
    assert touched == [([7, 8], False)]


def test_a_beginning_brings_the_pass_forward_that_an_end_called_for(write, tmp_path, monkeypatch):
    daemon = Daemon(config.load(write(f'host = "h1"\nruntime_dir = "{tmp_path}"')))
    called = []
    monkeypatch.setattr(
        daemon,
        "_at",
        lambda when, work: called.append(when) or SimpleNamespace(cancel=lambda: None),
    )
    record = SimpleNamespace(id=3)
    for message in (Message.END, Message.END, Message.BEGIN, Message.BEGIN, Message.END):
        daemon._rang(record, 0, message)
    assert len(called) == 2
    assert called[1] < called[0]
    assert list(daemon._take_touched()) == [record]
    daemon._rang(record, 0, Message.END)
    assert len(called) == 3


def test_slots_follow_the_wall_clock_and_lateness_is_kept(write, tmp_path):
    daemon = Daemon(config.load(write(f'host = "h1"\nslot_ms = 5\nruntime_dir = "{tmp_path}"')))
    first = time.time_ns() // 5_000_000
    run_for(daemon, lambda: daemon.metrics.slots >= 10)
    assert first < daemon.slot <= time.time_ns() // 5_000_000
    assert daemon.metrics.lateness.count == daemon.metrics.slots >= 10


def test_hosts_report_at_moments_of_their_own(write, tmp_path):
    moments = sorted(own_moment(i, 60_000_000) for i in range(8))
    assert moments[0] >= 15_000_000 and moments[-1] < 45_000_000
    assert all(b - a >= 1_500_000 for a, b in itertools.pairwise(moments))


def test_a_failed_start_leaves_nothing_behind(write, tmp_path):
    (tmp_path / "register.sock").write_text("not a socket")
    daemon = Daemon(config.load(write(f'host = "h1"\nruntime_dir = "{tmp_path}"')))
    with pytest.raises(OSError, match="not a socket"):
        asyncio.run(daemon.run())
    assert not (tmp_path / "control.sock").exists()
    assert (tmp_path / "register.sock").read_text() == "not a socket"


@pytest.mark.parametrize(
    ("text", "status", "error"),
    [
        ('mode = "enforec"', 2, "field `mode`: must be 'observe' or 'enforce', got \"enforec\""),
        ("capacity = 1", 2, "field `capacity`: unknown key; known keys: "),
        ('runtime_dir = "/proc/flowslot"', 1, "/proc/flowslot: No such file or directory"),
        ('runtime_dir = "/dev/null"', 1, "/dev/null: File exists"),
    ],
)
def test_errors_at_start_are_one_line_and_a_status(write, text, status, error):
    program = str(Path(sys.executable).with_name("flowslotd"))
    run = subprocess.run(
        [program, "--config", str(write(f'host = "h1"\n{text}'))],
        capture_output=True, text=True, check=False, timeout=30,
    )  # fmt: skip
    assert (run.returncode, run.stdout) == (status, "")
    assert run.stderr.startswith("flowslotd: ")
    assert error in run.stderr
    assert run.stderr.count("\n") == 1


def test_without_grpc_a_daemon_of_a_network_with_switches_says_what_is_missing(write):
    switch = '[[switches]]\nname = "s1"\naddress = "127.0.0.1:7400"\n'
    links = TOPOLOGY.replace("capacity_gbps", 'switch = "s1"\ncapacity_gbps')
    file = write('host = "h1"\nmode = "enforce"', switch + links)
    program = (
        "import sys; sys.modules['grpc'] = None; from flowslotd.main import main; "
        f"sys.argv = ['flowslotd', '--config', {str(file)!r}]; main()"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=30
    )
    assert run.returncode == 1 and run.stderr.count("\n") == 1
    assert run.stderr.startswith("flowslotd: no negotiation with switch processes: ")
    assert "install grpcio" in run.stderr
