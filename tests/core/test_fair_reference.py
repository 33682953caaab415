# SPDX-License-Identifier: Apache-2.0
"""The fair reference against what can be worked out by hand. One link carries 1 GB/s."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from states import keys, state

from flowslot.model.units import MILLISECOND, Nanos
from flowslot.policy.base import AllocationState, Keys
from flowslot.policy.fair_reference import MOST_SLOWDOWN, SLACK, FairReference
from flowslot.policy.job_links import of
from flowslot.policy.stagger import StaggerAllocator

MS = MILLISECOND


class Run:
    """Looks at jobs that send or not, at times in ms. Each flow, by what differs: a job's name
    stands for one flow on link 0 that sends 100 MB per iteration."""

    def __init__(self, *flows: str | dict[str, Any], links: int = 1) -> None:
        self.flows = [{"job": f} if isinstance(f, str) else f for f in flows]
        self.goodput = [1e9] * links
        self.jobs = sorted({f["job"] for f in self.flows})
        self.fair = FairReference()
        self.began: dict[tuple[str, ...], float] = {}

    def at(self, ms: float, *sending: str, left: float = 100e6) -> list[bool]:
        """Which jobs lag, by name. Those in `sending` have so many bytes left."""
        return self.look(self.state(sending, left), ms)

    def look(self, state: AllocationState, ms: float) -> list[bool]:
        seen = self.waits(state, ms)
        lags: list[bool] = self.fair.look(seen, Nanos(round(ms * MS)), of(seen)).tolist()
        return lags

    def waits(self, state: AllocationState, ms: float) -> AllocationState:
        """The same, with how long each flow has been sending."""
        wait = np.zeros(len(state.job))
        for i, (job, path) in enumerate(zip(state.job, state.paths, strict=True)):
            flow = (state.job_names[job], *map(str, path))
            if state.remaining[i] > 0:
                wait[i] = (ms - self.began.setdefault(flow, ms)) * MS
            else:
                self.began.pop(flow, None)
        return replace(state, wait_ns=wait)

    def alone(self, job: str, ms: float) -> list[bool]:
        """The same, if only this job is looked at. It sends."""
        k, whole = self.jobs.index(job), self.state((job,), 100e6)
        mine = np.flatnonzero(whole.job == k)
        columns = ("flow", "remaining", "cap", "sockets", "wait_ns", "period_ns", "due_ns")
        columns += ("next_bytes", "idle_ns", "goal", "paths")
        aggregates = whole.aggregate[mine]
        state = replace(
            whole,
            **{column: getattr(whole, column)[mine] for column in columns},
            job=np.zeros(len(mine), np.int64),
            job_names=[job],
            jobs=Keys(*(key[[k]] for key in whole.jobs)),
            aggregate=np.arange(len(mine)),
            aggregates=Keys(*(key[aggregates] for key in whole.aggregates)),
        )
        return self.look(state, ms)

    def learn(self) -> "Run":
        """All send from 0 to 100 ms and compute until 200: from then on they are known."""
        self.at(0, *self.jobs)
        self.at(100)
        self.at(200, *self.jobs)
        return self

    def state(self, sending: tuple[str, ...], left: float) -> AllocationState:
        flows: list[dict[str, Any]] = [
            {"next": 100e6, "idle": 0, "period": 0, **f, "left": left if f["job"] in sending else 0}
            for f in self.flows
        ]
        names = [(f["job"], f.get("links", (0,))) for f in flows]
        return replace(
            state(*flows, capacity=self.goodput),
            job=np.array([self.jobs.index(f["job"]) for f in flows]),
            job_names=list(self.jobs),
            jobs=keys(self.jobs),
            aggregate=np.array([names.index(name) for name in names]),
            aggregates=keys(names),
        )


def test_alone_a_job_lags_once_it_takes_longer_than_its_bytes_need() -> None:
    run = Run("a").learn()  # 100 MB at 1 GB/s: 100 ms
    assert run.at(299, "a") == [False]
    assert run.at(301, "a") == [True]
    assert run.at(310) == [False], "and no longer once it has ended"


def test_two_jobs_that_begin_together_share_the_link() -> None:
    run = Run("a", "b").learn()
    assert run.at(399, "a", "b") == [False, False]  # 200 ms at half the rate each
    assert run.at(401, "a", "b") == [True, True]


def test_the_references_next_iteration_begins_when_it_has_computed() -> None:
    """Not when the real one begins: the job, delayed by 30 ms, lags 30 ms earlier."""
    run = Run("a").learn()
    run.at(300, "a")
    run.at(330)  # ended 30 ms too late; computes for 100 ms
    assert run.at(430, "a") == [False]
    assert run.at(499, "a") == [False]  # in the reference: until 300, then from 400 to 500
    assert run.at(501, "a") == [True]


def test_what_more_flows_would_get_a_job_counts_for_a_little_less() -> None:
    """Two flows against one: two thirds of the link, in a run that is slower by SLACK."""
    half = {"job": "a", "next": 50e6}
    run = Run(half, half, "b").learn()
    at = 200 + 150 * SLACK
    assert run.at(at - 1, "a", "b") == [False, False]
    assert run.at(at + 1, "a", "b") == [True, False]
    assert run.at(399, "a", "b") == [True, False] and run.at(401, "a", "b") == [True, True]


def test_what_a_job_cannot_use_on_one_link_others_may_on_theirs() -> None:
    run = Run({"job": "a", "links": (0, 1)}, {"job": "b"}, links=2)
    run.goodput[1] = 0.25e9
    run.learn()
    # a: 400 ms at 0.25 GB/s; b: at the other 0.75, 133 ms.
    assert run.at(332, "a", "b") == [False, False]
    assert run.at(335, "a", "b") == [False, True]
    assert run.at(601, "a", "b") == [True, True]


def test_each_flow_of_a_job_goes_at_its_own_pace() -> None:
    """a's two flows are held up one after the other: by b in the first 100 ms, by c in the next.
    The second one has sent everything by then, and the first one needs 150 ms."""
    short = {"next": 50e6}
    b, c = {"job": "b", **short}, {"job": "c", "links": (1,), **short}
    run = Run("a", {"job": "a", "links": (1,)}, b, c, links=2)
    run.at(0, "a", "b", "c")
    run.at(100)
    run.at(200, "a", "b")
    run.at(300, "a", "b", "c")
    assert not run.at(349, "a", "b", "c")[0]
    assert run.at(351, "a", "b", "c")[0]


def test_flows_come_and_go_and_the_others_go_on() -> None:
    """What was sent in the reference is not forgotten; who takes a slot begins from the start."""
    run = Run({"job": "b", "links": (1,)}, "a", links=3).learn()
    new = {"job": "a", "links": (2,), "next": 1e6}
    run.flows.append(new)
    run.at(250, "a", "b")
    assert run.at(299, "a", "b") == [False, False]
    run.flows[0] = {"job": "b", "links": (2,)}
    assert run.at(301, "a", "b") == [True, False], "b's new flow has sent nothing"


def test_a_job_that_does_not_say_what_comes_does_not_lag_for_that() -> None:
    """The reference begins while it is not known how much there is to send, and waits for it."""
    run = Run({"job": "a", "next": 0.0})
    for ms in range(0, 2000, 10):
        sends = ms % 200 < 100
        lags = run.at(ms, *("a" * sends), left=100e6 - ms % 200 * 1e6)
        if ms > 400 and ms % 200 < 30:
            assert lags == [False], f"at {ms} ms, with nearly everything to send"


def test_flows_whose_path_is_not_known_do_not_count() -> None:
    run = Run({"job": "a", "links": ()}).learn()
    assert run.at(5000, "a") == [False], "the reference stands still"


def test_sockets_have_equal_rights_in_one_of_the_runs() -> None:
    """a has three of four: 100 MB in 133 ms, and time passes slower there."""
    for sockets, early in ((1, False), (3, True)):
        run = Run({"job": "a", "sockets": sockets}, "b").learn()
        run.at(200 + 133 * SLACK - 2, "a", "b")
        assert run.at(200 + 134 * SLACK + 2, "a", "b") == [early, False]


def test_where_all_lag_they_begin_anew() -> None:
    run = Run("a", "b").learn()
    assert run.at(650, "a", "b") == [True, True]  # in the reference: ended at 400, again at 700
    run.at(660)
    run.at(705)
    # Both have an iteration more behind them in the reference than really, and begin the next.
    assert run.at(760, "a", "b")[0] is False


@pytest.mark.parametrize(
    ("a", "size", "b", "says", "lag"),
    [
        (320, 300e6, 800, 800, "b"),  # a takes 1.6 times as long as alone, b twice
        (420, 300e6, 800, 800, "ab"),  # 2.1 times and twice, but b needs three times as long
        (420, 150e6, 475, 475, "a"),  # 2.1 and 1.9, of about the same length
        (420, 100e6, 420, 420, "ab"),  # both 2.1
        (320, 300e6, 800, 0, "b"),  # b does not say how long it takes
        (320, 300e6, 800, 10**6, "b"),  # it says far too much
        (420, 300e6, 800, 10**6, "ab"),
        (320, 300e6, 800, 440, "ab"),  # or less than it seems: 1.1 times
    ],
)
def test_who_pays_less_than_jobs_that_are_not_much_shorter_does_not_lag(
    a: int, size: float, b: int, says: int, lag: str
) -> None:
    far = {"job": "c", "next": 900e6, "links": (1,)}  # shares no link with them
    run = Run("a", {"job": "b", "next": size, "period": says}, far, links=2)
    takes, lagged = {"a": a, "b": b, "c": 9000}, set()
    for ms in range(8000):
        lags = run.at(ms, *(job for job, time in takes.items() if ms % time >= 100))
        lagged |= {job for job, lags in zip(run.jobs, lags, strict=True) if lags and ms > 4000}
    assert "".join(sorted(lagged)) == lag


def comes_first(
    stagger: StaggerAllocator, *left: float, a: int = 420, b: int = 200, known: str = "ab"
) -> str:
    """Of a and b, which have so many MB left. Both have computed for 100 ms and sent 100 MB, in
    iterations of `a` and `b` ms; of those that are not `known` nothing was seen. "=": the later one
    lags, and has its whole share."""
    run, times = Run("a", "b"), {"a": a, "b": b}
    for ms in range(4200):
        sending = tuple(job for job in known if ms % times[job] >= 100)
        stagger.allocate(run.waits(run.state(sending, 100e6), ms), Nanos(ms * MS))
    both = replace(run.state(("a", "b"), 100e6), remaining=1e6 * np.array(left))
    first, second = stagger.allocate(both, Nanos(4200 * MS))
    return "=" if first == pytest.approx(second) else "a" if first > second else "b"


def test_a_job_that_pays_more_for_others_comes_earlier() -> None:
    """Its iterations take 2.1 times as long as alone, the other one's no longer."""
    assert comes_first(StaggerAllocator(), 100.0, 40.0, known="") == "b"
    assert comes_first(StaggerAllocator(), 100.0, 40.0) == "a"
    assert comes_first(StaggerAllocator(), 100.0, 20.0) == "="


