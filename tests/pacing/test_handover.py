# SPDX-License-Identifier: Apache-2.0
"""A borrower uses its lender's rate while the lender has nothing left to send."""

from contextlib import suppress

import pytest
from waiting import settle

from flowslotd.pace.bpf import BpfPacer
from flowslotd.sockets import look

from .conformance import LONG, MB, Flows, apply, entry, stat

pytestmark = pytest.mark.root


class Pair:
    """A lender of 6 MB/s whose iteration has 100 kB, and a borrower of 1 MB/s, always busy."""

    def __init__(self, pacer: BpfPacer, enlisted: Flows) -> None:
        self.pacer = pacer
        self.lender, self.borrower = enlisted(busy=False), enlisted()
        self.grant(lender=6 * MB, borrower=MB)
        self.sent = self._sent()
        self.announce(100_000)
        pacer.lend({self.borrower.cookie: self.lender.cookie})

    def grant(self, lasts: int = LONG, **rates: float) -> None:
        """These rates to the `lender`, the `borrower` or both."""
        wanted = (entry(getattr(self, who), rate, ceiling=12 * MB) for who, rate in rates.items())
        apply(self.pacer, *wanted, lasts=lasts)

    def announce(self, size: int) -> None:
        """The lender's iteration ends after so many bytes from now on."""
        self.end = self.sent + size
        self.pacer.watch(self.lender.cookie, self.end)

    def _sent(self) -> int:
        return int(stat(self.pacer, self.lender)["sent"])

    def send(self, size: int) -> None:
        """By the lender, until our program has seen it.

        A hardened kernel may not run programs above a task that it protects, here the first
        process: if that was so at the last transmission, there is another one.
        """
        self._write(size)
        for _ in range(5):
            with suppress(AssertionError):
                settle(lambda: self._sent() == self.sent, 2)
                return
            settle(lambda: look(self.lender.sock).acked == self.sent)  # or TCP itself has lost it
            if self.sent == self.end:
                self.announce(1)
            self._write(1)
        raise AssertionError(f"of {self.sent} bytes our program has seen {self._sent()}")

    def _write(self, size: int) -> None:
        self.lender.sock.sendall(bytes(size))
        self.sent += size


@pytest.fixture
def pair(pacer: BpfPacer, enlisted: Flows) -> Pair:
    return Pair(pacer, enlisted)


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
    pair.grant(lender=2 * MB)
    assert pair.borrower.comes_to(3 * MB)
    pair.grant(lender=0, borrower=8 * MB)
    assert pair.borrower.comes_to(8 * MB)


@pytest.mark.parametrize(
    "how", ["nobody lends", "another lender", "entry lapses", "lender leaves", "target moves on"]
)
def test_it_ends(pair: Pair, flows: Flows, how: str) -> None:
    pair.send(100_000)
    assert pair.borrower.comes_to(7 * MB)
    if how == "nobody lends":
        pair.pacer.lend({})
    elif how == "another lender":
        pair.pacer.lend({pair.borrower.cookie: flows(busy=False).cookie})
    elif how == "entry lapses":
        pair.grant(lender=6 * MB, lasts=-1)
    elif how == "lender leaves":
        pair.lender.stop()
    else:
        pair.announce(50_000)
    assert pair.borrower.comes_to(MB)
    if how == "target moves on":
        pair.send(50_000)
        assert pair.borrower.comes_to(7 * MB)


def test_a_flow_that_was_let_go_lends_to_nobody_when_it_is_paced_again(pair: Pair) -> None:
    pair.pacer.release(pair.lender.cookie)
    pair.pacer.lend({})
    pair.grant(lender=6 * MB)
    pair.announce(100_000)
    pair.send(100_000)
    assert pair.borrower.comes_to(MB)
