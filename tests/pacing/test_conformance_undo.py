# SPDX-License-Identifier: Apache-2.0
"""What every back end promises: to fail open, and to leave a host as it was."""

import contextlib
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pytest import MonkeyPatch
from waiting import settle

from flowslotd.pace import guardian
from flowslotd.pace.undo import UndoTable

from .conformance import (
    FREE,
    LONG,
    MB,
    MOST,
    ON_DEVICES,
    SPEED,
    Bench,
    later,
    options,
    set_own,
    set_rate,
)
from .traffic import Flow, names

pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]


def test_fail_open_when_the_daemon_sleeps(on: Bench) -> None:
    pacer, flow = on.pair()
    set_rate(pacer, {flow: MB}, lasts=LONG)
    assert flow.comes_to(MB)
    set_rate(pacer, {flow: MB}, lasts=10**8)
    pacer.refresh(later(10**8))
    assert flow.exceeds(FREE)
    # Awake again: its entry is in force still, or it is told to apply it again.
    if not pacer.refresh(later()):
        assert set_rate(pacer, {flow: MB}) == 1
    assert flow.comes_to(MB)
    assert pacer.refresh(later())


@ON_DEVICES
def test_devices_stay_set_up_when_the_daemon_is_late(on: Bench) -> None:
    """Adding and removing a root qdisc drops what everybody has queued there."""
    pacer, flow = on.pair()
    before = options(flow)
    set_rate(pacer, {flow: MB})
    roots = on.roots()
    assert options(flow) != before
    set_rate(pacer, {flow: MB}, lasts=10**8)
    settle(lambda: options(flow) == before)
    eth0 = socket.if_nametoindex("eth0")
    settle(lambda: len(guardian.classes(eth0)) <= 1)  # the guardian lets go of these afterwards
    assert on.roots() == roots
    # Another one that comes and goes leaves them, too.
    other = on.pacer()
    set_rate(other, {on.flow(other): MB})
    other.close()
    assert on.roots() == roots
    assert not pacer.refresh(later())
    assert len(guardian.classes(eth0)) <= 1, "nothing is made anew"
    assert set_rate(pacer, {flow: MB}) == 1
    assert flow.comes_to(MB)


@pytest.mark.parametrize("how", ["at once", "slowly", "fails"])
@pytest.mark.parametrize("on", ["edt", "htb", "socket"], indirect=True)
def test_what_is_set_after_the_deadline_is_let_go(
    on: Bench, how: str, monkeypatch: MonkeyPatch
) -> None:
    """Also when the guardian looks after a socket was listed, and before it was touched; then
    something else may fail."""
    pacer, flow = on.pair()
    before = options(flow)
    list_row = UndoTable.list

    def slowly(*arguments: Any) -> None:
        list_row(*arguments)
        time.sleep(0.1)

    def then_fails(*arguments: Any) -> int:
        assert whole(*arguments) == 1
        raise OSError

    whole = pacer._set  # type: ignore[attr-defined]
    if how != "at once":
        monkeypatch.setattr(UndoTable, "list", slowly)
    if how == "fails":
        monkeypatch.setattr(pacer, "_set", then_fails)
    for rate, lasts in ((MB, 0), (2 * MB, -1)):
        with pytest.raises(OSError) if how == "fails" else contextlib.nullcontext():
            assert set_rate(pacer, {flow: rate}, lasts=lasts) == 1
        settle(lambda: options(flow) == before)


OWNER = """
import sys, time
from flowslotd.pace.bpf import BpfPacer
from flowslotd.pace.pacer import PaceEntry, pack
from flowslotd.pace.select import make_pacer
if "without-link" in sys.argv:
    load = BpfPacer._load
    BpfPacer._load = lambda self, elf, link: load(self, elf, link=False)
pacer = make_pacer(sys.argv[1], "victim")
print(pacer.congestion_control, flush=True)
cookie, pid, fd = map(int, sys.stdin.readline().split())
pacer.attach(cookie, pid, fd)
entry = PaceEntry(cookie, 1e6, 1e6, True, 0)
applied = pacer.apply(pack([entry]), time.monotonic_ns() + 2 * 10**9)
guard = getattr(getattr(pacer, "_undo", None), "guardian", None)
print(applied, guard.process.pid if guard else 0, flush=True)
while True:
    pacer.refresh(time.monotonic_ns() + 2 * 10**9)
    time.sleep(0.2)
"""


@contextlib.contextmanager
def owned_by_another(on: Bench, *how: str) -> Iterator[tuple[Any, int, set[int]]]:
    """A flow; the guardian of the process that paces it, and that process's BPF programs. The
    process is killed afterwards."""
    command = [sys.executable, "-c", OWNER, on.backend, *how]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as owner:
        try:
            name = owner.stdout.readline()
            if not name:
                pacer = on.pacer()  # says why, or that it works after all
                pytest.fail(f"{pacer.name} works here, but not in a process of its own")
            flow = Flow(on.net, most=MOST)
            on.flows.append(flow)
            set_own(flow)
            if name.strip():
                flow.enlist(name.strip())
            print(flow.cookie, os.getpid(), flow.sock.fileno(), file=owner.stdin, flush=True)
            applied, watcher = map(int, owner.stdout.readline().split())
            assert applied == 1
            assert flow.comes_to(MB)
            yield flow, watcher, programs_of(owner.pid)
        finally:
            owner.kill()
            owner.communicate()


