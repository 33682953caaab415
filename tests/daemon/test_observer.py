# SPDX-License-Identifier: Apache-2.0
"""From progress records to rows: which flows are taken in; hostile records included."""

import numpy as np
import pytest
from seen import Seen, at
from slots import Desk, start

from flowslot.model.topology import parse_topology
from flowslot_shm.layout import JOB_BYTES, SLOT, Quiet, Role, Transport, plain_text
from flowslotd.flows.counters import FlowCounters
from flowslotd.negotiate.aggregates import Aggregates
from flowslotd.observe.observer import Ended

from .conftest import ELSEWHERE, TOPOLOGY


def test_a_flow_appears_with_its_path(seen, job, flow, topology):
    seen.look(0, job)
    assert seen.flows == [7]
    assert seen.table.infos[0].path == topology.path("10.78.0.1", "10.78.0.2")


def test_jobs_whose_names_begin_alike_are_two(seen, make_job):
    names = [f"vit-huge-imagenet21k-pretrain-2031-07-{day}" for day in ("08", "09")]
    for i, name in enumerate(names):
        job = make_job(plain_text(name, JOB_BYTES).decode())
        job.flow(0, cookie=7 + i)
        seen.look(i, job)
    assert len(seen.table.jobs) == 2


@pytest.mark.parametrize(
    ("name", "taken_for"),
    [
        ("pslite-10.78.0.2-9000", "pslite-h2-9000"),
        ("pslite-10.78.0.1-9000", "pslite-h1-9000"),  # h1 calls itself by any of these
        ("pslite-127.0.0.1-9000", "pslite-h1-9000"),
        ("pslite-::1-9000", "pslite-h1-9000"),
        ("pslite-0.0.0.0-9000", "pslite-h1-9000"),
        ("pslite-10.99.0.9-9000", "pslite-10.99.0.9-9000"),  # nobody's in the topology
        ("pslite-sched-9000", "pslite-sched-9000"),
        ("pslite--9000", "pslite--9000"),
        ("pslite-127.0.0.1", "pslite-127.0.0.1"),
        ("bert", "bert"),
    ],
)
def test_a_job_named_after_a_host_has_one_name(seen, make_job, name, taken_for):
    job = make_job(name)
    job.flow(0, cookie=7)
    seen.look(0, job)
    assert seen.table.jobs == [taken_for]


def test_a_slot_that_is_freed_and_a_job_that_leaves_take_their_flows_along(seen, job):
    flows = [job.flow(i, cookie=7 + i) for i in range(3)]
    seen.look(0, job)
    seen.table.take_new()
    flows[1].close()
    seen.look(1, job)
    assert seen.flows == [7, 9]
    assert seen.gone() == [8]
    start(flows[2], 3, 50)
    seen.look(2, job)  # the rows still meet their slots
    assert seen["remaining"] == [0, 0, 50]
    seen.observer.forget(job.id)
    assert len(seen.table) == len(seen.table.rows) == len(seen.table.infos) == 0
    assert seen.table.jobs == []


def test_a_socket_that_comes_back_has_a_higher_incarnation(seen, job):
    job.flow(0, cookie=7).close()
    flow = job.flow(0, cookie=7)
    for i in range(20):
        flow.begin(i, 10)
        seen.look(100 + i, job)
    flow.close()
    ended = seen["inc"][0]
    seen.look(200, job)
    job.flow(1, cookie=7)
    seen.look(201, job)
    assert seen["inc"][0] > ended


def test_closed_sockets_stay_away_until_their_slot_changes(seen, job, flow):
    seen.look(0, job)
    seen.observer.closed(7)
    seen.look(1, job)
    job.flow(1, cookie=8)  # makes the table look at all slots again
    seen.look(2, job)
    assert seen.flows == [8]
    assert seen.notes == ["its socket is closed"]


