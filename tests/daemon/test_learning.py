# SPDX-License-Identifier: Apache-2.0
"""What is learnt of flows from looks at their records and the kernel's counters."""

import numpy as np
import pytest
from seen import MS, at
from slots import Desk, start

from flowslot_shm.layout import offset
from flowslotd.negotiate.aggregates import Aggregates

SIZE, HEADERS = 1_000_000, 4_000


def test_remaining_is_the_total_minus_what_the_kernel_saw_acknowledged(seen, job, flow):
    seen.look(0, job, c7=500)  # a handshake of the job's own, before the first iteration
    start(flow, 1, 1_000_000)
    flow.posted(800_000)
    seen.look(10, job, c7=500 + 300_000)
    assert seen["remaining"] == [700_000]
    assert seen["active"] == [True]
    assert seen.observer.take_watches() == [(7, 500 + 1_000_000)]
    assert seen.observer.take_watches() == []


def test_without_a_kernel_counter_the_record_is_believed(seen, job, flow):
    start(flow, 1, 1000)
    flow.done(400)
    seen.look(0, job)
    assert seen["remaining"] == [600]
    assert seen.observer.take_watches() == []


def test_a_phase_lasts_until_everything_is_acknowledged(seen, job, flow):
    seen.look(0, job, c7=0)
    start(flow, 1, 1000)
    flow.posted(1000)  # all of it is in the socket's buffer, and the job computes again
    seen.look(1, job, c7=900)
    assert seen["active"] == [True]
    seen.look(2, job, c7=1000)
    assert seen["active"] == [False]


def test_a_flow_met_in_mid_iteration_ends_its_phase_when_the_record_says_so(seen, job, flow):
    """The record lags behind the kernel: where the iteration began is only known from above."""
    start(flow, 1, 1000)
    flow.posted(800)
    flow.done(300)
    seen.look(0, job, c7=517 + 400)
    assert seen["remaining"] == [700]
    flow.done(300)
    seen.look(1, job, c7=517 + 650)
    assert seen["remaining"] == [400], "600 are done, the kernel's count tells 50 more"
    flow.posted(200)
    flow.done(400)
    seen.look(2, job, c7=517 + 1000)
    assert seen["active"] == [False]


def test_bytes_that_are_not_reported_do_not_add_up(seen, job, flow):
    """Libraries send headers beside the payload: 10 bytes per iteration here."""
    sent = 0
    seen.look(0, job, c7=0)
    for i in range(1, 200):
        start(flow, i, 1000)
        seen.look(100 * i, job, c7=sent + 100)
        assert seen["remaining"] == [900], i
        flow.done(1000)
        sent += 1010
        seen.look(100 * i + 50, job, c7=sent)
        assert seen["remaining"] == [0]


def test_an_iteration_may_begin_before_the_last_one_is_acknowledged(seen, job, flow):
    seen.look(0, job, c7=0)
    start(flow, 1, 1000)
    seen.look(1, job, c7=600)
    flow.done(1000)
    start(flow, 2, 1000)
    seen.look(2, job, c7=900)
    assert seen["remaining"] == [1000 + 100 - 0 - 100]  # the old 100 are not counted twice
    seen.look(3, job, c7=1500)
    assert 400 <= seen["remaining"][0] <= 600


def test_iterations_that_nobody_looked_at_count_as_several(seen, job, flow):
    for i, ms in ((1, 0), (2, 100), (5, 400)):
        for passed in range(i - 2 if i == 5 else i, i):
            start(flow, passed, 1000)
            flow.done(1000)
        start(flow, i, 1000)
        seen.look(ms, job)
        flow.done(1000)
    assert seen["period"] == [100 * MS]


NUMBERS = {
    "one by one": range(1, 40),
    "by micro-steps": range(3, 120, 3),
    "by samples": range(512, 40 * 512, 512),
    "back to a checkpoint": [*range(1, 18), *range(9, 31)],
}


@pytest.mark.parametrize("begun", [0, 2], ids=["", "empty iterations between"])
@pytest.mark.parametrize("numbers", NUMBERS.values(), ids=NUMBERS)
def test_periods_are_those_of_bursts_whatever_the_job_counts(seen, job, flow, numbers, begun):
    sent = 0
    seen.look(0, job, c7=0)
    for burst, number in enumerate(numbers):
        now = 250 * (burst + 1)
        for empty in range(begun):  # micro-steps that send nothing
            flow.begin(10**6 + begun * burst + empty)
            seen.look(now - 100 + 10 * empty, job, c7=sent)
        start(flow, number, 1000)
        seen.look(now, job, c7=sent + 100)
        assert seen["remaining"] == [900]
        flow.done(1000)
        sent += 1000
        seen.look(now + 40, job, c7=sent)
        assert seen["remaining"] == [0]
    assert seen["period"] == [250 * MS]
    assert not job.reader.faults.any()


def test_a_burst_between_two_looks_is_not_taken_for_the_present_one(seen, job, flow):
    """Nor if the first of these looks was before it had any bytes."""
    flow.begin(1, 1000)
    seen.look(0, job, c7=0)
    flow.ready(1000)
    flow.done(1000)
    start(flow, 2, 1000)
    flow.done(100)
    seen.look(10, job, c7=1100)
    assert seen["remaining"] == [900]


