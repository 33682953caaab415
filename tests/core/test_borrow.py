# SPDX-License-Identifier: Apache-2.0
"""Rates that become free without waiting: given back, or lent within one host and path."""

import pytest
from arbiters import Bench


def test_a_flow_of_the_same_host_and_path_borrows_at_once() -> None:
    b = Bench({7: (1, 0, 1), 8: (1, 0, 1)})
    b.step(f7=100.0)
    both = b.step(f7=0.0, f8=100.0)
    assert list(both) == [(1, 7), (1, 8)], "the lower comes first"
    assert both[1, 7].must_ack and both[1, 7].rate == 0.0 and both[1, 8].rate == 100.0
    assert b.committed() == [100.0, 100.0], "counted once"
    b.demand(9, 0, session=2)
    assert b.step(f9=50.0) == {}, "nothing is free"
    b.ack(both[1, 7])
    assert b.step() == {}
    assert b.committed() == [100.0, 100.0]


def test_what_is_free_is_given_on_top() -> None:
    b = Bench({7: (1, 0), 8: (1, 0)})
    b.step(f7=60.0)
    both = b.step(f7=20.0, f8=80.0)
    assert both[1, 8].rate == 80.0, "40 borrowed, 40 free"
    assert b.committed()[0] == 100.0


@pytest.mark.parametrize("other", [(2, 0), (1, 0, 1)], ids=["host", "path"])
def test_others_wait_for_the_acknowledgement(other: tuple[int, ...]) -> None:
    b = Bench({7: (1, 0), 8: other})
    b.step(f7=100.0)
    lower = b.step(f7=0.0, f8=100.0)
    assert list(lower) == [(1, 7)]
    b.ack(lower[1, 7])
    assert [grant.rate for grant in b.step().values()] == [100.0]


def test_an_older_lower_that_is_not_acknowledged_stands_in_the_way() -> None:
    b = Bench({7: (1, 0), 8: (1, 0)})
    b.step(f7=100.0)
    b.step(f7=60.0)
    lower = b.step(f7=0.0, f8=100.0)
    assert list(lower) == [(1, 7)], "until then it may send 100"
    b.ack(lower[1, 7])
    assert b.step()[1, 8].rate == 100.0


def test_a_borrower_that_goes_leaves_the_commitment_where_it_was() -> None:
    """Its Done may be older than the message in which it borrows: nothing was lowered then."""
    b = Bench({7: (1, 0), 8: (1, 0)})
    b.step(f7=100.0)
    both = b.step(f7=0.0, f8=100.0)
    b.done(8)
    assert b.committed()[0] == 100.0
    b.demand(9, session=2)
    assert b.step(f9=100.0) == {}
    b.ack(both[1, 7])
    assert b.step()[2, 9].rate == 100.0


def test_several_lend_to_one_and_one_lends_to_one() -> None:
    b = Bench()
    for flow in (6, 7, 8, 9):
        b.demand(flow)
    b.step(f6=50.0, f7=50.0)
    all_at_once = b.step(f6=0.0, f7=0.0, f8=100.0)
    assert all_at_once[1, 8].rate == 100.0
    for flow in (6, 7):
        b.ack(all_at_once[1, flow])
    back = b.step(f8=0.0, f6=50.0, f9=50.0)
    assert back[1, 6].rate == 50.0, "one borrower per lower; the other waits"
    assert (1, 9) not in back
    b.ack(back[1, 8])
    assert b.step()[1, 9].rate == 50.0


def test_a_grant_given_back_is_free_at_once() -> None:
    b = Bench({7: (1, 0), 8: (2, 0, 1)})
    first = b.step(f7=100.0)[1, 7]
    b.demand(7, 0, remaining=0, gave_back=first.seq)
    assert b.committed()[0] == 0.0
    up = b.step(f7=0.0, f8=80.0)
    assert list(up) == [(2, 8)] and up[2, 8].rate == 80.0, "no lower, no acknowledgement"


def test_what_was_given_back_too_late_is_taken_back_as_usual() -> None:
    b = Bench({7: (1, 0)})
    first = b.step(f7=50.0)[1, 7]
    second = b.step(f7=80.0)[1, 7]
    b.demand(7, remaining=0, gave_back=first.seq)  # `second` is on its way: it will be obeyed
    assert b.committed()[0] == 80.0
    lower = b.step(f7=30.0)[1, 7]
    for seq in (second.seq, lower.seq, 999):
        b.demand(7, remaining=0, gave_back=seq)  # beside a lower that is not acknowledged
        assert b.committed()[0] == 80.0
    b.ack(lower)
    assert b.committed()[0] == 30.0


def test_borrowers_have_what_they_borrow_whoever_waits() -> None:
    b = Bench({6: (1, 0), 7: (1, 0), 8: (2, 0, 1)})
    b.step(f6=30.0, f7=40.0, f8=30.0)
    b.demand(9, 0, session=2)
    sent = b.step(f6=20.0, f7=60.0, f8=0.0, f9=20.0)
    assert sent[1, 7].rate == 50.0, "10 that 6 may go on sending at no more"
    assert (2, 9) not in sent
    assert b.committed()[0] == 100.0
