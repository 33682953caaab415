# SPDX-License-Identifier: Apache-2.0
"""Processes that report nothing are seen from outside: real ones, over real TCP on loopback."""

import os
import socket
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from passive import (
    HERE,
    THERE,
    Sink,
    Unpatched,
    Watching,
    asked,
    congestion_controls,
    found,
    make_finder,
    node,
    stays,
    until_found,
)
from waiting import settle

from flowslot_shm.layout import Message, Role, Transport, address
from flowslot_shm.writer import Record as OwnRecord
from flowslotd.observe.passive import watcher
from flowslotd.observe.passive.finder import LONGEST_SOCKET_WAIT, OWN_RECORD, UNPLACED


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
        end = int(slot["fd"]), int(slot["sock_cookie"])
        assert asked(worker.pid, [end], socket.socket.getsockname) == [ends[0]]
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


def test_without_data_to_the_scheduler_or_within_this_host_it_is_left_alone(
    stack: ExitStack,
) -> None:
    data, scheduler, home = Sink(stack), Sink(stack), Sink(stack, HERE)
    ends = (THERE, data.port, THERE, scheduler.port, HERE, home.port)
    worker = Unpatched(stack, 1, *ends, env=node(port=scheduler.port))
    idle, finder = Unpatched(stack, 1, THERE, data.port), make_finder(stack)
    elsewhere = make_finder(stack, "127.9.9.9")  # as the daemons of a lab: all see all processes
    settle(lambda: found(finder, worker))
    idle.do("send 2000")
    for _ in range(2 * LONGEST_SOCKET_WAIT):
        (one,) = found(finder, worker).values()
        assert found(elsewhere, worker) == {}
        assert one.pid == worker.pid
        assert asked(worker.pid, one.sockets, socket.socket.getpeername) == [(THERE, data.port)]


def test_however_the_scheduler_is_spelled_the_job_has_one_name(
    stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    """And another one than a job of the same spelling, at another address."""
    data, scheduler, other = Sink(stack), Sink(stack), "127.200.1.1"
    Sink(stack, other, scheduler.port)
    processes = [
        Unpatched(stack, 1, THERE, data.port, where, scheduler.port, env=node(**root))
        for where, uri in ((THERE, THERE), (THERE, "sched.example"), (other, "sched.example"))
        if (root := {"port": scheduler.port, "DMLC_PS_ROOT_URI": uri})
    ]
    finder = make_finder(stack)
    seen = settle(lambda: len(all_seen := found(finder, *processes)) == 3 and all_seen)
    names = [seen[process.pid].job.decode() for process in processes]
    assert names[0] == names[1] == f"pslite-{THERE}-{scheduler.port}"
    assert names[2] == f"pslite-{other}-{scheduler.port}"
    assert UNPLACED not in caplog.text
    lost = Unpatched(stack, 1, THERE, data.port, env=node(DMLC_PS_ROOT_URI="sched"))
    assert settle(lambda: found(finder, lost).get(lost.pid)).job == b"pslite-sched-9"
    assert UNPLACED in caplog.text


def test_what_is_closed_or_killed_is_gone_at_once_for_its_peer_too(
    stack: ExitStack, watching: Watching
) -> None:
    sink = Sink(stack)
    closing, killed, other = (Unpatched(stack, n, THERE, sink.port) for n in (4, 2, 1))
    until_found(watching, closing, killed, other, connections=7)
    closing.do("close")
    settle(lambda: sink.ended == 4)
    killed.process.kill()
    settle(lambda: sink.ended == 6)
    settle(lambda: len(watching.passive.records) == len(watching.slots()) == 1)
    assert {source.pid for source in watching.left} == {closing.pid, killed.pid}


def test_sockets_are_enlisted_and_again_under_another_name(
    stack: ExitStack, watching: Watching
) -> None:
    worker = Unpatched(stack, 2, THERE, Sink(stack).port)
    slots = until_found(watching, worker, connections=2)
    (before,) = congestion_controls(worker.pid, slots)
    for name in ({"reno": "cubic"}.get(before, "reno"), before):
        watching.use(name)
        settle(lambda name=name: congestion_controls(worker.pid, slots) == {name})


def test_a_process_that_has_a_record_of_its_own_speaks_for_itself(stack: ExitStack) -> None:
    port, finder = Sink(stack).port, make_finder(stack)
    silent, patched = (Unpatched(stack, 1, THERE, port) for _ in range(2))
    settle(lambda: len(found(finder, silent, patched)) == 2)
    patched.do("register /nonexistent")  # no daemon there, but it would tell one
    assert found(finder, silent, patched).keys() == {silent.pid}


def test_who_is_registered_is_not_spoken_for_nor_anybody_once_it_is_switched_off(
    stack: ExitStack, watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its record cannot be recognized."""
    monkeypatch.setattr(watcher, "LOOK_S", 0.05)
    workers = [Unpatched(stack, 1, THERE, Sink(stack).port) for _ in range(2)]
    until_found(watching, *workers, connections=2)
    watching.call(watching.passive.give_way, workers[0].pid)
    stays(watching, *workers, connections=1)
    assert {source.pid for source in watching.passive.records.values()} == {workers[1].pid}
    watching.registered[1] = SimpleNamespace(pid=workers[1].pid)
    watching.use(pslite=False)
    assert not watching.passive.watching and watching.passive.records == {}
    assert {source.pid for source in watching.left} == {worker.pid for worker in workers}
    settle(lambda: not watcher.threads())
    watching.joined.clear()
    watching.use()
    until_found(watching, *workers, connections=1)  # the first one is registered no more
    stays(watching, *workers, connections=1)
    assert {source.pid for source in watching.joined} == {workers[0].pid}


def test_children_that_inherit_sockets_do_not_count(stack: ExitStack) -> None:
    worker, finder = Unpatched(stack, 1, THERE, Sink(stack).port), make_finder(stack)
    worker.do("fork")
    settle(lambda: found(finder, worker))
    for _ in range(2 * LONGEST_SOCKET_WAIT):
        assert found(finder, worker).keys() == {worker.pid}


def test_records_of_its_own_can_be_told_by_their_name() -> None:
    """Both libraries give their memfd this name."""
    record = OwnRecord(1)
    try:
        assert os.readlink(f"/proc/self/fd/{record.fd}") == OWN_RECORD
    finally:
        record.close()
