# SPDX-License-Identifier: Apache-2.0
"""Who borrows from whom."""

from typing import Any

import numpy as np
import pytest
from slots import Setup, slot_start, start

from flowslot.model.units import MILLISECOND, Nanos
from flowslot.protocol.grants import Granted
from flowslotd.flows.rows import FREE, as_structs
from flowslotd.pace import handover

Changes = dict[int, dict[str, Any]]
BOTH, FOUR = {3: 1, 4: 2}, {4: 1}
CASES: dict[str, list[tuple[Changes, dict[int, int]]]] = {
    "each lender has one borrower": [({}, BOTH), ({5: {"path": 1}}, BOTH)],
    "one lender for two jobs": [({2: {"rate": 0.0}, 4: {"job": 2}}, {3: 1})],
    "a lender that has ended keeps its borrower as long as its rate": [
        ({}, BOTH),
        ({1: {"active": False}, 3: {"active": True}}, BOTH),
        # And the other way round, for next time.
        ({1: {"rate": 0.0}, 3: {"rate": 20e6}}, {4: 2, 1: 3}),
        ({2: {"active": False, "rate": 0.0}}, {1: 3}),
    ],
    "a borrower at work may be a lender": [
        ({2: {"rate": 0.0}}, {3: 1}),
        ({1: {"active": False}, 3: {"active": True, "rate": 1e6}}, {3: 1, 2: 3}),
        ({2: {"path": 0}, 4: {"path": 0}}, {3: 1}),  # nobody is left for it
    ],
    "what stands is not lent": [  # its owner may start again at any time, and nobody looks
        ({1: {"suppressed": True}}, {3: 2}),
        ({2: {"active": False, "suppressed": True}}, {}),
    ],
    "no borrower on the path": [({3: {"path": 2}, 4: {"path": 2}}, {})],
    "no borrower of another job": [({3: {"job": 0}, 4: {"job": 0}}, {})],
    "no borrower that the kernel knows": [({3: {"kernel": False}, 4: {"kernel": False}}, {})],
    "no borrower that has too little": [({3: {"rate": 10e6}, 4: {"rate": 10e6}}, {})],
    "no borrower that anybody has a say in": [({3: {"rate": np.nan}, 4: {"rate": np.nan}}, {})],
    "no lender": [({1: {"kernel": False}, 2: {"rate": np.nan}}, {})],
    "who waits comes first, then who is due first": [
        ({2: {"rate": 0.0}, 3: {"onset": 100, "period": 50}, 4: {"onset": 90, "period": 50}}, FOUR),
        ({3: {"active": True, "onset": 200}}, {3: 1}),
    ],
}


@pytest.mark.parametrize("steps", CASES.values(), ids=CASES)
def test_who_borrows_from_whom(steps: list[tuple[Changes, dict[int, int]]]) -> None:
    """Flows 1 and 2 of job 0 are at work, flows 3 and 4 of job 1 are not; 5 has no path."""
    rows = np.repeat(FREE, 5)
    rows["cookie"], rows["job"], rows["path"] = range(1, 6), (0, 0, 1, 1, 1), (1, 1, 1, 1, 0)
    rows["active"] = rows["cookie"] <= 2
    rows["kernel"], rows["rate"] = True, np.where(rows["active"], 20e6, 0.0)
    for changes, expected in steps:
        for cookie, values in changes.items():
            for name, value in values.items():
                rows[name][cookie - 1] = value
        assert handover.update(rows, as_structs(rows), all_suppressed=False) == expected


def test_a_rate_that_a_borrower_uses_is_not_given_back(topology: Any, make_job: Any) -> None:
    setup = Setup(topology)
    jobs = [make_job("a"), make_job("b")]
    setup.jobs += jobs
    flows = [job.flow(0, cookie=7 + i) for i, job in enumerate(jobs)]
    setup.pacer.sent.update({7: 0, 8: 0})
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
    setup.pacer.sent[7] = 1_000_000
    setup.events(after(3), [jobs[0]])
    assert setup.desk.gave_back == []
    assert setup.pacer.lenders == {8: 7}, "the arbiter has not decided yet"
    assert setup.pacer.entries[7].reserved == 20e6
    setup.grant(after(9), Granted(7, 0.0, 20e6), Granted(8, 20e6, 20e6))
    assert setup.pacer.entries[7].reserved == 0.0 and setup.pacer.entries[8].reserved == 20e6

    setup.slot(1)
    flows[1].done(1_000_000)
    setup.pacer.sent[8] = 1_000_000
    start(flows[0], 2)
    setup.events(after(70), jobs)
    assert setup.pacer.lenders == {7: 8}
