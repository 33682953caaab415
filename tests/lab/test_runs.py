# SPDX-License-Identifier: Apache-2.0
"""Runs of every kind are real: `LiveRun.run` fails without bytes, grants, schedules or rates."""

import pytest

from flowslot_lab.runner import LiveRun, Options, kind
from flowslot_lab.state import RunState
from flowslot_scenario.scenario import load

from .conftest import LEAVES_NOTHING, SCENARIOS, Quiet

pytestmark = [pytest.mark.root, pytest.mark.timeout(120), LEAVES_NOTHING]
COUNTED = {"stagger": "granted", "mlcc": "scheduled"}
"""What a switch process counts under each policy."""


@pytest.mark.parametrize("policy", ["stagger@htb", "stagger@socket", "mlcc"])
def test_daemons_pace_with_the_policy_and_back_end_that_were_named(
    state: RunState, policy: str
) -> None:
    stacked = Options((policy,)).stacked
    assert stacked == policy.endswith("@htb")
    scenario = load(SCENARIOS / "two-equal.toml")
    with LiveRun(scenario, state, policy, 5, True, stacked=stacked) as live:
        result = live.run(1, Quiet())
        status = live.plane.ask("h1", "status")
        flows = live.plane.ask("h1", "flows")["flows"]
    assert result.policy == policy
    assert (status["policy"], status["errors"]) == (kind(policy), {})
    paced = [flow for flow in flows if flow["path"]]
    assert paced and not [flow["note"] for flow in paced if "not paced" in flow["note"]]
    evidence = result.evidence
    if policy != "mlcc":
        backend = policy.partition("@")[2]
        assert (status["backend"], status["congestion_control"]) == (backend, "")
        return
    assert evidence.granted == 0 and status["domain"] == {"state": "none"}
    assert status["feedback"]["rounds"] > 0
    peers = status["peers"]
    assert peers["told"] > 0 and peers["heard"] > 0
    assert (peers["rejected"], peers["error"]) == (0, "")
    assert 0 < status["reservations"]["scheduled"] <= evidence.scheduled


@pytest.mark.parametrize(("policy", "iterations"), [("stagger", 5), ("mlcc", 2)])
def test_the_switch_process_of_every_rack_takes_part(
    state: RunState, policy: str, iterations: int
) -> None:
    scenario = load(SCENARIOS / "ring4-two-jobs.toml")
    with LiveRun(scenario, state, policy, iterations, use_switch=True, per_rack=True) as live:
        result = live.run(1, Quiet())
        counted = {
            name: live.plane.describe_switch(name)["counters"][COUNTED[policy]]
            for name in ("r1", "r2")
        }
    assert min(counted.values()) > 0, counted
    evidence, used = result.evidence, result.utilisation
    assert {"switch-r1", "switch-r2", "daemon-h1", "daemon-h4"} < set(evidence.pids)
    # Each of the four sends 6/4 of a tensor in each iteration, and as much is received.
    assert evidence.bytes_verified == (scenario.warmup + iterations) * 2 * 4 * 1_500_000
    assert evidence.errors == []
    assert min(job.slowdowns.min() for job in result.jobs) > 0.95
    # As many bytes on all links, as h1 -> h2 -> h3 -> h4 -> h1. They are read one after the other.
    for uplink in ("r1->core", "core->r1", "r2->core", "core->r2"):
        assert used[uplink] == pytest.approx(used["r1->h1"], rel=0.15)
