# SPDX-License-Identifier: Apache-2.0
"""Jobs that report nothing, enlisted by process or control group: real processes and groups."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from passive import HERE, THERE, Sink, Unpatched, Watching, make_finder
from waiting import settle

from flowslot.model.errors import ConfigError
from flowslot.model.units import SECOND
from flowslot_shm.layout import Role
from flowslot_shm.writer import cookie_of
from flowslotd import sockets
from flowslotd.observe.passive import commands
from flowslotd.observe.passive.finder import Finder
from flowslotd.observe.passive.service import PassiveSources
from flowslotd.observe.passive.shadow import Found
from flowslotd.observe.passive.targets import Target
from flowslotd.observe.passive.watcher import ShadowRecords

from .test_daemon import FLOWS, SIZE, Daemon, Hosts, Job

DATA = 300_000
PLAIN = {name: value for name, value in os.environ.items() if not name.startswith("DMLC_")}


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group, and one in it; both empty at the end."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    version = {kind: Path(where) for _, where, kind, *_ in mounts}
    if "cgroup2" not in version or os.getuid() != 0:
        pytest.skip("needs root, and control groups of version 2")
    made = version["cgroup2"] / f"fs-test-{os.getpid()}"
    inner = made / "inner"
    inner.mkdir(parents=True)
    yield made
    for folder in (inner, made):
        with suppress(OSError):
            settle(lambda folder=folder: not (folder / "cgroup.procs").read_text())
        folder.rmdir()


def plain(stack: ExitStack, port: int, **environment: str) -> Unpatched:
    """A process that is no node of anything, and has sent something."""
    made = Unpatched(stack, 1, THERE, port, env=PLAIN | {"FROM": HERE} | environment)
    made.do(f"send {DATA}")
    return made


def jobs(finder: Finder, *targets: Target) -> dict[int, bytes]:
    return {each.pid: each.job for each in finder.look(targets, pslite=False)}


def test_an_enlisted_process_is_found_at_once_and_nobody_else(stack: ExitStack) -> None:
    port = Sink(stack).port
    one, other = plain(stack, port), plain(stack, port)
    named = plain(stack, port, FLOWSLOT_JOB="mine")
    finder = make_finder(stack)
    targets = Target.process(one.pid), Target.process(named.pid)
    assert jobs(finder, *targets) == {one.pid: b"pid-%d" % one.pid, named.pid: b"mine"}
    assert jobs(finder, Target.process(named.pid, "told")) == {named.pid: b"told"}
    assert jobs(finder) == {}
    assert other.pid not in jobs(finder, *targets)
    one.end()
    settle(lambda: not targets[0].alive())
    assert jobs(finder, *targets) == {named.pid: b"mine"}


def test_a_group_has_the_processes_below_it_that_it_has_now(stack: ExitStack, group: Path) -> None:
    port, finder = Sink(stack).port, make_finder(stack)
    outer, inner, outside = (plain(stack, port) for _ in range(3))
    (group / "cgroup.procs").write_text(str(outer.pid))
    (group / "inner" / "cgroup.procs").write_text(str(inner.pid))
    by_path, by_name = Target.group(str(group)), Target.group(group.name)
    assert by_path.what == by_name.what == ("cgroup", str(group))
    passive = PassiveSources(print, print, print, {}, lambda *_: None)
    with pytest.raises(ConfigError, match="is not enlisted"):
        commands.release(passive, {"cgroup": f"{group.name}/"})
    name = group.name.encode()
    assert jobs(finder, by_path) == {outer.pid: name, inner.pid: name}
    (group / "inner" / "cgroup.procs").write_text(str(outside.pid))
    inner.end()
    assert jobs(finder, by_path) == {outer.pid: name, outside.pid: name}
    for process in (outer, outside):
        process.end()
    (group / "inner").rmdir()
    group.rmdir()
    assert not by_path.alive()
    (group / "inner").mkdir(parents=True)  # another one of the same name
    assert not by_path.alive()
    assert jobs(finder, by_path) == {}


@pytest.mark.parametrize(
    ("request_", "field", "said"),
    [
        ({}, "pid", "must be given"),
        ({"pid": 1, "cgroup": "/x"}, "pid", "must be given, or else"),
        ({"pid": "1"}, "pid", "number of a process"),
        ({"pid": True}, "pid", "number of a process"),
        ({"pid": 1 << 40}, "pid", "no process"),
        ({"pid": 4_194_303}, "pid", "no process"),
        ({"cgroup": 7}, "cgroup", "must be the path"),
        ({"cgroup": "/tmp"}, "cgroup", "no control group"),
        ({"cgroup": "a\0b"}, "cgroup", "no control group"),
        ({"cgroup": ""}, "cgroup", "not that place itself"),
        ({"cgroup": "."}, "cgroup", "not that place itself"),
        ({"pid": os.getpid(), "job": "\ud800"}, "job", "must be a name"),
        ({"pid": os.getpid(), "job": ""}, "job", "must be a name"),
        ({"pid": os.getpid(), "job": 3}, "job", "must be a name"),
    ],
)
def test_bad_requests_enlist_nothing(request_: Any, field: str, said: str) -> None:
    passive = PassiveSources(print, print, print, {}, lambda *_: None)
    with pytest.raises(ConfigError, match=said) as error:
        commands.enlist(passive, request_)
    assert error.value.field == field
    assert passive.enlisted == []
    with pytest.raises(ConfigError, match="77 is not enlisted"):
        commands.release(passive, {"pid": 77})


@pytest.mark.root
def test_iterations_are_learnt_and_release_leaves_nothing(stack: ExitStack, tmp_path: Path) -> None:
    daemon = Daemon(Hosts(stack), tmp_path, mode="enforce", policy="static").start()
    job = Job(daemon.hosts, flows=FLOWS)
    before = job.sockets(sockets.tuning)
    job.train(SIZE, 2)
    assert daemon.ask("flows")["flows"] == []

    told = daemon.cli("enlist", "--pid", str(job.pid), "--job", "mine")
    assert (told.returncode, told.stdout) == (0, f"enlisted: pid {job.pid}, job mine\n")
    settle(lambda: len(daemon.ask("flows")["flows"]) == FLOWS)
    begun = [job.do(f"begin {SIZE}")]

    def learnt() -> bool:
        time.sleep(0.08)
        begun.append(job.do(f"begin {SIZE}"))
        return {f["iteration_bytes"] for f in daemon.ask("flows")["flows"]} == {SIZE}

    settle(learnt)
    flows = daemon.ask("flows")["flows"]
    assert {(f["job"], f["owned"], f["pid"]) for f in flows} == {("mine", True, job.pid)}
    assert job.is_under(daemon.ask("status")["congestion_control"])
    targets = daemon.ask("status")["unpatched"]["targets"]
    assert targets == [{"pid": str(job.pid), "job": "mine"}]

    assert daemon.cli("release", "--pid", "1").returncode == 2
    assert daemon.cli("release", "--all").stdout == f"released: pid {job.pid}, job mine\n"
    settle(lambda: daemon.ask("flows")["flows"] == [])
    settle(lambda: job.sockets(sockets.tuning) == before)
    assert job.is_unpaced()
    assert daemon.ask("status")["unpatched"]["watching"] is False
    job.train(SIZE, 2)
    assert daemon.stop() == (0, "")


@pytest.fixture
def connection() -> Iterator[socket.socket]:
    """A connection of this process, under Reno."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        made = stack.enter_context(socket.create_connection(server.getsockname()))
        stack.enter_context(server.accept()[0])
        sockets.enlist(made, "reno")
        yield made


