# SPDX-License-Identifier: Apache-2.0
"""From rows to demands, and from an aggregate's grant to the rates of its flows."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from seen import MS, Seen, at
from slots import Desk as Host
from slots import start

from flowslot.protocol.aggregate import NEVER
from flowslot.protocol.grants import Granted
from flowslot_shm.layout import SLOT
from flowslotd.flows.rows import FREE, as_structs
from flowslotd.negotiate import shares
from flowslotd.negotiate.aggregates import Aggregates

MB = 1_000_000


class Desk:
    """A table and its aggregates, looked at together. `host`: what the arbiters hear."""

    def __init__(self, topology):
        self.seen = Seen(topology)
        self.table, self.observer = self.seen.table, self.seen.observer
        self.aggregates = Aggregates(self.table)
        self.host, self.tops_up = Host(), True

    def see(self, ms, *jobs, small=True):
        """What is reported after a look at these jobs."""
        self.seen.look(ms, *jobs)
        self.aggregates.follow(at(ms), self.table.take_new(), self.table.take_gone())
        return self.report(ms, small=small)

    def report(self, ms, *lent, small=True):
        """`lent`: rows."""
        self.host.demands.clear()
        rows = np.array(lent, np.intp)
        self.aggregates.report(
            at(ms), self.host, small=small, lent=lambda now: rows, tops_up=self.tops_up
        )
        return [demand for demands in self.host.demands for demand in demands]

    def give(self, ms, *grants):
        """Which flows are concerned."""
        self.aggregates.grant(grants)
        return self.aggregates.share_out(at(ms))

    def rates(self):
        return self.seen["rate"]


@pytest.fixture
def desk(topology):
    return Desk(topology)


def at_work(desk, job, n=1):
    """Flows 7, 8, ..., which have 1 MB each to send, and 10 MB/s together."""
    flows = [job.flow(i, cookie=7 + i) for i in range(n)]
    for flow in flows:
        start(flow)
    desk.see(0, job)
    desk.give(0, Granted(7, 10e6, 20e6))
    return flows


def test_flows_of_one_job_and_path_ask_as_one(desk, make_job):
    a, b, again = make_job("a", pid=100), make_job("b"), make_job("a", pid=200)
    for i in range(3):
        start(a.flow(i, cookie=7 + i), total=(i + 1) * MB)
    start(b.flow(0, cookie=20))
    start(again.flow(0, cookie=30))
    first, second = desk.see(0, a, b, again)
    assert (first.flow, first.job, first.links, first.remaining) == (7, "a", (0, 3), 7 * MB)
    assert first.next_bytes == 7 * MB
    assert (second.flow, second.job, second.remaining) == (20, "b", MB)
    assert desk.see(0, a, b, again) == [], "once"


def test_unmapped_flows_are_never_asked_for(desk, job):
    start(job.flow(0, cookie=7, dst="192.0.2.9"))
    start(job.flow(1, cookie=8))
    (demand,) = desk.see(0, job)
    assert (demand.flow, demand.remaining) == (8, MB)
    desk.give(0, Granted(8, 1e6, 2e6), Granted(7, 1e6, 2e6))
    assert math.isnan(desk.rates()[0]) and desk.rates()[1] == 1e6


def test_all_flows_of_an_aggregate_end_together(desk, job):
    for i in range(3):
        start(job.flow(i, cookie=7 + i), total=(i + 1) * MB)
    desk.see(0, job)
    assert desk.give(0, Granted(7, 6e6, 20e6, False, 9e6)) == {7, 8, 9}
    assert desk.rates() == pytest.approx([1e6, 2e6, 3e6])
    assert desk.seen["ceiling"] == [20e6] * 3
    assert desk.seen["share"] == [3e6] * 3
    assert desk.give(1) == set(), "nothing has happened"
    assert desk.give(1, Granted(7, 6e6, 20e6, False, 9e6)) == {7, 8, 9}, "said anew"


def test_a_flow_that_has_ended_leaves_its_part_to_its_siblings_unasked(desk, job):
    flows = at_work(desk, job, 2)
    flows[0].done(MB)
    flows[1].done(250_000)
    assert desk.see(125, job) == [], "together they have sent what the arbiter expects"
    assert desk.give(125) == {7, 8}
    assert desk.rates() == [0.0, 10e6]


def test_a_flow_that_lags_behind_is_helped_by_the_others(desk, job):
    flows = at_work(desk, job, 2)
    flows[0].done(510_000)
    flows[1].done(490_000)
    desk.see(100, job)
    assert desk.give(100) == set(), "they end almost together: not worth a change"
    flows[0].done(390_000)
    flows[1].done(110_000)
    desk.see(150, job)
    assert desk.give(150) == {7, 8}
    assert desk.rates() == pytest.approx([2e6, 8e6])


def test_channels_and_sockets_to_one_peer_are_one_transfer(desk, make_job):
    """From any process; and what one socket leaves to another is no news to an arbiter."""
    ranks = [make_job("a", pid=100 + i) for i in range(2)]
    flows = []
    for i, job in enumerate(ranks):
        for n in range(4):
            cookie = 10 * (i + 1) + n
            flows.append(job.flow(n, cookie=cookie))
            slot = np.frombuffer(job.record.slot(n), SLOT)
            slot["rank"], slot["peer"], slot["channel"] = i, 2 + i, n // 2
    for flow in flows:
        flow.begin(1, MB)
        flow.ready(500_000)  # a window
    (demand,) = desk.see(0, *ranks)
    assert (demand.remaining, demand.sockets) == (8 * MB, 8)
    desk.give(0, Granted(10, 8e6, 20e6))
    assert desk.rates() == [1e6] * 8
    flows[0].done(100_000)
    for flow in flows[1:]:
        flow.done(350_000)
    flows[0].begin(1, 800_000)
    flows[1].begin(1, 1_200_000)
    assert desk.see(300, *ranks, small=False) == []
    desk.give(300)
    left = np.array([700_000, 850_000] + [650_000] * 6)
    assert desk.rates() == pytest.approx(8e6 * left / left.sum()), "all end together"


def test_siblings_that_are_still_to_start_keep_their_parts(desk, job):
    flows = [job.flow(i, cookie=7 + i) for i in range(2)]
    for i, ms in ((1, 0), (2, 200)):
        for flow in flows:
            start(flow, i)
        desk.see(ms, job)
        for flow in flows:
            flow.done(MB)
        desk.see(ms + 100, job)
    desk.give(350, Granted(7, 10e6, 20e6))
    assert desk.rates() == [5e6, 5e6], "ready for the next phase"
    start(flows[0], 3)
    desk.see(395, job)
    assert desk.give(395) == set(), "the other one is due in 5 ms"
    desk.see(425, job)
    assert desk.give(425) == {7, 8}
    assert desk.rates() == [10e6, 0.0], "and did not come"


def test_a_new_flow_of_an_aggregate_gets_its_part_at_once(desk, job):
    at_work(desk, job)
    start(job.flow(1, cookie=8), total=3 * MB)
    (demand,) = desk.see(0, job)
    assert demand.remaining == 4 * MB
    assert desk.give(0) == {7, 8}
    assert desk.rates() == pytest.approx([2.5e6, 7.5e6])


def test_an_aggregate_outlives_the_flow_that_it_is_named_after(desk, make_job):
    job, other = make_job("a"), make_job("b")
    flows = [job.flow(i, cookie=7 + i) for i in range(2)]
    desk.see(0, job)
    flows[0].close()
    desk.see(1, job)
    assert desk.host.dones == []
    other.flow(0, cookie=7)  # which another job claims now
    (demand,) = desk.see(2, job, other)
    assert (demand.job, demand.flow) == ("b", 1), "no two of one name"
    flows[1].close()
    desk.see(3, job)
    assert [done.flow for done in desk.host.dones] == [7]
    job.flow(2, cookie=7)
    desk.see(4, job, other)
    assert len(desk.host.dones) == 1


def test_an_aggregate_that_comes_back_has_a_higher_incarnation(desk, job):
    flow = job.flow(0, cookie=7)
    for i in range(20):
        start(flow, i)
        desk.see(100 + 3 * i, job)
        flow.done(MB)
        desk.see(101 + 3 * i, job)
    flow.close()
    desk.see(200, job)
    (done,) = desk.host.dones
    job.flow(1, cookie=7)
    (demand,) = desk.see(201, job)
    assert (demand.flow, demand.inc > done.inc) == (7, True)


def test_period_volume_and_next_start_are_reported(desk, job):
    flow = job.flow(0, cookie=7)
    for i in range(5):
        flow.begin(i, 0)  # the job does not know its totals
        flow.ready(1000)
        desk.see(200 * i, job)
        flow.done(1000)
        demands = desk.see(200 * i + 50, job)
    assert desk.seen["period"] == [200 * MS]
    (demand,) = demands
    assert demand.remaining == 0
    assert demand.next_bytes == 1000
    assert demand.period_ns == 200 * MS
    assert demand.next_in_ns == 150 * MS


def test_an_event_of_one_process_sends_nothing_old_about_another(desk, make_job):
    jobs = [make_job("a", pid=100), make_job("b"), make_job("a", pid=200)]
    for i, job in enumerate(jobs):
        start(job.flow(0, cookie=7 + i))
    desk.see(0, *jobs)
    desk.give(0, Granted(7, 10e6, 10e6))
    assert desk.see(50, jobs[1]) == []
    assert desk.see(50, jobs[2])[0].remaining == MB + MB - 250_000


def test_the_next_phase_is_another_incarnation(desk, job):
    flows = [job.flow(i, cookie=7 + i) for i in range(2)]
    start(flows[0])
    (first,) = desk.see(0, job)
    start(flows[1])
    (same,) = desk.see(3, job)  # its sibling starts a little later
    assert (same.inc, same.remaining, same.wait_ns) == (first.inc, 2 * MB, 3 * MS)
    for flow in flows:
        flow.done(MB)
    for flow in flows:
        start(flow, 2)  # nobody has looked between
    (second,) = desk.see(200, job)
    assert (second.inc, second.wait_ns) == (first.inc + 1, 0)


def test_what_a_flow_leaves_goes_to_its_siblings_before_anybody_looks(desk, job):
    at_work(desk, job, 2)
    assert desk.rates() == [5e6, 5e6]
    desk.observer.drained([8])
    assert desk.give(10) == {7, 8}
    assert desk.rates() == [10e6, 0.0]


@pytest.mark.parametrize("borrowed", [False, True])
def test_what_nobody_uses_any_more_is_given_back(desk, job, borrowed):
    (flow,) = at_work(desk, job)
    flow.done(MB)
    desk.seen.look(100, job)
    assert [demand.remaining for demand in desk.report(100, *[0] * borrowed)] == [0]
    desk.report(101, *[0] * borrowed)
    assert desk.host.gave_back == ([] if borrowed else [7]), "once"


# --- how a rate is shared out


def split(aggregate, rate, present, weight):
    rows, changed = np.repeat(FREE, len(aggregate)), np.zeros(len(aggregate), np.uint8)
    rows["aggregate"], rows["rate"], rows["target"] = aggregate, present, weight
    terms = np.zeros((len(rate), 7))
    terms[:, 0] = rate
    shares.share_out(0, as_structs(rows), terms, changed)
    same = (rows["rate"] == present) | (np.isnan(rows["rate"]) & np.isnan(present))
    assert (changed == ~same).all()
    return rows["rate"]


sizes = st.one_of(st.just(0), st.integers(1, 10**12))
rates = st.one_of(st.just(0.0), st.floats(1.0, 1e11))


@given(
    st.lists(st.tuples(st.integers(0, 2), sizes, st.one_of(rates, st.just(math.nan))), max_size=9),
    st.tuples(rates, rates),
)
def test_parts_add_up_and_everybody_ends_in_time(flows, granted):
    of = np.array([b for b, *_ in flows], np.intp)
    weight = np.array([w for _, w, _ in flows], np.int64)
    present = np.array([p for *_, p in flows])
    rate = np.array([math.nan, *granted])
    parts = split(of, rate, present, weight)
    assert np.isnan(parts[of == 0]).all() and (parts[of > 0] >= 0).all()
    for b in (1, 2):
        mine = of == b
        if not mine.any():
            continue
        assert parts[mine].sum() == pytest.approx(rate[b], rel=1e-6)
        assert parts[mine].sum() <= rate[b] * (1 + 1e-8)
        if rate[b] > 0:
            busy = mine & (weight > 0)
            best = weight[mine].sum() / rate[b]
            bound = shares.KEEP_RATIO * best + shares.KEEP_SLACK_S
            assert (weight[busy] / parts[busy] <= bound * (1 + 1e-6)).all()


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=9), st.floats(1.0, 1e11))
def test_what_was_shared_out_well_is_left_alone(weights, rate):
    of, weight = np.ones(len(weights), np.intp), np.array(weights)
    total = np.array([math.nan, rate])
    parts = split(of, total, np.full(len(weights), math.nan), weight)
    assert (split(of, total, parts, weight * 3 // 10) == parts).all()


def test_what_is_never_expected_is_so_for_loops_and_for_aggregates():
    assert shares.NEVER == NEVER


def test_flows_that_wait_for_other_hosts_give_their_rate_to_others(desk, job):
    flows = [job.flow(i, cookie=7 + i) for i in range(2)]
    for flow in flows:
        flow.begin(1, MB)
        flow.ready(250_000)
        flow.posted(250_000)
    (demand,) = desk.see(0, job)
    assert demand.cap == math.inf
    for flow in flows:
        flow.done(250_000)
    assert [d.cap for d in desk.see(50, job)] in ([], [math.inf]), "it may be on its way"
    (demand,) = desk.see(120, job)
    assert (demand.cap, demand.remaining) == (0.0, 2 * MB - 500_000)
    assert desk.see(125, job) == [], "once"
    flows[1].ready(10)
    (demand,) = desk.see(130, job)
    assert demand.cap == math.inf, "one of them is enough"


@pytest.mark.parametrize("why", ["it says nothing", "it moves", "it cannot top up"])
def test_only_who_is_dry_gives_way(desk, job, why):
    flow = job.flow(0, cookie=7)
    flow.begin(1, 100 * MB)
    flow.ready(0 if why == "it says nothing" else MB)
    if why == "it cannot top up":
        desk.tops_up = False
        flow.done(MB)
    if why == "it says nothing":
        flow.advance(posted=MB)
    for ms in range(0, 600, 60):
        if why == "it moves":
            flow.done(1000)
        desk.see(ms, job)
        assert all(
            b.reported is None or b.reported.cap == math.inf
            for b in desk.aggregates._by_id.values()
        )
