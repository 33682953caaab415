# SPDX-License-Identifier: Apache-2.0
"""Daemons and switch processes killed in the middle of ps-incast: training goes on.

What becomes of the flows is read from the kernel: the congestion control's own table (bpftool),
which outlives the daemon as long as flows use it, and `ss`.
"""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from kerneltable import SLOT_NS, KernelTable

from flowslot_lab.procs import Process
from flowslot_lab.runner import LiveRun, expected_bytes
from flowslot_lab.state import RunState
from flowslot_scenario.scenario import load
from flowslotd.pace.layout import Mode

from .conftest import SCENARIOS, Quiet

CONGESTION_CONTROLS = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
ENTRY_SLOTS = 2
ORPHAN_SLOTS = 2
LEASE_SLOTS = 5
"""What is promised (docs/adr/0001, 0003), not what the code says."""
PATIENCE_S = 20.0
ITERATIONS = 60
Tables = Callable[[str], KernelTable]

pytestmark = [pytest.mark.root, pytest.mark.timeout(180)]


@pytest.fixture
def live(nothing_left: None, state: RunState) -> Iterator[LiveRun]:
    scenario = load(SCENARIOS / "ps-incast.toml")
    with LiveRun(scenario, state, "stagger", ITERATIONS, use_switch=True) as live:
        yield live


@pytest.fixture
def table(live: LiveRun) -> Iterator[Tables]:
    """Opens the tables of a host's daemon."""
    with ExitStack() as opened:
        yield lambda host: opened.enter_context(closing(KernelTable(live.plane.daemons[host].pid)))


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


def finish(live: LiveRun, progress: Iterator[int], but: str = "") -> None:
    """The jobs end, and every byte of each (`but` one) was verified by its receiver."""
    for _ in progress:
        pass
    for job in (job for job in live.scenario.jobs if job.name != but):
        verified = sum(report.verified_bytes for report in live.jobs.reports(job))
        alone = live.scenario.model_copy(update={"jobs": (job,)})
        assert verified == expected_bytes(alone, live.scenario.warmup + live.iterations)


def kill(progress: Iterator[int], processes: list[Process], tables: list[KernelTable]) -> int:
    """kill -9, while entries of all these tables are in force. Returns when (CLOCK_MONOTONIC, ns)
    the processes are known to be dead: nothing of theirs is written after that."""
    in_force: list[int] = []

    def all_in_force() -> bool:
        in_force[:] = [table.in_force() for table in tables]
        return all(in_force)

    wait(progress, "entries are in force", all_in_force)
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
    for process in processes:
        process.popen.wait()
    dead = time.monotonic_ns()
    for table, moment in zip(tables, in_force, strict=True):
        assert max(table.deadlines()) > moment  # else what follows would prove nothing
    return dead


def longest_life(tables: list[KernelTable]) -> int:
    """How long (ns) any entry would outlive its daemon, killed at any moment of a few slots: it
    makes a difference when in a slot, and when in the lease that bounds entries too."""
    longest, end = 0, time.monotonic_ns() + 5 * SLOT_NS
    while time.monotonic_ns() < end:
        for table in tables:
            until = max(table.deadlines())
            longest = max(longest, until - time.monotonic_ns())
        time.sleep(0.002)
    return longest


def last_reservations(live: LiveRun, tables: dict[str, KernelTable], dead: int) -> None:
    """The switch process is dead since `dead`. Watch until no flow is reserved any more: until when
    the entries hold that make flows reserved is bounded, whenever the daemons get to run."""
    latest = {host: max([0, *it.deadlines(reserved=True)]) for host, it in tables.items()}
    assert any(latest.values())
    noticed: dict[str, int] = {}
    end = time.monotonic() + PATIENCE_S
    while len(noticed) < len(tables) or time.monotonic_ns() <= max(latest.values()):
        assert time.monotonic() < end, "the daemons go on as if the switch process were alive"
        for host in tables.keys() - noticed.keys():
            if live.plane.ask(host, "status")["grpc_connections"] == 0:
                noticed[host] = time.monotonic_ns()
        for host, table in tables.items():
            latest[host] = max([latest[host], *table.deadlines(reserved=True)])
        time.sleep(0.002)
    for host, until in latest.items():
        # Once the daemon has noticed the end of its stream, and whatever it notices.
        assert until <= noticed[host] + ORPHAN_SLOTS * SLOT_NS
        assert until <= dead + LEASE_SLOTS * SLOT_NS


def test_fail_open_daemon_killed_and_restarted(live: LiveRun, table: Tables) -> None:
    plane, progress = live.plane, live.follow(Quiet())
    tables = {host: table(host) for host in ("h2", "h3")}
    for host, it in tables.items():
        wait(progress, f"flows of {host} are paced", lambda it=it: it.modes() == {Mode.RESERVED})
    old = controls(live, "h2")
    assert len(old) == 1

    assert longest_life([tables["h2"]]) <= ENTRY_SLOTS * SLOT_NS
    dead = kill(progress, [plane.daemons["h2"]], [tables["h2"]])
    # Past its deadline an entry is void; nobody can renew it.
    assert max(tables["h2"].deadlines()) <= dead + ENTRY_SLOTS * SLOT_NS
    # A flow finds out when it next sends.
    wait(progress, "flows of h2 are unpaced", tables["h2"].unpaced)
    registered = set(CONGESTION_CONTROLS.read_text().split())
    assert not old & registered, "the kernel has unregistered what the dead daemon brought"
    assert tables["h3"].modes() == {Mode.RESERVED}, "others are not affected"

    plane.start_daemon("h2")
    wait(progress, "jobs have moved to the new daemon", lambda: not old & controls(live, "h2"))
    new = table("h2")
    wait(progress, "it paces the flows of h2", lambda: new.modes() == {Mode.RESERVED})
    finish(live, progress)


def test_fail_open_switch_killed_and_restarted(live: LiveRun, table: Tables) -> None:
    plane, progress = live.plane, live.follow(Quiet())
    assert set(plane.switches) == {"s1"}
    tables = {host: table(host) for host in plane.daemons}

    def modes() -> set[Mode]:
        return set().union(*(it.modes() for it in tables.values()))

    wait(progress, "all flows are paced", lambda: modes() == {Mode.RESERVED})
    dead = kill(progress, [plane.switches["s1"]], list(tables.values()))
    last_reservations(live, tables, dead)
    # Nobody holds the receivers' ports any more. The daemons go on with their own NICs (ADR 3).
    wait(progress, "flows are capped", lambda: modes() == {Mode.CAPPED})
    states = {plane.ask(host, "status")["domain"]["state"] for host in plane.daemons}
    assert states == {"fallback"}

    plane.start_switch()
    wait(progress, "all flows are reserved again", lambda: modes() == {Mode.RESERVED})
    finish(live, progress)


def test_fail_open_all_killed_at_once(live: LiveRun, table: Tables) -> None:
    plane, progress = live.plane, live.follow(Quiet())
    assert set(plane.switches) == {"s1"}
    tables = [table(host) for host in plane.daemons]
    for it in tables:
        wait(progress, "flows are paced", lambda it=it: it.modes() == {Mode.RESERVED})
    assert longest_life(tables) <= ENTRY_SLOTS * SLOT_NS
    dead = kill(progress, plane.processes(), tables)
    for it in tables:
        assert max(it.deadlines()) <= dead + ENTRY_SLOTS * SLOT_NS
    for it in tables:
        wait(progress, "flows are unpaced", it.unpaced)
    finish(live, progress)
