# SPDX-License-Identifier: Apache-2.0
"""Pacing through SO_MAX_PACING_RATE, and what frees the sockets when the daemon cannot."""

import gc
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowslotd.pace import guardian
from flowslotd.pace.pacer import PaceEntry
from flowslotd.pace.select import make_pacer
from flowslotd.pace.sockopt import SocketPacer

from .conformance import MB, Flows, apply, later, set_rate
from .traffic import inside, soon

pytestmark = pytest.mark.root


@pytest.fixture
def sockets(net: Any) -> Iterator[SocketPacer]:
    with inside(net.here):  # where a sysctl may be changed
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


def test_the_rate_is_the_sockets_own_limit_until_closing(
    sockets: SocketPacer, flows: Flows
) -> None:
    made = [flows(busy=False) for _ in range(3)]
    for flow in made:
        attach(sockets, flow)
    assert set_rate(sockets, dict.fromkeys(made, MB)) == 3
    assert [limit(flow) for flow in made] == [MB] * 3
    sockets.release(made[0].cookie)
    assert limit(made[0]) == guardian.UNLIMITED
    assert sockets._undo.guard is not None
    watcher = sockets._undo.guard.process.pid
    sockets.close()
    assert [limit(flow) for flow in made] == [guardian.UNLIMITED] * 3
    assert not os.path.exists(f"/proc/{watcher}")


def test_another_socket_under_the_same_number_is_not_touched(
    sockets: SocketPacer, flows: Flows
) -> None:
    flow, other = flows(busy=False), flows(busy=False)
    sockets.attach(flow.cookie, os.getpid(), other.sock.fileno())
    assert set_rate(sockets, {flow: MB}) == 0
    assert limit(other) == limit(flow) == guardian.UNLIMITED
    events = [(event.kind, event.cookie) for event in sockets.events()]
    assert events == [("closed", flow.cookie)]


@pytest.mark.parametrize("gone", ["process", "socket"])
def test_what_is_no_socket_any_more_is_a_closed_flow(
    sockets: SocketPacer, tmp_path: Path, gone: str
) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    with (tmp_path / "file").open("w") as file:  # under the number that a socket had
        sockets.attach(
            12345, *((ended.pid, 3) if gone == "process" else (os.getpid(), file.fileno()))
        )
        assert sockets.counters().cookie.size == 0
    assert [event.kind for event in sockets.events()] == ["closed"]
    assert apply(sockets, PaceEntry(12345, MB, MB, guaranteed=True, growth=0)) == 0


def test_a_process_that_cannot_be_seen_is_named(sockets: SocketPacer) -> None:
    sockets.attach(12345, 0, 3)
    assert apply(sockets, PaceEntry(12345, MB, MB, guaranteed=True, growth=0)) == 0
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


def test_no_descriptor_is_kept(sockets: SocketPacer, flows: Flows) -> None:
    flow = flows(busy=False)
    attach(sockets, flow)
    gc.collect()  # what earlier tests have left must not go between two counts
    before = len(os.listdir("/proc/self/fd"))
    for rate in range(1, 20):
        set_rate(sockets, {flow: rate * MB})
        sockets.counters()
    assert len(os.listdir("/proc/self/fd")) == before


def test_drained_is_noticed(sockets: SocketPacer, flows: Flows) -> None:
    flow = flows(busy=False)
    attach(sockets, flow)
    base = int(sockets.counters().acked[0])
    sockets.watch(flow.cookie, base + 50_000)
    flow.sock.sendall(bytes(60_000))
    assert soon(lambda: int(sockets.counters().acked[0]) >= base + 60_000)
    assert [(event.kind, event.cookie) for event in sockets.events()] == [("drained", flow.cookie)]
    sockets.counters()
    assert sockets.events() == []


def test_a_dead_guardian_is_replaced(sockets: SocketPacer, flows: Flows) -> None:
    assert sockets._undo.guard is not None
    first = sockets._undo.guard.process.pid
    os.kill(first, signal.SIGKILL)
    sockets._undo.guard.process.wait()
    flow = flows(busy=False)
    attach(sockets, flow)
    assert set_rate(sockets, {flow: MB}) == 1
    assert sockets._undo.guard.process.pid != first