def programs_of(pid: int) -> set[int]:
    """Ids of the BPF programs that a process has open."""
    text = "".join(info.read_text() for info in Path(f"/proc/{pid}/fdinfo").iterdir())
    return {int(number) for number in re.findall(r"^prog_id:\s*(\d+)$", text, re.MULTILINE)}


def loaded() -> set[int]:
    """Ids of all BPF programs in the kernel."""
    shown = subprocess.run(["bpftool", "-j", "prog", "show"], check=True, capture_output=True)
    return {program["id"] for program in json.loads(shown.stdout)}


@pytest.mark.parametrize("how", ["link", "without-link"])
@pytest.mark.parametrize("on", ["bpf"], indirect=True)
def test_a_killed_daemons_congestion_control_and_programs_go(on: Bench, how: str) -> None:
    before = set(names())
    with owned_by_another(on, how) as (flow, _, programs):
        assert programs and set(names()) - before
    settle(lambda: set(names()) <= before)
    assert flow.exceeds(FREE)
    flow.stop()
    settle(lambda: not programs & loaded())


@pytest.mark.parametrize("disturbed", [False, True])
def test_fail_open_and_restore_when_the_daemon_is_killed(on: Bench, disturbed: bool) -> None:
    before, plain = on.host(), Flow(on.net, busy=False)
    on.flows.append(plain)
    set_own(plain)
    with owned_by_another(on) as (flow, watcher, _):
        if on.backend != "bpf":
            assert on.host() != before or options(flow) != options(plain)
        if disturbed and watcher:  # as a service manager does to all processes of a service
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                os.kill(watcher, number)
    if watcher:
        settle(lambda: has_ended(watcher))
    assert flow.exceeds(FREE)
    settle(lambda: on.host() == before)
    settle(lambda: options(flow) == options(plain))


def has_ended(pid: int) -> bool:
    """Also when nobody has asked for its exit status: it has another parent by now."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@ON_DEVICES
def test_what_was_left_behind_is_removed_by_the_next(on: Bench) -> None:
    before = on.host()
    with owned_by_another(on) as (flow, watcher, _):
        os.kill(watcher, signal.SIGKILL)
    assert on.host() != before  # nobody was there to do it
    if on.backend == "htb":  # paced by nobody's daemon: what the next one is for
        assert flow.rate() < 2 * MB
    pacer = on.pacer()
    pacer.attach(flow.cookie, os.getpid(), flow.sock.fileno())
    set_rate(pacer, {flow: 2 * MB})
    assert flow.comes_to(2 * MB)
    pacer.close()
    # What the sysctl was has died with the two.
    assert on.host() | {"tcp_tso_rtt_log": 0} == before | {"tcp_tso_rtt_log": 0}


@pytest.mark.parametrize("guarded", [True, False])
def test_closing_restores_everything(on: Bench, guarded: bool) -> None:
    before = on.host()
    pacer: Any = on.pacer()
    flows = [on.flow(pacer) for _ in range(3)]
    if "udp" in pacer.traits.protocols:
        flows.append(on.flow(pacer, "udp"))
    as_they_were = [options(flow) for flow in flows]
    set_rate(pacer, dict.fromkeys(flows, MB))
    assert flows[0].comes_to(MB)
    pacer.release(flows[0].cookie)
    assert options(flows[0]) == as_they_were[0]
    assert flows[0].exceeds(FREE)
    assert set_rate(pacer, {flows[0]: 2 * MB}) == 1
    assert flows[0].comes_to(2 * MB)
    if not (guarded or on.backend == "bpf"):
        os.kill(pacer._undo.guardian.process.pid, signal.SIGKILL)
    pacer.close()
    assert on.host() == before
    assert [options(flow) for flow in flows] == as_they_were
    for flow in flows:
        # An emulated processor makes no more than some thousand datagrams in a second.
        free = max(3 * SPEED, 1.3) * MB if flow.sock.type == socket.SOCK_DGRAM else FREE
        assert flow.exceeds(free), flow


def test_two_daemons_at_once(on: Bench) -> None:
    before = on.host()
    first, second = on.pacer(), on.pacer()
    one, other = on.flow(first), on.flow(second)
    assert set_rate(first, {one: MB}) == set_rate(second, {other: 2 * MB}) == 1
    assert set_rate(first, {other: MB}) == 0  # not its flow
    assert one.comes_to(MB) and other.comes_to(2 * MB)
    first.close()
    assert one.exceeds(FREE)
    one.stop()
    assert other.comes_to(2 * MB)
    second.close()
    assert on.host() == before


def test_a_moment_without_descriptors_ends_nothing(on: Bench) -> None:
    pacer, flow = on.pair(busy=False)
    before = options(flow)
    set_rate(pacer, {flow: MB})
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 2, hard))
    try:
        pacer.counters()
        set_rate(pacer, {flow: 2 * MB})
        pacer.refresh(later())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [event for event in pacer.events() if event.kind == "closed"] == []
    set_rate(pacer, {flow: 3 * MB})
    pacer.close()
    assert options(flow) == before
