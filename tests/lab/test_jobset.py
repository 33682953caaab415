# SPDX-License-Identifier: Apache-2.0
"""When a job counts as stuck."""

import time
from typing import Any

import pytest

from flowslot_lab.jobset import JobSet, Stalled, _Worker
from flowslot_scenario.scenario import load

from .conftest import SCENARIOS


def jobs(*changes: str) -> JobSet:
    """Two jobs of one process each, that nobody has started."""
    scenario = load(SCENARIOS / "two-equal.toml", changes)
    nothing: Any = None
    made = JobSet(scenario, nothing, nothing, register=str, iterations=1)
    now = time.monotonic()
    made.workers = [_Worker(job, 0, nothing, heard_s=now + job.start_s) for job in scenario.jobs]
    return made


def test_a_job_that_is_silent_is_stuck_whatever_others_do() -> None:
    one = jobs("jobs.a.start_s=3600")
    assert not one.follow(0.0)
    one.workers[1].heard_s -= one._patience_s + 1
    with pytest.raises(Stalled, match=r"job b made no progress for 6\d s"):
        one.follow(0.0)


def test_a_job_that_has_not_begun_or_has_ended_is_not_stuck() -> None:
    one = jobs("jobs.a.start_s=3600")
    report: Any = "a report"
    one.workers[1].heard_s -= one._patience_s + 1
    one.workers[1].report = report
    assert not one.follow(0.0)
    one.workers[0].report = report
    assert one.follow(0.0)


def test_slow_scenarios_have_more_time() -> None:
    slow = jobs("jobs.bytes=1e10")
    ideal = slow.workers[0].job
    assert slow._patience_s > 4 * load(SCENARIOS / "two-equal.toml", ["jobs.bytes=1e10"]).ideal_s(
        ideal
    )