def test_a_job_that_is_late_comes_earlier() -> None:
    """Both are as slow as alone. a has 90 ms left, and b 60, of 200. a has waited for 90 ms: it is
    late by 80 ms, 0.4 of its iteration."""
    for wait, first in ((10, "b"), (90, "a")):
        run, stagger = Run("a", "b"), StaggerAllocator()
        for ms in range(4000):
            sending = [job for job, at in (("a", 0), ("b", 100)) if (ms + at) % 200 >= 100]
            stagger.allocate(run.waits(run.state(sending, 100e6), ms), Nanos(ms * MS))
        both = replace(
            run.state(("a", "b"), 100e6),
            remaining=np.array([90e6, 60e6]),
            wait_ns=MS * np.array([wait, 40.0]),
        )
        rates = stagger.allocate(both, Nanos(4001 * MS))
        assert "ab"[int(np.argmax(rates))] == first


def test_arbiters_of_a_part_do_not_go_by_slowdowns() -> None:
    """Others may see them in another way. Of one size, the first by name comes first."""
    assert comes_first(StaggerAllocator(), 100.0, 100.0, a=200, b=420) == "b"
    assert comes_first(StaggerAllocator(partial=True), 100.0, 100.0, a=200, b=420) == "="


def test_an_unknown_slowdown_counts_as_a_usual_one() -> None:
    assert comes_first(StaggerAllocator(), 100.0, 70.0, known="b") == "a"  # 64 = 100 / 1.25^2
    assert comes_first(StaggerAllocator(), 100.0, 60.0, known="b") == "b"


