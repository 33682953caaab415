# SPDX-License-Identifier: Apache-2.0
"""MlccPolicy on hosts made by hand: capacity 100 bytes/s, slots of 1 s, 10 of them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlcc_hosts import K, Switch, decide, rates_of, settle, view_of

from flowslot.model.units import SECOND
from flowslot.policy.mlcc import Dependency, MlccOptions, MlccPolicy, Observed
from flowslot.policy.mlcc.bandwidth import WINDOW
from flowslot.policy.mlcc.options import Bound
from flowslot.policy.mlcc.release import LONGEST

PAPER = MlccOptions()


def host(options: MlccOptions = PAPER) -> MlccPolicy:
    return MlccPolicy(options, SECOND)


def slots(*rates: float) -> list[float]:
    return [*rates, *[0.0] * (K - len(rates))]


def test_flows_of_a_host_see_each_others_plans() -> None:
    policy = host()
    _, rates = decide(policy, view_of(0, {1: ((0,), 150.0), 2: ((0,), 120.0)}))
    assert rates == {1: slots(100.0, 50.0), 2: slots(0.0, 0.0, 100.0, 20.0)}
    assert [(u.flow, u.links, u.slot) for u in policy.updates] == [(1, (0,), 0), (2, (0,), 0)]
    assert [u.rates.tolist() for u in policy.updates] == list(rates.values())


def test_own_reservations_are_not_in_the_way() -> None:
    policy, summed = host(replace(PAPER, cost="rhs")), Switch(capacity=np.inf)
    flows = {1: ((0,), 250.0)}
    _, before = decide(policy, view_of(0, flows, summed.load(0)))
    assert before == {1: slots(100.0, 100.0, 50.0)}
    assert summed.send(policy.updates) == []
    _, after = decide(policy, view_of(1, {1: ((0,), 150.0)}, summed.load(1)))
    assert after == {1: slots(100.0, 50.0)}
    assert policy.updates == ()  # the switch holds that already
    _, late = decide(policy, view_of(4, {1: ((0,), 150.0)}, summed.load(4)))
    assert late == after


def test_loads_of_all_links_count() -> None:
    load = np.zeros((2, K))
    load[0, 0], load[1, 0], load[1, 1] = 20.0, 90.0, 30.0
    _, rates = decide(host(), view_of(0, {1: ((0, 1), 800.0)}, load, n_links=2))
    # All but the most loaded slot, where the first link has room for 80 and the second for 10.
    assert rates == {1: [0.0, 0.0, *[100.0] * 8]}
    _, rates = decide(host(), view_of(0, {1: ((0, 1), 1e9)}, load, n_links=2))
    assert rates == {1: [10.0, 70.0, *[100.0] * 8]}


def test_idle_unmapped_and_gone_flows() -> None:
    policy = host()
    flows = {1: ((0,), 50.0), 2: ((0,), 0.0), 3: ((), 50.0), 4: ((0,), 50.0)}
    pace, rates = decide(policy, view_of(0, flows))
    assert rates == {1: slots(50.0), 2: slots(), 4: slots(0.0, 50.0)}
    assert not pace.guaranteed.any()
    assert {u.flow for u in policy.updates} == {1, 4}
    # Flow 1 is done, flow 4 closed: both are taken back from the switch.
    _, rates = decide(policy, view_of(0, {1: ((0,), 0.0)}))
    assert rates == {1: slots(50.0)}  # until the slot ends
    _, rates = decide(policy, view_of(1, {1: ((0,), 0.0)}))
    assert rates == {1: slots()}
    assert [(u.flow, u.slot, u.rates.tolist()) for u in policy.updates] == [(4, 1, slots())]
    decide(policy, view_of(2, {}))
    assert policy.updates == ()


def test_a_path_that_changes_is_given_back_first() -> None:
    policy = host(MlccOptions.repaired())
    decide(policy, view_of(0, {1: ((0,), 500.0)}, n_links=2))
    decide(policy, view_of(1, {1: ((1,), 400.0)}, n_links=2))
    assert [(u.links, bool(u.rates.any())) for u in policy.updates] == [((0,), False), ((1,), True)]


def test_rounding_errors_of_a_load_table_are_neither_load_nor_room() -> None:
    load = np.zeros((1, K))
    load[0, :2] = 1e-9, 100.0 - 1e-9
    _, rates = decide(host(), view_of(0, {1: ((0,), 150.0)}, load))
    assert rates[1] == pytest.approx(slots(100.0, 0.0, 50.0))
    _, rates = decide(host(), view_of(0, {1: ((0,), 1e6)}, load))
    assert rates[1][1] == 0.0


def test_events_within_a_slot_wait_for_the_next_as_published() -> None:
    policy = host()
    decide(policy, view_of(0, {1: ((0,), 150.0)}))
    _, rates = decide(policy, view_of(0, {1: ((0,), 100.0), 2: ((0,), 10.0)}), at_s=0.5)
    assert rates == {1: slots(100.0, 50.0), 2: slots()}
    assert policy.updates == ()


def test_replanning_within_a_slot_counts_on_the_rest_of_it() -> None:
    policy = host(replace(PAPER, cost="rhs", replan_on_events=True))
    decide(policy, view_of(0, {1: ((0,), 40.0)}))
    flows = {1: ((0,), 30.0), 2: ((0,), 120.0)}
    _, rates = decide(policy, view_of(0, flows), at_s=0.5)
    # Half a slot is left: 60 and 40 bytes/s in it are 30 and 20 bytes; 100 are for the next.
    assert rates == {1: slots(60.0), 2: slots(40.0, 100.0)}
    _, rates = decide(policy, view_of(0, {1: ((0,), 100.0)}), at_s=1.5)  # a late clock
    assert rates[1][0] == 100.0


def test_a_decision_that_comes_late_in_its_slot_counts_on_what_is_left() -> None:
    policy = host(replace(PAPER, cost="rhs"))
    _, rates = decide(policy, view_of(0, {1: ((0,), 120.0)}), at_s=0.5)
    assert rates == {1: slots(100.0, 70.0)}
    _, rates = decide(policy, view_of(1, {1: ((0,), 1.0)}), at_s=2.1)
    assert rates == {1: slots(16.0)}


def test_top_up_lets_flows_use_what_nobody_reserved() -> None:
    flows = {1: ((0,), 30.0), 2: ((0,), 0.0), 3: ((0,), 20.0)}
    view = view_of(0, flows)
    pace, rates = decide(host(), view)
    assert pace.ceilings.tolist() == pace.schedule.at(0).tolist() == [30.0, 0.0, 0.0]
    assert rates[3] == slots(0.0, 20.0)  # in the slots without load
    pace, _ = decide(host(replace(PAPER, top_up=True)), view)
    assert pace.ceilings.tolist() == [100.0, 70.0, 70.0]


def test_order_by_arrival_or_by_size_with_age() -> None:
    flows = {1: ((0,), 500.0), 2: ((0,), 100.0)}
    first = {}
    for order in ("arrival", "shortest"):
        policy = host(MlccOptions(order=order))
        _, rates = decide(policy, view_of(0, flows))
        first[order] = max(rates, key=lambda flow: rates[flow][0])
        assert sorted(u.key for u in policy.updates) == [1.0, 5.0]
    assert first == {"arrival": 1, "shortest": 2}
    # New small flows keep coming: the large one, waiting, gets its turn.
    policy, turn = host(MlccOptions(order="shortest")), None
    for slot in range(50):
        _, rates = decide(policy, view_of(slot, {1: flows[1], 100 + slot: flows[2]}))
        if rates[1][0] > 0.0:
            turn = slot
            break
    assert turn == 20  # 5 / (1 + 20 / 5) = 1, and it came first


def test_a_new_iteration_comes_last_in_order_of_arrival() -> None:
    policy = host()
    decide(policy, view_of(0, {1: ((0,), 100.0), 2: ((0,), 200.0)}))
    _, rates = decide(policy, view_of(1, {1: ((0,), 150.0), 2: ((0,), 200.0)}))
    assert rates == {1: slots(0.0, 0.0, 100.0, 50.0), 2: slots(100.0, 100.0)}


AHEAD, BEHIND = Dependency(30.0, 90.0), Dependency(30.0, 45.0)


@pytest.mark.parametrize(
    ("bound", "left", "dependency", "expected"),
    [
        # F_j - F_1 = 90 - (30 + 40) = 20 bytes: 60 in this slot, the other 40 in the next.
        ("paper", 100.0, AHEAD, slots(60.0, 40.0)),  # as published: 120 on a link of 100
        ("residual", 100.0, AHEAD, slots(40.0, 40.0, 20.0)),
        ("residual", 25.0, AHEAD, slots(40.0)),  # raised to what is free
        ("paper", 100.0, BEHIND, slots(15.0, 40.0, 40.0, 5.0)),  # 25 bytes too many
    ],
)
def test_dependencies_change_the_current_slot_and_the_rest_is_planned_again(
    bound: Bound, left: float, dependency: Dependency, expected: list[float]
) -> None:
    policy = host(MlccOptions(bound=bound))
    policy.dependencies = {1: dependency}
    _, rates = decide(policy, view_of(0, {1: ((0,), left)}, np.full((1, K), 60.0)))
    assert rates == {1: expected}


@pytest.mark.parametrize(("bound", "again"), [("paper", 0.0), ("residual", 100.0)])
def test_as_published_a_flow_that_was_silent_for_the_window_never_sends_again(
    bound: Bound, again: float
) -> None:
    policy, found = host(MlccOptions(bound=bound)), []
    for slot in range(2 + WINDOW + 6):
        other = 0.0 if 2 <= slot < 2 + WINDOW else 1e6
        policy.dependencies = {1: Dependency(0.0, other)}
        _, rates = decide(policy, view_of(slot, {1: ((0,), 5000.0)}))
        found.append(rates[1][0])
        policy.observe(Observed(slot, {1: rates[1][0]}))
    assert found == [100.0, 100.0, *[0.0] * WINDOW, *[again] * 6]


def test_other_traffic_is_left_its_bandwidth() -> None:
    for bound, room in (("paper", 25.0), ("residual", 70.0)):
        policy = host(MlccOptions(bound=bound))  # type: ignore[arg-type]
        policy.observe(Observed(0, {}, (np.array([25.0]), np.array([55.0]))))
        _, rates = decide(policy, view_of(1, {1: ((0,), 100.0)}))
        assert rates[1][0] == room


def test_unused_reservations_are_released_until_the_flow_sends() -> None:
    def run(options: MlccOptions, sends: int = -1, n: int = 16) -> list[int]:
        """When flow 1 has all slots, which it wants always, while it sends only in slot `sends`;
        else it has the current one."""
        policy, found = host(options), []
        for slot in range(n):
            _, rates = decide(policy, view_of(slot, {1: ((0,), 5000.0)}))
            if rates[1] == [100.0] * K:
                found.append(slot)
            else:
                assert rates[1] == slots(100.0)
            policy.observe(Observed(slot, {1: float(slot == sends)}))
        return found

    release = replace(PAPER, release=True)
    assert run(PAPER) == list(range(16))
    assert run(release, sends=7) == [0, 2, 5, 8, 10, 13]
    assert np.diff(run(release, n=60)).tolist() == [2, 3, 5, *[LONGEST + 1] * 5]  # 1, 2, 4 ... off


@pytest.mark.parametrize(("ahead", "slots_reserved"), [(0.0, 1), (700.0, K)])
def test_who_is_known_to_have_something_to_send_does_not_pause(
    ahead: float, slots_reserved: int
) -> None:
    policy = host(replace(PAPER, release=True, bound="residual"))
    flows = {1: ((0,), 5000.0)}
    decide(policy, view_of(0, flows))
    policy.observe(Observed(0, {1: 0.0}))
    policy.dependencies = {1: Dependency(0.0, ahead)}
    _, rates = decide(policy, view_of(1, flows))
    assert np.count_nonzero(rates[1]) == slots_reserved


def test_a_paused_flow_leaves_the_later_slots_to_others() -> None:
    policy = host(replace(PAPER, release=True))
    flows = {1: ((0,), 5000.0), 2: ((0,), 150.0)}
    _, rates = decide(policy, view_of(0, flows))
    assert rates == {1: [100.0] * K, 2: slots()}
    policy.observe(Observed(0, {1: 0.0, 2: 0.0}))
    _, rates = decide(policy, view_of(1, flows))
    assert rates == {1: slots(), 2: slots(100.0, 50.0)}


def test_nothing_is_released_that_had_no_rate_all_through_the_slot() -> None:
    policy = host(replace(PAPER, release=True, replan_on_events=True))
    decide(policy, view_of(0, {}))
    decide(policy, view_of(0, {1: ((0,), 5000.0)}), at_s=0.9)  # has only just come
    policy.observe(Observed(0, {1: 0.0}))
    _, rates = decide(policy, view_of(1, {1: ((0,), 5000.0)}))
    assert rates == {1: [100.0] * K}


def test_own_slots_change_hands_without_a_refusal() -> None:
    policy, switch = host(MlccOptions.repaired()), Switch()
    settle(policy, switch, {1: ((0,), 300.0)})
    switch.table.advance(1)
    pace = settle(policy, switch, {1: ((0,), 300.0), 2: ((0,), 100.0)})
    assert rates_of(pace) == {1: slots(0.0, 100.0, 100.0, 100.0), 2: slots(100.0)}


def test_refused_flows_keep_what_they_had() -> None:
    policy, switch = host(replace(PAPER, atomic=True, top_up=True)), Switch()
    settle(policy, switch, {1: ((0,), 100.0)})
    switch.table.update("another host's", [0], slots(0.0, 100.0))
    switch.table.advance(1)
    stale = np.zeros((1, K))
    _, rates = decide(policy, view_of(1, {1: ((0,), 150.0)}, stale))
    assert rates == {1: slots(100.0, 50.0)}
    refused = switch.send(policy.updates)
    assert len(refused) == 1
    pace = policy.refused(refused)
    assert rates_of(pace) == {1: slots()} and pace.ceilings.tolist() == [100.0]
    _, rates = decide(policy, view_of(1, {1: ((0,), 150.0)}, switch.table.load([0])))
    assert rates == {1: slots(0.0, 100.0, 50.0)}
    assert switch.send(policy.updates) == []


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_hosts_with_stale_feedback_never_overcommit_and_pace_what_they_hold(
    data: st.DataObject,
) -> None:
    n_links, switch = 3, Switch(3)
    options = [MlccOptions.repaired("rhs"), MlccOptions.repaired("literal"), MlccOptions()]
    policies = [MlccPolicy(replace(o, atomic=True), SECOND) for o in options]
    flow = st.tuples(
        st.sets(st.integers(0, n_links - 1), min_size=1).map(lambda links: tuple(sorted(links))),
        st.floats(0, 2000),
    )
    for slot in range(data.draw(st.integers(1, 6), "slots")):
        switch.table.advance(slot * data.draw(st.integers(1, 3), "steps"))
        stale = switch.table.load(range(n_links))
        for i, policy in enumerate(policies):
            flows = data.draw(st.dictionaries(st.integers(9 * i, 9 * i + 3), flow, max_size=4))
            settle(policy, switch, flows, stale if data.draw(st.booleans(), "stale") else None)
            assert np.all(switch.table.peak() <= 100.0 * (1 + 1e-6))
