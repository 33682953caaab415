# SPDX-License-Identifier: Apache-2.0
"""Processes that report nothing are seen from outside: real ones, over real TCP on loopback."""

import asyncio
import logging
import os
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from outsiders import HERE, THERE, Outsider, Sink, node, settle

from flowslot_shm.layout import Message, Role, State, Transport, address
from flowslot_shm.writer import Record as OwnRecord
from flowslotd.flowinfo import Source
from flowslotd.outside import finder, service, sockets, watcher
from flowslotd.outside.finder import Finder
from flowslotd.outside.service import Outside

SIZE = 300_000


class Watching:
    """The component, on an event loop of its own."""

    def __init__(self, congestion_control: str = "") -> None:
        self.joined: list[Source] = []
        self.rung: list[tuple[int, int, Message]] = []
        self.left: list[Source] = []
        self.bugs: list[BaseException] = []
        self.registered: dict[int, Any] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.outside = Outside(
            self.joined.append,
            lambda source, slot, message: self.rung.append((source.id, slot, message)),
            self.left.append,
            self.registered,
            lambda _, error: self.bugs.append(error),
        )
        self.use(congestion_control)

    def use(self, congestion_control: str = "", *, pslite: bool = True) -> None:
        self.call(self.outside.use, pslite, [HERE], congestion_control)

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        async def run() -> Any:
            return function(*arguments)

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(20)

    def slots(self) -> list[Any]:
        """Of all stand-ins, those in use."""

        def read() -> list[Any]:
            snapshots = [source.reader.snapshot() for source in self.outside.records.values()]
            return [slot for snap in snapshots for slot in snap if slot["state"] != State.FREE]

        found: list[Any] = self.call(read)
        return found

    def close(self) -> None:
        self.call(self.outside.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def watching(stack: ExitStack) -> Watching:
    watching = Watching()
    stack.callback(watching.close)
    return watching


def until_found(watching: Watching, *outsiders: Outsider, connections: int) -> list[Any]:
    def look() -> list[Any] | None:
        for outsider in outsiders:
            outsider.do(f"send {SIZE}")
        slots = watching.slots()
        return slots if len(slots) == connections else None

    found: list[Any] = settle(look)
    return found


def congestion_controls(pid: int, slots: list[Any]) -> set[bytes]:
    pidfd = os.pidfd_open(pid)
    try:
        found = set()
        for slot in slots:
            with sockets.borrow(pidfd, int(slot["fd"]), int(slot["sock_cookie"])) as sock:
                found.add(sock.getsockopt(6, 13, 16).split(b"\0")[0])
        return found
    finally:
        os.close(pidfd)


def test_data_connections_are_reported_as_a_patched_process_would(
    stack: ExitStack, watching: Watching
) -> None:
    sink = Sink(stack)
    worker = Outsider(stack, 3, THERE, sink.port)
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
    worker = Outsider(stack, 1, THERE, Sink(stack).port)
    until_found(watching, worker, connections=1)

    def known() -> bool:
        worker.train(SIZE, 1)
        return bool(watching.slots()[0]["iteration_total"] == SIZE)

    settle(known)
    (before,) = watching.slots()
    watching.rung.clear()
    worker.train(SIZE, 1)
    (after,) = settle(lambda: [s for s in watching.slots() if s["done"] == SIZE])
    assert after["iteration"] == before["iteration"] + 1
    assert after["ready"] == after["posted"] == SIZE
    kinds = [message for _, _, message in watching.rung]
    # All of it may have come and gone between two looks.
    assert kinds in ([], [Message.BEGIN, Message.END])


def test_connections_without_data_and_those_of_the_scheduler_are_left_alone(
    stack: ExitStack, watching: Watching
) -> None:
    data, scheduler = Sink(stack), Sink(stack)
    ends = (THERE, data.port, THERE, scheduler.port)
    worker = Outsider(stack, 1, *ends, env=node(port=scheduler.port))
    idle = Outsider(stack, 1, THERE, data.port)
    (slot,) = until_found(watching, worker, connections=1)
    idle.do("send 2000")
    for _ in range(3):
        worker.train(SIZE, 10)
        (slot,) = watching.slots()
        assert slot["dport"] == data.port
    assert {source.pid for source in watching.joined} == {worker.pid}


def test_what_does_not_leave_this_host_is_left_alone(stack: ExitStack, watching: Watching) -> None:
    sink = Sink(stack)
    away = Outsider(stack, 1, THERE, sink.port)
    # From an address that is not this host's, and to one that is.
    with ExitStack() as inner:
        local = _listening_at_home(inner)
        home = Outsider(stack, 1, HERE, local)
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
    worker = Outsider(stack, 4, THERE, sink.port)
    until_found(watching, worker, connections=4)
    worker.do("close")
    settle(lambda: sink.ended == 4)
    settle(lambda: not watching.slots() and not watching.outside.records)
    assert watching.left == watching.joined


def test_a_killed_process_is_forgotten(stack: ExitStack, watching: Watching) -> None:
    workers = [Outsider(stack, 2, THERE, Sink(stack).port) for _ in range(2)]
    until_found(watching, *workers, connections=4)
    workers[0].process.kill()
    settle(lambda: len(watching.outside.records) == 1)
    assert {source.pid for source in watching.outside.records.values()} == {workers[1].pid}
    assert len(watching.slots()) == 2


def test_sockets_are_enlisted_and_again_under_another_name(
    stack: ExitStack, watching: Watching
) -> None:
    worker = Outsider(stack, 2, THERE, Sink(stack).port)
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
    worker = Outsider(stack, 1, THERE, Sink(stack).port)
    until_found(watching, worker, connections=1)
    watching.use(pslite=False)
    assert watching.outside.records == {}
    assert len(watching.left) == 1
    assert not watching.outside.watching
    settle(lambda: not {t.name for t in threading.enumerate()} & {"outside-find", "outside-watch"})
    watching.use()
    until_found(watching, worker, connections=1)


def test_a_process_that_has_a_record_of_its_own_speaks_for_itself(
    stack: ExitStack, watching: Watching
) -> None:
    sink = Sink(stack)
    silent, patched = (Outsider(stack, 1, THERE, sink.port) for _ in range(2))
    patched.do("register /nonexistent")  # no daemon there, but it would tell one
    until_found(watching, silent, patched, connections=1)
    assert {source.pid for source in watching.joined} == {silent.pid}


def test_who_is_registered_is_not_spoken_for(stack: ExitStack, watching: Watching) -> None:
    """Also where its record cannot be recognized."""
    workers = [Outsider(stack, 1, THERE, Sink(stack).port) for _ in range(2)]
    until_found(watching, *workers, connections=2)
    watching.call(watching.outside.give_way, workers[0].pid)
    assert {source.pid for source in watching.outside.records.values()} == {workers[1].pid}

    class Registered:
        pid = workers[1].pid

    watching.registered[1] = Registered()
    watching.use(pslite=False)
    watching.joined.clear()
    watching.use()
    until_found(watching, *workers, connections=1)  # the first one is registered no more
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


# -- the hostile, and the unlucky ---------------------------------------------------------------


def test_strange_processes_hurt_nobody(stack: ExitStack, watching: Watching) -> None:
    port = Sink(stack).port
    Outsider(stack, 1, THERE, port, env=node(port=10**12))
    Outsider(stack, 1, THERE, port, env=node(role="w" * 100_000))
    crowd = Outsider(stack, 1, THERE, port, env=node(FLOWSLOT_JOB="bert"))
    crowd.do(f"open {min(10_000, _most_descriptors() - 100)}")
    honest = Outsider(stack, 1, THERE, port, env=node(FLOWSLOT_JOB="bert"))
    # Both claim the same job, as two of its nodes would.
    slots = until_found(watching, crowd, honest, connections=2)
    assert {bytes(slot["job"]) for slot in slots} == {b"bert"}
    assert watching.bugs == []


def _most_descriptors() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[1]


def test_more_processes_of_a_user_than_are_looked_at(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(finder, "MAX_PER_USER", 2)
    port = Sink(stack).port
    workers = [Outsider(stack, 1, THERE, port) for _ in range(4)]
    mine = {worker.pid for worker in workers}
    one = Finder([HERE])
    stack.callback(one.close)
    with caplog.at_level(logging.WARNING):
        found = settle(lambda: _found(one, workers, 2))
    assert set(found) < mine
    assert len([r for r in caplog.records if "more ps-lite processes" in r.message]) == 1


def _found(one: Finder, workers: list[Outsider], n: int) -> set[int] | None:
    for worker in workers:
        worker.do(f"send {SIZE}")
    pids = {found.pid for found in one.look()}
    return pids if len(pids) == n else None


def test_fail_open_a_bug_drops_the_stand_ins_and_begins_anew(
    stack: ExitStack, watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "AGAIN_S", 0.05)
    worker = Outsider(stack, 1, THERE, Sink(stack).port)
    until_found(watching, worker, connections=1)

    def fail(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(watcher.StandIns, "look", fail)
        settle(lambda: len(watching.bugs) >= 2)  # the second attempt fails, too
        assert watching.outside.records == {}
    assert {type(bug) for bug in watching.bugs} == {ZeroDivisionError}
    until_found(watching, worker, connections=1)


def test_a_process_that_cannot_be_read_holds_up_nobody(
    stack: ExitStack, watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its environment may be in memory that takes forever to be had."""
    worker = Outsider(stack, 1, THERE, Sink(stack).port)
    until_found(watching, worker, connections=1)
    stuck, free = threading.Event(), threading.Event()
    stack.callback(free.set)

    def wait(*_: object) -> None:
        stuck.set()
        free.wait(60)

    with monkeypatch.context() as patch:
        patch.setattr(finder, "_pids", wait)
        assert stuck.wait(20)
        iteration = int(watching.slots()[0]["iteration"])
        worker.train(SIZE, 3)
        settle(lambda: watching.slots()[0]["iteration"] >= iteration + 2)
        watching.use(pslite=False)  # does not wait for it either
        assert watching.outside.records == {}
        free.set()


@pytest.mark.root
@pytest.mark.skipif(not shutil.which("setpriv"), reason="setpriv is missing (util-linux)")
def test_without_the_privilege_there_is_one_line_in_the_log(stack: ExitStack) -> None:
    worker = Outsider(stack, 1, THERE, Sink(stack).port)
    program = (
        "import logging, sys\n"
        "from flowslotd.outside.finder import Finder\n"
        "logging.basicConfig(level=logging.INFO)\n"
        f"finder = Finder([{HERE!r}])\n"
        "print([finder.look() for _ in range(3)])\n"
    )
    run = subprocess.run(
        ["setpriv", "--bounding-set", "-sys_ptrace", sys.executable, "-c", program],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert run.stdout == "[[], [], []]\n"
    assert run.stderr.count("\n") == 1
    assert "CAP_SYS_PTRACE is missing" in run.stderr
    assert worker.process.poll() is None


def test_records_of_its_own_can_be_told_by_their_name() -> None:
    """Both libraries give their memfd this name."""
    record = OwnRecord(1)
    try:
        assert os.readlink(f"/proc/self/fd/{record.fd}") == finder.OWN_RECORD
    finally:
        record.close()
