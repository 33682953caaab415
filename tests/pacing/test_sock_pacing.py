# SPDX-License-Identifier: Apache-2.0
"""Pacing through SO_MAX_PACING_RATE, and what frees the sockets when the daemon cannot."""

import gc
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flowslotd.pace import guardian, make_pacer
from flowslotd.pace.pacer import PaceEntry, pack
from flowslotd.pace.sockopt import SocketPacer

from .conformance import FREE, MB, MOST, entry, later

pytestmark = pytest.mark.root


@pytest.fixture
def sockets(net: Any, from_here: Any) -> Iterator[SocketPacer]:
    with from_here.inside(net.here):  # where a sysctl may be changed
        pacer = make_pacer("socket", "test")
        assert isinstance(pacer, SocketPacer)
        yield pacer
        pacer.close()


def limit(flow: Any) -> int:
    """In kB/s, but for UNLIMITED: the last byte is a mark."""
    rate = int.from_bytes(flow.sock.getsockopt(socket.SOL_SOCKET, 47, 8), sys.byteorder)
    return rate if rate == guardian.UNLIMITED else round(rate, -3)


def attach(pacer: SocketPacer, flow: Any) -> None:
    pacer.attach(flow.cookie, os.getpid(), flow.sock.fileno())


def test_paces_and_lets_go(sockets: SocketPacer, flows: Callable[..., Any]) -> None:
    flow = flows(most=MOST)
    attach(sockets, flow)
    assert flow.exceeds(FREE)
    for rate in (10 * MB, 3 * MB):
        assert sockets.apply(pack([entry(flow, rate)]), later()) == 1
        assert sockets.apply(pack([entry(flow, rate)]), later()) == 0
        assert flow.comes_to(rate)
        counters = sockets.counters()
        assert counters.cookie.tolist() == [flow.cookie]
        assert limit(flow) == rate
        assert counters.acked[0] > 0
    sockets.release(flow.cookie)
    assert limit(flow) == guardian.UNLIMITED
    assert flow.exceeds(FREE)


def test_closing_frees_all(sockets: SocketPacer, flows: Callable[..., Any]) -> None:
    made = [flows(busy=False) for _ in range(3)]
    for flow in made:
        attach(sockets, flow)
    assert sockets.apply(pack([entry(flow, MB) for flow in made]), later()) == 3
    assert [limit(flow) for flow in made] == [MB] * 3
    assert sockets._undo.guard is not None
    watcher = sockets._undo.guard.pid
    sockets.close()
    assert [limit(flow) for flow in made] == [guardian.UNLIMITED] * 3
    assert not os.path.exists(f"/proc/{watcher}")


def test_another_socket_under_the_same_number_is_not_touched(
    sockets: SocketPacer, flows: Callable[..., Any]
) -> None:
    flow, other = flows(busy=False), flows(busy=False)
    sockets.attach(flow.cookie, os.getpid(), other.sock.fileno())
    assert sockets.apply(pack([entry(flow, MB)]), later()) == 0
    assert limit(other) == limit(flow) == guardian.UNLIMITED
    events = [(event.kind, event.cookie) for event in sockets.events()]
    assert events == [("closed", flow.cookie)]


def test_a_file_under_the_same_number_is_a_closed_flow(
    sockets: SocketPacer, tmp_path: Path
) -> None:
    with (tmp_path / "file").open("w") as file:
        sockets.attach(12345, os.getpid(), file.fileno())
        assert sockets.counters().cookie.size == 0
    assert [event.kind for event in sockets.events()] == ["closed"]


def test_a_process_that_cannot_be_seen_is_named(sockets: SocketPacer) -> None:
    sockets.attach(12345, 0, 3)
    entry = PaceEntry(12345, MB, MB, guaranteed=True, growth=0)
    assert sockets.apply(pack([entry]), later()) == 0
    assert "its process is in another pid namespace" in sockets.refusal(12345)
    assert sockets.events() == []


def test_one_follows_whoever_keeps_the_sysctl(sockets: SocketPacer) -> None:
    def sysctl() -> int:
        return int(Path(guardian.SYSCTL).read_text())

    assert sysctl() == 0
    second = make_pacer("socket", "second")
    try:
        sockets.close()
        assert sysctl() != 0
        second.refresh(later())
        assert sysctl() == 0
    finally:
        second.close()
    assert sysctl() != 0


