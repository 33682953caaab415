# SPDX-License-Identifier: Apache-2.0
"""What several arbiters say about a flow, as one, and what is done without any. More, at random, is
in test_protocol_properties."""

import math

import pytest
from arbiters import at

from flowslot.arbiter import TARGET, ArbiterConfig
from flowslot.model.units import Nanos
from flowslot.policy.stagger import StaggerAllocator
from flowslot.protocol.grants import Counts, Granted
from flowslot.protocol.host import Changes, Host, combined
from flowslot.protocol.loopback import Loopback
from flowslot.protocol.messages import Ack, Demand, Done, FromArbiter, Grant, HeartbeatEcho, Refusal
from flowslot.protocol.session import Session

SLOT, LEASE = at(60), at(240)
GOODPUT = [50e6, 100e6, 80e6]
OWN = (2, 1)
"""Of a host whose links these are; 0 is another host's."""


def make_own(now: Nanos, config: ArbiterConfig | None = None) -> Loopback:
    allocator = StaggerAllocator(partial=True)
    return Loopback(now, OWN, GOODPUT, allocator=allocator, config=config or ArbiterConfig())


def demand(flow: int, *links: int, remaining: int = 10**7, inc: int = 1) -> Demand:
    return Demand(flow, inc, f"job{flow % 3}", links, remaining, period_ns=at(50))


def granted(rate: float, ceiling: float = 90.0, standing: bool = False) -> Granted:
    return Granted(1, rate, ceiling, standing, share=rate)


class Trio:
    """Arbiters of links 0, 1 and 2. Flow 1 crosses 0 and 1, flow 2 crosses 2."""

    def __init__(self, *begun: int) -> None:
        """`begun`: those that have answered, and granted nothing yet."""
        sessions = [
            Session(
                "h1", [link], [str(link)], slot_ns=SLOT, lease_ns=LEASE, first_session=100 * link
            )
            for link in range(3)
        ]
        self.host = Host(sessions, make_own, SLOT)
        self.host.start(at(0))
        self.seq = 0
        self.host.demand(at(0), [demand(1, 0, 1), demand(2, 2)])
        for which in begun:
            self.host.connect(at(0), which)
            assert self.host.take_message(at(0), which, 0) is not None

    def hear(self, which: int, grant: Grant | None = None, *refusals: Refusal) -> Changes:
        session = self.host.sessions[which].session
        assert session is not None
        grants = [] if grant is None else [grant]
        answer = FromArbiter(session, grants, refusals, HeartbeatEcho(1))
        return self.host.received(at(1), which, answer)

    def give(self, which: int, rate: float) -> Changes:
        """A grant of the only flow that crosses this arbiter's link."""
        flow = 2 if which == 2 else 1
        self.seq += 1
        must_ack = rate < self.host.sessions[which].grant(flow).rate
        return self.hear(which, Grant(flow, 1, self.seq, rate, 90.0 - which, must_ack, share=rate))

    def rate(self, flow: int = 1) -> float:
        return self.host.grant(flow).rate


def test_the_least_of_what_is_said() -> None:
    both = combined(1, [granted(5.0, 80.0, True), granted(7.0, 60.0, True)])
    assert both == Granted(1, 5.0, 60.0, True, 5.0, most=7.0)
    assert combined(1, [granted(5.0), granted(5.0)]).most == 0.0, "they all know"
    assert not combined(1, [granted(5.0, standing=True), granted(7.0)]).standing
    assert combined(1, [granted(5.0, standing=True)]) == granted(5.0, standing=True)
    silent = granted(math.nan, math.nan)
    assert math.isnan(combined(1, []).rate) and math.isnan(combined(1, [silent, silent]).rate)
    one = combined(1, [granted(5.0, standing=True), silent])
    # Of the silent one's links the flow has nothing yet.
    assert (one.rate, one.ceiling, one.standing) == (0.0, 90.0, False)


def test_a_raise_takes_effect_once_all_agree_and_a_lower_at_once() -> None:
    trio = Trio(0, 1)
    first = trio.give(0, 50.0)
    assert first.grants[0] == Granted(1, 50.0, 90.0, share=50.0), "nobody else is live"
    assert math.isnan(first.grants[1].rate), "flow 2 had something of the own arbiter's"
    second = trio.give(1, 30.0)
    assert second.grants == [Granted(1, 30.0, 89.0, share=30.0, most=50.0)]
    for which, rate, least in ((0, 60.0, 30.0), (1, 70.0, 60.0), (1, 10.0, 10.0)):
        changes = trio.give(which, rate)
        assert [g.rate for g in changes.grants] == [trio.rate()] == [least]
    assert changes.news is not None and changes.news.acks == [Ack(1, 1, 5)]
    assert not trio.host.sessions[1].has_news
    trio.host.enforced(1, changes)
    assert trio.host.sessions[1].has_news and not trio.host.sessions[0].has_news, "it alone"
    assert trio.host.counts == Counts(granted=4, preempted=1)


def test_a_flow_that_one_refuses_is_left_alone_until_that_one_grants_it() -> None:
    trio = Trio(0, 1)
    trio.give(0, 50.0)
    trio.give(1, 30.0)
    changes = trio.hear(1, None, Refusal(1, 1, "no"))
    assert math.isnan(changes.grants[0].rate) and math.isnan(trio.rate())
    assert trio.host.counts.refused == 1 and trio.host.counts.error.endswith("no")
    trio.give(1, 20.0)
    assert trio.rate() == 20.0, "it has changed its mind"


