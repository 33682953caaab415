# SPDX-License-Identifier: Apache-2.0
"""Plans against load tables that come when they come. One link of 100 bytes/s, slots of 1 s."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from mlcc_hosts import K, view_of

from flowslot.model.units import SECOND, Nanos
from flowslot.policy.mlcc import Dependency, MlccOptions, MlccPolicy, Update
from flowslot.policy.mlcc.planner import PATIENCE_SLOTS, Feedback, Reserving


class Host:
    """One flow, 7, on link 0; another one, 8, on link 1 where there is one."""

    def __init__(
        self,
        options: MlccOptions | None = None,
        held: Sequence[bool] = (True,),
        target: float = 1.0,
    ) -> None:
        planner = MlccPolicy(options or MlccOptions.repaired(), SECOND)
        self.policy = Reserving(planner, held, SECOND, target)
        self.links = len(held)
        self.left = {7 + i: 1000.0 for i in range(self.links)}
        self.acked: dict[int, float] = {}

    def decide(self, at_s: float) -> dict[int, float]:
        """Rates that are in force; of flows that are let go there is none."""
        flows = {flow: ((flow - 7,), left) for flow, left in self.left.items()}
        view = view_of(int(at_s), flows, None, self.links)
        acked = [self.acked.get(flow, np.nan) for flow in flows]
        view = replace(view, acked=np.array(acked))
        self.pace = self.policy.rates(at(at_s), view)
        if self.pace is None:
            return {}
        rates = self.pace.schedule.at(view.slot).tolist()
        return dict(zip(self.pace.flows.tolist(), rates, strict=True))

    def wants(self, at_s: float) -> bool:
        """A round is due since this moment."""
        self.policy.wanted = False
        self.decide(at_s)
        return self.policy.wanted

    def plan(self, at_s: float, *feedback: Feedback) -> tuple[Update, ...] | None:
        self.policy.links()
        return self.policy.plan(at(at_s), feedback)

    def round(self, at_s: float, load: float = 0.0, slot: int | None = None) -> bool:
        updates = self.plan(at_s, says(int(at_s) if slot is None else slot, load))
        again = updates is not None and self.policy.settle([])
        self.policy.answered(at(at_s), [0])
        return again


def at(seconds: float) -> Nanos:
    return Nanos(round(seconds * SECOND))


def says(slot: int, load: float = 0.0, link: int = 0, slots: int = K) -> Feedback:
    return Feedback(slot, (link,), np.full((1, slots), load), np.array([96.0]))


def test_nothing_is_in_force_before_it_is_reserved_and_everything_after() -> None:
    host = Host()
    assert host.decide(100.0) == {} and host.policy.wanted
    assert host.policy.links() == (0,) and not host.policy.wanted
    (update,) = host.plan(100.1, says(100, 36.0)) or ()
    assert host.decide(100.15) == {}, "no switch process has answered yet"
    assert (update.slot, update.rates.tolist()) == (100, [60.0] * K)
    host.policy.settle([])
    host.policy.answered(at(100.2), [0])
    assert host.decide(100.2) == {7: 60.0}
    assert not host.policy.wanted, "nothing has happened since"


def test_a_late_reply_leaves_the_old_schedule_and_no_reply_lets_go() -> None:
    host = Host()
    host.decide(100.0)
    host.round(100.1, 36.0)
    assert host.decide(101.0) == {7: 60.0}
    assert host.plan(101.2) is None
    host.policy.answered(at(101.2), [])
    assert host.decide(102.0) == {7: 60.0}
    assert host.pace is not None and host.pace.ceilings.tolist() == [60.0]
    assert host.decide(100.1 + PATIENCE_SLOTS) == {7: 60.0}
    assert host.decide(100.11 + PATIENCE_SLOTS) == {}
    updates = host.plan(103.0)
    assert updates is not None, "it is planned without the flow"
    host.policy.settle([])
    assert host.decide(103.5) == {}
    host.round(103.6)
    assert host.decide(103.6) == {7: 96.0}


def test_what_is_refused_is_not_in_force_and_asked_for_again() -> None:
    host = Host()
    host.decide(100.0)
    host.round(100.1, 76.0)
    host.decide(101.0)
    updates = host.plan(101.1, says(101))
    assert updates is not None and updates[-1].rates[0] == 96.0
    assert host.decide(101.2)[7] == pytest.approx(20.0), "not before it is accepted"
    assert host.policy.settle([updates[-1]])
    assert host.decide(101.3)[7] == pytest.approx(20.0)
    assert not host.round(101.4, 20.0 + 30.0)
    assert host.decide(101.5)[7] == pytest.approx(66.0)


def test_what_is_taken_back_is_not_used_any_more_when_the_switch_is_told() -> None:
    host = Host()
    host.decide(100.0)
    host.round(100.1)
    assert host.decide(101.0) == {7: 96.0}
    host.left = {7: 30.0}
    host.decide(101.0)
    (update,) = host.plan(101.1, says(101, 96.0)) or ()
    assert update.key == 0.0 and update.rates[0] < 96.0
    assert host.decide(101.1)[7] == pytest.approx(update.rates[0])


def test_who_plans_when() -> None:
    for options, replans in ((MlccOptions.repaired(), True), (MlccOptions(), False)):
        host = Host(options)
        assert host.wants(100.0) and not host.wants(100.1)
        for flows in ({7: 0.0}, {7: 500.0}, {7: 600.0}, {}):
            host.left = flows
            assert host.wants(100.2) == replans
        assert host.wants(101.0) and not host.wants(101.5)


def test_clocks_that_differ() -> None:
    host = Host()
    host.decide(100.0)
    for slot, slots in ((99, K - 1), (101, K)):
        (update,) = host.plan(100.1, says(slot)) or ()
        host.policy.settle([update])
        assert (update.slot, len(update.rates)) == (100, slots)
    for slot in (98, 102):
        host.round(100.1, slot=slot)
        assert host.decide(100.1) == {}, "useless, as if it had not answered"


def test_links_that_nobody_holds_are_this_hosts_own() -> None:
    host = Host(held=(True, False), target=0.5)
    host.decide(100.0)
    assert host.policy.links() == (0,)
    updates = host.plan(100.0) or ()
    assert [(u.flow, u.rates[0]) for u in updates] == [(8, 50.0)]
    host.policy.settle([])
    assert host.decide(100.5) == {8: 50.0}, "the other one's switch process has never answered"


def test_a_standstill_is_reported_once() -> None:
    host = Host()
    for slot in range(100, 140):
        host.acked = {7: 5.0}
        host.decide(slot)
        host.round(slot + 0.1)
    (stall,) = host.policy.stalls
    assert (stall.kind, stall.flows, stall.since) == ("livelock", (7,), 100)


def test_a_flow_that_does_not_use_its_rate_pauses() -> None:
    host = Host()
    for slot in range(100, 103):
        host.acked = {7: 5.0}
        host.decide(slot)
        host.round(slot + 0.1)
    rates = host.decide(103.5)
    assert rates == {7: 96.0}
    host.decide(104.0)
    (update,) = host.plan(104.0, says(104, 96.0)) or ()
    assert np.count_nonzero(update.rates) <= 1, "it keeps to the current slot"


def test_what_has_passed_of_the_slot_when_the_tables_come_is_not_planned_with() -> None:
    for at_s, rate in ((100.0, 36.0), (100.25, 48.0), (100.5, 72.0), (100.75, 96.0)):
        host = Host(MlccOptions())
        host.left = {7: 36.0}
        host.decide(100.0)
        (update,) = host.plan(at_s, says(100)) or ()
        assert update.rates[0] == pytest.approx(rate)


def test_what_other_hosts_say_is_asked_for_when_there_is_something_to_plan() -> None:
    host = Host()
    host.policy.ask()
    assert not host.policy.wanted and host.policy.in_force(at(100.0)) == ({}, 0.0), (
        "nothing is known yet"
    )
    ahead = Dependency("ring", 10.0, (20.0,), 5.0)
    host.decide(100.0)
    (update,) = host.policy.plan(at(100.1), [says(100)], lambda now: {7: ahead}) or ()
    # Of what is left of the slot, 0.9 s, no more than the others bring: 20 + 5 - 10 bytes.
    assert update.rates[0] == pytest.approx(15.0 / 0.9) and update.rates[1] == 96.0
    host.policy.settle([])
    host.policy.answered(at(100.2), [0])
    rates, left_s = host.policy.in_force(at(100.2))
    assert rates == {7: pytest.approx(15.0 / 0.9)} and left_s == pytest.approx(0.8)
    host.policy.wanted = False
    host.policy.ask()
    assert host.policy.wanted
    literal = Host(MlccOptions())
    literal.decide(100.0)
    literal.policy.links()
    literal.policy.ask()
    assert not literal.policy.wanted, "it plans as slots begin"
