# SPDX-License-Identifier: Apache-2.0
"""The straight way from records to entries in the pacer: what goes down, and when."""

import math
from dataclasses import replace

import numpy as np
import pytest
from slots import SLOT, Desk, Setup, at_once, slot_start, start

from flowslot.model.schedule import Schedule
from flowslot.model.units import MILLISECOND, Nanos
from flowslot.policy.base import Pace
from flowslot.protocol.grants import Granted
from flowslotd.negotiate.source import RateSource

from .conftest import TOPOLOGY
from .hosts import Opened


def with_job(topology, make_job, *how, **all_else):
    """A loop, and a job that it looks at."""
    setup, job = Setup(topology, *how, **all_else), make_job()
    setup.jobs.append(job)
    return setup, job


def at_work(topology, make_job, **all_else):
    """One flow, of cookie 7, which is active since slot 0. Its demands are granted at once."""
    setup, job = with_job(topology, make_job, **all_else)
    setup.desk.answer = at_once
    setup.pacer.sent[7] = 0
    flow = job.flow(0, cookie=7)
    start(flow)
    setup.slot(0)
    return setup, flow


def test_from_a_record_to_the_kernel_and_back(topology, make_job):
    setup, job = with_job(topology, make_job)
    flow = job.flow(0, cookie=7)
    setup.pacer.sent[7] = 0
    setup.slot(0)
    start(flow)
    setup.events(Nanos(slot_start(0) + 5 * MILLISECOND), [job])
    assert [(d.flow, d.remaining) for d in setup.desk.demands[-1]] == [(7, 1_000_000)]
    assert setup.pacer.entries == {}  # nothing is granted yet, nothing is paced
    assert setup.pacer.watched == {7: 1_000_000}
    assert setup.pacer.attached == [(7, 4242, 0)]

    now = Nanos(slot_start(0) + 6 * MILLISECOND)
    setup.grant(now, Granted(7, 12e6, 20e6))
    entry = setup.pacer.entries[7]
    assert (entry.reserved, entry.ceiling, entry.guaranteed) == (12e6, 20e6, True)
    assert entry.queue_us == 128_000 * 8 / 0.4e9 * 1e6
    holds = topology.links[3].goodput * entry.queue_us / 1e6
    assert overshoot(entry) == pytest.approx(0.2 * holds / 40, rel=1e-3)
    assert entry.burst == pytest.approx(0.6 * holds)
    assert setup.pacer.deadline == now + 2 * SLOT

    flow.close()
    setup.slot(1)
    assert setup.pacer.entries == {}
    assert [done.flow for done in setup.desk.dones] == [7]


def test_of_a_deep_buffer_5_ms_count(topology, make_job):
    deep = [replace(link, buffer_bytes=100 * link.buffer_bytes) for link in topology.links]
    topology.links = tuple(deep)
    entry = granted(topology, make_job, 12e6).pacer.entries[7]
    assert entry.queue_us == 5000
    assert entry.burst == pytest.approx(0.6 * deep[3].goodput * 0.005)


def overshoot(entry):
    """Bytes that top-up sends in 2 ms, the least time after which a queue shows in the RTT."""
    return entry.growth * 2**2 / 2 / 1000


def granted(topology, make_job, rate):
    """So much was granted in slot 0 (the most: 20 MB/s)."""
    setup, _ = at_work(topology, make_job)
    setup.grant(Nanos(slot_start(0) + 6 * MILLISECOND), Granted(7, rate, 20e6))
    setup.desk.answer = None
    return setup


def test_what_was_undone_meanwhile_is_written_again(topology, make_job):
    setup = granted(topology, make_job, 12e6)
    setup.slot(1)
    written = len(setup.pacer.writes)
    setup.slot(2)
    assert len(setup.pacer.writes) == written  # nothing has changed
    setup.pacer.in_force = False
    setup.slot(3)
    assert setup.pacer.writes[written:] == [[7]]
    setup.slot(4)
    assert len(setup.pacer.writes) == written + 1


def test_a_daemon_without_flows_lets_the_kernel_know_that_it_lives(topology):
    """Or its first flow after a pause would find that it counts as dead."""
    setup = Setup(topology)
    setup.slot(5)
    assert setup.pacer.deadline == slot_start(5) + 2 * SLOT
    assert setup.pacer.writes == []


