# SPDX-License-Identifier: Apache-2.0
"""Which of its own files a switch process shuts down."""

import os
import socket
from contextlib import ExitStack

import pytest

from flowslot_switch.caller import peer_name
from flowslot_switch.guard import Guard


def test_a_number_that_is_another_sockets_by_now_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """gRPC closes and opens files meanwhile."""
    guard = Guard(lambda *_: None)
    look = guard._look
    with ExitStack() as stack:
        monkeypatch.setattr(guard._files, "lifted", ExitStack)
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        caller = stack.enter_context(socket.create_connection(listener.getsockname()))
        ours = stack.enter_context(listener.accept()[0])
        one, other = (stack.enter_context(end) for end in socket.socketpair())

        def then_reused() -> object:
            found = look()
            os.dup2(one.fileno(), ours.fileno())
            return found

        monkeypatch.setattr(guard, "_look", then_reused)
        monkeypatch.setattr(guard, "_port", listener.getsockname()[1])
        guard.cut(peer_name(*caller.getsockname()))
        assert caller.recv(1) == b""
        other.send(b"on")
        assert one.recv(2) == b"on"