def test_a_vanished_process_is_a_closed_flow(sockets: SocketPacer) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    sockets.attach(12345, gone.pid, 3)
    assert sockets.counters().cookie.size == 0
    assert [event.kind for event in sockets.events()] == ["closed"]
    assert sockets.apply(pack([PaceEntry(12345, MB, MB, guaranteed=True, growth=0)]), later()) == 0


def test_no_descriptor_is_kept(sockets: SocketPacer, flows: Callable[..., Any]) -> None:
    flow = flows(busy=False)
    attach(sockets, flow)
    gc.collect()  # what earlier tests have left must not go between two counts
    before = len(os.listdir("/proc/self/fd"))
    for rate in range(1, 20):
        sockets.apply(pack([entry(flow, rate * MB)]), later())
        sockets.counters()
    assert len(os.listdir("/proc/self/fd")) == before


def test_drained_is_noticed(sockets: SocketPacer, flows: Callable[..., Any]) -> None:
    flow = flows(busy=False)
    attach(sockets, flow)
    base = int(sockets.counters().acked[0])
    sockets.watch(flow.cookie, base + 50_000)
    flow.sock.sendall(bytes(60_000))
    end = time.monotonic() + 5
    while int(sockets.counters().acked[0]) < base + 60_000 and time.monotonic() < end:
        time.sleep(0.01)
    assert [(event.kind, event.cookie) for event in sockets.events()] == [("drained", flow.cookie)]
    sockets.counters()
    assert sockets.events() == []


def test_fail_open_when_the_daemon_sleeps(
    sockets: SocketPacer, flows: Callable[..., Any], from_here: Any
) -> None:
    flow = flows(most=MOST)
    attach(sockets, flow)
    sockets.apply(pack([entry(flow, MB)]), later(10**8))
    assert limit(flow) == MB
    assert from_here.soon(lambda: limit(flow) == guardian.UNLIMITED)
    assert flow.exceeds(FREE)
    sockets.refresh(later())  # awake again: it knows that nothing is paced any more
    assert sockets.apply(pack([entry(flow, MB)]), later()) == 1
    assert limit(flow) == MB


def test_a_dead_guardian_is_replaced(sockets: SocketPacer, flows: Callable[..., Any]) -> None:
    assert sockets._undo.guard is not None
    first = sockets._undo.guard.pid
    os.kill(first, signal.SIGKILL)
    sockets._undo.guard._process.wait()
    flow = flows(busy=False)
    attach(sockets, flow)
    assert sockets.apply(pack([entry(flow, MB)]), later()) == 1
    assert sockets._undo.guard.pid != first


def has_ended(pid: int) -> bool:
    """Also when nobody has asked for its exit status: it has another parent by now."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


OWNER = """
import sys, time
from flowslotd.pace import PaceEntry, make_pacer, pack
pacer = make_pacer("socket", "victim")
cookie, pid, fd = map(int, sys.stdin.readline().split())
pacer.attach(cookie, pid, fd)
entry = PaceEntry(cookie, 1e6, 1e6, True, 0)
applied = pacer.apply(pack([entry]), time.monotonic_ns() + 3600 * 10**9)
print(applied, pacer._undo.guard.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("disturbed", [False, True])
def test_fail_open_when_the_daemon_is_killed(
    flows: Callable[..., Any], from_here: Any, disturbed: bool
) -> None:
    flow = flows(most=MOST)
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdin is not None and owner.stdout is not None
    try:
        print(flow.cookie, os.getpid(), flow.sock.fileno(), file=owner.stdin, flush=True)
        applied, watcher = map(int, owner.stdout.readline().split())
        assert (applied, limit(flow)) == (1, MB)
        if disturbed:  # as a service manager does to all processes of a service
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                os.kill(watcher, number)
    finally:
        os.kill(owner.pid, signal.SIGKILL)
        owner.communicate()
    assert from_here.soon(lambda: limit(flow) == guardian.UNLIMITED)
    assert from_here.soon(lambda: has_ended(watcher))
    assert flow.exceeds(FREE)