def test_top_up_of_a_waiting_flow_fills_what_another_job_leaves(topology, make_job):
    setup = granted(topology, make_job, 1e6)
    entry = setup.pacer.entries[7]
    holds = topology.links[3].goodput * entry.queue_us / 1e6
    assert overshoot(entry) == pytest.approx(0.2 * holds, rel=1e-3)
    setup.grant(Nanos(slot_start(0) + 7 * MILLISECOND), Granted(7, 20e6, 20e6))
    entry = setup.pacer.entries[7]
    assert (entry.growth, entry.burst) == (0.0, 0.0)  # nothing above the ceiling


def test_flows_that_take_turns_top_up_to_their_paths_share(topology, make_job):
    setup, _ = at_work(topology, make_job)
    setup.grant(Nanos(slot_start(0) + 6 * MILLISECOND), Granted(7, 5e6, 20e6, share=8e6))
    assert setup.pacer.entries[7].ceiling == 8e6
    growth = setup.pacer.entries[7].growth
    setup.grant(Nanos(slot_start(0) + 7 * MILLISECOND), Granted(7, 9e6, 20e6, share=8e6))
    assert setup.pacer.entries[7].ceiling == 9e6
    # One that waits for another job takes what there is.
    setup.grant(Nanos(slot_start(0) + 8 * MILLISECOND), Granted(7, 1e6, 20e6, share=8e6))
    assert setup.pacer.entries[7].ceiling == 20e6
    # Nobody takes turns with a job that has its links for itself: stragglers may use them.
    alone = Granted(7, 5e6, 20e6, share=8e6, standing=True)
    setup.grant(Nanos(slot_start(0) + 9 * MILLISECOND), alone)
    assert setup.pacer.entries[7].ceiling == 20e6
    assert setup.pacer.entries[7].growth == pytest.approx(growth / 40)


def test_a_held_flow_goes_on_at_256_kb_s_or_an_eighth_of_its_share(topology, make_job):
    """So that a job of 128 held flows leaves its link to others."""
    setup = granted(topology, make_job, 0.0)
    assert setup.pacer.entries[7].least == 256_000
    setup.grant(Nanos(slot_start(0) + 7 * MILLISECOND), Granted(7, 0.0, 20e6, share=4e5))
    assert setup.pacer.entries[7].least == 50_000
    # A fixed rate is kept, as far as a segment leaves in each slot.
    for rate, least in ((40_000.0, 40_000.0), (1.0, 1448 / 0.06)):
        setup.grant(Nanos(slot_start(0) + 8 * MILLISECOND), Granted(7, rate, rate, share=4e5))
        assert setup.pacer.entries[7].least == pytest.approx(least)


def test_nothing_goes_down_when_nothing_changes(topology, make_job):
    setup, job = with_job(topology, make_job)
    flows = [job.flow(i, cookie=10 + i) for i in range(4)]
    for flow in flows:
        start(flow)
    setup.desk.answer = at_once
    setup.slot(0)
    assert setup.pacer.writes == [[10, 11, 12, 13]]
    asked = len(setup.desk.demands)
    setup.desk.answer = None
    for n in range(1, 10):
        done = 15_000  # what 1 MB/s makes of a slot, for four
        for flow in flows:
            flow.done(done)
        setup.slot(n)
        setup.events(Nanos(slot_start(n) + MILLISECOND), [])
    assert len(setup.pacer.writes) == 1
    assert len(setup.desk.demands) == asked
    assert setup.enforcer.rate_writes == 4
    assert setup.pacer.deadline == slot_start(9) + 2 * SLOT  # but the daemon lives
    setup.grant(slot_start(10), Granted(10, 5e5, 2e6))
    assert setup.pacer.writes[1:] == [[10, 11, 12, 13]]
    assert sum(e.reserved for e in setup.pacer.entries.values()) == pytest.approx(5e5)


