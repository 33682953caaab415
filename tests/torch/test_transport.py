# SPDX-License-Identifier: Apache-2.0
"""Plain TCP sockets as a transport: strangers, liars, and peers that are gone."""

import json
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from collectives import KEY, Listeners, in_threads
from waiting import settle

from flowslot_torch.engines import NumpyEngine
from flowslot_torch.operations import Operations
from flowslot_torch.peers import Peers, parse
from flowslot_torch.program import Program
from flowslot_torch.sockets import Borrowed
from flowslot_torch.tasks import TaskManager
from flowslot_torch.transport import PeerLost


def summed(rank: int, listeners: Listeners, **more: Any) -> Any:
    transport = listeners.tcp(rank, **more)
    mine = np.full(100_000, rank + 1.0, "float32")
    ops = Operations(NumpyEngine(), transport)
    ops.allreduce(mine)
    ops.barrier()
    return set(mine.tolist())


def test_strangers_are_not_let_in_and_keep_nobody_waiting() -> None:
    listeners = Listeners(3)
    strangers = [socket.create_connection(listeners.addresses[0]) for _ in range(5)]
    strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
    strangers[1].sendall(b"flowsdcc" + bytes(200))
    strangers[2].sendall(b"flowsdcc")
    strangers[3].close()  # the last one is silent
    strangers += [socket.create_connection(listeners.addresses[0]) for _ in range(70)]
    results = in_threads(3, lambda rank: summed(rank, listeners))
    assert results == [{6.0}] * 3


@pytest.mark.parametrize("other", [{"key": b"another"}, {"epoch": 7}])
def test_another_key_or_epoch_is_no_member(other: dict[str, Any]) -> None:
    listeners = Listeners(2)
    results = in_threads(
        2, lambda rank: summed(rank, listeners, timeout_s=0.5, **(other if rank else {}))
    )
    assert [type(error) for error in results] == [PeerLost] * 2
    assert "rank 1: did not connect within 0.5 s" in str(results[0])
    assert str(results[1]).startswith("rank 0: at (")  # closed, refused or silent: who is first


def gone(sock: socket.socket) -> None:
    sock.close()


def longer(sock: socket.socket) -> None:
    sock.sendall(struct.pack("!4sQ", b"fsdm", 1 << 62) + bytes(1000))


def garbage(sock: socket.socket) -> None:
    sock.sendall(bytes(range(256)) * 10)


def short(sock: socket.socket) -> None:
    sock.sendall(struct.pack("!4sQ", b"fsdm", 536) + bytes(3))
    sock.close()


def many(sock: socket.socket) -> None:
    """A message of coordination that tells of impossible tensors."""
    told = np.zeros(3 + 64, np.int64)
    told[1] = 1 << 40
    sock.sendall(struct.pack("!4sQ", b"fsdm", told.nbytes) + told.tobytes())


def silent(sock: socket.socket) -> None:
    threading.Event().wait(2)


@pytest.mark.parametrize("lie", [gone, longer, garbage, short, many, silent])
def test_a_peer_that_is_gone_or_lies_is_one_clear_error(lie: Callable[[Any], None]) -> None:
    """Rank 1 of 2 joins properly, and then does as it likes."""
    listeners = Listeners(2)

    def body(rank: int) -> None:
        transport = listeners.tcp(rank, timeout_s=1.0)
        if rank == 1:
            return lie(transport.sockets()[0])
        tasks = TaskManager(Program(), NumpyEngine(), transport)
        tasks.enqueue(0, np.ones(10_000, "float32"))
        return tasks.wait(0)  # type: ignore[func-returns-value]

    error = in_threads(2, body)[0]
    expected = {
        gone: "rank 1: ",
        longer: "rank 1: sends 4611686018427387904 bytes where 536 are right",
        garbage: "rank 1: sends",
        short: "rank 1: ",  # or our end breaks first
        many: "rank 1: tells of 1099511627776 tensors",
        silent: "rank 1: is silent",
    }
    assert isinstance(error, PeerLost | ValueError) and str(error).startswith(expected[lie])


def test_a_peer_that_reads_slowly_is_not_silent() -> None:
    """A message may take longer than the timeout, while it moves."""
    sent = memoryview(bytearray(32 << 20))
    listeners = Listeners(2)

    def body(rank: int) -> None:
        transport = listeners.tcp(rank, timeout_s=0.5)
        if rank == 0:
            return transport.send(sent, 1).wait()
        left = sent.nbytes + 12
        while left:
            left -= len(transport.sockets()[0].recv(min(left, 1 << 20)))
            time.sleep(0.03)
        return None

    assert in_threads(2, body) == [None, None]


def test_after_close_nothing_waits() -> None:
    def body(rank: int) -> None:
        transport = listeners.tcp(rank)
        assert KEY and transport.members == (0, 1)
        transport.close()
        with pytest.raises(PeerLost, match="closed here"):
            transport.send(memoryview(bytearray(4)), 1 - rank).wait()
        with pytest.raises(PeerLost):
            transport.receive(memoryview(bytearray(4)), 1 - rank).wait()
        with pytest.raises(ValueError, match="rank: must be another one"):
            transport.send(memoryview(bytearray(4)), 5)

    listeners = Listeners(2)
    assert in_threads(2, body) == [None, None]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[1]",
        b"{}x",
        b'{"a": 1}',
        b"[[[1], [2]]]",
        b"[" * 100_000,
        b'[[["a", "b"], ["c", 1]]]',
        b'[[["a", Infinity], ["b", 1]]]',
    ],
)
def test_what_a_rank_publishes_is_checked(raw: bytes) -> None:
    with pytest.raises(ValueError, match="connections of rank 3: must be"):
        parse(raw, "connections of rank 3")


def test_a_connection_leads_to_the_rank_that_published_it_turned_round() -> None:
    def sock(local: tuple[str, int], remote: tuple[str, int]) -> Borrowed:
        return Borrowed(3, 1, socket.AF_INET, local, remote)

    here, there = ("10.0.0.1", 1000), ("10.0.0.2", 2000)
    store: dict[str, bytes] = {"flowslot/connections/1": json.dumps([[there, here]]).encode()}
    store["flowslot/connections/2"] = b"nonsense"

    class Shared:
        def set(self, key: str, value: str) -> None:
            store[key] = value.encode()

        def get(self, key: str) -> bytes:
            return store[key]

        def check(self, keys: list[str]) -> bool:
            return all(key in store for key in keys)

    peers = Peers(0, 3, Shared)
    mine, other = sock(here, there), sock(here, ("10.0.0.9", 1))
    peers.look_up([mine, other])
    settle(lambda: peers.rank_of(mine) == 1 or None, 5)
    assert peers.news() and not peers.news() and peers.rank_of(other) is None
    assert json.loads(store["flowslot/connections/0"]) == [
        [list(here), ["10.0.0.2", 2000]],
        [list(here), ["10.0.0.9", 1]],
    ]
    peers.close()
