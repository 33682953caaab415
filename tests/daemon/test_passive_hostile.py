# SPDX-License-Identifier: Apache-2.0
"""Watching processes that report nothing, where they are hostile, too many, or out of reach."""

import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from unittest import mock

import pytest
from passive import (
    HERE,
    SIZE,
    THERE,
    Sink,
    Unpatched,
    Watching,
    found,
    make_finder,
    node,
    until_found,
)
from waiting import settle

from flowslot_shm.layout import Role
from flowslotd import sockets
from flowslotd.observe.passive import finder, service, watcher
from flowslotd.observe.passive.shadow import Found

UNIT = Path(__file__).parents[2] / "systemd/flowslotd.service"


def test_strange_processes_hurt_nobody(stack: ExitStack, watching: Watching) -> None:
    port = Sink(stack).port
    Unpatched(stack, 1, THERE, port, env=node(port=10**12))
    Unpatched(stack, 1, THERE, port, env=node(role="w" * 100_000))
    crowd = Unpatched(stack, 1, THERE, port, env=node(FLOWSLOT_JOB="bert"))
    crowd.do(f"open {min(10_000, resource.getrlimit(resource.RLIMIT_NOFILE)[1] - 100)}")
    honest = Unpatched(stack, 1, THERE, port, env=node(FLOWSLOT_JOB="bert"))
    # Both claim the same job, as two of its nodes would.
    slots = until_found(watching, crowd, honest, connections=2)
    assert {bytes(slot["job"]) for slot in slots} == {b"bert"}
    assert watching.bugs == []


