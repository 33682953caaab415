# SPDX-License-Identifier: Apache-2.0
"""Which changes an arbiter makes at once, and which it gathers; gangs that are granted together."""

import math

from test_arbiter import Bench

from flowslot.arbiter import Arbiter, ArbiterConfig
from flowslot.arbiter.rules import TOGETHER_NS
from flowslot.model.units import MILLISECOND, Nanos
from flowslot.policy.stagger import StaggerAllocator
from flowslot.protocol.messages import Ack, Demand, Grant, Hello

GATHER = Nanos(4 * MILLISECOND)


def test_what_a_flow_waits_for_comes_at_once_and_the_rest_in_a_while() -> None:
    b = Bench(coalesce_ns=GATHER)
    b.demand(7, 0)
    b.demand(8, 1)
    first = b.step(f7=80.0, f8=80.0)
    assert {key: g.rate for key, g in first.items()} == {(1, 7): 80.0, (1, 8): 80.0}
    b.demand(9, 0, session=2)
    # There is room for 20 of 24: enough to begin with. Nobody waits for the other changes.
    begun = b.step(f7=76.0, f8=90.0, f9=24.0)
    assert {key: g.rate for key, g in begun.items()} == {(2, 9): 20.0}
    assert b.arbiter.next_wakeup(Nanos(b.time * MILLISECOND)) == (b.time + 4) * MILLISECOND
    assert b.step() == b.step() == b.step() == {}
    gathered = b.step()
    assert {key: g.rate for key, g in gathered.items()} == {(1, 7): 76.0, (1, 8): 90.0}
    b.ack(gathered[1, 7])
    assert b.step() == b.step() == b.step() == b.step() == {}
    assert b.step()[2, 9].rate == 24.0


def test_others_give_way_at_once_to_a_flow_that_has_too_little() -> None:
    b = Bench(coalesce_ns=GATHER)
    b.demand(7, 0)
    b.demand(8, 1)
    b.step(f7=100.0, f8=100.0)
    b.demand(9, 0, session=2)
    lowered = b.step(f7=50.0, f8=99.0, f9=50.0)
    assert {key: g.rate for key, g in lowered.items()} == {(1, 7): 50.0}, "not on the other link"
    assert b.step() == {}
    b.ack(lowered[1, 7])
    assert b.step()[2, 9].rate == 50.0


def test_who_has_nothing_does_not_take_all_the_room_from_others_that_wait() -> None:
    b = Bench(coalesce_ns=GATHER)
    for flow in (1, 2):
        b.demand(flow, 0)
    b.step(f1=25.0, f2=1.0)
    b.demand(3, 0, session=2)
    grants = b.step(f1=0.0, f2=25.0, f3=70.0)
    assert grants[1, 1].rate == 0.0, "or the second would wait for as long as changes are gathered"
    assert grants[2, 3].rate == 70.0


def test_what_ceases_to_stand_is_said_in_a_while() -> None:
    config = ArbiterConfig(target=1.0, recovery=False, coalesce_ns=GATHER)
    arbiter, now = Arbiter([1e9], config, StaggerAllocator()), 10**9
    arbiter.hello(Nanos(now), Hello("h1", 1))

    def said(next_bytes: int, ms: int) -> list[Grant]:
        arbiter.demand(Nanos(now), 1, [Demand(7, 1, "job", (0,), 10**6, next_bytes=next_bytes)])
        steps = [arbiter.step(Nanos(now + i * MILLISECOND)) for i in range(ms)]
        return [grant for grants in steps for grant in grants.get(1, [])]

    assert [grant.standing for grant in said(10**6, 6)] == [True]
    now += 20 * MILLISECOND
    assert [grant.standing for grant in said(0, 6)] == [False]


class Gang:
    """Two daemons with a flow each of one job, on links of their own; another job uses both."""

    def __init__(self) -> None:
        self.now = Nanos(10**9)
        config = ArbiterConfig(target=1.0, recovery=False)
        self.arbiter = Arbiter([1e9, 1e9], config, StaggerAllocator())
        for session in (1, 2):
            self.arbiter.hello(self.now, Hello(f"h{session}", session))
        self.rates: dict[int, float] = {}

    def demand(self, flow: int, size: float, job: str = "gang", after_ms: float = 0.0) -> None:
        """Flows 1 and 3 are of session 1 on link 0, flows 2 and 4 of session 2 on link 1."""
        self.now = Nanos(self.now + int(after_ms * MILLISECOND))
        session = 1 if flow % 2 else 2
        demand = Demand(flow, 1, job, (session - 1,), int(size), math.inf)
        assert not self.arbiter.demand(self.now, session, [demand])
        self.settle()

    def settle(self) -> None:
        """Exchange messages, without delay, until there are none."""
        while sent := self.arbiter.step(self.now):
            for session, grants in sent.items():
                self.take(session, grants)

    def take(self, session: int, grants: list[Grant]) -> None:
        self.rates.update({g.flow: g.rate for g in grants})
        acks = [Ack(g.flow, g.inc, g.seq) for g in grants if g.must_ack]
        self.arbiter.ack(self.now, session, acks)

    def begin_once(self, apart_ms: float) -> None:
        """Both of the gang's flows have a phase; then only the other job's flows are active."""
        self.demand(1, 1e6)
        self.demand(2, 1e6, after_ms=apart_ms)
        self.demand(1, 0, after_ms=20)
        self.demand(2, 0)
        self.demand(3, 1e9, "other", after_ms=20)
        self.demand(4, 1e9, "other")
        assert self.rates[1] == self.rates[2] == 0.0


def test_what_began_together_is_granted_together() -> None:
    gang = Gang()
    gang.begin_once(apart_ms=2)
    gang.demand(1, 1e6, after_ms=20)
    assert gang.rates[1] == gang.rates[2] > 5e8, "the second has not asked yet"
    gang.demand(2, 1e6, after_ms=2)
    assert gang.rates[1] == gang.rates[2] > 5e8


def test_who_does_not_come_is_not_waited_for_any_longer_nor_again() -> None:
    gang = Gang()
    gang.begin_once(apart_ms=2)
    gang.demand(1, 1e6, after_ms=20)
    end = Nanos(gang.now + TOGETHER_NS)
    assert gang.now < gang.arbiter.next_wakeup(gang.now) <= end + 1
    gang.now = Nanos(end + 1)
    gang.settle()
    assert gang.rates[1] > 5e8
    assert gang.rates[2] == 0.0
    gang.demand(1, 0, after_ms=20)
    gang.demand(1, 1e6, after_ms=20)
    assert gang.rates[2] == 0.0, "the last time it did not begin with the other one"


def test_what_began_apart_is_granted_apart() -> None:
    gang = Gang()
    gang.begin_once(apart_ms=8)
    gang.demand(1, 1e6, after_ms=20)
    assert gang.rates[1] > 5e8
    assert gang.rates[2] == 0.0


def test_it_is_called_with_all_that_its_sockets_had_to_send() -> None:
    gang = Gang()
    gang.demand(1, 1e6)
    gang.demand(2, 1e3)
    gang.demand(2, 1e6, after_ms=1)  # another socket of the same aggregate
    gang.demand(1, 0, after_ms=20)
    gang.demand(2, 0)
    gang.demand(3, 1e9, "other", after_ms=20)
    gang.demand(4, 1e9, "other")
    gang.demand(1, 1e6, after_ms=20)
    assert gang.rates[2] == gang.rates[1] > 5e8
