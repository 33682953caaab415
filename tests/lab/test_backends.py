# SPDX-License-Identifier: Apache-2.0
"""Runs whose daemons pace with a back end that was named."""

import pytest
from leftovers import Host

from flowslot_lab.runner import LiveRun, Options
from flowslot_lab.state import RunState
from flowslot_scenario.scenario import load

from .conftest import NOTHING, SCENARIOS, Quiet, traces

TWO_EQUAL = load(SCENARIOS / "two-equal.toml")


@pytest.mark.root
@pytest.mark.timeout(120)
@pytest.mark.parametrize("backend", ["htb", "socket"])
def test_the_daemons_pace_with_it(host: Host, state: RunState, backend: str) -> None:
    stacked = Options((f"stagger@{backend}",)).stacked
    assert stacked == (backend == "htb")
    with LiveRun(TWO_EQUAL, state, f"stagger@{backend}", 3, True, stacked=stacked) as live:
        result = live.run(1, Quiet())
        assert live.plane is not None
        status = live.plane.ask("h1", "status")
        flows = live.plane.ask("h1", "flows")["flows"]
    assert (status["backend"], status["congestion_control"]) == (backend, "")
    assert result.policy == f"stagger@{backend}"
    assert result.evidence.rate_writes > 0 and result.evidence.granted > 0
    paced = [flow for flow in flows if flow["path"]]
    assert paced and not [flow["note"] for flow in paced if "not paced" in flow["note"]]
    state.clean()
    assert traces(state.id) == NOTHING
    assert host.left() == {}
