# SPDX-License-Identifier: Apache-2.0
import math

import pytest
from flowslot.protocol.grantbook import GrantBook, Granted

from flowslot.model.units import Nanos
from flowslot.protocol.messages import Ack, Done, Grant, Held

LEASE = Nanos(120)


def at(time: int) -> Nanos:
    return Nanos(time)


def connected(session: int = 1) -> GrantBook:
    book = GrantBook("h1#1", LEASE)
    hello = book.connect(at(0), session)
    assert (hello.daemon, hello.session, hello.held) == ("h1#1", session, ())
    return book


def grant(seq: int, rate: float, *, flow: int = 7, inc: int = 1, must_ack: bool = False) -> Grant:
    return Grant(flow, inc, seq, rate, 100.0, must_ack)


def test_changes_and_acks() -> None:
    book = connected()
    up = book.receive(at(1), 1, [grant(1, 50.0), grant(2, 20.0, flow=8)])
    assert (
        up.raised == [Granted(7, 50.0, 100.0), Granted(8, 20.0, 100.0)]
        and not up.lowered
        and not up.acks
    )
    down = book.receive(at(2), 1, [grant(3, 10.0, must_ack=True)])
    assert down.lowered == [Granted(7, 10.0, 100.0)] and down.acks == [Ack(7, 1, 3)]
    assert book.grant(7) == Granted(7, 10.0, 100.0)
    assert book.grant(99) == Granted(99, 0.0, 0.0) and 99 not in book


def test_repeated_outdated_and_foreign_grants_change_nothing() -> None:
    book = connected(session=5)
    book.receive(at(1), 5, [grant(2, 50.0)])
    for late in ([grant(1, 90.0)], [grant(2, 50.0)]):
        assert not book.receive(at(2), 5, late).raised
    assert not book.receive(at(2), 4, [grant(9, 90.0)]).raised
    assert book.grant(7).rate == 50.0


def test_a_dropped_flow_stays_dropped_until_its_next_life() -> None:
    book = connected()
    book.receive(at(1), 1, [grant(1, 50.0, inc=3)])
    assert book.drop(7, 2) == Done(7, 3)
    assert book.receive(at(2), 1, [grant(2, 60.0, inc=3, must_ack=True)]).acks == []
    assert 7 not in book
    book.receive(at(3), 1, [grant(3, 30.0, inc=4)])
    assert book.grant(7).rate == 30.0


def test_reconnect_keeps_and_lists_what_is_under_lease() -> None:
    book = connected()
    book.receive(at(1), 1, [grant(9, 50.0)])
    hello = book.connect(at(50), 2)
    assert hello.held == (Held(7, 1, 50.0),)
    assert not book.receive(at(51), 1, [grant(10, 90.0)]).raised  # the old stream
    assert book.receive(at(52), 2, [grant(1, 40.0, must_ack=True)]).acks  # numbers start anew
    with pytest.raises(ValueError, match="not greater"):
        book.connect(at(60), 2)


def test_lease_counts_from_the_sending_of_an_echoed_heartbeat() -> None:
    book = connected()
    book.receive(at(1), 1, [grant(1, 50.0)])
    assert book.lease_end == 120
    book.sent_heartbeat(at(30), 1)
    book.sent_heartbeat(at(60), 2)
    book.echoed(at(100), 1)
    assert book.lease_end == 150
    book.echoed(at(101), 1)  # again
    book.echoed(at(101), 99)  # never sent
    assert book.lease_end == 150
    assert not book.expired(at(149))
    assert book.expired(at(150))
    # Too late: the arbiter may have given everything away.
    book.echoed(at(151), 2)
    assert book.expired(at(151)) and book.grant(7) == Granted(7, 0.0, 0.0) and book.session is None
    assert not book.receive(at(152), 1, [grant(2, 50.0)]).raised
    assert book.connect(at(160), 2).held == ()
    assert not book.expired(at(161))


def test_grants_of_a_stream_that_has_ended_are_kept_for_a_while_only() -> None:
    book = connected()
    book.receive(at(1), 1, [grant(1, 50.0)])
    book.cut(at(200))
    assert book.lease_end == 120, "not made longer"
    book.cut(at(80))
    assert book.lease_end == 80
    assert book.connect(at(70), 2).held == (Held(7, 1, 50.0),)
    assert book.lease_end == 80, "not before it is answered"
    book.receive(at(75), 2, [grant(1, 40.0)])
    assert book.lease_end == 190
    book.cut(at(100))
    assert book.expired(at(100)) and book.connect(at(101), 3).held == ()


def test_an_echo_of_the_old_stream_does_not_extend_the_lease() -> None:
    book = connected()
    book.sent_heartbeat(at(50), 1)
    book.connect(at(60), 2)
    book.echoed(at(70), 1)
    assert book.lease_end == 120


@pytest.mark.parametrize("rate", [math.nan, math.inf, -1.0])
def test_nonsense_counts_as_nothing(rate: float) -> None:
    book = connected()
    book.receive(at(1), 1, [grant(1, 50.0), grant(2, rate)])
    assert book.grant(7).rate == 0.0


def test_a_grant_given_back_is_named_until_the_next_one_comes() -> None:
    book = connected()
    assert book.give_back(7) is None and book.given_back(7) == 0  # there is none
    book.receive(at(1), 1, [grant(5, 50.0)])
    assert book.give_back(7) == Granted(7, 0.0, 100.0)
    assert book.given_back(7) == 5
    assert book.give_back(7) is None  # once
    assert not book.receive(at(2), 1, [grant(5, 50.0)]).raised  # the same again
    assert book.given_back(7) == 5
    lower = book.receive(at(3), 1, [grant(6, 10.0, must_ack=True)])  # was on its way
    assert lower.raised == [Granted(7, 10.0, 100.0)] and lower.acks == [Ack(7, 1, 6)]
    assert book.given_back(7) == 0


def test_a_new_stream_says_what_is_held_instead_of_what_was_given_back() -> None:
    book = connected()
    book.receive(at(1), 1, [grant(5, 50.0)])
    book.give_back(7)
    assert book.connect(at(2), 2).held == (Held(7, 1, 0.0),)
    assert book.given_back(7) == 0
    assert book.give_back(7) is None
