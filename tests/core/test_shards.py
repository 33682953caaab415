# SPDX-License-Identifier: Apache-2.0
"""What several arbiters say about a flow, as one. Random interleavings are in test_negotiator."""

import math

import pytest
from flowslot.protocol.grantbook import Granted
from flowslot.protocol.negotiator import Negotiator, News
from flowslot.protocol.shards import Shards, combined

from flowslot.model.units import MILLISECOND, Nanos
from flowslot.protocol.messages import Demand, Done, FromArbiter, Grant, HeartbeatEcho, Refusal

SLOT, LEASE = Nanos(60 * MILLISECOND), Nanos(240 * MILLISECOND)


def at(ms: float) -> Nanos:
    return Nanos(int(ms * MILLISECOND))


def granted(rate: float, ceiling: float = 90.0, standing: bool = False) -> Granted:
    return Granted(1, rate, ceiling, standing, share=rate)


class Trio:
    """Arbiters of links 0, 1 and 2; flow 1 crosses 0 and 1, flow 2 crosses 2."""

    def __init__(self) -> None:
        self.each = [
            Negotiator("h1", [link], slot_ns=SLOT, lease_ns=LEASE, first_session=100 * (link + 1))
            for link in range(3)
        ]
        self.shards = Shards(self.each)
        self.seq = 0
        self.shards.demand(
            at(0), [Demand(1, 1, "job", (0, 1), 1000), Demand(2, 1, "job", (2,), 1000)]
        )

    def begin(self, which: int, ms: float = 0) -> None:
        """Connect it; live with its first answer."""
        one = self.each[which]
        one.connect(at(ms))
        assert one.take_message(at(ms), 0) is not None

    def give(self, which: int, ms: float, rate: float, *, standing: bool = False) -> News:
        one, flow = self.each[which], 2 if which == 2 else 1
        self.seq += 1
        must_ack = rate < one.grant(flow).rate
        grant = Grant(flow, 1, self.seq, rate, 90.0 - which, must_ack, standing, rate)
        assert one.session is not None
        echo = HeartbeatEcho(1)
        return one.received(at(ms), FromArbiter(one.session, [grant], (), echo))


def test_the_least_of_what_is_said() -> None:
    both = combined(1, [granted(5.0, 80.0, True), granted(7.0, 60.0, True)])
    assert both == Granted(1, 5.0, 60.0, True, 5.0, most=7.0)
    assert combined(1, [granted(5.0), granted(5.0)]).most == 0.0, "they all know"
    assert not combined(1, [granted(5.0, standing=True), granted(7.0)]).standing
    assert combined(1, [granted(5.0, standing=True)]) == granted(5.0, standing=True)


def test_until_all_have_answered_a_flow_has_nothing() -> None:
    silent = granted(math.nan, math.nan)
    assert math.isnan(combined(1, []).rate) and math.isnan(combined(1, [silent, silent]).rate)
    one = combined(1, [granted(5.0, standing=True), silent])
    # Of the silent one's links the flow has nothing yet.
    assert (one.rate, one.ceiling, one.standing) == (0.0, 90.0, False)


def test_a_raise_takes_effect_once_all_agree_and_a_lower_at_once() -> None:
    trio = Trio()
    trio.begin(0)
    trio.begin(1)
    assert math.isnan(trio.shards.grant(1).rate) and not trio.shards.live
    assert trio.give(0, 1, 50.0).began
    assert trio.shards.grant(1).rate == 50.0, "nobody else is live"
    assert trio.give(1, 2, 30.0).began
    assert trio.shards.grant(1) == Granted(1, 30.0, 89.0, share=30.0, most=50.0)
    trio.give(0, 3, 60.0)
    assert trio.shards.grant(1).rate == 30.0
    trio.give(1, 4, 70.0)
    assert trio.shards.grant(1).rate == 60.0
    lower = trio.give(1, 5, 10.0)
    assert trio.shards.grant(1).rate == 10.0 and lower.changes.acks
    assert not trio.each[1].has_news
    trio.each[1].enforced(lower)
    assert trio.each[1].has_news and not trio.each[0].has_news, "it alone is answered"


def test_a_flow_that_one_refuses_is_left_alone_and_that_is_news() -> None:
    trio = Trio()
    trio.begin(0)
    trio.begin(1)
    trio.give(0, 1, 50.0)
    trio.give(1, 2, 30.0)
    one = trio.each[1]
    assert one.session is not None
    refusal = FromArbiter(one.session, [], [Refusal(1, 1, "no")], None)
    news = one.received(at(3), refusal)
    assert news.left_alone == [1] and math.isnan(trio.shards.grant(1).rate)
    trio.give(1, 4, 20.0)
    assert trio.shards.grant(1).rate == 20.0, "it has changed its mind"


def test_a_dead_one_has_no_say_and_the_others_still_do() -> None:
    trio = Trio()
    for which in range(3):
        trio.begin(which)
    assert not trio.shards.covers((0, 1)) and trio.shards.lease_end is None
    for which, rate in enumerate((50.0, 30.0, 20.0)):
        trio.give(which, 1, rate)
    assert trio.shards.covers((0, 1)) and trio.shards.covers((2,)) and not trio.shards.covers(())
    assert not trio.shards.covers((0, 9)), "nobody holds link 9"
    assert trio.shards.lease_end == at(240)
    trio.each[1].closed(at(10))
    trio.each[2].closed(at(20))
    assert trio.shards.lease_end == at(130), "the first to end"
    assert trio.shards.grant(1).rate == 30.0, "until its lease has ended"
    assert trio.each[1].check(at(130))
    assert trio.shards.grant(1).rate == 50.0 and not trio.shards.covers((0, 1))
    assert trio.each[2].check(at(140))
    assert math.isnan(trio.shards.grant(2).rate) and trio.shards.live
    assert trio.shards.lease_end == at(240)
    assert trio.each[0].check(at(240))
    assert not trio.shards.live and trio.shards.lease_end is None
    assert [d.wait_ns for d in trio.shards.picture(at(250))] == [0, 0], "no period is known"


def test_each_is_asked_for_its_own_and_hears_of_what_is_given_back_or_gone() -> None:
    trio = Trio()
    for which in range(3):
        trio.begin(which)
    assert [one.flows() for one in trio.each] == [[1], [1], [2]]
    for which in range(2):
        trio.give(which, 1, 50.0)
    [left] = trio.shards.give_back([1, 2])
    assert (left.flow, left.rate) == (1, 0.0)
    said = [one.take_message(at(2), 0) for one in trio.each]
    assert [bool(message and message.demands) for message in said] == [True, True, False]
    assert all(d.gave_back for message in said[:2] if message for d in message.demands)
    trio.give(0, 3, 40.0)
    assert trio.shards.grant(1).rate == 0.0, "the other one has it back still"
    trio.shards.done([Done(1, 1)])
    assert trio.shards.flows() == [2] and math.isnan(trio.shards.grant(1).rate)
    assert trio.each[1].has_news and not trio.each[2].has_news
    assert not trio.shards.beat(at(60)), "in every other slot"
    assert trio.shards.beat(at(120)) and trio.each[2].has_news


def test_a_lease_without_flows_binds_nothing() -> None:
    trio = Trio()
    trio.shards.done([Done(1, 1)])
    trio.begin(0)
    trio.begin(2)
    trio.each[0].received(at(1), FromArbiter(100, (), (), HeartbeatEcho(1)))
    trio.give(2, 1, 20.0)
    trio.each[0].closed(at(2))
    assert trio.each[0].live and trio.each[0].lease_end == at(122)
    assert trio.shards.lease_end == pytest.approx(at(240))
