# SPDX-License-Identifier: Apache-2.0
"""Libraries send bytes that they do not report: a flow is at its end when these have gone too."""

import numpy as np
import pytest

from flowslotd.flows.flow_table import FlowTable
from flowslotd.negotiate.aggregates import Aggregates
from flowslotd.observe.observer import Observer

from .test_flowtable import Kernel, at

SIZE, HEADERS = 1_000_000, 4_000


@pytest.fixture
def observer(topology):
    return Observer(FlowTable(topology, "h1"), lambda pid, fd, cookie: None)


class Run:
    """A flow whose iterations are looked at when they begin, and when they are over."""

    def __init__(self, observer, job):
        self.observer, self.table = observer, observer.table
        self.job, self.kernel = job, Kernel()
        self.flow = job.flow(0, cookie=7)
        self.n = self.acked = 0
        self._look()

    def _look(self):
        self.kernel.set(c7=self.acked)
        self.observer.observe(at(10 * self.n), [self.job], self.kernel)

    def begin(self, size=SIZE):
        self.n += 1
        self.flow.begin(self.n, size)
        self.flow.ready(size)
        self._look()

    def send(self, acked, *, done=0):
        self.acked += acked
        self.flow.done(done)
        self._look()

    def iterate(self, headers, *, seen=True):
        """Returns how many bytes are to be sent from its beginning to its end, as watched."""
        began = self.acked
        self.begin()
        watches = self.observer.take_watches()
        self.acked += SIZE + headers
        self.flow.done(SIZE)
        if seen:
            self._look()
        return watches[0][1] - began


@pytest.fixture
def run(observer, make_job):
    return Run(observer, make_job())


def test_what_two_iterations_sent_besides_belongs_to_the_end_of_the_next(run):
    ends = [run.iterate(HEADERS) for _ in range(5)]
    assert ends == [SIZE, SIZE, *[SIZE + HEADERS] * 3]


def test_the_least_of_two_counts(run):
    ends = [run.iterate(HEADERS + 100 * n) for n in (0, 3, 1, 2)]
    assert ends[2:] == [SIZE + HEADERS, SIZE + HEADERS + 100]


def test_a_library_that_reports_everything_has_nothing_besides(run):
    assert [run.iterate(0) for _ in range(4)] == [SIZE] * 4


@pytest.mark.parametrize("strange", [SIZE, SIZE // 2 + 1, 2**62])
def test_what_cannot_be_headers_does_not_count(run, strange):
    for _ in range(3):
        run.iterate(HEADERS)
    run.iterate(strange)
    assert run.iterate(HEADERS) == SIZE


def test_an_iteration_whose_end_was_not_seen_teaches_nothing(run):
    for _ in range(3):
        run.iterate(HEADERS)
    run.iterate(HEADERS, seen=False)
    run.iterate(HEADERS)
    assert run.table.rows["unreported_last"].tolist() == [0]


def test_other_flows_are_left_alone(run, make_job):
    other = make_job().flow(0, cookie=8)
    other.begin(1, SIZE)
    for _ in range(4):
        run.iterate(HEADERS)
    assert np.count_nonzero(run.table.rows["unreported"]) == 1


MANY = SIZE // 8
BEFORE = MANY - SIZE // 64
"""How many of so many headers go before the last byte, at least."""


def test_headers_are_spread_evenly_over_what_is_sent(run):
    for _ in range(3):
        run.iterate(MANY)
    run.begin()
    run.send((SIZE + BEFORE) // 2)
    assert abs(run.table.rows["remaining"][0] - SIZE // 2) <= 1
    run.send((SIZE + BEFORE) // 2 - 100)
    assert 0 < run.table.rows["remaining"][0] <= 100
    run.send(MANY - BEFORE)
    assert run.table.rows["remaining"].tolist() == [0]


def test_few_headers_may_all_come_after_the_last_byte(run):
    for _ in range(3):
        run.iterate(HEADERS)
    run.begin()
    run.send(SIZE - 1)
    assert run.table.rows["active"][0]
    run.send(1)
    assert not run.table.rows["active"][0]


def test_what_is_done_is_at_its_end_whatever_else_was_sent_before(run):
    for _ in range(3):
        run.iterate(MANY)
    run.begin()
    run.send(SIZE, done=SIZE - 1)
    assert run.table.rows["active"][0]
    run.send(0, done=1)
    assert not run.table.rows["active"][0]


def test_an_arbiter_is_asked_for_headers_too(run):
    aggregates = Aggregates(run.table)
    for _ in range(3):
        run.iterate(MANY)
    run.begin()
    run.send((SIZE + BEFORE) // 2)
    aggregates.follow(at(0), run.table.take_new(), [])
    aggregates.look(at(10 * run.n))
    (demand,) = aggregates.demands(at(10 * run.n))
    assert abs(demand.remaining - (SIZE + BEFORE) // 2) <= 2
    assert demand.next_bytes == SIZE + BEFORE
    view = run.table.view(0, 1, [False] * 8, [0])
    assert abs(view.remaining[0] - (SIZE + BEFORE) // 2) <= 2


def test_of_a_shorter_iteration_headers_are_a_part(run):
    for _ in range(3):
        run.iterate(MANY)
    run.begin(100)
    assert run.observer.take_watches()[0][1] - run.acked == 150
