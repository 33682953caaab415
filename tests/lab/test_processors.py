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
    before = processors.Ticks(
        network=100, network_idle=50, programs=100, programs_idle=20, every=200, stolen=7
    )
    after = processors.Ticks(
        network=200, network_idle=80, programs=300, programs_idle=180, every=400, stolen=17
    )
    shares = after.since(before)
    assert shares == (pytest.approx(0.7), pytest.approx(0.2), pytest.approx(0.05))
    assert after.since(after) == (0.0, 0.0, 0.0)


STAT = """cpu  9 9 9 9 9 9 9 9 0 0
cpu0 1 2 3 40 5 6 7 8 0 0
cpu1 1000 0 0 0 0 0 0 0 0 0
cpu4 10 20 30 400 50 60 70 80 0 0
intr 7
"""


def test_what_the_kernel_counts(monkeypatch: MonkeyPatch) -> None:
    """By user, nice, system, idle, iowait, irq, softirq, steal. One processor is another's, and
    one of ours is gone."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 4, 5})
    monkeypatch.setattr(processors.Path, "read_text", lambda path: STAT)
    assert processors.read_ticks() == processors.Ticks(
        network=72, network_idle=45, programs=720, programs_idle=450, every=792, stolen=88
    )


@pytest.mark.parametrize(
    ("field", "share", "warning"),
    [
        ("network_busy", 0.5, None),
        ("network_busy", 0.93, "busy most of the time (network: stagger 93%)"),
        ("programs_busy", 0.5, None),
        ("programs_busy", 0.85, "busy most of the time (others: stagger 85%)"),
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
