# SPDX-License-Identifier: Apache-2.0
"""A borrower uses its lender's rate while the lender has nothing left to send."""

import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from flowslotd.pace.bpf import BpfPacer
from flowslotd.pace.pacer import PaceEntry, pack

from .conformance import MB, later
from .traffic import soon

pytestmark = pytest.mark.root


def entry(flow: Any, rate: float, ceiling: float = 12 * MB) -> PaceEntry:
    return PaceEntry(flow.cookie, rate, ceiling, guaranteed=True, growth=0.0)


class Pair:
    """A lender of 6 MB/s whose iteration has 100 kB, and a borrower of 1 MB/s, always busy."""

    def __init__(self, pacer: BpfPacer, flows: Callable[..., Any]) -> None:
        self.pacer = pacer
        self.lender, self.borrower = flows(busy=False), flows()
        for flow in (self.lender, self.borrower):
            flow.enlist(pacer.congestion_control)
        pacer.apply(pack([entry(self.lender, 6 * MB), entry(self.borrower, MB)]), later())
        self.acked = self._acked()
        self.announce(100_000)
        pacer.lend({self.borrower.cookie: self.lender.cookie})

    def announce(self, size: int) -> None:
        """The lender's iteration ends after so many bytes from now on."""
        self.end = self.acked + size
        self.pacer.watch(self.lender.cookie, self.end)

    def _acked(self) -> int:
        return int(self._stat()["acked"])

    def _stat(self) -> Any:
        row = self.pacer.stat(self.lender.cookie)
        assert row is not None
        return row[0]

    def send(self, size: int) -> None:
        """By the lender, until all is acknowledged and our program has seen it.

        A hardened kernel may not run programs above a task that it protects, here the first
        process: if that was so at the last acknowledgement, there is another one.
        """
        self._write(size)
        for _ in range(5):
            if soon(lambda: self._acked() == self.acked, 2):
                return
            assert soon(lambda: self._acked_of_tcp() == self.acked), "lost by TCP itself"
            if self.acked == self.end:
                self.announce(1)
            self._write(1)
        raise AssertionError(f"of {self.acked} bytes our program has seen {self._stat()}")

    def _write(self, size: int) -> None:
        self.lender.sock.sendall(bytes(size))
        self.acked += size

    def _acked_of_tcp(self) -> int:
        info = self.lender.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128)
        return int.from_bytes(info[120:128], sys.byteorder)


@pytest.fixture
def pair(pacer: BpfPacer, flows: Callable[..., Any]) -> Pair:
    return Pair(pacer, flows)


def test_the_borrower_has_its_lenders_rate_while_that_has_drained(pair: Pair) -> None:
    pair.send(60_000)
    assert pair.borrower.comes_to(MB), "its lender has something left"
    pair.send(40_000)
    assert pair.borrower.comes_to(7 * MB)
    pair.send(10_000)  # the next iteration has begun, nobody has reported it yet
    assert pair.borrower.comes_to(MB)


def test_more_than_was_announced_is_no_end(pair: Pair) -> None:
    pair.send(400_000)
    assert pair.borrower.comes_to(MB)


def test_it_is_what_the_lender_has_at_that_moment(pair: Pair) -> None:
    pair.send(100_000)
    assert pair.borrower.comes_to(7 * MB)
    pair.pacer.apply(pack([entry(pair.lender, 2 * MB)]), later())
    assert pair.borrower.comes_to(3 * MB)
    pair.pacer.apply(pack([entry(pair.lender, 0), entry(pair.borrower, 8 * MB)]), later())
    assert pair.borrower.comes_to(8 * MB)


@pytest.mark.parametrize("how", ["nobody lends", "another lender", "entry lapses", "lender leaves"])
def test_it_ends(pair: Pair, flows: Callable[..., Any], how: str) -> None:
    pair.send(100_000)
    assert pair.borrower.comes_to(7 * MB)
    if how == "nobody lends":
        pair.pacer.lend({})
    elif how == "another lender":
        pair.pacer.lend({pair.borrower.cookie: flows(busy=False).cookie})
    elif how == "entry lapses":
        pair.pacer.apply(pack([entry(pair.lender, 6 * MB)]), time.monotonic_ns() - 1)
    else:
        pair.lender.stop()
    assert pair.borrower.comes_to(MB)


def test_a_flow_that_was_let_go_lends_to_nobody_when_it_is_paced_again(pair: Pair) -> None:
    pair.pacer.release(pair.lender.cookie)
    pair.pacer.lend({})
    pair.pacer.apply(pack([entry(pair.lender, 6 * MB)]), later())
    pair.announce(100_000)
    pair.send(100_000)
    assert pair.borrower.comes_to(MB)


def test_a_target_moves_on(pair: Pair) -> None:
    pair.send(100_000)
    assert pair.borrower.comes_to(7 * MB)
    pair.announce(50_000)
    assert pair.borrower.comes_to(MB)
    pair.send(50_000)
    assert pair.borrower.comes_to(7 * MB)
