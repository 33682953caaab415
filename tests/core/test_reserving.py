# SPDX-License-Identifier: Apache-2.0
"""Plans against load tables that come when they come. One link of 100 bytes/s, slots of 1 s."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from mlcc_hosts import K, view_of

from flowslot.model.units import SECOND, Nanos
from flowslot.policy.mlcc import Dependency, MlccOptions, MlccPolicy, Update
from flowslot.policy.mlcc.planner import (
    AGAIN,
    EARLY_PART,
    PATIENCE_SLOTS,
    Feedback,
    Reserve,
    Reserving,
)


class Host:
    """One flow, 7, on link 0; another one, 8, on link 1 where there is one."""

    def __init__(
        self,
        options: MlccOptions | None = None,
        held: Sequence[bool] = (True,),
        target: float = 1.0,
    ) -> None:
        policy = MlccPolicy(options or MlccOptions.repaired(), SECOND)
        switches = [{link} for link, there in enumerate(held) if there]
        self.policy = Reserving(policy, held, switches, SECOND, target=target)
        self.links = len(held)
        self.paths = {7 + i: (i,) for i in range(self.links)}
        self.left = {7 + i: 1000.0 for i in range(self.links)}
        self.sent: dict[int, float] = {}

    def decide(self, at_s: float) -> dict[int, float]:
        """Rates that are in force; of flows that are let go there is none."""
        flows = {flow: (self.paths[flow], left) for flow, left in self.left.items()}
        view = view_of(int(at_s), flows, None, self.links)
        sent = [self.sent.get(flow, np.nan) for flow in flows]
        view = replace(view, sent=np.array(sent))
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

    def plan(
        self, at_s: float, *feedback: Feedback, known: Mapping[int, Dependency] | None = None
    ) -> tuple[Update, ...] | None:
        """A round begins, and is answered at once; the updates that are sent."""
        fetches = self.policy.begin(at(at_s))
        said = {one.links: one for one in feedback}
        answers = [said.get(fetch.links) for fetch in fetches]
        self.calls = self.policy.plan(at(at_s), answers, known or {})
        return None if self.calls is None else tuple(call.update for call in self.calls)

    def answer(self, at_s: float, *accepted: bool | None) -> None:
        """To these calls; all that follow are accepted."""
        assert self.calls is not None
        while self.calls:
            its = accepted or (True,) * len(self.calls)
            self.calls, accepted = self.policy.reserved(at(at_s), its), ()

    def round(self, at_s: float, load: float = 0.0, slot: int | None = None) -> None:
        if self.plan(at_s, says(int(at_s) if slot is None else slot, load)):
            self.answer(at_s)


def at(seconds: float) -> Nanos:
    return Nanos(round(seconds * SECOND))


def says(slot: int, load: float = 0.0, link: int = 0, slots: int = K) -> Feedback:
    return Feedback(slot, (link,), np.full((1, slots), load), np.array([96.0]))


def planned(load: float = 0.0) -> Host:
    """At 100.1 s a round has reserved what this load of others leaves."""
    host = Host()
    host.decide(100.0)
    host.round(100.1, load)
    return host


def test_nothing_is_in_force_before_it_is_reserved_and_everything_after() -> None:
    host = Host()
    assert host.decide(100.0) == {} and host.policy.wanted
    (update,) = host.plan(100.1, says(100, 36.0)) or ()
    assert not host.policy.wanted
    assert host.decide(100.15) == {}, "no switch process has answered yet"
    assert (update.slot, update.rates.tolist()) == (100, [60.0] * K)
    host.answer(100.2)
    assert host.decide(100.2) == {7: 60.0}
    assert not host.policy.wanted, "nothing has happened since"


def test_a_late_reply_leaves_the_old_schedule_and_no_reply_lets_go() -> None:
    host = planned(36.0)
    assert host.decide(101.0) == {7: 60.0}
    assert host.plan(101.2) is None and host.policy.counts.late == 1
    assert host.decide(102.0) == {7: 60.0}
    assert host.pace is not None and host.pace.ceilings.tolist() == [60.0]
    assert host.decide(100.1 + PATIENCE_SLOTS) == {7: 60.0}
    assert host.decide(100.11 + PATIENCE_SLOTS) == {}
    assert host.plan(103.0) is not None, "it is planned without the flow"
    host.answer(103.0)
    assert host.decide(103.5) == {}
    host.round(103.6)
    assert host.decide(103.6) == {7: 96.0}


def test_what_is_refused_is_not_in_force_and_asked_for_again() -> None:
    host = planned(76.0)
    host.decide(101.0)
    for again in range(1, AGAIN + 1):
        (update,) = host.plan(101.1, says(101)) or ()
        assert update.rates[0] == 96.0
        assert host.decide(101.2)[7] == pytest.approx(20.0), "not before it is accepted"
        host.answer(101.2, False)
        assert host.decide(101.3)[7] == pytest.approx(20.0)
        assert host.policy.wanted == (again < AGAIN)
    host.decide(102.0)
    host.round(102.4, 20.0 + 30.0)
    assert host.decide(102.5)[7] == pytest.approx(66.0)
    assert (host.policy.counts.accepted, host.policy.counts.refused) == (2, AGAIN)


def test_what_is_taken_back_is_not_used_any_more_when_the_switch_is_told() -> None:
    host = planned()
    assert host.decide(101.0) == {7: 96.0}
    host.left = {7: 30.0}
    host.decide(101.0)
    (update,) = host.plan(101.1, says(101, 96.0)) or ()
    assert update.before is None and update.rates[0] < 96.0
    assert host.decide(101.1)[7] == pytest.approx(update.rates[0])


@pytest.mark.parametrize("other", [False, None])
def test_what_one_switch_process_does_not_accept_is_undone_at_the_other(other: bool | None) -> None:
    host = Host(held=(True, True))
    host.paths, host.left = {7: (0, 1)}, {7: 1000.0}
    host.decide(100.0)
    assert host.plan(100.1, says(100, 76.0), says(100, 36.0, 1)) is not None
    host.answer(100.1)
    host.decide(101.0)
    updates = host.plan(101.1, says(101, 20.0), says(101, 20.0, 1))
    assert updates is not None and [u.links for u in updates] == [(0,), (1,)]
    calls = host.policy.reserved(at(101.2), (True, other))
    assert [(c.switch, c.update.links) for c in calls] == [(0, (0,))]
    assert calls[0].update.rates[0] == pytest.approx(20.0), "as before"
    assert calls[0].until > at(101.9), "it is worth waiting for"
    assert host.policy.reserved(at(101.2), (True,)) == ()
    assert host.policy.counts.undone == 1 and host.decide(101.3)[7] == pytest.approx(20.0)
    assert host.decide(100.2 + PATIENCE_SLOTS) == ({} if other is None else {7: 20.0})


def test_a_round_that_was_broken_off_has_reserved_nothing() -> None:
    host = planned(76.0)
    host.decide(101.0)
    assert host.plan(101.1, says(101))
    assert host.plan(101.2, says(101)), "asked for anew"
    assert host.decide(101.2)[7] == pytest.approx(20.0) and host.policy.counts.refused == 0
    host.answer(101.2)
    assert host.decide(101.3) == {7: 96.0}


def test_in_the_end_all_is_given_back() -> None:
    host = Host(held=(True, True))
    host.decide(100.0)
    host.plan(100.1, says(100), says(100, 0.0, 1))
    host.answer(100.1, True, False)
    (back,) = host.policy.end(at(100.2))
    assert isinstance(back, Reserve) and (back.switch, back.update.flow) == (0, 7)
    assert not back.update.rates.any()


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
        host.answer(100.1, False)
        assert (update.slot, len(update.rates)) == (100, slots)
    host = Host()
    host.decide(100.0)
    for slot in (98, 102):
        host.round(100.1, slot=slot)
        assert host.decide(100.1) == {}, "useless, as if it had not answered"


def test_links_that_nobody_holds_are_this_hosts_own() -> None:
    host = Host(held=(True, False), target=0.5)
    host.decide(100.0)
    assert [fetch.links for fetch in host.policy.begin(at(100.0))] == [(0,)]
    assert host.plan(100.0) == (), "there is nobody to be asked"
    assert host.decide(100.5) == {8: 50.0}, "the other one's switch process has never answered"


def test_a_standstill_is_reported_once() -> None:
    host = Host()
    for slot in range(100, 140):
        host.sent = {7: 5.0}
        host.decide(slot)
        host.round(slot + 0.1)
    (stall,) = host.policy.stalls
    assert (stall.kind, stall.flows, stall.since) == ("livelock", (7,), 100)


def test_a_flow_that_does_not_use_its_rate_pauses() -> None:
    host = Host()
    for slot in range(100, 103):
        host.sent = {7: 5.0}
        host.decide(slot)
        host.round(slot + 0.1)
    rates = host.decide(103.5)
    assert rates == {7: 96.0}
    host.decide(104.0)
    (update,) = host.plan(104.0, says(104, 96.0)) or ()
    assert np.count_nonzero(update.rates) <= 1, "it keeps to the current slot"


def test_what_has_passed_of_the_slot_when_the_tables_come_is_not_planned_with() -> None:
    for at_s in (100.0, 100.25, 100.5, 100.75):
        host = Host(MlccOptions())
        host.left = {7: 20.0}
        host.decide(100.0)
        (update,) = host.plan(at_s, says(100)) or ()
        left = 101.0 - at_s - EARLY_PART
        assert update.rates[0] == pytest.approx(host.left[7] / left)
    # Nor with what the answers to updates will take, by what load tables took.
    host.policy.begin(at(100.25))
    (call,) = host.policy.plan(at(100.5), [says(100)], {}) or ()
    assert call.update.rates[0] == pytest.approx(host.left[7] / (0.25 - EARLY_PART))


def test_what_other_hosts_say_is_planned_with() -> None:
    host = Host()
    host.policy.ask()
    assert not host.policy.wanted and host.policy.in_force(at(100.0)) == ({}, 0.0), (
        "nothing is known yet"
    )
    ahead = Dependency(10.0, 20.0, 5.0)
    host.decide(100.0)
    (update,) = host.plan(100.1, says(100), known={7: ahead}) or ()
    # Of what is left of the slot, no more than the others bring: 20 + 5 - 10 bytes.
    rate = 15.0 / (0.9 - EARLY_PART)
    assert update.rates[0] == pytest.approx(rate) and update.rates[1] == 96.0
    host.answer(100.2)
    rates, left_s = host.policy.in_force(at(100.2))
    assert rates == {7: pytest.approx(rate)} and left_s == pytest.approx(0.8)
    host.policy.ask()
    assert host.policy.wanted
    literal = Host(MlccOptions())
    literal.decide(100.0)
    literal.round(100.0)
    literal.policy.ask()
    assert not literal.policy.wanted, "it plans as slots begin"
