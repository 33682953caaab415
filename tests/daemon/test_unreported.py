# SPDX-License-Identifier: Apache-2.0
"""Libraries send bytes that they do not report: a flow is at its end when these have gone too."""

import numpy as np
import pytest

from flowslotd.flowtable import FlowTable

from .test_flowtable import Kernel, at

SIZE, HEADERS = 1_000_000, 4_000


@pytest.fixture
def table(topology):
    return FlowTable(topology, "h1", lambda pid, fd, cookie: None)


class Run:
    """A flow whose iterations are looked at when they begin, and when they are over."""

    def __init__(self, table, job):
        self.table, self.job, self.kernel = table, job, Kernel()
        self.flow = job.flow(0, cookie=7)
        self.n = self.acked = 0
        self._look()

    def _look(self):
        self.kernel.set(c7=self.acked)
        self.table.observe(at(10 * self.n), [self.job], self.kernel)

    def iterate(self, headers, *, seen=True):
        """Returns how many bytes are to be sent from its beginning to its end, as watched."""
        self.n += 1
        began = self.acked
        self.flow.begin(self.n, SIZE)
        self.flow.ready(SIZE)
        self._look()
        watches = self.table.take_watches()
        self.acked += SIZE + headers
        self.flow.done(SIZE)
        if seen:
            self._look()
        return watches[0][1] - began


@pytest.fixture
def run(table, make_job):
    return Run(table, make_job())


def test_what_two_iterations_sent_besides_belongs_to_the_end_of_the_next(run):
    ends = [run.iterate(HEADERS) for _ in range(5)]
    assert ends == [SIZE, SIZE, *[SIZE + HEADERS] * 3]


def test_the_least_of_two_counts(run):
    ends = [run.iterate(HEADERS + 100 * n) for n in (0, 3, 1, 2)]
    assert ends[2:] == [SIZE + HEADERS, SIZE + HEADERS + 100]


def test_a_library_that_reports_everything_has_nothing_besides(run):
    assert [run.iterate(0) for _ in range(4)] == [SIZE] * 4


@pytest.mark.parametrize("strange", [SIZE, SIZE // 10, 2**62])
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
