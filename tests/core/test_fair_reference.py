# SPDX-License-Identifier: Apache-2.0
"""The virtual fair run against what can be worked out by hand."""

from typing import Any

import numpy as np
import pytest

from flowslot.model.units import MILLISECOND, Nanos
from flowslot.policy.base import AllocationState
from flowslot.policy.fair_reference import SLACK, FairReference

MS = MILLISECOND


def state(*flows: dict[str, Any], capacity: tuple[float, ...] = (1e9,)) -> AllocationState:
    """Each flow: job, and what differs from one that is idle, has 100 MB per iteration, and ended
    just now. `left` > 0: it sends, since `wait` ms."""
    n = len(flows)
    names = sorted({f["job"] for f in flows})
    paths = np.full((n, 2), len(capacity), np.int32)
    for row, flow in enumerate(flows):
        links = flow.get("links", (0,))
        paths[row, : len(links)] = links

    def column(name: str, default: float, factor: float = 1.0) -> Any:
        return np.array([float(f.get(name, default)) * factor for f in flows])

    left = column("left", 0.0)
    return AllocationState(
        paths=paths,
        capacity=np.array([*capacity, np.inf]) * 0.9,
        goodput=np.array([*capacity, np.inf]),
        job=np.array([names.index(f["job"]) for f in flows]),
        job_names=names,
        flow=np.arange(n, dtype=np.uint64),
        aggregate=np.arange(n),
        aggregates=list(range(n)),
        remaining=left,
        stalled=np.zeros(n, np.bool_),
        wait_ns=np.where(left > 0, column("wait", 0.0, MS), 0.0),
        period_ns=np.zeros(n),
        due_ns=np.zeros(n),
        next_bytes=column("bytes", 100e6),
        idle_ns=np.where(left > 0, 0.0, column("idle", 0.0, MS)),
        goal=np.zeros(n),
    )


SENDS, IDLE = 100e6, 0.0


class Run:
    """Looks at jobs that send or not, at times in ms."""

    def __init__(self, *jobs: str, **more: Any) -> None:
        self.fair, self.jobs, self.more = FairReference(), jobs, more

    def at(self, ms: float, *sending: str) -> list[bool]:
        flows = [
            {"job": j, "left": SENDS if j in sending else IDLE, **self.more} for j in self.jobs
        ]
        late: list[bool] = self.fair.look(state(*flows), Nanos(round(ms * MS))).tolist()
        return late


def learn(run: Run, *jobs: str) -> None:
    """All send from 0 to 100 ms and compute until 200: from then on they are known."""
    run.at(0, *jobs)
    run.at(100)
    run.at(200, *jobs)


def test_alone_a_job_is_late_once_it_takes_longer_than_its_bytes_need() -> None:
    run = Run("a")
    learn(run, "a")  # 100 MB at 1 GB/s: 100 ms
    assert run.at(299, "a") == [False]
    assert run.at(301, "a") == [True]
    assert run.at(310) == [False], "and no longer once it has ended"


def test_two_jobs_that_begin_together_share_the_link() -> None:
    run = Run("a", "b")
    learn(run, "a", "b")
    assert run.at(399, "a", "b") == [False, False]  # 50 ms... of 200 at half the rate each
    assert run.at(401, "a", "b") == [True, True]


def test_its_next_virtual_iteration_begins_when_it_has_computed() -> None:
    """Not when the real one begins: the real job, delayed by 30 ms, is late 30 ms earlier."""
    run = Run("a")
    learn(run, "a")
    run.at(300, "a")
    run.at(330)  # ended 30 ms late; computes for 100 ms
    assert run.at(430, "a") == [False]
    assert run.at(499, "a") == [False]  # virtually: 300, 400 to 500
    assert run.at(501, "a") == [True]


def test_what_more_flows_would_get_a_job_counts_for_a_little_less() -> None:
    """Two flows against one: two thirds of the link, in a run that is slower by SLACK."""
    fair = FairReference()

    def look(ms: float, left: float) -> list[bool]:
        flows = [{"job": "a", "left": left, "bytes": 50e6}] * 2
        both = [*flows, {"job": "b", "left": left, "bytes": 100e6}]
        late: list[bool] = fair.look(state(*both), Nanos(round(ms * MS))).tolist()
        return late

    look(0, SENDS), look(100, IDLE), look(200, SENDS)
    at = 200 + 150 * SLACK
    assert look(at - 1, SENDS) == [False, False]
    assert look(at + 1, SENDS) == [True, False]
    assert look(399, SENDS) == [True, False] and look(401, SENDS) == [True, True]


def test_what_a_job_cannot_use_on_one_link_others_may_on_theirs() -> None:
    fair = FairReference()

    def look(ms: float, left: float) -> list[bool]:
        narrow = {"job": "a", "left": left, "links": (0, 1)}
        wide = {"job": "b", "left": left, "links": (0,)}
        both = state(narrow, wide, capacity=(1e9, 0.25e9))
        late: list[bool] = fair.look(both, Nanos(round(ms * MS))).tolist()
        return late

    look(0, SENDS), look(100, IDLE), look(200, SENDS)
    # a: 400 ms at 0.25 GB/s; b: at the other 0.75, 133 ms.
    assert look(332, SENDS) == [False, False]
    assert look(335, SENDS) == [False, True]
    assert look(601, SENDS) == [True, True]


