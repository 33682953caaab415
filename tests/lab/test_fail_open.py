# SPDX-License-Identifier: Apache-2.0
"""Daemons and switch processes killed in the middle of ps-incast: training goes on.

What the kernel does is read from the kernel (`ss`): a flow whose entry has lapsed is unpaced.
"""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flowslot_lab.runner import LiveRun, expected_bytes
from flowslot_lab.scenario import Scenario, load
from flowslot_lab.state import RunState

from .conftest import NOTHING, SCENARIOS, Quiet, traces

CONGESTION_CONTROLS = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
SLOT_S = 0.060
PATIENCE_S = 20.0
ITERATIONS = 60

pytestmark = [pytest.mark.root, pytest.mark.timeout(180)]


@pytest.fixture
def scenario() -> Scenario:
    return load(SCENARIOS / "ps-incast.toml")


@pytest.fixture
def live(scenario: Scenario, state: RunState) -> Iterator[LiveRun]:
    with LiveRun(scenario, state, "stagger", ITERATIONS, use_switch=True) as live:
        yield live
    assert traces(state.id) == NOTHING


def pacing(live: LiveRun, host: str) -> list[tuple[str, float]]:
    """(congestion control, pacing rate in bit/s, inf: none) of the data sockets of a host."""
    command = ["nsenter", f"--net=/run/netns/{live.net.hosts[host]}", "ss", "-tinHO"]
    lines = subprocess.run(
        [*command, "state", "established", "dst", "10.78.0.0/16"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    found = []
    for line in lines:
        name = re.search(r"\b(fs_\w+|cubic|reno|bbr)\b", line)
        rate = re.search(r"pacing_rate (\d+(?:\.\d+)?)([KMGT]?)bps", line)
        scale = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
        bps = float(rate[1]) * scale[rate[2]] if rate else float("inf")
        found.append((name[1] if name else "", bps))
    return found


def paced(live: LiveRun, host: str) -> bool:
    """All data sockets of the host are on our congestion control, at less than the link's rate."""
    sockets = pacing(live, host)
    return bool(sockets) and all(n.startswith("fs_") and bps < 4e8 for n, bps in sockets)


def unpaced(live: LiveRun, host: str) -> bool:
    sockets = pacing(live, host)
    return bool(sockets) and all(bps > 4e9 for _, bps in sockets)


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
    wait(progress, "flows of h2 are paced", lambda: paced(live, "h2"))
    old = {name for name, _ in pacing(live, "h2")}

    kill(plane.daemons["h2"].pid)
    time.sleep(2 * SLOT_S)
    # The kernel looks at the deadline when it next sends or hears of the flow.
    took = wait(progress, "flows of h2 are unpaced", lambda: unpaced(live, "h2"))
    assert took < 2.0
    registered = CONGESTION_CONTROLS.read_text().split()
    assert not old & set(registered), "the kernel has unregistered what the dead daemon brought"
    assert paced(live, "h3"), "others are not affected"

    plane.start_daemon("h2")
    wait(progress, "the new daemon paces the flows of h2", lambda: paced(live, "h2"))
    assert not old & {name for name, _ in pacing(live, "h2")}
    finish(live, progress)


def test_fail_open_switch_killed_and_restarted(live: LiveRun) -> None:
    plane, progress = live.plane, live.follow(Quiet())
    assert plane is not None and plane.switch is not None
    wait(progress, "flows of h2 are paced", lambda: paced(live, "h2"))

    def modes() -> set[str]:
        flows = plane.ask("h2", "flows")["flows"]
        return {flow["mode"] for flow in flows if flow["path"]}

    def state() -> str:
        return str(plane.ask("h2", "status")["domain"]["state"])

    assert state() == "switch"
    kill(plane.switch.pid)
    time.sleep(2 * SLOT_S)
    # Nobody holds the receiver's port any more: nothing may be reserved on it.
    took = wait(progress, "no flow of h2 is guaranteed", lambda: "reserved" not in modes())
    assert took < 2.0
    assert state() != "switch"

    plane.start_switch()
    wait(progress, "the new switch process grants", lambda: state() == "switch")
    wait(progress, "flows of h2 are reserved again", lambda: modes() == {"reserved"})
    finish(live, progress)


def test_fail_open_all_killed_at_once(live: LiveRun) -> None:
    plane, progress = live.plane, live.follow(Quiet())
    assert plane is not None and plane.switch is not None
    wait(progress, "flows are paced", lambda: all(paced(live, h) for h in ("h2", "h3", "h4")))
    for process in plane.processes():
        kill(process.pid)
    time.sleep(2 * SLOT_S)
    for host in ("h1", "h2", "h3", "h4", "h5"):
        wait(progress, f"flows of {host} are unpaced", lambda host=host: unpaced(live, host))
    finish(live, progress)
