# SPDX-License-Identifier: Apache-2.0
"""Which processors emulate the network, and whether they were fast enough."""

import io
import os
import time

import pytest
from pytest import MonkeyPatch
from rich.console import Console

from flowslot_lab import processors
from flowslot_scenario.results import Evidence, Results, Run
from flowslot_scenario.table import _warn_of_busy_processors, _warn_of_stolen_time

from .conftest import TWO_EQUAL


@pytest.mark.parametrize(
    ("there", "network", "programs"),
    [({0}, [0], [0]), ({0, 1}, [0], [1]), ({3, 4, 5}, [3], [4, 5]), ({1, 2, 6, 7}, [1, 2], [6, 7])],
)
def test_the_network_has_half_of_them(
    monkeypatch: MonkeyPatch, there: set[int], network: list[int], programs: list[int]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: there)
    assert processors.of_the_network() == network
    assert processors.of_the_programs() == programs


def test_time_of_the_processors_passes() -> None:
    before = processors.read_ticks()
    time.sleep(0.1)
    after = processors.read_ticks()
    assert after.every - before.every >= after.network - before.network > 0
    assert after.every - before.every >= after.programs - before.programs > 0
    assert all(0.0 <= share <= 1.0 for share in after.since(before))


def test_what_part_was_busy_and_what_was_stolen() -> None:
    before = processors.Ticks(100, 50, 100, 20, every=200, stolen=7)
    after = processors.Ticks(200, 80, 300, 180, every=400, stolen=17)
    shares = after.since(before)
    assert shares == (pytest.approx(0.7), pytest.approx(0.2), pytest.approx(0.05))
    assert after.since(after) == (1.0, 1.0, 0.0)


@pytest.mark.parametrize(
    ("field", "share", "warning"),
    [
        ("network_busy", 0.5, None),
        ("network_busy", 0.93, "emulate the network were busy most of the time (stagger 93%"),
        ("programs_busy", 0.5, None),
        ("programs_busy", 0.85, "of the control plane were busy most of the time (stagger 85%"),
        ("stolen", 0.004, None),
        ("stolen", 0.06, "stagger 6% in the worst run"),
    ],
)
def test_processors_that_were_too_slow_are_mentioned(
    field: str, share: float, warning: str | None
) -> None:
    evidence = Evidence(**{field: share})  # type: ignore[arg-type]
    assert evidence.to_json()[field] == share
    runs = [
        Run("stagger", 1, evidence, [], 0, {}),
        Run("stagger", 2, Evidence(), [], 0, {}),
        Run("cubic", 1, Evidence(network_busy=0.4), [], 0, {}),
    ]
    text = io.StringIO()
    for warn in (_warn_of_busy_processors, _warn_of_stolen_time):
        warn(Results(TWO_EQUAL, runs, {}), Console(file=text, width=200))
    assert warning in text.getvalue() if warning else not text.getvalue()
    assert "cubic" not in text.getvalue()
