# SPDX-License-Identifier: Apache-2.0
"""Shadow records, without threads: of this process, for connections of its own."""

import errno
import os
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest
from registering import open_fds

from flowslot.model.units import SECOND
from flowslot_shm.layout import Role
from flowslot_shm.writer import Record, cookie_of
from flowslotd import sockets
from flowslotd.observe.passive import shadow
from flowslotd.observe.passive.shadow import Found, ShadowRecord
from flowslotd.observe.passive.watcher import ShadowRecords


@pytest.fixture
def connection(stack: ExitStack) -> socket.socket:
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    connected = stack.enter_context(socket.create_connection(listener.getsockname()))
    stack.enter_context(listener.accept()[0])
    return connected


TOLD: list[str] = []


@pytest.fixture
def all_of_them(stack: ExitStack) -> ShadowRecords:
    TOLD.clear()
    all_of_them = ShadowRecords(lambda what, *_: TOLD.append(what))
    stack.callback(all_of_them.close)
    return all_of_them


def found(*connections: socket.socket) -> Found:
    ends = tuple((one.fileno(), cookie_of(one)) for one in connections)
    return Found(os.getpid(), b"job", Role.PUSH, ends)


def kinds(all_of_them: ShadowRecords, now: int = 0) -> list[str]:
    """What was told since the last call, after a look."""
    all_of_them.look(now, "")
    told = TOLD.copy()
    TOLD.clear()
    return told


@contextmanager
def descriptors(more: int) -> Iterator[None]:
    """The lowest free one and those up to `more` above it can be opened meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def shadow_record() -> None:
    one = ShadowRecord(-1, found(), lambda *_: None, lambda _: None)
    one.close()
    one.reader.close()


def own_record() -> None:
    Record(4).close()


@pytest.mark.parametrize("make", [shadow_record, own_record])
def test_fail_open_whatever_descriptor_is_not_to_be_had_the_others_are_closed(
    make: Callable[[], None],
) -> None:
    before = open_fds()
    for more in range(64):
        with suppress(OSError), descriptors(more):
            make()
            break
        assert open_fds() == before
    assert more >= 2  # the memfd, its mapping
    assert open_fds() == before


def test_fail_open_without_descriptors_a_process_is_spoken_for_later(
    connection: socket.socket, all_of_them: ShadowRecords, caplog: pytest.LogCaptureFixture
) -> None:
    for more in (0, 0, 1):
        with descriptors(more):
            all_of_them.update([found(connection)], 0)
            assert kinds(all_of_them) == []
    assert len(caplog.records) == len({record.message for record in caplog.records}) >= 1
    all_of_them.update([found(connection)], 0)
    assert "joined" in kinds(all_of_them)


def test_a_connection_that_was_shut_down_and_is_kept_is_dropped_once(
    connection: socket.socket, all_of_them: ShadowRecords, caplog: pytest.LogCaptureFixture
) -> None:
    all_of_them.update([found(connection)], 0)
    assert "joined" in kinds(all_of_them)
    connection.shutdown(socket.SHUT_WR)
    assert kinds(all_of_them, 10 * SECOND)[-1] == "left"
    before = open_fds()
    for _ in range(3):
        all_of_them.update([found(connection)], 11 * SECOND)
        assert kinds(all_of_them, 12 * SECOND) == []
    assert open_fds() == before
    assert caplog.records == []  # nothing is wrong


def test_a_connection_that_was_closed_meanwhile_is_no_news(
    connection: socket.socket, all_of_them: ShadowRecords, caplog: pytest.LogCaptureFixture
) -> None:
    gone = found(connection)
    connection.close()
    all_of_them.update([gone], 0)
    assert kinds(all_of_them) == []
    assert caplog.records == []


def test_fail_open_a_file_that_takes_a_connections_number_is_not_kept_open(
    connection: socket.socket, all_of_them: ShadowRecords, caplog: pytest.LogCaptureFixture
) -> None:
    all_of_them.update([found(connection)], 0)
    assert "joined" in kinds(all_of_them)
    end, other = os.pipe()
    os.dup2(other, connection.fileno(), inheritable=False)
    os.close(other)
    assert kinds(all_of_them, 10 * SECOND)[-1] == "left"
    assert caplog.records == []
    connection.close()
    os.set_blocking(end, False)
    assert os.read(end, 1) == b""  # nobody has the other end
    os.close(end)


def test_a_refused_congestion_control_is_tried_again_and_a_selected_one_is_not(
    connection: socket.socket,
    all_of_them: ShadowRecords,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attempts: list[tuple[int, str]] = []
    enlist = sockets.enlist

    def counted(sock: socket.socket, name: str) -> None:
        attempts.append((second, name))
        if name == "reno" and second < 50:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        enlist(sock, name)

    monkeypatch.setattr(sockets, "enlist", counted)
    all_of_them.update([found(connection)], 0)
    for second in range(80):
        all_of_them.look(second * SECOND, "nonexistent" if second < 35 else "reno")
    again = shadow.AGAIN_NS // SECOND
    refused = [(at, "nonexistent") for at in range(0, 35, again)]
    assert attempts == [*refused, (35, "reno"), (35 + again, "reno"), (35 + 2 * again, "reno")]
    assert len(caplog.records) == 2
    assert "sockets cannot select nonexistent: No such file" in caplog.records[0].message
    assert connection.getsockopt(6, 13, 16).startswith(b"reno\0")
