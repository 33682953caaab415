# SPDX-License-Identifier: Apache-2.0
"""Algorithm 2 of MLCC, and what it and Algorithm 1 take from the last slots."""

import numpy as np
import pytest

from flowslot.policy.base import Floats
from flowslot.policy.mlcc import depend
from flowslot.policy.mlcc.bandwidth import (
    WINDOW,
    History,
    Observed,
    history_bound,
    residual_bound,
)
from flowslot.policy.mlcc.depend import Dependency

SLOT_S = 0.5
CAPACITY = np.array([100.0])


@pytest.mark.parametrize(
    ("dependency", "delta", "less"),
    [
        # F_i = 40 + 20 * 0.5 = 50 bytes
        (Dependency("aggregation", 40.0, (30.0, 60.0)), 20.0, 0.0),  # the fastest broadcast
        (Dependency("aggregation", 40.0, (30.0, 45.0)), 0.0, 0.0),
        (Dependency("broadcast", 40.0, (55.0, 70.0)), 10.0, 0.0),  # the slowest aggregation
        (Dependency("broadcast", 40.0, (45.0, 70.0)), 0.0, 10.0),
        (Dependency("ring", 40.0, (52.0,)), 4.0, 0.0),
        (Dependency("ring", 40.0, (48.0,)), 0.0, 4.0),
        (Dependency("ring", 40.0, (48.0,), lead=1.0), 0.0, 2.0),
        (Dependency("ring", 40.0, (10.0,)), 0.0, 20.0),  # never below rate 0
        (Dependency("ring", 40.0), 0.0, 0.0),
    ],
)
def test_deltas(dependency: Dependency, delta: float, less: float) -> None:
    assert depend.increase(dependency, 20.0, SLOT_S) == delta
    assert depend.decrease(dependency, 20.0, SLOT_S) == less


def test_rate_is_capped_by_the_bound_even_below_itself() -> None:
    assert depend.adjusted(20.0, 0.0, 5.0) == 20.0  # line 6: no look at B
    assert depend.adjusted(20.0, 4.0, 30.0) == 24.0
    assert depend.adjusted(20.0, 4.0, 22.0) == 22.0
    assert depend.adjusted(20.0, 4.0, 5.0) == 5.0


def test_who_waits_may_not_send() -> None:
    assert not depend.may_send(Dependency("ring", 10.0, (10.0,)))
    assert depend.may_send(Dependency("ring", 10.0, (10.0,), lead=5.0))
    assert not depend.may_send(Dependency("broadcast", 10.0, (10.0, 90.0)))
    assert depend.may_send(Dependency("aggregation", 10.0, (0.0,)))


def spiral(bound: str) -> list[float]:
    """A follower whose predecessor pauses for WINDOW slots, then always is ahead: its rates."""
    history, sent, rates = History(), 0.0, []
    for slot in range(12):
        ahead = sent if 2 <= slot < 2 + WINDOW else sent + 100.0
        planned = 20.0
        dependency = Dependency("ring", sent, (ahead,))
        delta = depend.increase(dependency, planned, 1.0)
        if bound == "paper":
            most = history_bound(history.flow_rates(1, 1.0), 60.0)
        else:
            most = residual_bound(planned, 60.0 - planned)
        rate = depend.adjusted(planned, delta, most)
        rate -= depend.decrease(dependency, rate, 1.0)
        history.observe(Observed(slot, {1: rate}))
        sent += rate
        rates.append(rate)
    return rates


def test_history_alone_is_a_death_spiral() -> None:
    pause = [0.0] * WINDOW
    assert spiral("paper") == [60.0, 60.0, *pause, *[0.0] * 6]
    assert spiral("residual") == [60.0, 60.0, *pause, *[60.0] * 6]


def available(history: History, *, paper: bool) -> float:
    limits: Floats = history.limits(CAPACITY, history=paper)
    return float(limits[0])


def link(slot: int, controlled: float, other: float) -> Observed:
    return Observed(slot, {}, np.array([controlled]), np.array([controlled + other]))


def test_bandwidth_of_a_steady_path_is_the_same_in_both() -> None:
    history = History()
    for slot in range(10):
        history.observe(link(slot, 70.0, 30.0))
        assert available(history, paper=True) == available(history, paper=False) == 70.0


def test_bandwidth_recovers_only_if_what_others_left_counts() -> None:
    history, estimates = History(), []
    for slot in range(16):
        other = 100.0 if slot < 6 else 0.0
        # The flow sends what it is told to, as far as other traffic leaves room.
        both = available(history, paper=True), available(history, paper=False)
        estimates.append(both)
        history.observe(link(slot, min(both[0], 100.0 - other), other))
    paper, ours = zip(*estimates, strict=True)
    assert paper == (100.0,) + (0.0,) * 15
    assert ours == (100.0,) + (0.0,) * 9 + (100.0,) * 6


def test_what_was_left_unused_stays_available() -> None:
    history = History()
    history.observe(link(0, 10.0, 30.0))
    assert available(history, paper=True) == 10.0
    assert available(history, paper=False) == 70.0


def test_no_link_has_more_than_its_capacity() -> None:
    history = History()
    history.observe(link(0, 120.0, -5.0))  # counters that were read a little late
    assert available(history, paper=True) == available(history, paper=False) == 100.0


def test_unseen_links_have_their_capacity() -> None:
    history = History()
    for observed in (
        Observed(0, {}),
        Observed(1, {}, np.array([np.nan]), np.array([50.0])),
        Observed(2, {}, np.array([1.0, 2.0]), np.array([9.0, 9.0])),  # another network
    ):
        history.observe(observed)
        assert available(history, paper=True) == available(history, paper=False) == 100.0


def test_history_looks_back_so_far_and_not_into_the_past() -> None:
    history = History()
    for slot in range(WINDOW + 2):
        history.observe(Observed(slot, {7: 100.0 - slot} if slot else {}))
    assert history.flow_rates(7, SLOT_S).tolist() == [2 * (100.0 - s) for s in (2, 3, 4, 5)]
    assert history_bound(history.flow_rates(8, SLOT_S), 33.0) == 33.0
    with pytest.raises(ValueError, match="after"):
        history.observe(Observed(WINDOW + 1, {}))
