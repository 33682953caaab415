# SPDX-License-Identifier: Apache-2.0
"""Which changes an arbiter makes at once, which it coalesces, and how gangs are granted."""

from arbiters import MS, Bench
from test_standing import Standing

from flowslot.arbiter.rules import TOGETHER_NS
from flowslot.model.units import MILLISECOND, Nanos

WHILE = Nanos(4 * MILLISECOND)


def test_what_a_flow_waits_for_comes_at_once_and_the_rest_in_a_while() -> None:
    b = Bench({7: (1, 0), 8: (1, 1)}, coalesce_ns=WHILE)
    first = b.step(f7=80.0, f8=80.0)
    assert {key: g.rate for key, g in first.items()} == {(1, 7): 80.0, (1, 8): 80.0}
    b.demand(9, 0, session=2)
    # There is room for 20 of 24: enough to begin with. Nobody waits for the other changes.
    begun = b.step(f7=76.0, f8=90.0, f9=24.0)
    assert {key: g.rate for key, g in begun.items()} == {(2, 9): 20.0}
    assert b.arbiter.next_wakeup(Nanos(b.time * MILLISECOND)) == (b.time + 4) * MILLISECOND
    assert b.step() == b.step() == b.step() == {}
    made = b.step()
    assert {key: g.rate for key, g in made.items()} == {(1, 7): 76.0, (1, 8): 90.0}
    b.ack(made[1, 7])
    assert b.step() == b.step() == b.step() == b.step() == {}
    assert b.step()[2, 9].rate == 24.0


def test_without_coalescing_nobody_spins_until_an_acknowledgement_comes() -> None:
    b = Bench({7: (1, 0)})
    b.step(f7=100.0)
    b.demand(9, 0, session=2)
    lowered = b.step(f7=50.0, f9=50.0)
    now = Nanos(b.time * MILLISECOND)
    assert b.arbiter.next_wakeup(now) >= now + MILLISECOND
    b.ack(lowered[1, 7])
    assert b.step()[2, 9].rate == 50.0


def test_others_give_way_at_once_to_a_flow_that_has_too_little() -> None:
    b = Bench({7: (1, 0), 8: (1, 1)}, coalesce_ns=WHILE)
    b.step(f7=100.0, f8=100.0)
    b.demand(9, 0, session=2)
    lowered = b.step(f7=50.0, f8=99.0, f9=50.0)
    assert {key: g.rate for key, g in lowered.items()} == {(1, 7): 50.0}, "not on the other link"
    assert b.step() == {}
    b.ack(lowered[1, 7])
    assert b.step()[2, 9].rate == 50.0


def test_who_has_nothing_does_not_take_all_the_room_from_others_that_wait() -> None:
    b = Bench(coalesce_ns=WHILE)
    for flow in (1, 2):
        b.demand(flow, 0)
    b.step(f1=25.0, f2=1.0)
    b.demand(3, 0, session=2)
    grants = b.step(f1=0.0, f2=25.0, f3=70.0)
    assert grants[1, 1].rate == 0.0, "or the second would wait for as long as changes are coalesced"
    assert grants[2, 3].rate == 70.0


def test_what_ceases_to_stand_is_said_in_a_while() -> None:
    b = Standing(1e9, coalesce_ns=WHILE)

    def said(next_bytes: int) -> list[bool]:
        b.say(7, "job", remaining=10**6, next_bytes=next_bytes)
        grants = []
        for _ in range(6):
            grants += b.answered()
        return [grant.standing for grant in grants]

    assert said(10**6) == [True]
    assert said(0) == [False]


class Gang(Standing):
    """Two daemons with a flow each of one job, on links of their own; another job uses both."""

    def __init__(self) -> None:
        super().__init__(1e9)
        self.rates: dict[int, float] = {}

    def ask(self, flow: int, size: float, job: str = "gang", after_ms: int = 0) -> None:
        """Flows 1 and 3 are of session 1 on link 0, flows 2 and 4 of session 2 on link 1."""
        self.time += after_ms
        link = (flow - 1) % 2
        of = {"remaining": int(size), "next_bytes": 0, "period_ns": 0}
        self.say(flow, job, link, session=link + 1, **of)
        self.look()

    def look(self) -> None:
        self.rates |= {flow: grant.rate for flow, grant in self.settle().items()}

    def begin_once(self, apart_ms: int) -> None:
        """Both of the gang's flows have a phase; then only the other job's flows are active."""
        self.ask(1, 1e6)
        self.ask(2, 1e6, after_ms=apart_ms)
        self.ask(1, 0, after_ms=20)
        self.ask(2, 0)
        self.ask(3, 1e9, "other", after_ms=20)
        self.ask(4, 1e9, "other")
        assert self.rates[1] == self.rates[2] == 0.0


def test_what_began_together_is_granted_together_and_what_began_apart_is_not() -> None:
    gang, apart = Gang(), Gang()
    gang.begin_once(apart_ms=2)
    gang.ask(1, 1e6, after_ms=20)
    assert gang.rates[1] == gang.rates[2] > 5e8, "the second has not asked yet"
    gang.ask(2, 1e6, after_ms=2)
    assert gang.rates[1] == gang.rates[2] > 5e8
    apart.begin_once(apart_ms=8)
    apart.ask(1, 1e6, after_ms=20)
    assert (apart.rates[1] > 5e8, apart.rates[2]) == (True, 0.0)


def test_who_does_not_come_is_not_waited_for_any_longer_nor_again() -> None:
    gang = Gang()
    gang.begin_once(apart_ms=2)
    gang.ask(1, 1e6, after_ms=20)
    assert gang.now() < gang.arbiter.next_wakeup(gang.now()) <= gang.now() + TOGETHER_NS + 1
    gang.time += TOGETHER_NS // MS + 1
    gang.look()
    assert gang.rates[1] > 5e8
    assert gang.rates[2] == 0.0
    gang.ask(1, 0, after_ms=20)
    gang.ask(1, 1e6, after_ms=20)
    assert gang.rates[2] == 0.0, "the last time it did not begin with the other one"


def test_a_flow_is_anticipated_with_all_that_its_sockets_had_to_send() -> None:
    gang = Gang()
    gang.ask(1, 1e6)
    gang.ask(2, 1e3)
    gang.ask(2, 1e6, after_ms=1)  # another socket of the same aggregate
    gang.ask(1, 0, after_ms=20)
    gang.ask(2, 0)
    gang.ask(3, 1e9, "other", after_ms=20)
    gang.ask(4, 1e9, "other")
    gang.ask(1, 1e6, after_ms=20)
    assert gang.rates[2] == gang.rates[1] > 5e8
