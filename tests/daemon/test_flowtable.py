# SPDX-License-Identifier: Apache-2.0
"""Rows of flows: whose they are, and what is said of them to policies and to other hosts."""

import numpy as np
import pytest
from slots import Setup, at_once, slot_start, start

from flowslot.protocol.grants import Granted
from flowslot_shm.layout import SLOT, Role
from flowslotd.flows.rows import FREE

from .conftest import ELSEWHERE


def test_a_row_is_its_flows_for_life_and_blank_for_the_next_one(seen, make_job):
    table, job, other = seen.table, make_job(slots=64), make_job("b")
    flows = [job.flow(i, cookie=100 + i) for i in range(40)]
    for flow in flows:
        start(flow, 1, 100)
    seen.look(0, job)
    table.rows["rate"], table.rows["aggregate"], table.rows["lender"] = 1.0, 5, 20
    table.rows["lender"][30] = 21
    flows[20].close()
    seen.look(1, job)
    assert table.used().tolist() == [*range(20), *range(21, 40)]
    assert table.rows[20].tobytes() == FREE.tobytes()
    assert set(seen["lender"]) == {-1, 21}, "nobody borrows from who has gone"
    table.take_new()
    other.flow(0, cookie=7)
    other.flow(1, cookie=8)
    seen.look(2, other)
    assert [(info.cookie, info.row) for info in table.take_new()] == [(7, 20), (8, 40)]
    assert table.find(7) == 20 and table.infos[20].cookie == 7
    assert (table.rows["aggregate"][20], table.rows["target"][20]) == (0, 0)
    assert np.isnan(table.rows["rate"][20])
    assert all(table.find(100 + i) == i for i in range(40) if i != 20)
    assert seen["rate"][39] == 1.0, "and what is kept of the others stays theirs"
    seen.observer.forget(other.id)
    seen.observer.forget(job.id)
    assert len(table.rows) == 0


def test_a_flow_that_comes_and_goes_between_two_passes_is_nobodys_news(seen, job, flow):
    job.flow(1, cookie=8)
    seen.look(0, job)
    seen.observer.closed(7)
    assert [info.cookie for info in seen.table.take_new()] == [8]
    assert seen.table.take_gone() == []


def test_unmapped_flows_are_observed(seen, job):
    flow = job.flow(0, cookie=7, dst="192.0.2.9")
    start(flow, 1, 100)
    seen.look(0, job)
    assert seen["remaining"] == [100]
    view = seen.table.view(0, 10, [False] * len(seen.table.links), np.zeros(1, np.intp))
    assert (view.paths == len(view.capacity)).all()


def test_share_divides_the_bottleneck_among_a_jobs_flows_there(seen, make_job, topology):
    a, b = make_job("a"), make_job("b")
    for i in range(4):
        a.flow(i, cookie=10 + i)
    b.flow(0, cookie=20)
    seen.look(0, a, b)
    bottleneck = topology.links[3].goodput  # s1->h2, 0.2 Gbit/s
    assert seen.table.rows["own_share"] == pytest.approx([bottleneck / 4] * 4 + [bottleneck])


def test_flows_are_told_which_of_the_hosts_links_they_begin_on(seen, make_job, topology):
    job = make_job("a")
    job.flow(0, cookie=10)
    job.flow(1, cookie=11)
    job.flow(2, cookie=12, dst="192.0.2.9")
    seen.look(0, job)
    first = topology.links[seen.table.links[1][0]]
    assert first.name.startswith(f"{seen.table.host}->")
    assert seen["uplink"] == [1, 1, 0]
    assert seen["line"] == [first.goodput, first.goodput, 0.0]


def test_others_may_wait_for_what_goes_to_other_hosts_in_a_known_role_and_rank(seen, job):
    flows = [
        job.flow(0, cookie=7),
        job.flow(1, cookie=8, role=Role.UNKNOWN),
        job.flow(2, cookie=9, dst="10.99.0.1"),
        job.flow(3, cookie=11),
        job.flow(4, cookie=12),
        job.flow(5, cookie=13),
        job.flow(6, cookie=10, role=Role.PULL),
    ]
    # Iterations of an unpatched job are counted from when they were first seen.
    for slot, unknown in enumerate(("rank", "peer", "channel"), 3):
        np.frombuffer(job.record.slot(slot), SLOT)[unknown] = -1
    for flow in flows[:6]:
        flow.begin(4, 1_000_000)
        flow.ready(300_000)
        flow.posted(300_000)
    sent = dict.fromkeys(("c7", "c8", "c9", "c11", "c12", "c13"), 200_000)
    seen.look(0, job, c10=0, **dict.fromkeys(sent, 0))
    seen.look(10, job, c10=0, **sent)
    (one,) = seen.table.transfers({7: 5e6, 8: 1.0})
    assert (one.flow, one.host, one.group[:2]) == (7, "h2", ("train", "ring"))
    assert (one.iteration, one.total, one.ready, one.sent) == (4, 1e6, 3e5, 2e5)
    assert one.rate == 5e6


def test_a_flow_takes_over_nothing_from_the_one_that_had_its_row(topology, make_job):
    """The old flow is let go and given up, the new one is paced at a grant of its own."""
    setup = Setup(topology)
    setup.desk.answer = at_once
    jobs = [make_job("a"), make_job("b")]
    setup.jobs += jobs
    old = jobs[0].flow(0, cookie=7)
    start(old)
    setup.slot(0)
    assert setup.pacer.entries[7].reserved == 1e6
    setup.desk.answer = None
    old.close()
    start(jobs[1].flow(0, cookie=8, dst=ELSEWHERE))
    setup.slot(1)
    assert setup.table.find(8) == 0
    assert (setup.pacer.released, setup.pacer.entries) == ([7], {})
    assert [done.flow for done in setup.desk.dones] == [7]
    assert [(d.flow, d.job) for d in setup.desk.demands[-1]] == [(8, "b")]
    setup.grant(slot_start(1), Granted(8, 2e6, 3e6))
    assert [(e.cookie, e.reserved) for e in setup.pacer.entries.values()] == [(8, 2e6)]
