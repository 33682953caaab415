# SPDX-License-Identifier: Apache-2.0
"""Standing grants in the daemon's book."""

from flowslot.protocol.grantbook import GrantBook, Granted

from flowslot.model.units import MILLISECOND, Nanos
from flowslot.protocol.messages import Grant, Held

MS = int(MILLISECOND)
LEASE = 120


def grant(seq: int, rate: float, standing: bool) -> Grant:
    return Grant(7, 1, seq, rate, 100.0, False, standing)


def test_the_book_reports_a_change_of_standing_alone() -> None:
    book = GrantBook("h1#1", Nanos(LEASE * MS))
    book.connect(Nanos(0), 1)
    now = Nanos(MS)
    assert book.receive(now, 1, [grant(1, 50.0, False)]).raised == [Granted(7, 50.0, 100.0)]
    for seq, standing in ((2, True), (4, False), (6, True)):
        changes = book.receive(now, 1, [grant(seq, 50.0, standing)])
        assert changes.raised == [Granted(7, 50.0, 100.0, standing)]
        assert not changes.lowered and not changes.acks
        assert book.grant(7).standing is standing
        assert not book.receive(now, 1, [grant(seq + 1, 50.0, standing)]).raised, "nothing new"
    lowered = book.receive(now, 1, [grant(8, 20.0, True)]).lowered
    assert lowered == [Granted(7, 20.0, 100.0, True)]


def test_the_book_forgets_it_with_the_stream_and_hears_it_again() -> None:
    book = GrantBook("h1#1", Nanos(LEASE * MS))
    book.connect(Nanos(0), 1)
    book.receive(Nanos(MS), 1, [grant(9, 50.0, True)])
    assert book.connect(Nanos(2 * MS), 2).held == (Held(7, 1, 50.0),)
    assert book.grant(7) == Granted(7, 50.0, 100.0, False), "the rate is kept, the promise is not"
    assert book.receive(Nanos(3 * MS), 2, [grant(1, 50.0, True)]).raised
    assert book.grant(7).standing
