# SPDX-License-Identifier: Apache-2.0
"""Who borrows from whom."""

from typing import Any

import numpy as np
import pytest
from slots import Setup, slot_start, start

from flowslot.model.units import MILLISECOND, Nanos
from flowslot.protocol.grants import Granted
from flowslotd.flows.rows import FREE
from flowslotd.pace import handover


class Flows:
    """Rows of flows; by default of path 1 and at rest, known to the kernel, with rate 0."""

    def __init__(self) -> None:
        self.rows = FREE[:0]

    def add(self, cookie: int, job: int, **values: Any) -> None:
        row = FREE.copy()
        row["cookie"], row["job"], row["path"], row["kernel"], row["rate"] = cookie, job, 1, True, 0
        self.rows = np.concatenate((self.rows, row))
        self.set(cookie, **values)

    def set(self, cookie: int, **values: Any) -> None:
        for name, value in values.items():
            self.rows[name][self.rows["cookie"] == cookie] = value

    def lenders(self, *suppressed: int) -> dict[int, int]:
        self.rows["suppressed"] = np.isin(self.rows["cookie"], suppressed)
        return handover.update(self.rows, all_suppressed=False)


@pytest.fixture
def two_jobs() -> Flows:
    """Flows 1 and 2 of job 0 are at work, flows 3 and 4 of job 1 are not."""
    flows = Flows()
    for cookie in (1, 2):
        flows.add(cookie, 0, active=True, rate=20e6)
    for cookie in (3, 4):
        flows.add(cookie, 1)
    return flows


def test_each_lender_has_one_borrower(two_jobs: Flows) -> None:
    assert two_jobs.lenders() == {3: 1, 4: 2}
    two_jobs.add(5, 1)
    assert two_jobs.lenders() == {3: 1, 4: 2}


def test_a_lender_that_has_ended_keeps_its_borrower_as_long_as_its_rate(two_jobs: Flows) -> None:
    two_jobs.lenders()
    two_jobs.set(1, active=False)
    two_jobs.set(3, active=True)
    assert two_jobs.lenders() == {3: 1, 4: 2}
    two_jobs.set(1, rate=0.0)
    two_jobs.set(3, rate=20e6)
    assert two_jobs.lenders() == {4: 2, 1: 3}, "and the other way round, for next time"
    two_jobs.set(2, active=False, rate=0.0)
    assert two_jobs.lenders() == {1: 3}


def test_a_borrower_at_work_may_be_a_lender(two_jobs: Flows) -> None:
    two_jobs.set(2, rate=0.0)
    assert two_jobs.lenders() == {3: 1}
    two_jobs.set(1, active=False)
    two_jobs.set(3, active=True, rate=1e6)
    assert two_jobs.lenders() == {3: 1, 2: 3}
    two_jobs.set(2, path=0)
    two_jobs.set(4, path=0)
    assert two_jobs.lenders() == {3: 1}, "nobody is left for it"


def test_what_stands_is_not_lent(two_jobs: Flows) -> None:
    """Its owner may start again at any time, and nobody looks."""
    assert two_jobs.lenders(1) == {3: 2}
    two_jobs.set(2, active=False)
    assert two_jobs.lenders(1, 2) == {}


@pytest.mark.parametrize(
    "values",
    [{"path": 2}, {"job": 0}, {"kernel": False}, {"rate": 10e6}, {"rate": np.nan}],
    ids=["path", "job", "unknown to the kernel", "has enough", "nobody has a say"],
)
def test_no_borrower(two_jobs: Flows, values: dict) -> None:
    two_jobs.set(3, **values)
    two_jobs.set(4, **values)
    assert two_jobs.lenders() == {}


def test_no_lender(two_jobs: Flows) -> None:
    two_jobs.set(1, kernel=False)
    two_jobs.set(2, rate=np.nan)
    assert two_jobs.lenders() == {}


def test_who_waits_comes_first_then_who_is_due_first(two_jobs: Flows) -> None:
    two_jobs.set(2, rate=0.0)
    two_jobs.set(3, onset=100, period=50)
    two_jobs.set(4, onset=90, period=50)
    assert two_jobs.lenders() == {4: 1}
    two_jobs.set(3, active=True)
    assert two_jobs.lenders() == {3: 1}


def test_a_rate_that_a_borrower_uses_is_not_given_back(topology: Any, make_job: Any) -> None:
    setup = Setup(topology)
    jobs = [make_job("a"), make_job("b")]
    setup.jobs += jobs
    flows = [job.flow(0, cookie=7 + i) for i, job in enumerate(jobs)]
    setup.pacer.acked.update({7: 0, 8: 0})
    now = slot_start(0)

    def after(milliseconds: int) -> Nanos:
        return Nanos(now + milliseconds * MILLISECOND)

    start(flows[0])
    setup.slot(0)
    setup.grant(after(1), Granted(7, 20e6, 20e6), Granted(8, 0.0, 20e6))
    setup.events(after(1), jobs)
    assert setup.pacer.lenders == {8: 7}
    start(flows[1])
    setup.events(after(2), [jobs[1]])
    flows[0].done(1_000_000)
    setup.pacer.acked[7] = 1_000_000
    setup.events(after(3), [jobs[0]])
    assert setup.desk.gave_back == []
    assert setup.pacer.lenders == {8: 7}, "the arbiter has not decided yet"
    assert setup.pacer.entries[7].reserved == 20e6
    setup.grant(after(9), Granted(7, 0.0, 20e6), Granted(8, 20e6, 20e6))
    assert setup.pacer.entries[7].reserved == 0.0 and setup.pacer.entries[8].reserved == 20e6

    setup.slot(1)
    flows[1].done(1_000_000)
    setup.pacer.acked[8] = 1_000_000
    start(flows[0], 2)
    setup.events(after(70), jobs)
    assert setup.pacer.lenders == {7: 8}
