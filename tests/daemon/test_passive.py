# SPDX-License-Identifier: Apache-2.0
"""Processes that report nothing are seen from outside: real ones, over real TCP on loopback."""

import os
import subprocess
import sys
import threading
from contextlib import ExitStack

import pytest
from passive import (
    HERE,
    SIZE,
    THERE,
    Looks,
    Sink,
    Unpatched,
    Watching,
    congestion_controls,
    node,
    settle,
    until_found,
)

from flowslot_shm.layout import Message, Role, Transport, address
from flowslot_shm.writer import Record as OwnRecord
from flowslotd import sockets
from flowslotd.observe.passive import finder


def test_data_connections_are_reported_as_a_patched_process_would(
    stack: ExitStack, watching: Watching
) -> None:
    sink = Sink(stack)
    worker = Unpatched(stack, 3, THERE, sink.port)
    slots = until_found(watching, worker, connections=3)
    for slot in slots:
        assert slot["job"] == b"pslite-10.0.0.9-9"
        assert (slot["role"], slot["transport"]) == (Role.PUSH, Transport.TCP)
        assert (slot["rank"], slot["peer"], slot["channel"]) == (-1, -1, 0)
        ends = [
            (address(2, bytes(slot[end])), int(slot[end[0] + "port"])) for end in ("src", "dst")
        ]
        assert ends[0][0] == HERE
        assert ends[1] == (THERE, sink.port)
        pidfd = os.pidfd_open(worker.pid)
        with sockets.borrow(pidfd, int(slot["fd"]), int(slot["sock_cookie"])) as sock:
            assert sock.getsockname() == ends[0]
        os.close(pidfd)
    (source,) = watching.joined
    assert (source.pid, source.id) == (worker.pid, -abs(source.id))
    assert watching.bugs == []


def test_bytes_per_iteration_are_learnt_and_doorbells_rung(
    stack: ExitStack, watching: Watching
) -> None:
    worker = Unpatched(stack, 1, THERE, Sink(stack).port)
    until_found(watching, worker, connections=1)
    large = 60_000_000  # so that it takes several looks, however fast loopback is

    def as_a_patched_process_would() -> bool:
        (before,) = watching.slots()
        watching.rung.clear()
        worker.train(large, 1)
        (after,) = watching.slots()
        counts = [int(after[name]) for name in ("iteration_total", "ready", "posted", "done")]
        kinds = [message for _, _, message in watching.rung]
        whole = after["iteration"] == before["iteration"] + 1 and counts == [large] * 4
        return whole and kinds == [Message.BEGIN, Message.END]

    # Not each time: on a busy machine an iteration may have a pause, or none behind it.
    settle(as_a_patched_process_would, 60)


def test_connections_without_data_and_those_of_the_scheduler_are_left_alone(
    stack: ExitStack, watching: Watching
) -> None:
    data, scheduler = Sink(stack), Sink(stack)
    ends = (THERE, data.port, THERE, scheduler.port)
    worker = Unpatched(stack, 1, *ends, env=node(port=scheduler.port))
    idle = Unpatched(stack, 1, THERE, data.port)
    (slot,) = until_found(watching, worker, connections=1)
    idle.do("send 2000")
    for _ in range(3):
        worker.train(SIZE, 10)
        (slot,) = watching.slots()
        assert slot["dport"] == data.port
    assert {source.pid for source in watching.joined} == {worker.pid}


def test_what_does_not_leave_this_host_is_left_alone(stack: ExitStack, watching: Watching) -> None:
    sink = Sink(stack)
    away = Unpatched(stack, 1, THERE, sink.port)
    # From an address that is not this host's, and to one that is.
    with ExitStack() as inner:
        local = _listening_at_home(inner)
        home = Unpatched(stack, 1, HERE, local)
        until_found(watching, away, home, connections=1)
    assert {source.pid for source in watching.joined} == {away.pid}


