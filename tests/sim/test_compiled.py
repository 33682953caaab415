# SPDX-License-Identifier: Apache-2.0
"""The compiled loops of the network do what their source says."""

import pytest
from chaos import star
from interpreted import plain

import flowslot_sim.fluid
import flowslot_sim.network
from flowslot_sim.simulation import Control, Simulation


def ends(seed: int) -> list[list[int]]:
    sim = Simulation(star(seed), lambda _: Control())
    sim.run(until_ns=2 * 10**9)
    return [progress.ends for progress in sim.progress]


@pytest.mark.parametrize("seed", range(6))
def test_runs_are_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert flowslot_sim.fluid.COMPILED, "make setup compiles them"
    compiled, interpreted = ends(seed), plain(flowslot_sim.fluid)
    assert not interpreted.COMPILED and any(compiled)
    monkeypatch.setattr(flowslot_sim.network, "fluid", interpreted)
    assert ends(seed) == compiled
