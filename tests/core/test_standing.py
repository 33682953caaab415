# SPDX-License-Identifier: Apache-2.0
"""Standing grants: reported once, and again whenever they begin or cease to stand.

One link carries 100 bytes/s; every grant is acknowledged before the next step.
"""

from typing import Any

import pytest
from arbiters import LEASE, MS, Bench, Counting

from flowslot.arbiter.config import ACK_LEASES
from flowslot.model.errors import ScheduleRefused
from flowslot.protocol.messages import Grant, Held

SLOT = 60
near: Any = pytest.approx


class Standing(Bench):
    """Two links, sessions 1 and 2, and time that passes in slots."""

    def __init__(self, goodput: float = 100.0, **config: Any) -> None:
        self.allocator = Counting()
        self.sessions = {1, 2}
        super().__init__(None, self.allocator, goodput, **config)

    def say(self, flow: int, job: str, *links: int, **more: Any) -> None:
        given = {"remaining": 50, "next_bytes": 50, "period_ns": 200 * MS, **more}
        assert self.demand(flow, *links, job=job, **given) == []

    def answered(self) -> list[Grant]:
        """One step; what it sends is acknowledged at once."""
        sent = self.step()
        for (session, _), grant in sent.items():
            self.ack(grant, session)
        return list(sent.values())

    def settle(self) -> dict[int, Grant]:
        """Steps until nothing is sent any more; the last grant of each flow that got one."""
        last: dict[int, Grant] = {}
        for _ in range(10):
            grants = self.answered()
            if not grants:
                return last
            last |= {grant.flow: grant for grant in grants}
        raise AssertionError("it does not settle")

    def rest(self, slots: int = 20) -> list[Grant]:
        """Many slots in which nothing is said but heartbeats."""
        sent = []
        for _ in range(slots):
            self.time += SLOT
            for session in self.sessions:
                assert self.arbiter.heartbeat(self.now(), session)
            sent += self.answered()
        return sent


def alone() -> Standing:
    """A bench on which flow 7 of job a is alone, and its grant is reported to stand."""
    b = Standing()
    b.say(7, "a")
    assert b.settle()[7].standing
    return b


def test_a_job_alone_hears_that_once_and_then_nothing_is_planned() -> None:
    b = Standing()
    b.say(7, "a")
    b.say(8, "a", 1)
    first = {grant.flow: grant for grant in b.answered()}
    assert {flow: (g.rate, g.standing) for flow, g in first.items()} == {
        7: (near(100.0), True),
        8: (near(100.0), True),
    }
    assert not any(grant.must_ack for grant in first.values())
    assert b.answered() == []
    calls = b.allocator.calls
    assert b.rest(50) == []
    assert b.allocator.calls == calls, "all stands: there is nothing to plan"
    b.say(7, "a", remaining=0)  # not that anybody needs to know
    assert b.rest(50) == []
    assert b.allocator.calls == calls + 1


def test_jobs_on_different_links_stand_beside_each_other() -> None:
    b = alone()
    b.say(20, "b", 1, session=2)
    assert [(g.flow, g.standing) for g in b.answered()] == [(20, True)], "the other hears nothing"
    assert b.settle() == {}


def test_a_flow_of_which_nothing_is_known_neither_stands_nor_ends_that_of_others() -> None:
    b = alone()
    b.say(20, "b", session=2, remaining=0, next_bytes=0)
    assert b.settle() == {}
    calls = b.allocator.calls
    assert b.rest(5) == []
    assert b.allocator.calls == calls, "it will say when it begins"
    b.say(20, "b", session=2, next_bytes=0)
    assert [grant.standing for grant in b.settle().values()] == [False, False]


def test_it_is_said_even_when_the_rate_stays_the_same() -> None:
    b = alone()
    # The newcomer computes, and will send in a while: 7, at work, keeps all there is.
    later = {"remaining": 0, "next_in_ns": 150 * MS}
    b.say(20, "b", session=2, **later)
    grants = b.answered()
    assert [(g.flow, g.rate) for g in grants] == [(7, near(100.0))]
    assert not grants[0].standing and not grants[0].must_ack
    assert b.answered() == []
    b.done(20, session=2)
    grants = b.answered()
    assert [(g.flow, g.rate) for g in grants] == [(7, near(100.0))]
    assert grants[0].standing and not grants[0].must_ack
    assert b.answered() == []


def test_it_is_said_with_a_lower_too() -> None:
    b = alone()
    b.say(7, "a", remaining=0, next_in_ns=150 * MS)
    b.say(20, "b", session=2)
    (lower,) = b.answered()
    assert (lower.flow, lower.must_ack, lower.standing) == (7, True, False)


def test_a_new_session_hears_it_again() -> None:
    b = alone()
    b.hello(3, Held(7, 1, float(b.arbiter.commitments()[0])), daemon=1)
    b.sessions = {2, 3}
    b.say(7, "a", session=3)
    grants = b.answered()
    assert [(g.flow, g.rate, g.standing) for g in grants] == [(7, near(100.0), True)]
    assert not grants[0].must_ack
    assert b.answered() == []
    assert b.rest() == []


def test_what_a_new_session_holds_without_demanding_it_is_taken_back() -> None:
    b = Standing(time=100)  # later nobody can hold what nobody granted
    b.hello(3, Held(9, 1, 10.0))
    b.sessions.add(3)
    assert [(g.flow, g.rate, g.standing) for g in b.rest() if g.flow == 9] == [(9, 0.0, False)]


def test_what_a_sibling_leaves_is_given_to_the_rest_of_the_job() -> None:
    b = alone()
    b.say(8, "a")
    b.say(9, "a", session=2)
    assert [g.rate for g in b.settle().values()] == [near(100 / 3)] * 3
    b.done(8)
    said = b.settle()
    assert {flow: (g.rate, g.standing) for flow, g in said.items()} == {
        7: (near(50.0), True),
        9: (near(50.0), True),
    }
    b.sessions = {1}
    (grant,) = b.rest(LEASE // SLOT + 1)
    assert (grant.flow, grant.rate, grant.standing) == (7, near(100.0), True), "a lease is lost"
    assert b.arbiter.expired == 1


def test_a_lower_that_is_never_acknowledged_costs_the_session_although_all_stands() -> None:
    b = alone()
    b.allocator.halve = True
    b.say(7, "a")
    ((lower,),) = b.arbiter.step(b.now()).values()
    assert lower.must_ack and lower.standing
    for _ in range(2 * ACK_LEASES):
        b.time += LEASE // 2
        assert all(b.arbiter.heartbeat(b.now(), session) for session in b.sessions)
        b.arbiter.step(b.now())
    assert b.arbiter.heartbeat(b.now(), 1)
    b.time += 1
    b.arbiter.step(b.now())
    assert not b.arbiter.heartbeat(b.now(), 1)


def test_an_explicit_schedule_takes_effect_although_all_stands() -> None:
    b = alone()
    with pytest.raises(ScheduleRefused):  # the link is full, and what is held is never taken back
        b.arbiter.update_schedule(b.now(), "x", [0], [40.0])
    b.allocator.halve = True
    b.say(7, "a")
    b.settle()
    b.allocator.halve = False
    b.arbiter.update_schedule(b.now(), "x", [0], [40.0] * 3)
    (raised,) = b.settle().values()
    assert raised.rate == near(60.0)
    assert b.rest(2) == []
    # It is over: the rest comes without anybody saying anything.
    assert [g.rate for g in b.rest(2)] == [near(100.0)]