def _listening_at_home(stack: ExitStack) -> int:
    """A port on HERE, where everything is read."""
    program = (
        "import socket, sys\n"
        f"s = socket.create_server(({HERE!r}, 0)); print(s.getsockname()[1], flush=True)\n"
        "c, _ = s.accept()\n"
        "while c.recv(1 << 20): pass\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    stack.callback(process.wait)
    stack.callback(process.kill)
    assert process.stdout is not None
    stack.callback(process.stdout.close)
    return int(process.stdout.readline())


def test_a_closed_connection_is_closed_for_its_peer_at_once_and_reported_no_more(
    stack: ExitStack, watching: Watching
) -> None:
    sink = Sink(stack)
    worker = Unpatched(stack, 4, THERE, sink.port)
    until_found(watching, worker, connections=4)
    worker.do("close")
    settle(lambda: sink.ended == 4)
    settle(lambda: not watching.slots() and not watching.passive.records)
    assert watching.left == watching.joined


def test_a_killed_process_is_forgotten(stack: ExitStack, watching: Watching) -> None:
    workers = [Unpatched(stack, 2, THERE, Sink(stack).port) for _ in range(2)]
    until_found(watching, *workers, connections=4)
    workers[0].process.kill()
    settle(lambda: len(watching.passive.records) == 1)
    assert {source.pid for source in watching.passive.records.values()} == {workers[1].pid}
    assert len(watching.slots()) == 2


def test_sockets_are_enlisted_and_again_under_another_name(
    stack: ExitStack, watching: Watching
) -> None:
    worker = Unpatched(stack, 2, THERE, Sink(stack).port)
    slots = until_found(watching, worker, connections=2)
    (before,) = congestion_controls(worker.pid, slots)
    other = {b"reno": "cubic"}.get(before, "reno")
    for name in (other, before.decode()):
        watching.use(name)
        settle(lambda name=name: congestion_controls(worker.pid, slots) == {name.encode()})
    watching.use("nonexistent")  # refused: they stay as they are
    worker.train(SIZE, 3)
    assert congestion_controls(worker.pid, slots) == {before}
    assert (len(watching.slots()), watching.bugs) == (2, [])


def test_it_can_be_switched_off_and_on(stack: ExitStack, watching: Watching) -> None:
    worker = Unpatched(stack, 1, THERE, Sink(stack).port)
    until_found(watching, worker, connections=1)
    watching.use(pslite=False)
    assert watching.passive.records == {}
    assert len(watching.left) == 1
    assert not watching.passive.watching
    settle(lambda: not {t.name for t in threading.enumerate()} & {"passive-find", "passive-watch"})
    watching.use()
    until_found(watching, worker, connections=1)


def test_a_process_that_has_a_record_of_its_own_speaks_for_itself(
    stack: ExitStack, watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = Looks(monkeypatch)
    sink = Sink(stack)
    silent, patched = (Unpatched(stack, 1, THERE, sink.port) for _ in range(2))
    patched.do("register /nonexistent")  # no daemon there, but it would tell one
    until_found(watching, silent, patched, connections=1)
    looks.more(watching, silent, patched, connections=1)
    assert {source.pid for source in watching.joined} == {silent.pid}


def test_who_is_registered_is_not_spoken_for(
    stack: ExitStack, watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its record cannot be recognized."""
    looks = Looks(monkeypatch)
    workers = [Unpatched(stack, 1, THERE, Sink(stack).port) for _ in range(2)]
    until_found(watching, *workers, connections=2)
    watching.call(watching.passive.give_way, workers[0].pid)
    looks.more(watching, *workers, connections=1)
    assert {source.pid for source in watching.passive.records.values()} == {workers[1].pid}

    class Registered:
        pid = workers[1].pid

    watching.registered[1] = Registered()
    watching.use(pslite=False)
    watching.joined.clear()
    watching.use()
    until_found(watching, *workers, connections=1)  # the first one is registered no more
    looks.more(watching, *workers, connections=1)
    assert {source.pid for source in watching.joined} == {workers[0].pid}


def test_children_that_inherit_sockets_do_not_count(stack: ExitStack, watching: Watching) -> None:
    program = (
        "import os, socket, sys, time\n"
        f"s = socket.create_connection(({THERE!r}, int(sys.argv[1])))\n"
        "os.fork()\n"
        "while True: s.sendall(bytes(100_000)); time.sleep(0.02)\n"
    )
    port = Sink(stack).port
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(port)], env=node(), start_new_session=True
    )
    stack.callback(process.wait)
    stack.callback(os.killpg, process.pid, 9)
    assert len(settle(watching.slots)) == 1
    assert {source.pid for source in watching.joined} == {process.pid}


def test_records_of_its_own_can_be_told_by_their_name() -> None:
    """Both libraries give their memfd this name."""
    record = OwnRecord(1)
    try:
        assert os.readlink(f"/proc/self/fd/{record.fd}") == finder.OWN_RECORD
    finally:
        record.close()
