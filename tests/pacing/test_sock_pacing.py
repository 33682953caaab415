# SPDX-License-Identifier: Apache-2.0
"""Pacing through SO_MAX_PACING_RATE, and what frees the sockets when the daemon cannot."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from registering import open_fds

from flowslotd.pace import guardian
from flowslotd.pace.pacer import PaceEntry
from flowslotd.pace.sockopt import SocketPacer

from .conformance import MB, Bench, apply, later, options, set_rate

pytestmark = [pytest.mark.root, pytest.mark.parametrize("on", ["socket"], indirect=True)]


@pytest.fixture
def sockets(on: Bench) -> SocketPacer:
    return on.pacer()


def limit(flow: Any) -> int:
    return int.from_bytes(options(flow)["max_pacing_rate"], sys.byteorder)


def test_what_had_no_limit_has_none_afterwards(sockets: SocketPacer, on: Bench) -> None:
    flow = on.flow(sockets, busy=False)
    guardian.set_option(flow.sock, 47, 8, guardian.UNLIMITED)
    assert set_rate(sockets, {flow: MB}) == 1
    assert round(limit(flow), -3) == MB  # the last byte is a mark
    sockets.release(flow.cookie)
    assert limit(flow) == guardian.UNLIMITED


def test_another_socket_under_the_same_number_is_not_touched(
    sockets: SocketPacer, on: Bench
) -> None:
    flow, other = (on.flow(sockets, busy=False) for _ in range(2))
    before = limit(flow)
    sockets.attach(flow.cookie, os.getpid(), other.sock.fileno())
    assert set_rate(sockets, {flow: MB}) == 0
    assert limit(other) == limit(flow) == before
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


def test_one_follows_whoever_keeps_the_sysctl(sockets: SocketPacer, on: Bench) -> None:
    def sysctl() -> int:
        return int(Path(guardian.SYSCTL).read_text())

    assert sysctl() == 0
    second = on.pacer()
    sockets.close()
    assert sysctl() != 0
    second.refresh(later())
    assert sysctl() == 0
    second.close()
    assert sysctl() != 0


def test_no_descriptor_is_kept(sockets: SocketPacer, on: Bench) -> None:
    flow = on.flow(sockets, busy=False)
    before = open_fds()
    for rate in range(1, 20):
        set_rate(sockets, {flow: rate * MB})
        sockets.counters()
    assert open_fds() == before


def test_a_dead_guardian_is_replaced_and_ends_with_its_daemon(
    sockets: SocketPacer, on: Bench
) -> None:
    first = sockets._undo.guardian.process
    first.kill()
    first.wait()
    assert set_rate(sockets, {on.flow(sockets, busy=False): MB}) == 1
    second = sockets._undo.guardian.process
    assert second.pid != first.pid
    sockets.close()
    assert not os.path.exists(f"/proc/{second.pid}")
