# SPDX-License-Identifier: Apache-2.0
"""What comes over the network is not trusted: this test speaks the plugin's protocol (wire.h),
to a receiver that is loaded into this process."""

import ctypes
import shutil
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from waiting import settle

from .conftest import environment

MAGIC, VERSION, LANES = 0x31746C7366636E66, 2, 2
PIECE, NOTE = 0x65636570, 0x65746F6E
OK, REMOTE_ERROR = 0, 6
INIT, LISTEN, ACCEPT, RECEIVE, TEST, CLOSE_RECEIVE, CLOSE_LISTEN = 1, 4, 6, 11, 13, 15, 16
"""Places in the table of version 12."""


def hello(
    key: bytes,
    lane: int,
    *,
    magic: int = MAGIC,
    version: int = VERSION,
    lanes: int = LANES,
    connection: int = 1,
) -> bytes:
    return struct.pack("<QIHH16sQ", magic, version, lane, lanes, key, connection)


def piece(
    data: bytes,
    offset: int = 0,
    total: int | None = None,
    *,
    request: int = 0,
    length: int | None = None,
    magic: int = PIECE,
) -> bytes:
    head = (request, offset, len(data) if total is None else total)
    return struct.pack("<IIQQII", magic, *head, len(data) if length is None else length, 0) + data


@dataclass
class Message:
    """A receive that was posted. `size`: of what came, once it is `done`."""

    plugin: "Plugin"
    request: ctypes.c_void_p
    data: "ctypes.Array[ctypes.c_char]"
    done: bool = False
    size: int = -1

    def test(self) -> int:
        """The plugin's result."""
        done, size = ctypes.c_int(), ctypes.c_int()
        result = self.plugin.call(TEST, self.request, ctypes.byref(done), ctypes.byref(size))
        self.done, self.size = bool(done), size.value
        return result

    def fails(self) -> bool:
        return self.test() == REMOTE_ERROR


class Plugin:
    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self.table = (ctypes.c_void_p * 22).in_dll(library, "ncclNetPlugin_v12")
        self.context = ctypes.c_void_p()
        assert (
            self.call(INIT, ctypes.byref(self.context), ctypes.c_uint64(1), None, None, None) == OK
        )

    def call(self, place: int, *arguments: object) -> int:
        return int(ctypes.CFUNCTYPE(ctypes.c_int)(self.table[place])(*arguments))


@dataclass
class Receiver:
    """A comm that receives, and the sockets of its other end: two lanes, and control."""

    plugin: Plugin
    listener: ctypes.c_void_p
    address: tuple[str, int]
    key: bytes
    comm: ctypes.c_void_p = field(default_factory=ctypes.c_void_p)
    sockets: list[socket.socket] = field(default_factory=list)

    def connect(self, said: bytes) -> socket.socket:
        self.sockets.append(socket.create_connection(self.address))
        self.sockets[-1].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sockets[-1].sendall(said)
        return self.sockets[-1]

    def accept(self) -> bool:
        arguments = (self.listener, ctypes.byref(self.comm), None)
        assert self.plugin.call(ACCEPT, *arguments) == OK
        return bool(self.comm)

    def open(self) -> "Receiver":
        for lane in range(LANES + 1):
            self.connect(hello(self.key, lane))
        settle(self.accept)
        return self

    def post(self, room: int) -> Message:
        data, request = ctypes.create_string_buffer(room + 1), ctypes.c_void_p(1)
        at, size = ctypes.c_void_p(ctypes.addressof(data)), ctypes.c_size_t(room)
        tag, none = ctypes.c_int(0), ctypes.c_void_p()
        arguments = [ctypes.byref(value) for value in (at, size, tag, none, none, request)]
        assert self.plugin.call(RECEIVE, self.comm, 1, *arguments) == OK
        return Message(self.plugin, request, data)

    def close(self) -> None:
        for one in self.sockets:
            one.close()
        if self.comm:
            self.plugin.call(CLOSE_RECEIVE, self.comm)
        self.plugin.call(CLOSE_LISTEN, self.listener)


@pytest.fixture(scope="module", params=[0, 1], ids=["no-threads", "a-thread"])
def plugin(
    request: pytest.FixtureRequest, library: Path, tmp_path_factory: pytest.TempPathFactory
) -> Plugin:
    """Each copy is a library of its own, with settings of its own."""
    copy = shutil.copy(library, tmp_path_factory.mktemp("wire"))
    threads = str(request.param)
    each = {"NCCL_SOCKET_NTHREADS": threads, "NCCL_NSOCKS_PERTHREAD": str(LANES)}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(each | {"NCCL_IB_DISABLE": "1"}).items():
            patch.setenv(name, value)
        return Plugin(Path(copy))


@pytest.fixture
def receiver(plugin: Plugin) -> Iterator[Receiver]:
    handle, listener = ctypes.create_string_buffer(128), ctypes.c_void_p()
    arguments = (plugin.context, 0, handle, ctypes.byref(listener))
    assert plugin.call(LISTEN, *arguments) == OK
    address = socket.inet_ntoa(handle.raw[16:20])
    (port,) = struct.unpack_from("<H", handle.raw, 32)
    made = Receiver(plugin, listener, (address, port), handle.raw[40:56])
    try:
        yield made
    finally:
        made.close()