@pytest.mark.parametrize(
    ("flow", "note"),
    [
        ({"src": "10.78.0.2", "dst": "10.78.0.1"}, "10.78.0.2 is not an address of this host"),
        ({"dst": "10.78.0.1"}, "stays on this host"),
        ({"src": "127.0.0.1", "dst": "127.0.0.1"}, "stays on this host"),
        ({"cookie": 0}, "no socket cookie was reported"),
        ({"role": Role.RECEIVE}, "only receives"),
        (
            {"transport": Transport.RDMA},
            "neither TCP nor UDP: its progress is seen, but it cannot be paced",
        ),
    ],
)
def test_flows_that_are_left_alone_say_why(seen, job, flow, note):
    job.flow(0, **{"cookie": 7, **flow})
    seen.look(0, job)
    assert len(seen.table) == 0
    assert seen.notes == [note]


@pytest.mark.parametrize("paced", [False, True])
def test_udp_flows_are_left_to_back_ends_that_pace_them(seen, job, paced):
    seen.observer.protocols = ("tcp", "udp") if paced else ("tcp",)
    job.flow(0, cookie=7, transport=Transport.UDP)
    seen.look(0, job)
    assert len(seen.table) == paced
    notes = [] if paced else ["UDP, which this back end does not pace"]
    assert seen.notes == notes


def test_one_socket_in_two_records_stays_with_the_first(seen, make_job):
    first, second = make_job("a", pid=100), make_job("b", pid=200)
    first.flow(0, cookie=7)
    second.flow(0, cookie=7)
    second.flow(1, cookie=8)
    seen.look(0, first, second)
    assert {info.cookie: info.job for info in seen.table.infos} == {7: "a", 8: "b"}
    assert seen.notes == ["process 100 reported this socket before"]


def test_the_process_that_holds_the_socket_gets_it(topology, make_job):
    owners = {7: 200}
    seen = Seen(topology, lambda pid, fd, cookie: owners.get(cookie, pid) == pid)
    thief, owner = make_job("thief", pid=100), make_job("owner", pid=200)
    thief.flow(0, cookie=7)
    seen.look(0, thief)
    assert seen.notes == ["the socket belongs to another process"]
    owner.flow(0, cookie=7)
    seen.look(1, thief, owner)
    assert [info.job for info in seen.table.infos] == ["owner"]


def test_ranks_that_become_known_later_are_corrected_on_the_live_flow(seen, job, flow):
    def say(slot, **fields):
        content = np.frombuffer(job.record.slot(slot), SLOT)[0].copy()
        for name, value in fields.items():
            content[name] = value
        content["seq"] += 2
        job.record.slot(slot)[:] = content.tobytes()
        seen.look(1, job)
        return seen.table.infos[0]

    say(0, rank=3, peer=-1, channel=-1)
    seen.table.take_new()
    start(flow)
    seen.look(0, job)
    known = say(0, peer=1, channel=2)
    assert (known.rank, known.peer, known.channel, known.role) == (3, 1, 2, Role.RING)
    assert seen["remaining"] == [1_000_000] and not seen.table.has_news(), "it is the same flow"
    known = say(0, role=Role.RECEIVE, peer=7, job=b"another", dst=b"\1" * 16)
    assert (known.peer, known.role, known.job) == (1, Role.RING, "train"), "that no flow becomes"
    job.flow(1, cookie=7)
    known = say(1, peer=5)
    assert known.peer == 1, "a second slot for the same socket says nothing"


def test_an_owner_that_is_sure_displaces_one_that_is_not(topology, make_job):
    sure = {100: None, 200: True}
    seen = Seen(topology, lambda pid, fd, cookie: sure[pid])
    thief, owner = make_job("thief", pid=100), make_job("owner", pid=200)
    thief.flow(0, cookie=7)
    thief.flow(1, cookie=8)
    seen.look(0, thief)
    seen.table.take_new()
    owner.flow(0, cookie=7)
    seen.look(1, thief, owner)
    assert {info.cookie: info.job for info in seen.table.infos} == {7: "owner", 8: "thief"}
    assert seen.gone() == [7]