def test_each_flow_of_a_job_goes_at_its_own_pace() -> None:
    """a's two flows are held up one after the other: by b in the first 100 ms, by c in the next.
    The second one has sent everything by then, and the first one needs 150 ms."""
    fair = FairReference()

    def look(ms: float, **left: float) -> list[bool]:
        flows = [
            {"job": "a", "left": left["a"], "links": (0,)},
            {"job": "a", "left": left["a"], "links": (1,)},
            {"job": "b", "left": left["b"], "links": (0,), "bytes": 50e6},
            {"job": "c", "left": left["c"], "links": (1,), "bytes": 50e6},
        ]
        both = state(*flows, capacity=(1e9, 1e9))
        late: list[bool] = fair.look(both, Nanos(round(ms * MS))).tolist()
        return late

    look(0, a=SENDS, b=SENDS, c=SENDS)
    look(100, a=IDLE, b=IDLE, c=IDLE)
    look(200, a=SENDS, b=SENDS, c=IDLE)
    look(300, a=SENDS, b=SENDS, c=SENDS)
    assert not look(349, a=SENDS, b=SENDS, c=SENDS)[0]
    assert look(351, a=SENDS, b=SENDS, c=SENDS)[0]


def test_flows_come_and_go_and_the_others_go_on() -> None:
    """What a flow has sent virtually is not forgotten when the rows of the table change."""
    fair = FairReference()
    a = {"job": "a", "links": (0,)}
    new = {"job": "a", "links": (1,), "bytes": 1e6}
    b = {"job": "b", "links": (2,)}

    def look(ms: float, *flows: dict[str, Any]) -> list[bool]:
        late: list[bool] = fair.look(
            state(*flows, capacity=(1e9, 1e9, 1e9)), Nanos(round(ms * MS))
        ).tolist()
        return late

    def sends(flow: dict[str, Any]) -> dict[str, Any]:
        return {**flow, "left": SENDS}

    look(0, sends(b), sends(a))
    look(100, b, a)
    look(200, sends(b), sends(a))
    look(250, sends(new), sends(a), sends(b))
    assert look(299, sends(new), sends(a), sends(b)) == [False, False]
    assert look(301, sends(a), sends(b)) == [True, True]


def test_a_job_that_does_not_say_what_comes_is_not_late_for_that() -> None:
    """Its virtual self begins while it is not known how much there is to send, and waits for it."""
    fair = FairReference()
    for ms in range(0, 2000, 10):
        left = 100e6 - ms % 200 * 1e6 if ms % 200 < 100 else 0.0
        flow = {"job": "a", "bytes": 0.0, "left": left}
        early = fair.look(state(flow), Nanos(ms * MS)).tolist()
        if ms > 400 and ms % 200 < 30:
            assert early == [False], f"at {ms} ms, with nearly everything to send"


def test_flows_whose_path_is_not_known_do_not_count() -> None:
    fair = FairReference()
    a = {"job": "a", "links": ()}
    for ms, left in ((0, SENDS), (100, IDLE), (200, SENDS), (5000, SENDS)):
        late = fair.look(state({**a, "left": left}), Nanos(ms * MS)).tolist()
    assert late == [False], "its virtual self stands still"


def test_where_all_are_late_they_begin_anew() -> None:
    run = Run("a", "b")
    learn(run, "a", "b")
    assert run.at(650, "a", "b") == [True, True]  # virtually: ended at 400, and again at 700
    run.at(660)
    run.at(705)
    # Both have a virtual iteration more behind them than real ones, and begin the next.
    assert run.at(760, "a", "b")[0] is False


def test_jobs_that_are_not_known_yet_are_not_late() -> None:
    run = Run("a", "b")
    assert run.at(0, "a") == [False, False]
    assert run.at(10_000, "a") == [False, False]
    assert run.at(10_001) == [False, False]


def test_an_index_that_gets_another_job_begins_anew() -> None:
    fair = FairReference()
    for ms, left in ((0, SENDS), (100, IDLE), (200, SENDS)):
        fair.look(state({"job": "a", "left": left}), Nanos(ms * MS))
    assert fair.look(state({"job": "a", "left": SENDS}), Nanos(350 * MS)).tolist() == [True]
    assert fair.look(state({"job": "z", "left": SENDS}), Nanos(360 * MS)).tolist() == [False]


@pytest.mark.parametrize("hours", [1, 100])
def test_a_long_time_between_two_looks_ends(hours: int) -> None:
    run = Run("a", "b")
    learn(run, "a", "b")
    assert len(run.at(hours * 3600e3, "a")) == 2


def test_a_job_that_pauses_owes_nobody_anything() -> None:
    """Its virtual self goes on meanwhile; what it does then is not held against the others."""
    run = Run("a")
    learn(run, "a")
    run.at(300, "a")
    run.at(301)
    assert run.at(10_000, "a") == [False]
    assert run.at(10_099, "a") == [False] and run.at(10_110, "a") == [True]


def test_a_job_whose_flows_have_gone_holds_nobody_up() -> None:
    run = Run("a", "b")
    for ms, sending in ((0, "ab"), (100, ""), (100.001, "ab"), (300, ""), (400, "b")):
        run.at(ms, *sending)
    gone = VirtualFairWithout(run)
    # b computed for 0.1 ms at first, and for 100 then: it is alone, and has a period of some 125.
    lateness = [gone.at(400 + 10 * k)[0] for k in range(40)]
    assert not lateness[0] and lateness[-1], "its virtual self goes on, at its own pace"


class VirtualFairWithout:
    """The same run, in which job a has no flows any more."""

    def __init__(self, run: Run) -> None:
        self.fair = run.fair

    def at(self, ms: float) -> list[bool]:
        of = state({"job": "a", "left": 0.0}, {"job": "b", "left": SENDS})
        of.next_bytes[0] = 0.0
        late: list[bool] = self.fair.look(of, Nanos(round(ms * MS))).tolist()
        return late[1:]
