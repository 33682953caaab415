# SPDX-License-Identifier: Apache-2.0
"""The policies of live arbiters, by messages on simulated wires."""

from pathlib import Path
from typing import Any

import pytest
from scenariofiles import SCENARIOS

from flowslot.policy import registry
from flowslot.policy.base import Floats
from flowslot_scenario.results import Results
from flowslot_scenario.scenario import load
from flowslot_sim.network import Network
from flowslot_sim.runner import Options, simulate


def simulated(name: str, *policies: str, iterations: int = 20, switch: bool = True) -> Results:
    scenario = load(SCENARIOS / f"{name}.toml")
    return simulate(scenario, Options(policies, iterations=iterations, use_switch=switch))


def mean(results: Results, policy: str, job: str | None = None) -> float:
    """Slowdown."""
    found = [
        results.times(policy, one.name).mean() / results.scenario.ideal_s(one)
        for one in results.scenario.jobs
        if job in (None, one.name)
    ]
    return float(sum(found) / len(found))


@pytest.mark.parametrize("policy", registry.names())
def test_every_policy_runs(policy: str) -> None:
    assert 0.99 < mean(simulated("three-equal", policy, iterations=3), policy) < 4


def test_of_a_deep_buffer_top_up_counts_5_ms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (SCENARIOS / "two-equal.toml").read_text()
    path = tmp_path / "deep.toml"
    path.write_text(text.replace("buffer_kb = 128", "buffer_kb = 3000"))
    kernels, use_queues = [], Network.use_queues

    def kept(network: Network, buffers: Floats) -> Any:
        assert buffers.min() > 2_000_000, "the queues themselves are as long as ever"
        kernels.append(use_queues(network, buffers))
        return kernels[-1]

    monkeypatch.setattr(Network, "use_queues", kept)
    simulate(load(path), Options(("stagger",), iterations=3))
    assert [set(kernel["buffer"].tolist()) for kernel in kernels] == [{0.005}]


def test_gates_and_shifts_take_turns_where_fair_sharing_does_not() -> None:
    results = simulated("three-equal", "fair", "adadual", "srsf2", "cassini", iterations=30)
    assert mean(results, "fair") > 1.2
    assert mean(results, "adadual") < 1.03
    assert 1.05 < mean(results, "srsf2") < 1.25, "two at a time"
    assert mean(results, "cassini") < 1.08


def test_without_a_switch_process_nobody_is_held() -> None:
    results = simulated("two-equal", "srsf1", "cassini", iterations=10, switch=False)
    for policy in ("srsf1", "cassini"):
        assert mean(results, policy) < 1.45, "as under fair sharing"


@pytest.mark.parametrize("policy", ["stagger", "adadual"])
def test_a_protected_job_is_as_if_alone_and_nobody_starves(policy: str) -> None:
    results = simulated("protected", policy, iterations=30)
    assert mean(results, policy, "first") < 1.02
    for job in ("a", "b", "c"):
        times = results.times(policy, job)
        tens = [times[k : k + 10].sum() for k in range(len(times) - 9)]
        assert max(tens) < 3 * min(tens), "no ten iterations are much longer than others"
