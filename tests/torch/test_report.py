# SPDX-License-Identifier: Apache-2.0
"""What is seen of the connections that carry gradients: real sockets, a clock of ours."""

import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from waiting import settle

from flowslot_torch import report
from flowslot_torch.report import Reporter
from flowslot_torch.sockets import Borrowed, cookie_of

BYTES = 40_000


class Peers:
    """All connections that are `known` go to rank 1."""

    def __init__(self) -> None:
        self.known: set[int] = set()

    def rank_of(self, sock: Borrowed) -> int | None:
        return 1 if sock.cookie in self.known else None

    def news(self) -> bool:
        return False

    def looking(self) -> bool:
        return False

    def look_up(self, _: Any) -> None: ...

    def close(self) -> None: ...


class Training:
    """Iterations of 10 ms that send BYTES of gradients, over a connection that can be another."""

    def __init__(self, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.asked, self.peers, self.sent = 5.0, 0, Peers(), BYTES
        self.reporter = Reporter("job", 0, self.peers, path)  # type: ignore[arg-type]
        monkeypatch.setattr(report.time, "monotonic", lambda: self.now)
        acked = Borrowed.acked
        monkeypatch.setattr(Borrowed, "acked", lambda one: self.count() or acked(one))
        self.connect()

    def count(self) -> None:
        self.asked += 1

    def connect(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.sock = socket.create_connection(listener.getsockname())
            self.other, _ = listener.accept()
        self.peers.known = {cookie_of(self.sock)}

    def close(self) -> None:
        self.sock.close()
        self.other.close()

    def iterate(self, count: int) -> None:
        for _ in range(count):
            self.reporter.begin()
            self.now += 0.01
            self.reporter.ready(BYTES)
            reader = threading.Thread(target=self.read)
            reader.start()
            self.sock.sendall(bytes(self.sent))
            reader.join()
            settle(lambda: self.unacked() == 0)
            self.reporter.complete()

    def read(self) -> None:
        left = self.sent
        while left:
            left -= len(self.other.recv(left))

    def unacked(self) -> int:
        info = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        return int.from_bytes(info[24:28], "little")  # tcpi_unacked

    def shares(self) -> dict[int, float]:
        return {cookie: one.share for cookie, one in self.reporter._carriers.items()}


@pytest.fixture
def training(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Training]:
    with closing(Training(str(tmp_path / "none"), monkeypatch)) as made:
        yield made
        made.reporter.close()


def test_steady_shares_are_rarely_asked_for(training: Training) -> None:
    training.iterate(100)
    assert training.shares() == {cookie_of(training.sock): pytest.approx(1.0, rel=0.01)}
    # In one second about five times, at its beginning, and where all connections are looked at.
    assert 4 <= training.asked <= 14 and training.reporter.error == ""


def test_a_share_that_changes_and_a_connection_that_goes_are_seen_soon(training: Training) -> None:
    training.iterate(30)
    training.sent = BYTES // 2
    training.iterate(23)  # 0.2 s, and an iteration after what was seen of both
    assert training.shares() == {cookie_of(training.sock): pytest.approx(0.5, rel=0.01)}
    training.iterate(10)
    training.close()
    training.connect()
    training.iterate(24)
    assert training.shares() == {cookie_of(training.sock): pytest.approx(0.5, rel=0.01)}