def test_a_library_that_does_not_count_its_bursts(seen, job, flow):
    """One compiled with an older header: what is missed is guessed by the numbers."""
    word = memoryview(job.record.slot(0)).cast("Q")
    for i, (ms, sent) in enumerate(((0, 0), (200, 1000), (400, 2000))):
        start(flow, 10 * i, 1000)
        word[offset("phases") // 8] = 0
        flow.done(300)
        seen.look(ms, job, c7=sent + 300)
        assert seen["remaining"] == [700]
        flow.done(700)
        seen.look(ms + 50, job, c7=sent + 1000)
    assert seen["period"] == [200 * MS]


# --- bytes that libraries send and do not report: a flow is at its end when these have gone too


class Run:
    """A flow whose iterations are looked at when they begin, and when they are over."""

    def __init__(self, seen, job):
        self.seen, self.job = seen, job
        self.flow = job.flow(0, cookie=7)
        self.n = self.sent = 0
        self._look()

    def _look(self):
        self.seen.look(10 * self.n, self.job, c7=self.sent)

    def begin(self, size=SIZE):
        self.n += 1
        start(self.flow, self.n, size)
        self._look()

    def send(self, sent, *, done=0):
        self.sent += sent
        self.flow.done(done)
        self._look()

    def iterate(self, headers, *, seen=True):
        """Returns how many bytes are to be sent from its beginning to its end, as watched."""
        began = self.sent
        self.begin()
        watches = self.seen.observer.take_watches()
        self.sent += SIZE + headers
        self.flow.done(SIZE)
        if seen:
            self._look()
        return watches[0][1] - began

    def learn(self, headers, size=SIZE):
        """So many in three iterations; and another one begins."""
        for _ in range(3):
            self.iterate(headers)
        self.begin(size)


@pytest.fixture
def run(seen, job):
    return Run(seen, job)


@pytest.mark.parametrize(
    ("sent", "belongs"),
    [
        ([HEADERS] * 5, [0, 0, HEADERS, HEADERS, HEADERS]),  # of two iterations, to the next
        ([100, 400, 200, 300], [0, 0, 100, 200]),  # the least of two counts
        ([0] * 4, [0] * 4),  # a library that reports everything
        *[
            ([HEADERS, HEADERS, HEADERS, strange, HEADERS], [0, 0, HEADERS, HEADERS, 0])
            for strange in (SIZE, SIZE // 2 + 1, 2**62)  # which cannot be headers
        ],
    ],
)
def test_what_iterations_sent_besides_belongs_to_the_end_of_the_next(run, sent, belongs):
    assert [run.iterate(headers) - SIZE for headers in sent] == belongs


def test_an_iteration_whose_end_was_not_seen_teaches_nothing(run):
    for _ in range(3):
        run.iterate(HEADERS)
    run.iterate(HEADERS, seen=False)
    run.iterate(HEADERS)
    assert run.seen["unreported_last"] == [0]


def test_other_flows_are_left_alone(run, make_job):
    other = make_job().flow(0, cookie=8)
    other.begin(1, SIZE)
    for _ in range(4):
        run.iterate(HEADERS)
    assert np.count_nonzero(run.seen["unreported"]) == 1


MANY = SIZE // 8
BEFORE = MANY - SIZE // 64
"""How many of so many headers go before the last byte, at least."""


def test_headers_are_spread_evenly_over_what_is_sent(run):
    run.learn(MANY)
    run.send((SIZE + BEFORE) // 2)
    assert abs(run.seen["remaining"][0] - SIZE // 2) <= 1
    run.send((SIZE + BEFORE) // 2 - 100)
    assert 0 < run.seen["remaining"][0] <= 100
    run.send(MANY - BEFORE)
    assert run.seen["remaining"] == [0]


@pytest.mark.parametrize(
    ("headers", "all_but_one", "one"),
    [
        (HEADERS, {"sent": SIZE - 1}, {"sent": 1}),  # few: all of them may come after it
        (MANY, {"sent": SIZE, "done": SIZE - 1}, {"sent": 0, "done": 1}),
    ],
)
def test_the_last_byte_is_the_end_whatever_else_was_sent(run, headers, all_but_one, one):
    run.learn(headers)
    run.send(**all_but_one)
    assert run.seen["active"][0]
    run.send(**one)
    assert not run.seen["active"][0]


def test_an_arbiter_is_asked_for_headers_too(run):
    aggregates, desk = Aggregates(run.seen.table), Desk()
    run.learn(MANY)
    run.send((SIZE + BEFORE) // 2)
    aggregates.follow(at(0), run.seen.table.take_new(), [])
    aggregates.report(at(10 * run.n), desk, small=True, lent=lambda now: np.zeros(0, np.intp))
    ((demand,),) = desk.demands
    assert abs(demand.remaining - (SIZE + BEFORE) // 2) <= 2
    assert demand.next_bytes == SIZE + BEFORE
    view = run.seen.table.view(0, 1, [False] * 8, np.zeros(1, np.intp))
    assert abs(view.remaining[0] - (SIZE + BEFORE) // 2) <= 2


def test_of_a_shorter_iteration_headers_are_a_part(run):
    run.learn(MANY, 100)
    assert run.seen.observer.take_watches()[0][1] - run.sent == 150