def test_entries_do_not_outlive_the_arbiters_lease(topology, make_job):
    setup, _ = at_work(topology, make_job, desk=Desk(lease_end=slot_start(1)))
    assert setup.pacer.deadline == slot_start(1)
    written, setup.desk.lease_end = len(setup.pacer.writes), slot_start(99)
    setup.on_rates(Nanos(slot_start(1) - 1))  # it has ended, and another one counts
    assert setup.pacer.deadline == slot_start(3) - 1
    setup.slot(1)
    assert setup.pacer.deadline == slot_start(3)
    assert len(setup.pacer.writes) == written


@pytest.mark.parametrize("met_late", [False, True])
def test_fail_open_a_grant_that_ends_lets_the_flow_go(topology, make_job, met_late):
    setup, _ = at_work(topology, make_job)
    assert setup.pacer.entries[7].reserved == 1e6
    if met_late:
        setup.loop.on_new(7)
    setup.grant(slot_start(1), Granted(7, float("nan"), float("nan")))
    assert setup.pacer.entries == {}
    assert setup.pacer.released == [7]


def test_flows_are_capped_only_while_a_link_of_theirs_is_held_by_nobody(topology, make_job):
    setup, _ = at_work(topology, make_job, desk=Desk(held=False))
    assert setup.pacer.entries[7].guaranteed is False
    setup.desk.held = True
    setup.slot(1)
    setup.slot(2)  # the flow has not sent what it might have: another grant
    assert setup.pacer.entries[7].guaranteed is True


def test_the_kernel_is_told_who_borrows_only_when_more_than_progress_was_seen(topology, make_job):
    setup, flow = at_work(topology, make_job)
    assert setup.pacer.watched == {7: 1_000_000}
    setup.slot(1)
    setup.desk.answer = None
    lent = setup.pacer.lent
    for n in range(2, 5):
        setup.pacer.sent[7] += 100_000
        setup.slot(n)
    assert setup.pacer.lent == lent
    setup.pacer.sent[7] = 1_000_000
    setup.slot(5)
    assert setup.pacer.lent == lent + 1
    start(flow, iteration=2, total=2_000_000)
    setup.events(slot_start(6), setup.jobs)
    assert setup.pacer.lent == lent + 2
    assert setup.pacer.watched == {7: 3_000_000}


def test_small_news_is_told_with_a_sign_of_life(topology, make_job):
    setup, _ = at_work(topology, make_job)
    assert (len(setup.desk.demands), setup.desk.beats) == (1, 1)
    setup.events(slot_start(1), setup.jobs)
    assert (len(setup.desk.demands), setup.desk.beats) == (1, 1)
    setup.slot(1)
    assert (len(setup.desk.demands), setup.desk.beats) == (1, 2), "none is due in this slot"
    setup.slot(2)
    assert (len(setup.desk.demands), setup.desk.beats) == (2, 3)
    setup.slot(2)
    assert (len(setup.desk.demands), setup.desk.beats) == (2, 4)


def test_unmapped_flows_are_never_paced(topology, make_job):
    for policy in ("stagger", "static"):
        setup, job = with_job(topology, make_job, policy)
        start(job.flow(0, cookie=7, dst="192.0.2.1"))
        setup.slot(0)
        assert len(setup.table) == 1
        assert setup.pacer.entries == {}
        assert setup.pacer.attached == []


def test_static_needs_no_arbiter(topology, make_job):
    setup, job = with_job(topology, make_job, "static")
    for i in range(4):
        job.flow(i, cookie=10 + i)
    setup.slot(0)
    share = topology.links[3].goodput / 4
    assert [e.reserved for e in setup.pacer.entries.values()] == pytest.approx([share] * 4)
    assert {e.growth for e in setup.pacer.entries.values()} == {0.0}  # capped, no top-up


def test_hard_pacing_has_no_top_up(topology, make_job):
    setup, _ = at_work(topology, make_job, hard=True)
    entry = setup.pacer.entries[7]
    assert (entry.reserved, entry.ceiling, entry.growth) == (1e6, 1e6, 0.0)


@pytest.mark.parametrize(("hard", "cap"), [(False, 0.0), (True, math.inf)])
def test_who_has_nothing_to_send_asks_for_nothing_if_it_can_top_up(topology, make_job, hard, cap):
    setup, job = with_job(topology, make_job, hard=hard)
    flow = job.flow(0, cookie=7)
    flow.begin(1, 1_000_000)
    for n in range(4):
        flow.advance(done=1000 * (n == 0))
        setup.slot(2 * n)
    assert [demand.cap for demand in setup.desk.demands[-1]] == [cap]


