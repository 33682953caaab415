# SPDX-License-Identifier: Apache-2.0
"""Policies of running processes change while jobs train. At length: bench/policy_switches.py."""

import pytest
from bench.policy_switches import play
from kerneltable import KernelTable

from flowslot_lab.progress import Silent
from flowslot_lab.runner import LiveRun
from flowslot_lab.state import RunState
from flowslot_lab.tools import LabError

from .conftest import LEAVES_NOTHING, TWO_EQUAL
from .test_fail_open import finish

pytestmark = [pytest.mark.root, pytest.mark.timeout(120), LEAVES_NOTHING]
SWITCHES = 50


def test_changes_of_policy_lose_no_connection_and_leave_no_rate_behind(state: RunState) -> None:
    with LiveRun(TWO_EQUAL, state, "stagger", 30, use_switch=True) as live:
        assert live.plane is not None
        progress = live.follow(Silent())
        next(done for done in progress if done >= 2)
        with pytest.raises(LabError, match="did you mean"):
            live.plane.set_policy("adadul")
        with pytest.raises(LabError, match="no arbiter decides by"):
            live.plane.set_policy("static")
        tables: list[KernelTable] = []

        def look() -> None:
            tables[:] = [KernelTable(daemon.pid) for daemon in live.plane.daemons.values()]
            assert any(table.in_force() for table in tables)

        outcome = play(live, SWITCHES, 0.05, look)
        assert len(outcome.before["h1"]) >= 4 and outcome.before == outcome.after
        assert outcome.paced == 0 and outcome.errors == []
        assert not any(table.in_force() for table in tables)
        assert live.plane.set_policy("stagger")["policy"] == "stagger"
        for host in live.net.hosts:
            live.plane.set_policy("stagger", host)
        for table in tables:
            table.close()
        finish(live, progress)  # every byte has come, once
