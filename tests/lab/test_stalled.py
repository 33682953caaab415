# SPDX-License-Identifier: Apache-2.0
"""Runs that never end, as MLCC's may."""

import contextlib
import io
from typing import Any, Self

import pytest
from pytest import MonkeyPatch
from rich.console import Console

from flowslot_lab import runner
from flowslot_lab.jobset import Stalled
from flowslot_lab.runner import Options, measure
from flowslot_scenario.results import Run
from flowslot_scenario.table import print_result

from .conftest import TWO_EQUAL, Quiet
from .test_results import make_run


class Fake:
    """A LiveRun of which those under the policies in `stops` never end."""

    stops: tuple[str, ...] = ()

    def __init__(self, scenario: Any, state: Any, policy: str, *_: Any, **__: Any) -> None:
        self.policy = policy

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def run(self, repeat: int, watch: object, label: str) -> Run:
        if self.policy in self.stops and repeat == 2:
            raise Stalled("job a made no progress for 61 s; daemon of h1: 1 livelocks")
        return make_run(self.policy, repeat, [[1.0], [1.5]])


def results(monkeypatch: MonkeyPatch, *stops: str) -> Any:
    monkeypatch.setattr(runner, "LiveRun", Fake)
    monkeypatch.setattr(runner, "awake", contextlib.nullcontext)
    monkeypatch.setattr(Fake, "stops", stops)
    state: Any = None
    options = Options(("mlcc-literal", "stagger"), repeat=3, iterations=1)
    return measure(TWO_EQUAL, options, state, Quiet())


def test_a_run_that_stands_still_is_a_result_and_the_others_go_on(monkeypatch: MonkeyPatch) -> None:
    found = results(monkeypatch, "mlcc-literal")
    assert [(run.policy, run.repeat) for run in found.runs] == [
        ("mlcc-literal", 1), ("stagger", 1), ("stagger", 2), ("stagger", 3),
    ]  # fmt: skip
    what = "job a made no progress for 61 s; daemon of h1: 1 livelocks"
    assert found.to_json()["stalled"] == {"mlcc-literal": what}
    console = Console(width=120, record=True, file=io.StringIO())
    print_result(found, console)
    assert f"mlcc-literal stalled: {what}" in console.export_text()
    found.runs.clear()
    print_result(found, console)
    assert "stalled" in console.export_text()
    assert found.to_json()["summary"] == []


def test_of_other_policies_it_is_a_failure(monkeypatch: MonkeyPatch) -> None:
    assert results(monkeypatch).stalled == {}
    with pytest.raises(Stalled):
        results(monkeypatch, "stagger")