def test_a_flow_that_the_kernel_meets_late_gets_its_entry_again(topology, make_job):
    setup, _ = at_work(topology, make_job)
    setup.loop.on_new(7)
    setup.events(Nanos(slot_start(0) + MILLISECOND), setup.jobs)
    assert setup.pacer.writes == [[7], [7]]


def pace(cookie, *rates):
    """By slot from slot 0 on; up to 9 MB/s."""
    schedule = Schedule(0, np.array([rates]))
    return Pace(np.array([cookie], np.uint64), schedule, np.array([9e6]), np.array([True]))


class Script(RateSource):
    """Says what the test says, about the flows that are `changed`; writes down what it is asked."""

    def __init__(self, pace, changed=None):
        self.pace, self.changed, self.calls = pace, changed, []

    def beat(self, now):
        return True

    def follow(self, now, new, gone):
        self.calls.append("follow")

    def negotiate(self, now, slot, *, moved, small):
        self.calls.append(("negotiate", moved, small))

    def due(self, now):
        self.calls.append("due")
        return self.changed

    def rates(self, now, view):
        self.calls.append(("rates", view.flow.tolist()))
        return self.pace


@pytest.mark.parametrize("joint", [False, True])
def test_observe_negotiate_decide_and_pace_follow_each_other_and_nothing_is_decided_twice(
    topology, make_job, joint
):
    source = Script(pace(7, 1e6, 3e6), set())
    source.joint = joint
    setup, job = with_job(topology, make_job, source)
    start(job.flow(0, cookie=7))
    job.flow(1, cookie=8)
    asked = setup.pacer.writes = source.calls
    setup.slot(0)
    begun = ["follow", ("negotiate", True, True), "due"]
    assert asked == [*begun, ("rates", [7, 8]), [7]]
    begun[1] = ("negotiate", False, True)
    for changed, met, decided in (
        ([], [], []),
        ([7], [], [7]),
        ([], [8], [7, 8] if joint else [8]),
    ):
        asked.clear()
        source.changed = set(changed)
        for flow in met:
            setup.loop.on_new(flow)
        setup.slot(0)
        assert asked == begun + [("rates", decided)] * bool(decided)


def test_a_schedule_is_followed_slot_by_slot(topology, make_job):
    setup, job = with_job(topology, make_job, Script(pace(7, 1e6, 3e6, 2e6)))
    job.flow(0, cookie=7)
    rates = []
    for n in range(4):
        setup.slot(n)
        rates.append(setup.pacer.entries[7].reserved)
    assert rates == [1e6, 3e6, 2e6, 2e6]


def test_each_slot_of_a_plan_is_paced_though_no_flow_is_looked_at(topology, make_job, tmp_path):
    source, slots = Opened(tmp_path, "h1", TOPOLOGY, policy='"mlcc"').source, []
    setup, job = with_job(topology, make_job, source)
    source.rates = lambda now, view: slots.append(view.slot)
    start(job.flow(0, cookie=7))
    setup.slot(0)
    setup.events(Nanos(slot_start(1) - MILLISECOND), [job])
    setup.slot(1)
    assert slots == [0, 1]


def test_decisions_about_flows_that_are_not_there_have_no_effect(topology, make_job):
    setup = Setup(topology, Script(pace(99, 1e6)))
    setup.slot(0)
    assert setup.pacer.entries == {}


def test_fail_open_release_lets_everything_go_and_the_next_slot_takes_it_back(topology, make_job):
    setup, _ = at_work(topology, make_job)
    setup.loop.release()
    assert setup.pacer.entries == {}
    setup.slot(1)
    assert setup.pacer.entries[7].reserved == 1e6


def test_observing_touches_nothing(topology, make_job):
    setup, job = with_job(topology, make_job, "fair", paces=False)
    start(job.flow(0, cookie=7))
    setup.slot(0)
    setup.loop.refresh(slot_start(0))
    setup.loop.release()
    assert setup.table.rows["active"].tolist() == [True]
