# SPDX-License-Identifier: Apache-2.0
"""When an aggregate is reported to an arbiter, and what. More of it in the daemon's
test_aggregates."""

import math

import pytest

from flowslot.arbiter import ArbiterConfig
from flowslot.model.units import MILLISECOND, SECOND, Nanos
from flowslot.policy.stagger import StaggerAllocator
from flowslot.protocol.aggregate import (
    NEVER,
    RESEND_SHARE,
    SAME_PHASE_NS,
    SMALL_SHARE,
    Aggregate,
    report,
    take,
)
from flowslot.protocol.grants import Granted
from flowslot.protocol.host import Host
from flowslot.protocol.loopback import Loopback
from flowslot.protocol.messages import Done, FromArbiter, FromDaemon, Grant, HeartbeatEcho
from flowslot.protocol.session import Session

MB = 1_000_000


def at(ms: float) -> Nanos:
    return Nanos(SECOND + int(ms * MILLISECOND))


def active() -> Aggregate:
    return Aggregate(
        1, "job", (0,), 5, True, 10.0 * MB, 10.0 * MB, 10.0 * MB, at(0), period=100 * MILLISECOND
    )


def test_what_is_reported_of_a_phase_and_of_the_time_between() -> None:
    aggregate = active()
    assert aggregate.has_news(at(2), small=False), "nothing was reported yet"
    said = aggregate.demand(at(2))
    assert (said.flow, said.inc, said.remaining) == (1, 6, 10 * MB)
    assert (said.wait_ns, said.next_in_ns) == (2 * MILLISECOND, 0)
    assert not aggregate.has_news(at(2), small=True)
    aggregate.active, aggregate.due = False, at(100)
    assert aggregate.has_news(at(60), small=False)
    said = aggregate.demand(at(60))
    assert (said.inc, said.remaining, said.next_in_ns) == (6, 0, 40 * MILLISECOND)
    assert (said.next_bytes, said.period_ns) == (10 * MB, 100 * MILLISECOND)
    aggregate.due = NEVER
    assert aggregate.demand(at(61)).next_in_ns == 0
    aggregate.active, aggregate.onset = True, at(101)
    assert aggregate.demand(at(101)).inc == 7, "another phase"
    aggregate.onset += SAME_PHASE_NS
    assert aggregate.demand(at(112)).inc == 7
    aggregate.onset += SAME_PHASE_NS + 1
    assert aggregate.has_news(at(130), small=False) and aggregate.demand(at(130)).inc == 8


def test_who_has_nothing_to_send_asks_for_nothing_until_it_has() -> None:
    aggregate = active()
    assert aggregate.demand(at(0)).cap == math.inf
    aggregate.cap = 0.0
    assert not aggregate.has_news(at(60), small=False), "the arbiter can do without for a while"
    aggregate.remaining = 1
    assert aggregate.has_news(at(60), small=False), "other news are told all the same"
    aggregate.remaining = 10 * MB
    assert aggregate.has_news(at(60), small=True)
    said = aggregate.demand(at(60))
    assert (said.cap, said.remaining, said.inc) == (0.0, 10 * MB, 6), "the phase goes on"
    assert not aggregate.has_news(at(60), small=True)
    aggregate.cap = math.inf
    assert aggregate.has_news(at(61), small=False), "this cannot wait"
    assert aggregate.demand(at(61)).cap == math.inf
    aggregate.cap, aggregate.standing = 0.0, True
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


# --- report


def own_arbiter(now: Nanos) -> Loopback:
    allocator = StaggerAllocator(partial=True)
    return Loopback(now, (0,), (100e6,), allocator=allocator, config=ArbiterConfig())


def negotiating(aggregate: Aggregate) -> Host:
    """With a switch process, which has granted this much to the aggregate."""
    slot, lease = Nanos(60 * MILLISECOND), Nanos(300 * MILLISECOND)
    session = Session("h1", (0,), ("a",), slot_ns=slot, lease_ns=lease, first_session=1)
    host = Host((session,), own_arbiter, slot)
    host.start(at(0))
    host.connect(at(0), 0)
    report(at(0), host, {1: aggregate})
    said(host, 0)
    grant = Grant(1, aggregate.inc, 1, 9e6, 9e7, False)
    changes = host.received(at(1), 0, FromArbiter(1, [grant], (), HeartbeatEcho(1)))
    assert take({1: aggregate}, changes.grants) == [Granted(1, 9e6, 9e7)]
    assert aggregate.rate == 9e6 and aggregate.granted
    assert aggregate.reported is None, "the own arbiter's grant stood, this one does not"
    report(at(2), host, {1: aggregate})
    said(host, 2)
    return host


def said(host: Host, ms: float) -> FromDaemon:
    message = host.take_message(at(ms), 0, 0)
    assert message is not None
    return message


def test_what_the_own_arbiter_grants_at_once_is_taken() -> None:
    host, aggregate = Host((), own_arbiter, Nanos(60 * MILLISECOND)), active()
    host.start(at(0))
    assert report(at(0), host, {1: aggregate}) == [host.grant(1)]
    assert aggregate.rate == host.grant(1).rate > 95e6
    assert report(at(1), host, {1: aggregate}, [Done(1, 5)]) == [], "nothing is new but its end"
    assert math.isnan(host.grant(1).rate)


@pytest.mark.parametrize(("lent", "left", "gave_back"), [([], 0.0, 1), ([1], 9e6, 0)])
def test_what_is_over_is_given_back_and_then_reported_unless_it_is_lent(
    lent: list[int], left: float, gave_back: int
) -> None:
    aggregate = active()
    host = negotiating(aggregate)
    aggregate.active = False
    back = [Granted(1, left, 9e7)] * gave_back
    assert report(at(5), host, {1: aggregate}, lent=lambda: lent) == back
    assert report(at(5), host, {1: aggregate}) == [], "once"
    [demand] = said(host, 5).demands
    assert (aggregate.rate, demand.remaining, demand.gave_back) == (left, 0, gave_back)


def test_a_standing_grant_and_one_of_a_job_at_work_are_not_given_back() -> None:
    for standing in (True, False):
        aggregate, sibling = active(), active()
        host = negotiating(aggregate)
        sibling.id, sibling.active = 2, not standing
        aggregate.active, aggregate.standing = False, standing
        assert report(at(5), host, {1: aggregate, 2: sibling}) == [] and aggregate.rate == 9e6


def test_when_a_grant_no_longer_stands_the_phase_is_not_the_one_that_was_reported() -> None:
    aggregate = active()
    host = negotiating(aggregate)
    before = aggregate.inc
    take({1: aggregate}, [Granted(1, 9e6, 9e6, standing=True)])
    aggregate.onset = at(1000)
    assert not aggregate.has_news(at(1001), small=True)
    take({1: aggregate}, [Granted(1, 9e6, 9e6)])
    report(at(1002), host, {1: aggregate})
    assert aggregate.inc > before


def test_small_news_travel_when_they_may() -> None:
    aggregate = active()
    host = negotiating(aggregate)
    host.beat(at(200))
    said(host, 200)
    aggregate.remaining = 8.0 * MB  # the arbiter can work out 8.2
    for small in (False, True):
        report(at(201), host, {1: aggregate}, small=small)
        assert host.sessions[0].has_news == small
