# SPDX-License-Identifier: Apache-2.0
"""Which of its own files a switch process shuts down, and how much one caller may have."""

import os
import socket

import pytest

from flowslot_switch.caller import owner_of
from flowslot_switch.guard import Connection, Guard
from flowslot_switch.limits import Quota


def test_of_ipv6_a_network_counts_as_one_address() -> None:
    near = {owner_of(f"2001:db8::{end}") for end in ("1", "2", "ffff:0:0:3%eth0")}
    assert near == {"2001:db8::/64"} and owner_of("2001:db8:0:1::1") not in near
    assert owner_of("::ffff:10.0.0.1") == owner_of("10.0.0.1") == "10.0.0.1"


def test_calls_have_a_limit_each_and_in_all() -> None:
    quota = Quota(5, 2)
    assert [quota.take(who) for who in "aaabbcc"] == [True, True, False, True, True, True, False]
    quota.give_back("a")
    assert quota.take("c") and not quota.take("d") and not quota.take("a")


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
