# SPDX-License-Identifier: Apache-2.0
"""Which of its own files a switch process shuts down."""

import os
import socket

import pytest

from flowslot_switch.guard import Connection, Guard


def test_only_the_socket_that_was_found_is_shut(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC closes and opens files meanwhile: a number may be another one's by now."""
    guard, (one, other) = Guard(lambda *_: None), socket.socketpair()

    def cut(number: int) -> None:
        found = 1, [(number, one.fileno(), Connection("127.0.0.1", "peer"))]
        monkeypatch.setattr(guard, "_look", lambda: found)
        guard.cut("peer")

    with one, other:
        mine = os.fstat(one.fileno()).st_ino
        cut(mine + 1)
        other.send(b"on")
        assert one.recv(2) == b"on"
        cut(mine)
        assert other.recv(2) == b""
