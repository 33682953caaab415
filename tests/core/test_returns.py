# SPDX-License-Identifier: Apache-2.0
"""When jobs come back, as seen by an arbiter."""

import numpy as np
import pytest
from states import MS, NOW, state

from flowslot.policy.returns import MOST, NEGOTIATED_NS, Returns

ALL = np.ones(1, np.bool_)


def follow(returns, phases, said):
    """A job of one flow that begins and ends at these times, ms; `said(end)`: when it is due again,
    by its daemon. Returns how far what is expected at each end was off, ms."""
    off = []
    for k, (begin, end) in enumerate(phases):
        returns.look(state({"job": "j", "next": 100.0, "wait": 2.0}), NOW + (begin + 2) * MS, ALL)
        due = said(end) - end
        idle = state({"job": "j", "next": 100.0, "left": 0.0, "due": due, "idle": 0.0})
        found = returns.look(idle, NOW + end * MS, ALL)
        if k + 1 < len(phases):
            off.append(end + found.due[0] / MS - phases[k + 1][0])
    return off


def sends(computes, lasts):
    """Begin and end of each phase, ms."""
    at, phases = 0.0, []
    for compute, last in zip(computes, lasts, strict=True):
        phases.append((at + compute, at + compute + last))
        at += compute + last
    return phases


def test_a_job_is_expected_by_what_it_computes_however_long_others_hold_it_up():
    phases = sends([100.0] * 12, [250.0, 60.0, 200.0, 60.0] * 3)
    phases[0] = 100.0, 390.0  # which was noticed late
    returns = Returns()
    off = follow(returns, phases, lambda end: end + 40.0)
    assert off[0] == pytest.approx(-20.0), "nothing but what its daemon says"
    assert off[2:] == pytest.approx([0.0] * 9)
    assert np.isinf(returns.look(state({"job": "j"}), NOW, ALL).due[0]), "it sends"


def test_a_job_that_pauses_within_an_iteration_is_expected_as_its_daemon_says():
    phases = sends([100.0, 5.0] * 8, [20.0] * 16)
    nexts = dict(zip([end for _, end in phases], [begin for begin, _ in phases[1:]], strict=False))
    off = follow(Returns(), phases, lambda end: nexts.get(end, end) + 1.0)
    assert off[4:] == pytest.approx([1.0] * 11)


def test_the_margin_grows_with_how_much_computations_vary_and_a_pause_is_none():
    def margin(computes):
        returns = Returns()
        follow(returns, sends(computes, [50.0] * len(computes)), lambda end: end + 500.0)
        idle = state({"job": "j", "next": 100.0, "left": 0.0, "due": 400.0, "idle": 0.0})
        found = returns.look(idle, NOW + 10**6 * MS, ALL)
        return found.margin[0], found.due[0] / MS

    steady, varied = margin([200.0] * 20), margin([190.0, 210.0] * 10)
    assert steady[0] == pytest.approx(NEGOTIATED_NS, rel=0.01)
    assert varied[0] > NEGOTIATED_NS + 8 * MS
    assert margin([8.0] * 20)[0] == pytest.approx(MOST * 8 * MS)
    assert steady[1] == pytest.approx(200.0)
    paused = margin([200.0] * 10 + [60_000.0])
    assert paused[1] == pytest.approx(250.0), "a quarter of once more"


def test_flows_that_have_yet_to_begin_are_expected_at_once_and_those_at_their_end_are_not():
    returns = Returns()
    follow(returns, sends([100.0] * 5, [50.0] * 5), lambda end: end + 500.0)
    one = {"job": "j", "next": 100.0}
    flows = [
        one | {"wait": 30.0},
        one | {"left": 0.0, "idle": 90.0},
        one | {"left": 0.0, "idle": 5.0},
    ]
    found = returns.look(state(*flows), NOW + 10**4 * MS, ALL)
    assert found.due.tolist() == [np.inf, -30 * MS, np.inf]


def test_a_job_of_the_same_name_that_comes_later_is_another_one():
    returns = Returns()
    follow(returns, sends([100.0] * 5, [50.0] * 5), lambda end: end + 500.0)
    idle = state({"job": "j", "next": 100.0, "left": 0.0, "due": 400.0, "idle": 0.0})
    again = idle.jobs._replace(turns=idle.jobs.turns + 1)
    object.__setattr__(idle, "jobs", again)
    assert returns.look(idle, NOW + 10**6 * MS, ALL).due[0] == 400 * MS


def test_computations_that_were_none_at_first_are_learnt_all_the_same():
    """Ends are noticed where there are none while daemons have yet to learn what an iteration is;
    what they say is wrong by turns here."""
    phases = sends([0.0] * 3 + [100.0] * 30, [250.0, 60.0, 200.0] * 11)
    dues = iter([400.0, 20.0] * 17)
    off = follow(Returns(), phases, lambda end: end + next(dues))
    assert off[-1] == pytest.approx(0.0, abs=5.0)


def test_where_nobody_knows_when_it_ended_its_daemon_is_believed():
    """All its flows are new: their daemons were restarted, one after the other."""
    returns = Returns()
    follow(returns, sends([100.0] * 5, [50.0] * 5), lambda end: end + 500.0)
    new = state({"job": "j", "next": 100.0, "left": 0.0, "due": 400.0, "idle": np.inf})
    assert returns.look(new, NOW + 10**4 * MS, ALL).due[0] == 400 * MS