def test_more_processes_of_a_user_than_are_looked_at(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(finder, "MAX_PER_USER", 2)
    port = Sink(stack).port
    workers = [Unpatched(stack, 1, THERE, port) for _ in range(4)]
    monkeypatch.setattr(finder, "_pids", lambda: {worker.pid for worker in workers})
    one = make_finder(stack)
    settle(lambda: len(found(one, *workers)) == 2)
    assert found(one).keys() < {worker.pid for worker in workers}
    assert len([r for r in caplog.records if "more processes" in r.message]) == 1


def test_fail_open_a_bug_drops_the_shadow_records_and_begins_anew(
    stack: ExitStack, watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "AGAIN_S", 0.05)
    worker = Unpatched(stack, 1, THERE, Sink(stack).port)
    until_found(watching, worker, connections=1)

    def fail(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(watcher.ShadowRecords, "look", fail)
        settle(lambda: len(watching.bugs) >= 2)  # the second attempt fails, too
        assert watching.passive.records == {}
    assert {type(bug) for bug in watching.bugs} == {ZeroDivisionError}
    until_found(watching, worker, connections=1)


def test_a_process_that_cannot_be_read_holds_up_nobody(
    stack: ExitStack, watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its environment may be in memory that takes forever to be had."""
    worker = Unpatched(stack, 1, THERE, Sink(stack).port)
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
        assert watching.passive.records == {}
        free.set()


def test_fail_open_a_process_that_holds_up_the_thread_is_not_waited_for(
    stack: ExitStack, watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It closes a socket while that is borrowed, and wants all of it sent first."""
    monkeypatch.setattr(service, "AGAIN_S", 0.05)
    monkeypatch.setattr(watcher, "CHECK_S", 0.1)
    sinks = Sink(stack), Sink(stack)
    hostile, honest = (Unpatched(stack, 1, THERE, sink.port) for sink in sinks)
    until_found(watching, hostile, honest, connections=2)
    look, held = sockets.look, []
    sinks[0].reading.clear()
    stack.callback(sinks[0].reading.set)

    def while_borrowed(sock: socket.socket) -> sockets.Info:
        thread = threading.current_thread()
        theirs = thread.name == "passive-watch" and sock.getpeername()[1] == sinks[0].port
        if theirs and not held:
            held.append(thread)
            hostile.do("linger")
        return look(sock)

    monkeypatch.setattr(sockets, "look", while_borrowed)
    settle(lambda: len(watching.left) == 2)
    assert [str(bug) for bug in watching.bugs] == ["passive-watch is held up by some process"]
    until_found(watching, honest, connections=1)
    assert held[0].is_alive()
    sinks[0].reading.set()  # or the hour is over
    settle(lambda: not held[0].is_alive())
    assert len(watching.slots()) == 1, "what it says at last does not count"


@pytest.mark.parametrize(("check_s", "bugs"), [(0.02, 3), (60.0, 0)])
def test_only_so_many_threads_are_left_to_themselves(
    stack: ExitStack, watching: Watching, monkeypatch: pytest.MonkeyPatch, check_s: float, bugs: int
) -> None:
    """Those that are found to be held up, and those that a reload stops before."""
    monkeypatch.setattr(service, "AGAIN_S", 0.02)
    monkeypatch.setattr(service, "MAX_STUCK", 3)
    free = threading.Event()
    stack.callback(free.set)
    watching.use(pslite=False)
    settle(lambda: _threads("passive-watch") == 0)

    def reload() -> bool:
        watching.use(pslite=False)
        watching.use()
        return not watching.passive.watching and _threads("passive-watch") == 3

    with monkeypatch.context() as patch:
        patch.setattr(watcher, "CHECK_S", check_s)
        patch.setattr(watcher.ShadowRecords, "look", lambda *_: free.wait(120))
        watching.use()
        settle(lambda: len(watching.bugs) == bugs)
        settle(reload)
        assert reload() and reload()
        assert len(watching.bugs) == bugs
    free.set()
    settle(lambda: watching.passive.watching and _threads("passive-watch") == 1)


def _threads(name: str) -> int:
    return sum(thread.name == name for thread in threading.enumerate())


def test_a_thread_that_gets_nowhere_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    one = watcher.Watcher([HERE], "", {}, lambda *_: None)  # its threads have not started
    monkeypatch.setattr(threading.current_thread(), "name", "passive-watch")
    said = []
    for check in range(32):
        if check < 10:
            one._alive()
        said.append(one.stuck())
    assert said == [""] * 13 + ["passive-watch"] * 16 + ["passive-find and passive-watch"] * 3


def test_the_newest_look_at_processes_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    one, heard = watcher.Watcher([HERE], "", {}, lambda *_: None), []

    def update(_: object, found: Iterable[Found], *__: object) -> None:
        heard.extend(each.pid for each in found)
        one.stop()

    monkeypatch.setattr(watcher.ShadowRecords, "update", update)
    for pid in (1, 2, 3):
        one._found.put([Found(pid, b"job", Role.PUSH, ())])
    one._watch()
    assert heard == [3]


def test_a_stop_while_the_thread_is_about_to_wait_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    class Queue(SimpleQueue[Any]):
        def get(self, *how: Any, **more: Any) -> Any:
            one.stop()
            return super().get(*how, **more)

    monkeypatch.setattr(watcher, "CHECK_S", 3600.0)
    one = watcher.Watcher([HERE], "", {}, lambda *_: None)
    one._found = Queue()
    thread = threading.Thread(target=one._watch, daemon=True)
    thread.start()
    settle(lambda: not thread.is_alive())


def test_a_reload_while_it_waits_to_begin_anew_leaves_one_watcher(
    stack: ExitStack, watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "AGAIN_S", 0.2)
    worker = Unpatched(stack, 1, THERE, Sink(stack).port)
    bug = ZeroDivisionError("a bug")
    watching.call(watching.passive._failed, bug)
    watching.use()
    one = watching.passive._watcher
    until_found(watching, worker, connections=1)  # which takes more than a second
    assert watching.passive._watcher is one
    settle(lambda: _threads("passive-watch") == _threads("passive-find") == 1)


def test_fail_open_it_begins_anew_though_letting_go_fails_too(
    stack: ExitStack, watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "AGAIN_S", 0.05)
    workers = [Unpatched(stack, 1, THERE, Sink(stack).port) for _ in range(2)]
    until_found(watching, *workers, connections=2)

    def fail(_: object) -> None:
        raise ZeroDivisionError("another bug")

    watching.passive._left = fail
    watching.call(watching.passive._failed, ValueError("a bug"))
    assert [type(bug) for bug in watching.bugs] == [ValueError] + [ZeroDivisionError] * 2
    until_found(watching, *workers, connections=2)


# -- what others may see, and how much of it ----------------------------------------------------


LOOKER = f"""
import logging, time
from flowslotd.observe.passive.finder import Finder
logging.basicConfig(level=logging.INFO)
finder, found = Finder([{HERE!r}]), set()
for _ in range(20):
    found.update(one.pid for one in finder.look())
    time.sleep(0.1)
print(*found)
"""


@pytest.mark.root
@pytest.mark.skipif(not shutil.which("setpriv"), reason="setpriv is missing (util-linux)")
def test_with_the_units_capabilities_another_users_process_is_found(stack: ExitStack) -> None:
    theirs = Unpatched(stack, 1, THERE, Sink(stack).port, user=65534, group=65534, extra_groups=[])
    assert os.stat(f"/proc/{theirs.pid}").st_uid == 65534
    (line,) = re.findall(r"^CapabilityBoundingSet=(.*)$", UNIT.read_text(), re.MULTILINE)
    units = set(line.replace("CAP_", "").lower().split())
    lookers = {}
    for absent in ("", "sys_ptrace", "dac_read_search"):
        bound = ",".join(["-all", *(f"+{name}" for name in units - {absent})])
        lookers[absent] = subprocess.Popen(
            ["setpriv", "--bounding-set", bound, sys.executable, "-c", LOOKER],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        stack.callback(lookers[absent].kill)
    while any(looker.poll() is None for looker in lookers.values()):
        theirs.do(f"send {SIZE}")
    for absent, looker in lookers.items():
        found, said = looker.communicate()
        assert (str(theirs.pid) in found.split()) == (not absent)
        if absent:
            assert f"cannot be seen: CAP_{absent.upper()} is missing" in said
            assert said.count("\n") == 1
        else:  # of others, perhaps, in a sandbox
            assert "missing" not in said and f"process {theirs.pid} " not in said


def test_a_refusal_is_said_once(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    workers = [Unpatched(stack, 1, THERE, Sink(stack).port) for _ in range(2)]
    monkeypatch.setattr(finder, "_absent", list)
    one = make_finder(stack)

    def refuse(*_: object) -> None:
        raise PermissionError

    settle(lambda: len(found(one, *workers)) == 2)
    monkeypatch.setattr(finder, "_links", refuse)
    assert one.look() == one.look() == []
    (record,) = caplog.records
    assert "must not be looked at" in record.message


def test_a_process_that_ends_while_it_is_examined_leaves_no_descriptor(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Unpatched(stack, 1, THERE, Sink(stack).port)
    other = stack.enter_context(subprocess.Popen(["sleep", "60"]))
    stack.callback(other.kill)
    read, calls = finder._node, []
    opened = mock.Mock(side_effect=os.pidfd_open)

    def gone_the_second_time(pid: int) -> Any:
        calls.extend([pid] * (pid == worker.pid))
        if pid == worker.pid and len(calls) % 2 == 0:
            raise ProcessLookupError
        return read(pid)

    monkeypatch.setattr(finder, "_node", gone_the_second_time)
    monkeypatch.setattr(os, "pidfd_open", opened)
    before, one = pidfds(), make_finder(stack)
    for _ in range(4):
        one.look()
    assert len(calls) >= 4
    assert mock.call(other.pid) not in opened.mock_calls  # it is no node, and costs none
    assert pidfds() == before + len(one._processes)


def pidfds() -> int:
    links = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own
            links += "pidfd" in os.readlink(f"/proc/self/fd/{name}")
    return links


def test_who_has_too_many_connections_takes_none_from_others(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(finder, "MAX_CONNECTIONS_PER_USER", 2)
    port = Sink(stack).port
    greedy, modest, late = (Unpatched(stack, n, THERE, port) for n in (3, 2, 1))
    one = make_finder(stack)
    for _ in range(8):
        seen = found(one, greedy, modest, late)
    assert seen.keys() == {modest.pid}
    assert len([r for r in caplog.records if "more connections" in r.message]) == 1
    one._processes[late.pid].uid += 1  # somebody else's
    assert found(one).keys() == {modest.pid, late.pid}