def test_no_slowdown_counts_for_more_than_the_most() -> None:
    run = Run("a", "b")
    for ms in range(15_000):
        run.at(ms, *(job for job, time in (("a", 2400), ("b", 200)) if ms % time >= 100))
    assert run.fair.seen[0].tolist() == [MOST_SLOWDOWN, pytest.approx(1.0, abs=0.1)]


def in_turns(run: Run, ms: int, *bursts: tuple[int, int, int], since: int = 0) -> list[bool]:
    """Looks every ms, from `since` to `ms`, at flows of one job. Each sends from `late` on for
    `takes` ms in each `period`. Whether the job lags, in each ms in which one sends; else False."""
    lags = []
    for at in range(since, ms):
        on = [at >= late and (at - late) % period < takes for late, takes, period in bursts]
        seen = replace(run.state(("a",), 100e6), remaining=np.where(on, 100e6, 0.0))
        lags += [run.look(seen, at)[0] and any(on)]
    return lags


@pytest.mark.parametrize(
    ("takes", "offset", "computes"), [(60, 80, 100), (100, 75, 50), (100, 90, 100)]
)
def test_hosts_of_a_job_need_not_be_in_step(takes: int, offset: int, computes: int) -> None:
    """Each of two sends for `takes` ms and computes, and the second one begins `offset` ms later.
    So the job is idle between their bursts, or never, or hardly ever. It gains no credit either:
    the first iteration that takes half as long again is seen to lag."""
    period, size = takes + computes, takes * 1e6
    flow = {"job": "a", "next": size}
    run = Run(flow, {**flow, "links": (1,)}, links=2)
    assert not any(in_turns(run, 11 * period + offset, (0, takes, period), (offset, takes, period)))
    late = (0, takes, period), (11 * period + offset, takes + takes // 2, 100 * period)
    now = 11 * period + offset
    assert any(in_turns(run, now + takes + takes // 2, *late, since=now))


def test_an_aggregate_that_sits_out_does_not_hold_the_count_up() -> None:
    """The second one sends in every other iteration only."""
    run = Run("a", {"job": "a", "links": (1,)}, links=2)
    assert not any(in_turns(run, 4000, (0, 100, 200), (0, 100, 400)))


def test_an_iteration_counts_that_begins_before_the_last_one_has_arrived() -> None:
    """The second one's sockets hold what they have not sent: it begins anew every 200 ms as the
    first one does, and is never idle."""
    run = Run("a", {"job": "a", "links": (1,)}, links=2)
    for ms in range(4000):
        on = [ms % 200 < 100, ms % 200 < 100 or ms > 400]
        seen = replace(run.state(("a",), 100e6), remaining=np.where(on, 100e6, 0.0))
        if ms % 200 == 0:
            run.began.clear()
        assert not run.look(seen, ms)[0] or not on[0], f"at {ms} ms"


def test_jobs_that_are_not_known_yet_do_not_lag() -> None:
    run = Run("a", "b")
    for ms, sending in ((0, "a"), (10_000, "a"), (10_001, "")):
        assert run.at(ms, *sending) == [False, False]


def test_an_index_that_gets_another_job_begins_anew() -> None:
    run = Run("a").learn()
    assert run.at(350, "a") == [True]
    run.jobs[0] = run.flows[0]["job"] = "z"
    assert run.at(360, "z") == [False]


@pytest.mark.parametrize("hours", [1, 100])
def test_a_long_time_between_two_looks_ends(hours: int) -> None:
    assert len(Run("a", "b").learn().at(hours * 3600e3, "a")) == 2


def test_a_job_that_pauses_owes_nobody_anything() -> None:
    """The reference goes on meanwhile; what it does then is not held against the others."""
    run = Run("a").learn()
    run.at(300, "a")
    run.at(301)
    assert run.at(10_000, "a") == [False]
    assert run.at(10_099, "a") == [False] and run.at(10_110, "a") == [True]


def test_a_job_whose_flows_have_gone_holds_nobody_up() -> None:
    run = Run("a", "b")
    for ms, sending in ((0, "ab"), (100, ""), (100.001, "ab"), (300, ""), (400, "b")):
        run.at(ms, *sending)
    run.flows[0]["next"] = 0.0
    # b computed for 0.1 ms at first, and for 100 then: it is alone, and has a period of some 125.
    lags = [run.at(400 + 10 * k, "b")[1] for k in range(40)]
    assert not lags[0] and lags[-1], "the reference goes on, at its own pace"


@pytest.mark.parametrize("seed", range(20))
def test_who_shares_no_link_may_be_looked_at_at_other_times(seed: int) -> None:
    """Also when they meet later."""
    draw = random.Random(seed)
    both = Run("a", {"job": "b", "links": (1,)}, links=2).learn()
    apart = Run("a", {"job": "b", "links": (1,)}, links=2).learn()
    ms = 200
    for _ in range(20):
        ms += draw.randint(1, 40)
        seen, one = both.at(ms, "a", "b"), draw.choice("ab")
        assert apart.alone(one, ms) == [seen[both.jobs.index(one)]]
    for run in (both, apart):
        run.flows[1] = {"job": "b", "next": 50e6, "links": (1, 0)}
    for more in range(10, 900, 10):
        assert both.at(ms + more, "a", "b") == apart.at(ms + more, "a", "b")
