# SPDX-License-Identifier: Apache-2.0
"""Where a simulated run's time goes: the lab's table (flowslot_scenario.budget), from events."""

from __future__ import annotations

import numpy as np

from flowslot.model.units import SECOND, Nanos
from flowslot_scenario.budget import CAUSES, Bools, Floats, JobBudget, Link, busiest, charge, settle
from flowslot_scenario.scenario import Scenario
from flowslot_sim.simulation import Simulation

_FULL, _NEAR = 0.01, 1e-6
_TOGETHER = 1024
"""Moments that are charged in one go."""
_STEPS = ("in_force", "first_byte", "last_byte")


class Ledger:
    """Accounts for each stretch of time in which no rate changes, once all jobs are warm."""

    def __init__(self, sim: Simulation, scenario: Scenario, *, grants: bool) -> None:
        """`scenario`: what the simulation's world was made from. `grants`: somebody paces."""
        self._sim, self._scenario, self._grants = sim, scenario, grants
        index = {name: i for i, name in enumerate(sim.world.links)}
        self._index = {
            name: index[name] for job in scenario.jobs for name in busiest(scenario, job)
        }
        paths = sim.network.paths
        self._at = {
            name: np.flatnonzero((paths == link).any(axis=1)) for name, link in self._index.items()
        }
        self._job = np.array(sim.job_of, np.intp)
        self._lost = {
            (name, j): np.zeros(len(CAUSES))
            for name in self._index
            for j in range(len(scenario.jobs))
        }
        self._moments: list[tuple[float, Floats, Floats, Bools, Bools]] = []
        """Not charged yet: seconds; rate, reserved, active and not fed, of each flow."""
        self._seconds = 0.0
        self._active: Bools = np.zeros(len(paths), np.bool_)
        self._begun, self._onset = np.zeros((2, len(paths)), np.int64)
        self._steps: Floats = np.full((len(paths), len(_STEPS)), np.nan)
        self._found: list[list[Floats]] = [[] for _ in scenario.jobs]

    def account(self, now: Nanos, elapsed: Nanos) -> None:
        """From `now` on, for `elapsed` ns, rates are as they are."""
        progress = self._sim.progress
        if any(len(one.ends) < self._scenario.warmup for one in progress):
            return
        seconds = elapsed / SECOND
        self._seconds += seconds
        self._step(now, elapsed)
        rows = self._sim.network.rows
        fed = rows["bound"] & (rows["rate"] >= rows["limit"] * (1 - _NEAR))
        moment = rows["rate"].copy(), rows["reserved"].copy(), rows["active"].copy(), ~fed
        self._moments.append((seconds, *moment))
        if len(self._moments) >= _TOGETHER:
            self._charge()

    def _charge(self) -> None:
        """Charge the moments kept so far."""
        if not self._moments:
            return
        seconds, rate, reserved, active, unfed = map(np.array, zip(*self._moments, strict=True))
        self._moments.clear()
        network = self._sim.network
        capacity = network.capacity
        carried = np.zeros((len(capacity), len(seconds)))
        for hop in network.paths.T:
            np.add.at(carried, hop, rate.T)
        unused = np.clip(1.0 - carried.T / capacity, 0.0, 1.0)
        full: Bools = np.less(unused, _FULL)
        held_up: Bools = np.any(full[:, network.paths], axis=2)
        for name, link in self._index.items():
            at = self._at[name]
            in_force = reserved[:, at] / capacity[link]
            granted = in_force.sum(axis=1) if self._grants else np.full(len(seconds), np.inf)
            nowhere = np.zeros(in_force.shape, np.bool_)
            one = Link(
                seconds=seconds,
                unused=unused[:, link],
                granted=granted,
                job=self._job[at],
                carried=rate[:, at] / capacity[link],
                in_force=in_force,
                open=active[:, at],
                ready=(active & unfed)[:, at],
                elsewhere=held_up[:, at] & ~full[:, link, None],
                at_receiver=nowhere,
                in_process=nowhere,
            )
            for j in set(one.job.tolist()):
                self._lost[name, j] += charge(one, j)

    def _step(self, now: Nanos, elapsed: Nanos) -> None:
        """What flows do for the first time in their phase."""
        rows, steps = self._sim.network.rows, self._steps
        self._onset[rows["begun"] != self._begun] = now
        self._begun = rows["begun"].copy()
        since = (now - self._onset) / 1e6
        for row in np.flatnonzero(self._active & ~rows["active"]).tolist():
            self._found[self._job[row]].append(steps[row].copy())
        steps[rows["active"] & ~self._active] = np.nan
        self._active = rows["active"].copy()
        for k, begun in enumerate((rows["reserved"] > 0, rows["rate"] > 0)):
            new = self._active & begun & np.isnan(steps[:, k])
            steps[new, k] = since[new]
        steps[self._active, 2] = since[self._active] + elapsed / 1e6

    def budgets(self) -> list[JobBudget]:
        """Of all jobs, once they have done their iterations; empty: some have done none."""
        self._charge()
        warmup = self._scenario.warmup
        lasted = [
            np.subtract(one.ends, one.began[: len(one.ends)])[warmup:] / SECOND
            for one in self._sim.progress
        ]
        if not all(map(len, lasted)) or not self._seconds:
            return []
        means = [float(some.mean()) for some in lasted]
        counts = [self._seconds / mean for mean in means]
        budgets = settle(self._scenario, counts, means, lambda link, j: self._lost[link, j])
        for budget, found in zip(budgets, self._found, strict=True):
            for k, step in enumerate(_STEPS if found else ()):
                known = np.array(found)[:, k]
                if not np.isnan(known).all():
                    budget.steps[step] = float(np.nanmedian(known))
        return budgets