def test_leases_end_one_by_one_and_without_any_the_own_links_are_shared_out() -> None:
    trio = Trio(0, 1, 2)
    host = trio.host
    for which, rate in enumerate((50.0, 30.0, 20.0)):
        assert host.covers((which,)) == (which in OWN if which == 0 else False)
        trio.give(which, rate)
    assert host.own is None and host.covers((0, 1)) and host.covers((2,))
    assert not host.covers(()) and not host.covers((0, 9)), "nobody holds link 9"
    assert host.lease_end == at(240) and host.deadline(at(1)) == at(121)
    assert host.deadline(at(200)) == at(240)
    host.closed(at(10), 1)
    assert host.closed(at(20), 2) == Changes()
    assert host.lease_end == at(130), "the first to end"
    assert trio.rate() == 30.0, "until its lease has ended"
    changes = host.wake(at(130))
    assert changes.lost == [1] and [(g.flow, g.rate) for g in changes.grants] == [(1, 50.0)]
    assert not host.covers((0, 1))
    changes = host.wake(at(140))
    assert changes.lost == [2] and math.isnan(changes.grants[0].rate) and host.live
    assert host.wake(at(239)) == Changes()
    changes = host.wake(at(240))
    assert changes.lost == [0] and host.own is not None and not host.live
    assert [g.rate for g in changes.grants] == pytest.approx([TARGET * 100e6, TARGET * 80e6])
    assert host.lease_end is None and host.deadline(at(240)) == at(360)
    assert host.covers((1,)) and not host.covers((0, 1)), "link 0 is not ours"
    assert host.counts.expired == 3
    assert [d.wait_ns for d in host.picture(at(250))] == [at(50)] * 2, "at most a period"


def test_each_is_asked_for_its_own_and_hears_of_what_is_given_back_or_gone() -> None:
    trio = Trio(0, 1, 2)
    host = trio.host
    assert [one.flows() for one in host.sessions] == [[1], [1], [2]]
    assert host.give_back([1, 2]) == [], "the own arbiter needs no help"
    for which in range(2):
        trio.give(which, 50.0)
    [left] = host.give_back([1, 2])
    assert (left.flow, left.rate) == (1, 0.0)
    said = [host.take_message(at(2), k, 0) for k in range(3)]
    assert [bool(message and message.demands) for message in said] == [True, True, False]
    assert all(d.gave_back for message in said[:2] if message for d in message.demands)
    trio.give(0, 40.0)
    assert trio.rate() == 0.0, "the other one has it back still"
    host.done(at(2), [Done(1, 1)])
    assert math.isnan(trio.rate()) and host.sessions[1].has_news and not host.sessions[2].has_news
    assert not host.beat(at(60)), "in every other slot"
    assert host.beat(at(120)) and host.sessions[2].has_news


def test_a_lease_without_flows_binds_nothing() -> None:
    trio = Trio()
    trio.host.done(at(0), [Done(1, 1)])
    for k in (0, 2):
        trio.host.connect(at(0), k)
        trio.host.take_message(at(0), k, 0)
    trio.hear(0)
    trio.give(2, 20.0)
    trio.host.closed(at(2), 0)
    assert trio.host.sessions[0].live and trio.host.sessions[0].lease_end == at(122)
    assert trio.host.lease_end == at(240)


def test_the_next_stream_takes_over_and_what_stood_does_not_stand_in_it() -> None:
    trio = Trio(0)
    trio.hear(0, Grant(1, 1, 1, 50.0, 90.0, False, standing=True))
    assert trio.host.grant(1).standing
    trio.host.closed(at(2), 0)
    opening, changes = trio.host.connect(at(30), 0)
    assert [held.rate for held in opening.hello.held] == [50.0]
    assert changes.grants == [Granted(1, 50.0, 90.0)]
    opening, changes = trio.host.connect(at(150), 0)  # too late
    assert opening.hello.held == () and changes.lost == [0] and trio.host.own is not None


# --- without a switch process


def test_the_own_arbiter_decides_at_once_and_about_its_own_links_only() -> None:
    host = Host((), make_own, SLOT)
    host.start(at(0))
    [got] = host.demand(at(0), [demand(1, 2, 0), demand(2, 0)])
    assert got == host.grant(1) and got.rate == pytest.approx(TARGET * 80e6)
    assert math.isnan(host.grant(2).rate), "crosses none of ours"
    assert host.demand(at(0), []) == [] and host.beat(at(0)), "what is said costs no message"
    assert host.own is not None and host.own_counts == Counts(granted=1)
    assert host.own.load_table(at(0))[:, 0].tolist() == [pytest.approx(TARGET * 80e6), 0.0]
    host.done(at(1), [Done(1, 1)])
    assert math.isnan(host.grant(1).rate) and not host.own.load_table(at(1)).any()
    wakeup = host.next_wakeup(at(1))
    assert wakeup is not None and wakeup > at(1) and host.wake(wakeup) == Changes()


def test_the_own_arbiter_refuses_what_makes_no_sense_however_much_it_is() -> None:
    host = Host((), lambda now: make_own(now, ArbiterConfig(max_flows_per_session=2)), SLOT)
    host.start(at(0))
    host.demand(at(0), [demand(flow, 2, 2) for flow in range(5)])
    assert host.own_counts.refused == 5 and "field" not in host.own_counts.error
    got = host.demand(at(0), [demand(flow, 2) for flow in range(5, 10)])
    assert len(got) == 5, "it has no other daemon to protect"
