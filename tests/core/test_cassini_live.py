# SPDX-License-Identifier: Apache-2.0
"""CASSINI's coordinator and drift: from observed starts and ends to holds."""

import numpy as np
import pytest

from flowslot.model.units import MILLISECOND as MS
from flowslot.policy.cassini import Coordinator, Drift, Phase, Profile, plan

C = 1e9
PERIOD, UP = 100 * MS, 40 * MS


def pair(up=UP, names=("a", "b")):
    profiles = [Profile(n, PERIOD, (Phase(0, up, C),), {0: 1.0}) for n in names]
    return Drift(profiles, {0: C}, plan(profiles, {0: C}))


def iteration(drift, job, start, up=UP):
    drift.started(job, start)
    return drift.ended(job, start + up)


def test_a_shift_delays_the_next_iteration_only() -> None:
    drift = pair()
    assert iteration(drift, "a", 0) == {}  # the first has its place
    drift.started("b", 0)
    held = drift.ended("b", UP)["b"] - PERIOD
    assert abs(held - 50 * MS) <= PERIOD / 72
    assert iteration(drift, "a", PERIOD) == {}
    assert iteration(drift, "b", PERIOD + held) == {}
    assert iteration(drift, "a", 2 * PERIOD) == {}
    assert iteration(drift, "b", 2 * PERIOD + held) == {}


def test_who_is_well_placed_already_stays() -> None:
    drift = pair()
    iteration(drift, "a", 0)
    assert iteration(drift, "b", 57 * MS) == {}


def test_drift_is_corrected_by_the_least_that_helps() -> None:
    """Nobody is led back to the grid: b waits until a has sent, and not longer; what is not in the
    way is let alone; and a, which comes first, does not wait for b."""
    drift = pair()
    iteration(drift, "a", 0)
    iteration(drift, "b", 50 * MS)
    assert iteration(drift, "a", 100 * MS) == {}
    assert iteration(drift, "b", 141 * MS) == {}  # 9 ms early, and in nobody's way
    assert iteration(drift, "a", 207 * MS) == {}
    assert iteration(drift, "b", 243 * MS) == {
        "b": (207 + 100 + 40 - 243) * MS
    }  # not 50 ms after a


def test_drift_holds_a_job_for_a_quarter_of_an_iteration_at_most() -> None:
    drift = pair()
    iteration(drift, "a", 0)
    iteration(drift, "b", 50 * MS)
    iteration(drift, "a", 100 * MS)
    assert iteration(drift, "b", 105 * MS)["b"] == PERIOD + PERIOD // 4


def test_jobs_that_are_not_there_hold_nobody() -> None:
    drift = pair()
    iteration(drift, "a", 0)
    iteration(drift, "b", 50 * MS)
    late = 1000 * MS  # a has not come back for long
    assert iteration(drift, "b", late) == {}
    assert drift.ended("nobody", 0) == {} and drift.started("nobody", 0) is None
    assert drift.ended("b", late + UP) == {}  # twice


class World:
    """Jobs that share one link fairly, told to a Coordinator at once. Times in ms steps."""

    def __init__(self, names, compute, size, seed=0):
        self.coordinator = Coordinator({0: C})
        self.draw = np.random.default_rng(seed)
        self.compute, self.size = compute, size
        self.left = dict.fromkeys(names, 0.0)
        self.ready = {n: float(self.draw.integers(3)) for n in names}
        self.start, self.hold, self.times, self.began = (
            {},
            {},
            {n: [] for n in names},
            dict(self.ready),
        )

    def step(self, t):
        for n in self.left:
            if not self.left[n] and t >= max(self.ready[n], self.hold.get(n, 0)):
                self.left[n], self.start[n] = self.size, t
                self.hold.pop(n, None)
                self.coordinator.started(n, t * MS, {0: self.size})
        active = [n for n in self.left if self.left[n]]
        for n in active:
            self.left[n] = max(self.left[n] - C / 1e3 / len(active), 0.0)
            if not self.left[n]:
                self.coordinator.ended(n, (t + 1) * MS)
                self.times[n].append(t + 1 - self.began[n])
                self.began[n] = t + 1
                self.ready[n] = t + 1 + self.compute * (1 + 0.02 * self.draw.standard_normal())
        for n, after in self.coordinator.changed().items():
            self.hold[n] = self.start[n] + after / MS


@pytest.mark.parametrize("names", ["ab", "abc"])
def test_a_coordinator_makes_jobs_take_turns(names) -> None:
    up, n = 50.0, len(names)
    world = World(names, compute=1.1 * n * up - up, size=up * C / 1e3)
    for t in range(8000):
        world.step(t)
    ideal = 1.1 * n * up
    for times in world.times.values():
        assert np.mean(times[:3]) > 1.2 * ideal  # nothing is known yet
        assert np.mean(times[10:40]) < 1.04 * ideal
    assert world.coordinator.plans == 1


def test_when_many_jobs_go_at_once_one_new_plan_is_made() -> None:
    names = [f"j{k}" for k in range(8)]
    coordinator = Coordinator({0: C})
    for start in (0, 1000, 2000, 3000):
        for k, job in enumerate(names):
            coordinator.started(job, (start + k * 100) * MS, {0: 4e7})
            coordinator.ended(job, (start + k * 100 + 40) * MS)
    before = coordinator.plans
    coordinator.started("j0", 4000 * MS, {})
    for job in names[1:]:
        coordinator.gone(job)
    assert coordinator.plans == before
    coordinator.ended("j0", 4040 * MS)
    assert coordinator.plans == before + 1
    assert set(coordinator.changed()) <= {"j0"}


def test_a_coordinator_plans_anew_when_jobs_change() -> None:
    coordinator = Coordinator({0: C})

    def run(job, start, up=40, size=4e7):
        coordinator.started(job, start * MS, {0: size})
        coordinator.ended(job, (start + up) * MS)

    for start in (0, 100, 200):
        run("a", start)
    assert coordinator.plans == 1 and coordinator.changed() == {}
    for start in (300, 400, 500):
        run("a", start)
        run("b", start + 5)
    assert coordinator.plans == 2
    held = coordinator.changed()
    assert held.keys() == {"b"} and held["b"] > PERIOD
    run("a", 600, up=80, size=8e7)  # twice as much
    assert coordinator.plans == 3
    coordinator.gone("b")
    coordinator.gone("never there")
    assert coordinator.plans == 3, "not for each that goes"
    run("a", 760, up=80, size=8e7)
    assert coordinator.plans == 4
    coordinator.changed()
    coordinator.ended("b", 0)
    coordinator.started("c", 0, {5: 1.0})  # a link of others
    coordinator.ended("c", -5)
    assert coordinator.changed() == {}
