# SPDX-License-Identifier: Apache-2.0
"""Daemons and switch processes killed in the middle of ps-incast: training goes on.

What becomes of the flows is read from the kernel: the congestion control's own table (bpftool),
which outlives the daemon as long as flows use it, and `ss`.
"""

import contextlib
import ctypes
import json
import mmap
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from flowslot_lab.runner import LiveRun, expected_bytes
from flowslot_lab.scenario import Scenario, load
from flowslot_lab.state import RunState
from flowslotd.pacing import layout
from flowslotd.pacing.layout import Mode

from .conftest import NOTHING, SCENARIOS, Quiet, traces

CONGESTION_CONTROLS = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
SLOT_S = 0.060
PATIENCE_S = 20.0
PIDFD_GETFD = 438
ITERATIONS = 60

pytestmark = [pytest.mark.root, pytest.mark.timeout(180)]


@pytest.fixture
def scenario() -> Scenario:
    return load(SCENARIOS / "ps-incast.toml")


@pytest.fixture
def live(scenario: Scenario, state: RunState) -> Iterator[LiveRun]:
    with LiveRun(scenario, state, "stagger", ITERATIONS, use_switch=True) as live:
        yield live
    state.clean()
    assert traces(state.id) == NOTHING


class KernelTable:
    """What the kernel does with the flows of one daemon, whether that daemon lives or not.

    Shares the memory of the daemon's map `fs_stat`, through a duplicate of its descriptor.
    """

    def __init__(self, daemon: int) -> None:
        for entry in Path(f"/proc/{daemon}/fdinfo").iterdir():
            number = re.search(r"^map_id:\s*(\d+)$", entry.read_text(), re.MULTILINE)
            if number and map_name(number[1]) == "fs_stat":
                with duplicate(daemon, int(entry.name)) as fd:
                    size = layout.SLOTS * layout.STAT.itemsize
                    shared = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
                self._stat = np.frombuffer(shared, layout.STAT)
                return
        raise AssertionError("the daemon has no table in the kernel")

    def modes(self) -> set[Mode]:
        """Modes of the live flows."""
        return {Mode(mode) for mode in self._stat["mode"][self._stat["cookie"] != 0]}


def map_name(number: str) -> str:
    command = ["bpftool", "-j", "map", "show", "id", number]
    shown = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return str(shown.get("name"))


@contextlib.contextmanager
def duplicate(pid: int, fd: int) -> Iterator[int]:
    """A copy of another process's descriptor."""
    process = os.pidfd_open(pid)
    copy = ctypes.CDLL(None, use_errno=True).syscall(PIDFD_GETFD, process, fd, 0)
    os.close(process)
    assert copy >= 0, os.strerror(ctypes.get_errno())
    yield copy
    os.close(copy)


def controls(live: LiveRun, host: str) -> set[str]:
    """Congestion controls of the data sockets of a host, as the kernel says."""
    command = ["nsenter", f"--net=/run/netns/{live.net.hosts[host]}", "ss", "-tinHO"]
    text = subprocess.run(
        [*command, "state", "established", "dst", "10.78.0.0/16"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return set(re.findall(r"\b(fs_\w+|cubic|reno|bbr)\b", text))


def wait(progress: Iterator[int], what: str, condition: Callable[[], bool]) -> float:
    """Let the jobs go on until `condition`; returns the seconds that took."""
    start = time.monotonic()
    for _ in progress:
        if condition():
            return time.monotonic() - start
        assert time.monotonic() - start < PATIENCE_S, f"not within {PATIENCE_S} s: {what}"
    pytest.fail(f"the jobs ended before: {what}")


def finish(live: LiveRun, progress: Iterator[int]) -> None:
    """The jobs end, and every byte was verified by its receiver."""
    for _ in progress:
        pass
    verified = sum(r.verified_bytes for job in live.scenario.jobs for r in live.jobs.reports(job))
    assert verified == expected_bytes(live.scenario, live.scenario.warmup + live.iterations)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def test_fail_open_daemon_killed_and_restarted(live: LiveRun) -> None:
    plane, progress = live.plane, live.follow(Quiet())
    assert plane is not None
    tables = {host: KernelTable(plane.daemons[host].pid) for host in ("h2", "h3")}
    for host, table in tables.items():
        wait(progress, f"flows of {host} are paced", lambda t=table: t.modes() == {Mode.RESERVED})
    old = controls(live, "h2")
    assert len(old) == 1

    kill(plane.daemons["h2"].pid)
    time.sleep(2 * SLOT_S)
    # A flow finds out when it next sends or hears an acknowledgement.
    wait(progress, "flows of h2 are unpaced", lambda: tables["h2"].modes() == {Mode.OPEN})
    registered = set(CONGESTION_CONTROLS.read_text().split())
    assert not old & registered, "the kernel has unregistered what the dead daemon brought"
    assert tables["h3"].modes() == {Mode.RESERVED}, "others are not affected"

    plane.start_daemon("h2")
    wait(progress, "jobs have moved to the new daemon", lambda: not old & controls(live, "h2"))
    new = KernelTable(plane.daemons["h2"].pid)
    wait(progress, "it paces the flows of h2", lambda: new.modes() == {Mode.RESERVED})
    finish(live, progress)


def test_fail_open_switch_killed_and_restarted(live: LiveRun) -> None:
    plane, progress = live.plane, live.follow(Quiet())
    assert plane is not None and plane.switch is not None
    tables = [KernelTable(daemon.pid) for daemon in plane.daemons.values()]

    def modes() -> set[Mode]:
        return set().union(*(table.modes() for table in tables))

    wait(progress, "all flows are paced", lambda: modes() == {Mode.RESERVED})
    kill(plane.switch.pid)
    time.sleep(2 * SLOT_S)
    # Nobody holds the receivers' ports any more: nothing may be reserved there.
    wait(progress, "no flow is reserved", lambda: Mode.RESERVED not in modes())
    states = {plane.ask(host, "status")["domain"]["state"] for host in plane.daemons}
    assert "switch" not in states

    plane.start_switch()
    wait(progress, "all flows are reserved again", lambda: modes() == {Mode.RESERVED})
    finish(live, progress)


def test_fail_open_all_killed_at_once(live: LiveRun) -> None:
    plane, progress = live.plane, live.follow(Quiet())
    assert plane is not None and plane.switch is not None
    tables = [KernelTable(daemon.pid) for daemon in plane.daemons.values()]
    for table in tables:
        wait(progress, "flows are paced", lambda t=table: t.modes() == {Mode.RESERVED})
    for process in plane.processes():
        kill(process.pid)
    time.sleep(2 * SLOT_S)
    for table in tables:
        wait(progress, "flows are unpaced", lambda t=table: t.modes() == {Mode.OPEN})
    finish(live, progress)
