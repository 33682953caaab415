# SPDX-License-Identifier: Apache-2.0
"""From progress records to rows, demands and learnt periods; hostile records included."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from flowslot.protocol.grantbook import Granted
from numpy.typing import NDArray
from slots import Setup, slot_start, start

from flowslot.model.topology import parse_topology
from flowslot.model.units import MILLISECOND, Nanos
from flowslot_shm.layout import Quiet, Role, Transport
from flowslotd.flows.flow_table import FlowTable
from flowslotd.flows.rows import FREE
from flowslotd.negotiate.aggregates import Aggregates
from flowslotd.observe.observer import Ended, Observer

from .conftest import ELSEWHERE, TOPOLOGY

MS = MILLISECOND


@dataclass
class Kernel:
    """Counters as a pacer gives them."""

    cookie: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))
    acked: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def set(self, **acked):
        known = sorted((int(name[1:]), counter) for name, counter in acked.items())
        self.cookie = np.array([cookie for cookie, _ in known], np.uint64)
        self.acked = np.array([counter for _, counter in known], np.int64)


@pytest.fixture
def observer(topology):
    return Observer(FlowTable(topology, "h1"), lambda pid, fd, cookie: None)


@pytest.fixture
def table(observer):
    return observer.table


def at(ms):
    return Nanos(10**12 + round(ms * MS))


def column(table, name):
    return table.rows[name].tolist()


def test_a_flow_appears_with_its_path(observer, table, make_job, topology):
    job = make_job()
    job.flow(0, cookie=7)
    observer.observe(at(0), [job], None)
    assert [info.cookie for info in table.infos] == [7]
    assert table.infos[0].path == topology.path("10.78.0.1", "10.78.0.2")


def test_remaining_is_the_total_minus_what_the_kernel_saw_acknowledged(observer, table, make_job):
    job, kernel = make_job(), Kernel()
    flow = job.flow(0, cookie=7)
    kernel.set(c7=500)  # a handshake of the job's own, before the first iteration
    observer.observe(at(0), [job], kernel)
    flow.begin(1, 1_000_000)
    flow.ready(1_000_000)
    flow.posted(800_000)
    kernel.set(c7=500 + 300_000)
    observer.observe(at(10), [job], kernel)
    assert column(table, "remaining") == [700_000]
    assert column(table, "active") == [True]
    assert observer.take_watches() == [(7, 500 + 1_000_000)]
    assert observer.take_watches() == []


def test_without_a_kernel_counter_the_record_is_believed(observer, table, make_job):
    job = make_job()
    flow = job.flow(0, cookie=7)
    flow.begin(1, 1000)
    flow.ready(1000)
    flow.done(400)
    observer.observe(at(0), [job], None)
    assert column(table, "remaining") == [600]
    assert observer.take_watches() == []


def test_a_phase_lasts_until_everything_is_acknowledged(observer, table, make_job):
    job, kernel = make_job(), Kernel()
    flow = job.flow(0, cookie=7)
    kernel.set(c7=0)
    observer.observe(at(0), [job], kernel)
    flow.begin(1, 1000)
    flow.ready(1000)
    flow.posted(1000)  # all of it is in the socket's buffer, and the job computes again
    kernel.set(c7=900)
    observer.observe(at(1), [job], kernel)
    assert column(table, "active") == [True]
    kernel.set(c7=1000)
    observer.observe(at(2), [job], kernel)
    assert column(table, "active") == [False]


def test_a_flow_met_in_mid_iteration_ends_its_phase_when_the_record_says_so(
    observer, table, make_job
):
    """The record lags behind the kernel: where the iteration began is only known from above."""
    job, kernel = make_job(), Kernel()
    flow = job.flow(0, cookie=7)
    flow.begin(1, 1000)
    flow.ready(1000)
    flow.posted(800)
    flow.done(300)
    kernel.set(c7=517 + 400)
    observer.observe(at(0), [job], kernel)
    assert column(table, "remaining") == [700]
    flow.done(300)
    kernel.set(c7=517 + 650)
    observer.observe(at(1), [job], kernel)
    assert column(table, "remaining") == [400], "600 are done, the kernel's count tells 50 more"
    flow.posted(200)
    flow.done(400)
    kernel.set(c7=517 + 1000)
    observer.observe(at(2), [job], kernel)
    assert column(table, "active") == [False]


def test_bytes_that_are_not_reported_do_not_add_up(observer, table, make_job):
    """Libraries send headers beside the payload: 10 bytes per iteration here."""
    job, kernel = make_job(), Kernel()
    flow = job.flow(0, cookie=7)
    sent = 0
    kernel.set(c7=0)
    observer.observe(at(0), [job], kernel)
    for i in range(1, 200):
        flow.begin(i, 1000)
        flow.ready(1000)
        kernel.set(c7=sent + 100)
        observer.observe(at(100 * i), [job], kernel)
        assert column(table, "remaining") == [900], i
        flow.done(1000)
        sent += 1010
        kernel.set(c7=sent)
        observer.observe(at(100 * i + 50), [job], kernel)
        assert column(table, "remaining") == [0]


def test_an_iteration_may_begin_before_the_last_one_is_acknowledged(observer, table, make_job):
    job, kernel = make_job(), Kernel()
    flow = job.flow(0, cookie=7)
    kernel.set(c7=0)
    observer.observe(at(0), [job], kernel)
    flow.begin(1, 1000)
    flow.ready(1000)
    kernel.set(c7=600)
    observer.observe(at(1), [job], kernel)
    flow.done(1000)
    flow.begin(2, 1000)
    flow.ready(1000)
    kernel.set(c7=900)
    observer.observe(at(2), [job], kernel)
    assert column(table, "remaining") == [1000 + 100 - 0 - 100]  # the old 100 are not counted twice
    kernel.set(c7=1500)
    observer.observe(at(3), [job], kernel)
    assert 400 <= column(table, "remaining")[0] <= 600


def test_skipped_iterations_count_as_several(observer, table, make_job):
    job = make_job()
    flow = job.flow(0, cookie=7)
    for i, ms in ((1, 0), (2, 100), (5, 400)):
        flow.begin(i, 1000)
        flow.ready(1000)
        observer.observe(at(ms), [job], None)
        flow.done(1000)
    assert column(table, "period") == [100 * MS]


def test_a_slot_that_is_freed_and_a_job_that_leaves_take_their_flows_along(
    observer, table, make_job
):
    job = make_job()
    flows = [job.flow(i, cookie=7 + i) for i in range(3)]
    observer.observe(at(0), [job], None)
    table.take_new()
    flows[1].close()
    observer.observe(at(1), [job], None)
    assert [info.cookie for info in table.infos] == [7, 0, 9]
    assert [info.cookie for info in table.take_gone()] == [8]
    flows[2].begin(3, 50)
    flows[2].ready(50)
    observer.observe(at(2), [job], None)  # the rows still meet their slots
    assert column(table, "remaining") == [0, 0, 50]
    observer.forget(job.id)
    assert len(table) == len(table.rows) == len(table.infos) == 0
    assert table.jobs == []


def test_a_row_is_its_flows_for_life_and_blank_for_the_next_one(observer, table, make_job):
    job, other = make_job(slots=64), make_job("b")
    flows = [job.flow(i, cookie=100 + i) for i in range(40)]
    for flow in flows:
        flow.begin(1, 100)
        flow.ready(100)
    observer.observe(at(0), [job], None)
    table.rows["rate"], table.rows["aggregate"], table.rows["lender"] = 1.0, 5, 20
    table.rows["lender"][30] = 21
    flows[20].close()
    observer.observe(at(1), [job], None)
    assert table.used().tolist() == [*range(20), *range(21, 40)]
    assert table.rows[20].tobytes() == FREE.tobytes()
    assert set(table.rows["lender"].tolist()) == {-1, 21}, "nobody borrows from who has gone"
    table.take_new()
    other.flow(0, cookie=7)
    other.flow(1, cookie=8)
    observer.observe(at(2), [other], None)
    assert [(info.cookie, info.row) for info in table.take_new()] == [(7, 20), (8, 40)]
    assert table.find(7) == 20 and table.infos[20].cookie == 7
    assert (table.rows["aggregate"][20], table.rows["target"][20]) == (0, 0)
    assert np.isnan(table.rows["rate"][20])
    assert all(table.find(100 + i) == i for i in range(40) if i != 20)
    assert table.rows["rate"][39] == 1.0, "and what is kept of the others stays theirs"
    observer.forget(other.id)
    observer.forget(job.id)
    assert len(table.rows) == 0


def test_a_flow_that_comes_and_goes_between_two_passes_is_nobodys_news(observer, table, make_job):
    job = make_job()
    job.flow(0, cookie=7)
    job.flow(1, cookie=8)
    observer.observe(at(0), [job], None)
    observer.closed(7)
    assert [info.cookie for info in table.take_new()] == [8]
    assert table.take_gone() == []


def test_a_socket_that_comes_back_has_a_higher_incarnation(observer, table, make_job):
    job = make_job()
    job.flow(0, cookie=7).close()
    flow = job.flow(0, cookie=7)
    for i in range(20):
        flow.begin(i, 10)
        observer.observe(at(100 + i), [job], None)
    flow.close()
    ended = column(table, "inc")[0]
    observer.observe(at(200), [job], None)
    job.flow(1, cookie=7)
    observer.observe(at(201), [job], None)
    assert column(table, "inc")[0] > ended


def test_closed_sockets_stay_away_until_their_slot_changes(observer, table, make_job):
    job = make_job()
    job.flow(0, cookie=7)
    observer.observe(at(0), [job], None)
    observer.closed(7)
    observer.observe(at(1), [job], None)
    job.flow(1, cookie=8)  # makes the table look at all slots again
    observer.observe(at(2), [job], None)
    assert [info.cookie for info in table.infos] == [8]
    assert [info.note for info in observer.refused()] == ["its socket is closed"]


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
def test_flows_that_are_left_alone_say_why(observer, table, make_job, flow, note):
    job = make_job()
    job.flow(0, **{"cookie": 7, **flow})
    observer.observe(at(0), [job], None)
    assert len(table) == 0
    assert [info.note for info in observer.refused()] == [note]


@pytest.mark.parametrize("paced", [False, True])
def test_udp_flows_are_left_to_back_ends_that_pace_them(observer, table, make_job, paced):
    observer.protocols = ("tcp", "udp") if paced else ("tcp",)
    job = make_job()
    job.flow(0, cookie=7, transport=Transport.UDP)
    observer.observe(at(0), [job], None)
    assert len(table) == paced
    notes = [] if paced else ["UDP, which this back end does not pace"]
    assert [info.note for info in observer.refused()] == notes


def test_unmapped_flows_are_observed(observer, table, make_job):
    job = make_job()
    flow = job.flow(0, cookie=7, dst="192.0.2.9")
    flow.begin(1, 100)
    flow.ready(100)
    observer.observe(at(0), [job], None)
    assert column(table, "remaining") == [100]
    view = table.view(0, 10, [False] * len(table.links), [0])
    assert (view.paths == len(view.capacity)).all()


def test_one_socket_in_two_records_stays_with_the_first(observer, table, make_job):
    first, second = make_job("a", pid=100), make_job("b", pid=200)
    first.flow(0, cookie=7)
    second.flow(0, cookie=7)
    second.flow(1, cookie=8)
    observer.observe(at(0), [first, second], None)
    assert {info.cookie: info.job for info in table.infos} == {7: "a", 8: "b"}
    assert [info.note for info in observer.refused()] == ["process 100 reported this socket before"]


def test_the_process_that_holds_the_socket_gets_it(topology, make_job):
    owners = {7: 200}
    observer = Observer(
        FlowTable(topology, "h1"), lambda pid, fd, cookie: owners.get(cookie, pid) == pid
    )
    table = observer.table
    thief, owner = make_job("thief", pid=100), make_job("owner", pid=200)
    thief.flow(0, cookie=7)
    observer.observe(at(0), [thief], None)
    assert [info.note for info in observer.refused()] == ["the socket belongs to another process"]
    owner.flow(0, cookie=7)
    observer.observe(at(1), [thief, owner], None)
    assert [info.job for info in table.infos] == ["owner"]


def test_an_owner_that_is_sure_displaces_one_that_is_not(topology, make_job):
    sure = {100: None, 200: True}
    observer = Observer(FlowTable(topology, "h1"), lambda pid, fd, cookie: sure[pid])
    table = observer.table
    thief, owner = make_job("thief", pid=100), make_job("owner", pid=200)
    thief.flow(0, cookie=7)
    thief.flow(1, cookie=8)
    observer.observe(at(0), [thief], None)
    table.take_new()
    owner.flow(0, cookie=7)
    observer.observe(at(1), [thief, owner], None)
    assert {info.cookie: info.job for info in table.infos} == {7: "owner", 8: "thief"}
    assert [info.cookie for info in table.take_gone()] == [7]


def test_absurd_values_neither_overflow_nor_raise(observer, table, make_job):
    job, kernel, aggregates = make_job(), Kernel(), Aggregates(table)
    flow = job.flow(0, cookie=7)
    rng = np.random.default_rng(5)
    for i in range(300):
        flow.begin(int(rng.integers(2**63)) * 2, int(rng.integers(2**63)) * 2)
        flow.ready(int(rng.integers(2**40)))
        flow.done(int(rng.integers(2**63)))
        kernel.set(c7=int(rng.integers(2**62)))
        observer.observe(at(i), [job], kernel if i % 3 else None)
        aggregates.follow(at(i), table.take_new(), table.take_gone())
        aggregates.look(at(i))
        aggregates.share_out(at(i))
        for demand in aggregates.demands(at(i), small=True):
            assert 0 <= demand.remaining < 2**62
            assert 0 <= demand.period_ns < 10**12
            assert 0 <= demand.next_in_ns < 10**12
    assert np.isfinite(table.view(0, 10, [False] * 2, [0]).remaining).all()


def test_a_new_topology_maps_every_flow_again(observer, table, make_job):
    job = make_job()
    job.flow(0, cookie=7)
    observer.observe(at(0), [job], None)
    table.take_new()
    changed = TOPOLOGY.replace('addresses = ["10.78.0.2"]', 'addresses = ["10.78.0.4"]')
    observer.remap(parse_topology(changed, "t"), "h1")
    observer.observe(at(1), [job], None)
    assert table.infos[0].path == ()
    assert [info.cookie for info in table.take_gone()] == [7]


def test_share_divides_the_bottleneck_among_a_jobs_flows_there(observer, table, make_job, topology):
    a, b = make_job("a"), make_job("b")
    for i in range(4):
        a.flow(i, cookie=10 + i)
    b.flow(0, cookie=20)
    observer.observe(at(0), [a, b], None)
    bottleneck = topology.links[3].goodput  # s1->h2, 0.2 Gbit/s
    assert table.rows["own_share"] == pytest.approx([bottleneck / 4] * 4 + [bottleneck])


def test_drained_tells_what_has_ended(observer, make_job):
    a, b = make_job("a"), make_job("b")
    for i, job in enumerate((a, a, a, b)):
        flow = job.flow(i, cookie=10 + i, **({"dst": ELSEWHERE} if i == 2 else {}))
        flow.begin(1, 100)
        flow.ready(100)
    observer.observe(at(0), [a, b], None)
    assert observer.drained([10]) == Ended.FLOWS
    assert observer.drained([11, 99]) == Ended.PATH
    assert observer.drained([99]) == Ended.FLOWS
    assert observer.drained([12]) == Ended.JOB
    observer.observe(at(1), [a], None)
    assert observer.drained([10]) == Ended.FLOWS  # a new look, a new state
    assert observer.drained([13]) == Ended.JOB


def test_of_bytes_that_are_not_announced_only_a_look_tells_the_end(observer, make_job):
    job = make_job()
    for i in range(2):
        flow = job.flow(i, cookie=10 + i)
        flow.begin(1, 0)
        flow.ready(100)
    observer.observe(at(0), [job], None)
    assert observer.drained([10]) == Ended.PATH


def test_ends_need_not_be_rung_where_the_kernel_tells_of_them(observer, make_job):
    job, kernel = make_job(), Kernel()
    flows = [job.flow(i, cookie=7 + i) for i in range(2)]
    for flow in flows:
        flow.begin(1, 1000)
        flow.ready(1000)
    kernel.set(c7=0)
    observer.observe(at(0), [job], kernel)
    observer.suppress([job], ends_are_reported=True)
    assert job.record.quiet == Quiet.NONE, "the kernel does not know the second one"
    kernel.set(c7=0, c8=0)
    observer.observe(at(1), [job], kernel)
    observer.suppress([job], ends_are_reported=False)
    assert job.record.quiet == Quiet.NONE, "a pacer that has to be asked"
    observer.suppress([job], ends_are_reported=True)
    assert job.record.quiet == Quiet.ENDS
    flows[0].begin(2)
    flows[0].ready(10)
    observer.observe(at(2), [job], kernel)
    observer.suppress([job], ends_are_reported=True)
    assert job.record.quiet == Quiet.NONE, "without a total only its end tells how much it was"


def test_what_others_may_wait_for_is_what_goes_to_other_hosts_in_a_known_role(
    observer, table, make_job
):
    job, kernel = make_job(), Kernel()
    flows = [
        job.flow(0, cookie=7),
        job.flow(1, cookie=8, role=Role.UNKNOWN),
        job.flow(2, cookie=9, dst="10.99.0.1"),
        job.flow(3, cookie=10, role=Role.PULL),
    ]
    kernel.set(c7=0, c8=0, c9=0, c10=0)
    for flow in flows[:3]:
        flow.begin(4, 1_000_000)
        flow.ready(300_000)
        flow.posted(300_000)
    observer.observe(at(0), [job], kernel)
    kernel.set(c7=200_000, c8=200_000, c9=200_000, c10=0)
    observer.observe(at(10), [job], kernel)
    (one,) = table.transfers({7: 5e6, 8: 1.0})
    assert (one.flow, one.host, one.group[:2]) == (7, "h2", ("train", "ring"))
    assert (one.iteration, one.total, one.ready, one.sent) == (4, 1e6, 3e5, 2e5)
    assert one.rate == 5e6


def test_whoever_gets_a_row_inherits_nothing_from_who_had_it(topology, make_job):
    """The old flow is let go and given up, the new one is paced at a grant of its own."""
    setup = Setup(topology)
    setup.desk.answer = setup.loop.on_grants
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
    setup.loop.on_grants(slot_start(1), [Granted(8, 2e6, 3e6)])
    assert [(e.cookie, e.reserved) for e in setup.pacer.entries.values()] == [(8, 2e6)]
