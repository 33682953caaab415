# SPDX-License-Identifier: Apache-2.0
"""When the daemon looks, and what stops it."""

import itertools
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from flowslot.model.slot import Tick
from flowslot.model.units import MILLISECOND, Nanos
from flowslot_proto.unix_socket import AlreadyRunning
from flowslot_shm.layout import Message
from flowslotd import config
from flowslotd.daemon import Daemon
from flowslotd.flows.rows import ROW
from flowslotd.negotiate.source import RateSource
from flowslotd.observe.observer import Ended
from flowslotd.pace.pacer import KernelEvent
from flowslotd.passes import BUSY, COALESCE_NS, LAZY_BUSY, LAZY_NS, Passes, own_moment
from flowslotd.slotloop import SlotLoop

from .conftest import HELD
from .hosts import running

SLOT = Nanos(60 * MILLISECOND)
NOW = Nanos(10**12)
ONE, TWO = (SimpleNamespace(id=i) for i in (1, 2))

# -- when a pass is due


def test_what_happens_at_about_the_same_time_shares_a_pass():
    passes = Passes(SLOT, 0)
    assert passes.next_wakeup is None
    passes.touch(NOW, ONE)
    passes.touch(NOW + COALESCE_NS // 2, TWO)
    passes.touch(NOW + COALESCE_NS // 2, ONE)
    assert passes.next_wakeup == NOW + COALESCE_NS
    assert passes.take() == [ONE, TWO]
    assert (passes.take(), passes.next_wakeup) == ([], None)


def test_a_beginning_brings_the_pass_forward_that_an_end_called_for():
    passes, due = Passes(SLOT, 0), []
    for i, lazy in enumerate((True, True, False, False, True)):
        passes.rang(NOW + i, ONE, lazy=lazy)
        due.append(passes.next_wakeup - NOW)
    assert due == [LAZY_NS, LAZY_NS, COALESCE_NS + 2, COALESCE_NS + 2, COALESCE_NS + 2]
    assert passes.take() == [ONE]
    passes.rang(NOW, ONE, lazy=True)
    assert passes.next_wakeup == NOW + LAZY_NS


def test_a_job_that_has_left_is_not_looked_at_but_what_it_held_is_free():
    passes = Passes(SLOT, 0)
    passes.touch(NOW, ONE, lazy=True)
    passes.forget(NOW, ONE.id)
    assert passes.next_wakeup == NOW + COALESCE_NS
    assert passes.take() == []


@pytest.mark.parametrize(
    ("lazy", "times", "within"), [(False, BUSY, COALESCE_NS), (True, LAZY_BUSY, LAZY_NS)]
)
def test_after_a_pass_there_is_a_rest_as_long_as_it_was(lazy, times, within):
    passes, cpu = Passes(SLOT, 0), 5 * MILLISECOND
    passes.took(NOW, cpu)
    passes.soon(NOW + cpu, lazy=lazy)
    assert passes.next_wakeup == NOW + times * cpu
    passes.take()
    passes.soon(NOW + times * cpu, lazy=lazy)
    assert passes.next_wakeup == NOW + times * cpu + within, "it has had its rest"


def test_a_job_all_of_whose_flows_have_begun_waits_only_for_the_rest_after_the_last_pass():
    passes, cpu = Passes(SLOT, 0), 5 * MILLISECOND
    passes.rang(NOW, ONE, lazy=False)
    passes.complete(NOW, ONE)
    assert (passes.next_wakeup, passes.take()) == (NOW, [ONE])
    passes.took(NOW + cpu, cpu)
    passes.complete(NOW + cpu, TWO)
    assert (passes.next_wakeup, passes.take()) == (NOW + cpu + BUSY * cpu, [TWO])
    passes.complete(NOW + SLOT, ONE)
    assert passes.next_wakeup == NOW + SLOT


def test_everything_is_looked_at_once_per_slot_at_the_boundary_or_at_a_moment_of_its_own():
    tick, passes = Tick(7, Nanos(NOW + SLOT)), Passes(SLOT, 3)
    assert passes.next_slot(NOW, tick, at_boundary=True) == NOW + SLOT
    moment = passes.next_slot(NOW, tick, at_boundary=False)
    assert moment == NOW + own_moment(3, SLOT)
    assert passes.next_slot(moment, tick, at_boundary=False) == moment + SLOT


def test_hosts_report_at_moments_of_their_own():
    moments = sorted(own_moment(i, SLOT) for i in range(8))
    assert moments[0] >= SLOT // 4 and moments[-1] < 3 * SLOT // 4
    assert all(b - a >= SLOT // 40 for a, b in itertools.pairwise(moments))


# -- the daemon around it


@pytest.fixture
def daemon(write, tmp_path):
    """One that does not run."""
    return Daemon(config.load(write(f'host = "h1"\nslot_ms = 5\nruntime_dir = "{tmp_path}"')))


class Engine(SimpleNamespace):
    """Notes the passes, and hands out `events` of the kernel, some at each look."""

    def __init__(self, *events):
        looks, self.passes = list(events), []
        super().__init__(
            loop=SimpleNamespace(
                on_slot=lambda now, slot, sources, small=False: self.passes.append(list(sources)),
                pace=lambda now: self.passes.append("paced"),
                refresh=lambda now: None,
                has_news=False,
            ),
            pacer=SimpleNamespace(events=lambda: looks.pop(0) if looks else [], noticed=[1]),
            source=RateSource(),
        )


async def test_fail_open_a_bug_in_a_pass_lets_flows_go_and_the_daemon_lives(
    daemon, tmp_path, monkeypatch, caplog
):
    released = []
    monkeypatch.setattr(SlotLoop, "refresh", lambda *_: 1 / 0)
    monkeypatch.setattr(SlotLoop, "release", lambda self: released.append(1))
    async with running(daemon) as (_, _, until):
        await until(lambda: daemon.metrics.errors["slot"] >= 5)
    assert daemon.metrics.last_error == "slot: ZeroDivisionError: division by zero"
    assert len(released) >= 5
    assert sum("slot failed" in line for line in caplog.messages) == 1  # not once per slot
    assert not (tmp_path / "control.sock").exists()


def test_what_had_ended_before_it_was_watched_is_heard_of_with_the_pass(daemon, monkeypatch):
    """Nothing wakes the daemon for it: the pacer only finds out as it is asked to watch."""
    heard = []
    daemon.engine = Engine(*[[KernelEvent("drained", 7)]] * 2)
    monkeypatch.setattr(daemon.observer, "drained", lambda flows: heard.extend(flows) or 0)
    monkeypatch.setattr(daemon, "_rearm", lambda: None)
    daemon._at_events()
    daemon._on_rates(0)
    assert daemon.engine.passes == [[], "paced"]
    assert heard == [7, 7]


def test_as_a_job_ends_all_its_processes_here_are_looked_at(daemon, monkeypatch):
    rows, ended, touched = np.zeros(2, ROW), [Ended.FLOWS, Ended.JOB], []
    rows["cookie"] = 7, 8

    def drained(flows):
        rows["drained"][np.isin(rows["cookie"], list(flows))] = True
        return ended.pop(0)

    daemon.engine = Engine([KernelEvent("drained", 7)], [KernelEvent("drained", 8)])
    daemon.table.rows = rows
    monkeypatch.setattr(daemon.observer, "drained", drained)
    monkeypatch.setattr(daemon, "_rearm", lambda: None)
    monkeypatch.setattr(daemon, "_touch", lambda flows, look: touched.append((flows, look)))
    daemon._on_kernel()
    assert touched == [], "the other one goes on"
    daemon._on_kernel()
    assert touched == [([7, 8], daemon._passes.complete)]


@pytest.mark.parametrize("asked", [True, False])
def test_a_pass_at_a_slot_is_the_one_that_was_due_at_events(daemon, monkeypatch, asked):
    """Also where no flow has to be looked at: some have ended, and their rates are free."""
    timers = []

    def at(when, work):
        name = getattr(work, "func", work).__name__
        timers.append((name, SimpleNamespace(cancel=lambda: timers.append("cancelled"))))
        return timers[-1][1]

    monkeypatch.setattr(daemon, "_at", at)
    daemon.engine = Engine()
    if asked:
        daemon._soon(lazy=True)
        assert [name for name, _ in timers] == ["_at_events"]
    daemon._at_slot(0)
    assert daemon.engine.passes == [[]] * asked
    assert ("cancelled" in timers) == asked and timers[-1][0] == "_at_slot"


@pytest.mark.parametrize("all_send", [True, False])
def test_a_phase_is_looked_at_at_once_when_all_flows_have_begun(daemon, monkeypatch, all_send):
    due = []
    monkeypatch.setattr(daemon, "_at", lambda when, work: due.append(when))
    monkeypatch.setattr(daemon.observer, "all_send", lambda source: all_send)
    daemon._rang(ONE, 0, Message.END)
    before = time.monotonic_ns()
    daemon._rang(ONE, 0, Message.BEGIN)
    assert due[1] <= time.monotonic_ns() if all_send else due[1] >= before + COALESCE_NS


async def test_slots_follow_the_wall_clock_and_lateness_is_kept(daemon):
    first = time.time_ns() // 5_000_000
    async with running(daemon) as (_, _, until):
        await until(lambda: daemon.metrics.slots >= 10)
    assert first < daemon.slot <= time.time_ns() // 5_000_000
    assert daemon.metrics.lateness.count == daemon.metrics.slots >= 10


async def test_a_second_daemon_refuses_to_start(daemon):
    async with running(daemon):
        with pytest.raises(AlreadyRunning, match=r"answers on .*/control\.sock; stop it"):
            await Daemon(daemon.config).run()


async def test_a_failed_start_leaves_nothing_behind(daemon, tmp_path):
    (tmp_path / "register.sock").write_text("not a socket")
    with pytest.raises(OSError, match="not a socket"):
        await daemon.run()
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
    check_fails(status, error, program, "--config", str(write(f'host = "h1"\n{text}')))


def check_fails(status, error, *command):
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert (run.returncode, run.stdout) == (status, "")
    assert run.stderr.startswith("flowslotd: ")
    assert error in run.stderr
    assert run.stderr.count("\n") == 1
    return run.stderr


def test_without_grpc_a_daemon_of_a_network_with_switches_says_what_is_missing(write):
    file = write('host = "h1"\nmode = "enforce"', HELD)
    program = (
        "import sys; sys.modules['grpc'] = None; from flowslotd.main import main; "
        f"sys.argv = ['flowslotd', '--config', {str(file)!r}]; main()"
    )
    # In the middle: which module it was.
    begins = "no negotiation with switch processes: "
    assert "install grpcio" in check_fails(1, begins, sys.executable, "-c", program)