def test_what_comes_byte_by_byte_is_put_together(receiver: Receiver) -> None:
    """Hellos and pieces, of two messages at once."""
    for lane in range(LANES + 1):
        said = hello(receiver.key, lane)
        other = receiver.connect(said[:1])
        for at in range(1, len(said)):
            receiver.accept()
            other.sendall(said[at : at + 1])
    settle(receiver.accept)
    first, second = receiver.post(10), receiver.post(4)
    said = piece(b"world", 5, 10) + piece(b"", request=1)
    for at in range(len(said)):
        assert first.test() == OK and not first.done
        receiver.sockets[1].sendall(said[at : at + 1])
    settle(lambda: second.test() == OK and second.done)
    assert second.size == 0
    receiver.sockets[0].sendall(piece(b"hello", 0, 10))
    settle(lambda: first.test() == OK and first.done)
    assert (first.size, first.data.value) == (10, b"helloworld")


HALF = piece(b"12345", 0, 10)
BAD = {
    "larger than the receive": piece(b"x" * 11, total=11),
    "changed its size": HALF + piece(b"1234", 5, 9),
    "lies outside": piece(b"12345", 6, 10),
    "lies outside of": piece(b"12345", 2**64 - 1, 10),
    "lies outside of its": piece(b"", 0, 10, length=2**32 - 1),
    "pieces overlap": HALF + piece(b"123456", 0, 10),
    "piece is empty": piece(b"", 0, 10),
    "message that is complete": piece(b"12345", request=2**32 - 1),
    "speaks another protocol": piece(b"12345", magic=PIECE + 1),
}


@pytest.mark.parametrize("said", BAD)
def test_a_wrong_piece_is_an_error(
    receiver: Receiver, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing is written outside of the receive's memory, nor is anything waited for."""
    message = receiver.open().post(10)
    message.data[10] = b"\xa5"
    receiver.sockets[0].sendall(BAD[said])
    settle(message.fails)
    settle(lambda: said in capfd.readouterr().err)  # a thread says so when it has failed
    assert message.data[10] == b"\xa5"


def test_a_wrong_note_is_an_error(receiver: Receiver, capfd: pytest.CaptureFixture[str]) -> None:
    message = receiver.open().post(10)
    receiver.sockets[LANES].sendall(struct.pack("<Iii", NOTE + 1, 0, 0))
    settle(message.fails)
    settle(lambda: "speaks another protocol" in capfd.readouterr().err)


END: dict[str, Callable[[list[socket.socket]], None]] = {
    "within a header": lambda lanes: lanes[0].sendall(HALF[:20]),
    "within a piece": lambda lanes: lanes[0].sendall(HALF[:-1]),
    "between pieces": lambda lanes: lanes[0].sendall(HALF),
    "with a later message": lambda lanes: lanes[1].sendall(piece(b"12345", request=1)),
}


@pytest.mark.parametrize("where", END)
def test_an_end_is_an_error_at_once(receiver: Receiver, where: str) -> None:
    message = receiver.open().post(10)
    END[where](receiver.sockets)
    for one in receiver.sockets:
        one.close()
    began = time.monotonic()
    settle(message.fails)
    assert time.monotonic() - began < 1


def test_what_came_before_the_end_is_received(receiver: Receiver) -> None:
    """Also a message that is posted only then, of which a piece came first on each lane."""
    first = receiver.open().post(10)
    receiver.sockets[0].sendall(HALF + piece(b"abc", 0, 6, request=1))
    receiver.sockets[1].sendall(piece(b"67890", 5, 10) + piece(b"def", 3, 6, request=1))
    for one in receiver.sockets:
        one.close()
    settle(lambda: first.test() == OK and first.done)
    second = receiver.post(6)
    settle(lambda: second.test() == OK and second.done)
    assert (first.data.value, second.data.value) == (b"1234567890", b"abcdef")


@pytest.mark.parametrize(
    "wrong",
    [
        {"magic": MAGIC + 1},
        {"version": VERSION + 1},
        {"key": bytes(16)},
        {"lane": LANES + 1},
        {"lanes": LANES + 1},
        {"connection": 0},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_stranger_is_dropped_and_delays_nobody(
    receiver: Receiver, wrong: dict[str, int | bytes]
) -> None:
    said = {"key": receiver.key, "lane": 0} | wrong
    stranger = receiver.connect(hello(**said))  # type: ignore[arg-type]
    receiver.sockets.clear()
    message = receiver.open().post(10)
    receiver.sockets[0].sendall(piece(b"1234567890"))
    settle(lambda: message.test() == OK and message.done)
    stranger.settimeout(5)
    with suppress(ConnectionResetError), stranger:
        assert stranger.recv(1) == b""


def test_a_lane_that_comes_twice_is_dropped(receiver: Receiver) -> None:
    receiver.connect(hello(receiver.key, 0))
    twice = receiver.connect(hello(receiver.key, 0))
    assert not receiver.accept()
    twice.settimeout(5)
    with suppress(ConnectionResetError):
        assert twice.recv(1) == b""
