# SPDX-License-Identifier: Apache-2.0
"""What is granted is verified by use: a flow whose bytes do not leave, or leave slowly, asks for
what it can use."""

import math
from typing import Any

import pytest
from slots import start
from test_aggregates import MB, Desk

from flowslot.protocol.grants import Granted

RATE = 10e6
ROOM = 1.25


class Sending:
    """Flow 7, and more, of 100 MB each, which are granted 10 MB/s; looked at once a slot."""

    def __init__(self, topology: Any, job: Any, flows: int = 1) -> None:
        self.desk, self.job, self.ms = Desk(topology), job, 0
        self.sent = dict.fromkeys((f"c{7 + i}" for i in range(flows)), 0)
        for i in range(flows):
            start(job.flow(i, cookie=7 + i), total=100 * MB)
        self.look()
        self.grant(RATE)

    def look(self, **sent: int) -> list[float]:
        """The kernel has seen so many more bytes; the caps that are reported."""
        for name, more in sent.items():
            self.sent[name] += more
        self.desk.seen.look(self.ms, self.job, **self.sent)
        self.desk.aggregates.follow(self.ms, self.desk.table.take_new(), [])
        self.said = self.desk.report(self.ms)
        self.desk.give(self.ms)
        self.ms += 60
        return [demand.cap for demand in self.said]

    def report_after_look(self, **sent: int) -> list[Any]:
        self.look(**sent)
        return self.said

    def grant(self, rate: float) -> None:
        self.desk.give(self.ms, Granted(7, rate, 20e6))


@pytest.fixture
def sending(topology: Any, job: Any) -> Sending:
    return Sending(topology, job)


def test_a_flow_that_hangs_asks_for_nothing_until_it_moves(sending: Sending) -> None:
    sending.look()  # it has a rate since then
    assert sending.look() == [0.0]
    sending.grant(0.0)
    for _ in range(5):
        assert sending.look() == []
    sending.ms -= 55  # at whatever look
    assert sending.look(c7=1000) == [math.inf]


def test_a_flow_that_sends_again_what_was_lost_does_not_hang(sending: Sending) -> None:
    seen = sending.desk.seen
    seen.way = 600_000
    sending.look(c7=600_000)
    assert seen["remaining"] == [100 * MB - 600_000]
    for _ in range(5):
        seen.way -= 100_000
        assert 0.0 not in sending.look()


def test_also_where_the_kernel_has_no_top_up(sending: Sending) -> None:
    sending.desk.tops_up = False
    sending.look()
    assert sending.look() == [0.0]


def test_a_flow_without_a_rate_waits_and_does_not_hang(sending: Sending) -> None:
    sending.grant(0.0)
    for _ in range(5):
        assert sending.look() == []


@pytest.mark.parametrize("why", ["it hangs", "nothing has come"])
def test_who_does_not_move_for_a_second_takes_no_part_until_it_does(
    topology: Any, job: Any, why: str
) -> None:
    sending = Sending(topology, job, flows=0)
    flow = job.flow(0, cookie=7)
    flow.begin(1, 100 * MB)
    flow.ready(MB)
    sending.desk.tops_up = False
    sending.sent = {"c7": 0}
    sending.look()
    sending.grant(RATE)
    if why == "nothing has come":
        sending.look(c7=MB)
    for _ in range(16):
        assert all(demand.remaining for demand in sending.report_after_look())
    for _ in range(2):
        said = sending.report_after_look()
        if said:
            break
    assert [(demand.remaining, demand.next_bytes) for demand in said] == [(0, 0)]
    assert sending.desk.host.gave_back == [7]
    flow.ready(MB)
    (demand,) = sending.report_after_look(c7=1000)
    assert demand.remaining > 90 * MB and demand.next_bytes == 100 * MB


def test_a_new_iteration_hangs_by_itself_only(sending: Sending) -> None:
    sending.look()
    assert sending.look() == [0.0]
    sending.job.flow(0, cookie=7).begin(2, 100 * MB)
    assert sending.look() == [math.inf]


def test_who_reads_slowly_is_left_what_is_used(sending: Sending) -> None:
    used = round(0.3 * RATE * 0.06)
    assert sending.look(c7=used) == [], "a moment says little"
    sending.look(c7=used)
    assert sending.look(c7=used) == [pytest.approx(0.3 * RATE * ROOM)]
    sending.grant(0.3 * RATE * ROOM)
    for _ in range(5):
        assert sending.look(c7=used) == []
    assert sending.look(c7=round(ROOM * used)) == [math.inf], "it uses all that it has"


def test_who_has_no_more_to_send_is_not_taken_to_be_slow(topology: Any, job: Any) -> None:
    """What was there at the beginning has gone by the end: what comes from elsewhere comes late."""
    sending = Sending(topology, job, flows=0)
    flow = job.flow(0, cookie=7)
    flow.begin(1, 100 * MB)
    flow.ready(100_000)
    sending.sent = {"c7": 0}
    sending.look()
    sending.grant(RATE)
    for _ in range(6):
        flow.ready(100_000)  # a sixth of what the rate carries
        assert all(cap == math.inf for cap in sending.look(c7=100_000))


def test_what_a_flow_that_hangs_has_goes_to_its_siblings(topology: Any, job: Any) -> None:
    sending = Sending(topology, job, flows=2)
    assert sending.desk.rates() == [RATE / 2, RATE / 2]
    for _ in range(3):
        assert sending.look(c8=300_000) == []
    assert sending.desk.rates() == [0.0, RATE]
    sending.look(c7=1000, c8=600_000)
    assert min(sending.desk.rates()) > 0.4 * RATE


def test_sockets_that_take_part_are_counted(topology: Any, job: Any) -> None:
    desk = Desk(topology)
    flows = [job.flow(i, cookie=7 + i) for i in range(4)]
    for flow in flows[:3]:
        start(flow)
    assert [demand.sockets for demand in desk.see(0, job)] == [3]
    start(flows[3])
    assert [demand.sockets for demand in desk.see(10, job)] == [4]