def uses(sock: socket.socket) -> bytes:
    return sockets.tuning(sock).congestion_control


def test_sockets_are_as_before_whatever_ends_it(connection: socket.socket) -> None:
    """Stock congestion controls stand for ours. Each second a look."""
    records, seconds = ShadowRecords(lambda *_: None), iter(range(100))

    def look(name: str, job: bytes = b"one", fd: int = 0, speaking: tuple[int, ...] = ()) -> bytes:
        now = next(seconds) * SECOND
        ends = ((fd or connection.fileno(), cookie_of(connection)),) if job else ()
        found = [Found(os.getpid(), job, Role.UNKNOWN, ends)] if job else []
        records.update(found, now, speaking)
        records.look(now, name)
        return uses(connection)

    assert look("cubic") == b"cubic"
    assert look("") == b"reno"  # nothing is paced any more
    assert look("cubic") == b"cubic"
    assert look("cubic", b"two") == b"cubic"  # enlisted again, under another name
    with socket.socket(fileno=os.dup(connection.fileno())) as other:
        assert look("cubic", b"two", other.fileno()) == b"cubic"
        assert look("cubic", b"") == b"reno"  # released
    assert look("cubic") == b"cubic"
    assert look("cubic", speaking=(os.getpid(),)) == b"cubic"  # the process has its own way now
    records.close()


def test_who_has_ended_is_not_looked_for_any_more(stack: ExitStack, watching: Watching) -> None:
    watching.use(pslite=False)
    worker = plain(stack, Sink(stack).port)
    watching.call(watching.passive.enlist, Target.process(worker.pid))
    assert watching.passive.watching
    worker.end()
    settle(lambda: not watching.passive.watching)
    assert watching.bugs == []
