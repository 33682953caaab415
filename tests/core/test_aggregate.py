# SPDX-License-Identifier: Apache-2.0
"""When an arbiter is told of an aggregate, and what. More of it in the daemon's test_aggregates."""

import math

from flowslot.model.units import MILLISECOND, SECOND, Nanos
from flowslot.protocol.aggregate import NEVER, RESEND_SHARE, SAME_PHASE_NS, SMALL_SHARE, Aggregate

MB = 1_000_000


def at(ms: float) -> Nanos:
    return Nanos(SECOND + int(ms * MILLISECOND))


def active() -> Aggregate:
    return Aggregate(
        1, "job", (0,), 5, True, 10.0 * MB, 10.0 * MB, 10.0 * MB, at(0), period=100 * MILLISECOND
    )


def test_what_is_told_of_a_phase_and_of_the_time_between() -> None:
    aggregate = active()
    assert aggregate.has_news(at(2), small=False), "nothing was told yet"
    said = aggregate.demand(at(2))
    assert (said.flow, said.inc, said.remaining) == (1, 5, 10 * MB)
    assert (said.wait_ns, said.next_in_ns) == (2 * MILLISECOND, 0)
    assert not aggregate.has_news(at(2), small=True)
    aggregate.active, aggregate.due = False, at(100)
    assert aggregate.has_news(at(60), small=False)
    said = aggregate.demand(at(60))
    assert (said.inc, said.remaining, said.next_in_ns) == (5, 0, 40 * MILLISECOND)
    assert (said.next_bytes, said.period_ns) == (10 * MB, 100 * MILLISECOND)
    aggregate.due = NEVER
    assert aggregate.demand(at(61)).next_in_ns == 0
    aggregate.active, aggregate.onset = True, at(101)
    assert aggregate.demand(at(101)).inc == 6, "another phase"
    aggregate.onset += SAME_PHASE_NS
    assert aggregate.demand(at(112)).inc == 6
    aggregate.onset += SAME_PHASE_NS + 1
    assert aggregate.has_news(at(130), small=False) and aggregate.demand(at(130)).inc == 7


def test_who_has_nothing_to_send_asks_for_nothing_until_it_has() -> None:
    aggregate = active()
    assert aggregate.demand(at(0)).cap == math.inf
    aggregate.stalled = True
    assert not aggregate.has_news(at(60), small=False), "the arbiter can do without for a while"
    assert aggregate.has_news(at(60), small=True)
    said = aggregate.demand(at(60))
    assert (said.cap, said.remaining, said.inc) == (0.0, 10 * MB, 5), "the phase goes on"
    assert not aggregate.has_news(at(60), small=True)
    aggregate.stalled = False
    assert aggregate.has_news(at(61), small=False), "this cannot wait"
    assert aggregate.demand(at(61)).cap == math.inf
    aggregate.stalled = aggregate.standing = True
    assert not aggregate.has_news(at(62), small=True) and aggregate.demand(at(62)).cap == math.inf


def test_what_the_arbiter_can_work_out_is_no_news() -> None:
    aggregate = active()
    aggregate.demand(at(0))
    aggregate.rate = 100.0 * MB
    aggregate.remaining = 5.0 * MB  # what 50 ms at this rate have left
    assert not aggregate.has_news(at(50), small=True)
    aggregate.remaining += 1.01 * SMALL_SHARE * 10 * MB
    assert aggregate.has_news(at(50), small=True) and not aggregate.has_news(at(50), small=False)
    aggregate.remaining = (5 + 1.01 * RESEND_SHARE * 10) * MB
    assert aggregate.has_news(at(50), small=False)
    aggregate.standing = True
    assert not aggregate.has_news(at(50), small=True), "it holds, whatever is left"
    aggregate.expected *= 1.2
    assert aggregate.has_news(at(50), small=False)


def test_an_arbiter_that_granted_more_than_another_let_through_is_put_right() -> None:
    aggregate = active()
    aggregate.demand(at(0))
    aggregate.rate, aggregate.remaining = 20.0 * MB, 9.0 * MB
    assert not aggregate.has_news(at(50), small=False)
    aggregate.most = 80.0 * MB  # it believes that 6 MB remain
    assert aggregate.has_news(at(50), small=False)