def test_absurd_values_neither_overflow_nor_raise(seen, make_job):
    job, aggregates = make_job(), Aggregates(seen.table)
    flow = job.flow(0, cookie=7)
    rng = np.random.default_rng(5)
    for i in range(300):
        flow.begin(int(rng.integers(2**63)) * 2, int(rng.integers(2**63)) * 2)
        flow.ready(int(rng.integers(2**40)))
        flow.done(int(rng.integers(2**63)))
        seen.sent = FlowCounters.none()
        seen.look(i, job, **({"c7": int(rng.integers(2**62))} if i % 3 else {}))
        aggregates.follow(at(i), seen.table.take_new(), seen.table.take_gone())
        desk = Desk()
        aggregates.report(at(i), desk, small=True, lent=lambda now: np.zeros(0, np.intp))
        aggregates.share_out(at(i))
        for demand in [demand for demands in desk.demands for demand in demands]:
            assert 0 <= demand.remaining < 2**62
            assert 0 <= demand.period_ns < 10**12
            assert 0 <= demand.next_in_ns < 10**12
    assert np.isfinite(seen.table.view(0, 10, [False] * 2, np.zeros(1, np.intp)).remaining).all()


def test_a_new_topology_maps_every_flow_again(seen, job, flow):
    seen.look(0, job)
    seen.table.take_new()
    changed = TOPOLOGY.replace('addresses = ["10.78.0.2"]', 'addresses = ["10.78.0.4"]')
    seen.observer.remap(parse_topology(changed, "t"), "h1")
    seen.look(1, job)
    assert seen.table.infos[0].path == ()
    assert seen.gone() == [7]


def test_drained_tells_what_has_ended(seen, make_job):
    a, b = make_job("a"), make_job("b")
    for i, job in enumerate((a, a, a, b)):
        flow = job.flow(i, cookie=10 + i, **({"dst": ELSEWHERE} if i == 2 else {}))
        start(flow, 1, 100)
    seen.look(0, a, b)
    assert seen.observer.drained([10]) == Ended.FLOWS
    assert seen.observer.drained([11, 99]) == Ended.PATH
    assert seen.observer.drained([99]) == Ended.FLOWS
    assert seen.observer.drained([12]) == Ended.JOB
    seen.look(1, a)
    assert seen.observer.drained([10]) == Ended.FLOWS  # a new look, a new state
    assert seen.observer.drained([13]) == Ended.JOB


def test_all_flows_of_a_record_send_when_the_last_one_has_begun_the_iteration(seen, job):
    flows = [job.flow(i, cookie=10 + i) for i in range(2)]
    assert not seen.observer.all_send(job)
    seen.look(0, job)
    found = []
    for iteration in 1, 2:
        for flow in flows:
            start(flow, iteration, 100)
            found.append(seen.observer.all_send(job))
    assert found == [False, True, False, True]
    flows[0].done(100)
    assert not seen.observer.all_send(job)


def test_of_bytes_that_are_not_announced_only_a_look_tells_the_end(seen, job):
    for i in range(2):
        flow = job.flow(i, cookie=10 + i)
        flow.begin(1, 0)
        flow.ready(100)
    seen.look(0, job)
    assert seen.observer.drained([10]) == Ended.PATH


def test_ends_need_not_be_rung_where_the_kernel_tells_of_them(seen, job):
    flows = [job.flow(i, cookie=7 + i) for i in range(2)]
    for flow in flows:
        start(flow, 1, 1000)
    seen.look(0, job, c7=0)
    seen.observer.suppress([job], ends_are_reported=True)
    assert job.record.quiet == Quiet.NONE, "the kernel does not know the second one"
    seen.look(1, job, c7=0, c8=0)
    seen.observer.suppress([job], ends_are_reported=False)
    assert job.record.quiet == Quiet.NONE, "a pacer that has to be asked"
    seen.observer.suppress([job], ends_are_reported=True)
    assert job.record.quiet == Quiet.ENDS
    flows[0].begin(2)
    flows[0].ready(10)
    seen.look(2, job)
    seen.observer.suppress([job], ends_are_reported=True)
    assert job.record.quiet == Quiet.NONE, "without a total only its end tells how much it was"
