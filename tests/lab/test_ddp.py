# SPDX-License-Identifier: Apache-2.0
"""Jobs of the lab that train: they report to the daemon, and are paced."""

from pathlib import Path

import pytest
from bench.harm import progress
from collectives import NO_TORCH

from flowslot.model.errors import ConfigError
from flowslot_lab.net import data_ip
from flowslot_lab.runner import LiveRun, Options, measure
from flowslot_lab.state import RunState
from flowslot_scenario.scenario import parse
from flowslot_torch.program import Links

from .conftest import LEAVES_NOTHING, TWO_HOSTS, Quiet
from .test_fail_open import finish, wait

GRADIENTS = 448_808
KIND = 'kind = "ddp"\nmodel = "resnet"\n'


def small(program: str) -> str:
    text = TWO_HOSTS.replace("sockets = 2\nslice_kb = 25\n", "").replace('kind = "ring"\n', KIND)
    lines = [f"bytes = {GRADIENTS}" if "bytes =" in one else one for one in text.splitlines()]
    return "\n".join([*lines, f'program = "{program}"\n'])


@pytest.mark.root
@pytest.mark.timeout(90)
@pytest.mark.parametrize("program", ["ddp", "sum"])
@LEAVES_NOTHING
def test_a_job_that_trains_reports_and_is_paced(state: RunState, program: str) -> None:
    pytest.importorskip("torch", reason=NO_TORCH)
    with LiveRun(parse(small(program), "f"), state, "stagger", 25, use_switch=False) as live:
        follow = live.follow(Quiet())

        def known() -> bool:
            shown = progress(live, "h1", "a")
            return len(shown) == 1 and shown[0]["rate"] is not None

        wait(follow, "its connection is paced", known)
        (flow,) = progress(live, "h1", "a")
        assert flow["destination"].partition(":")[0] == data_ip(1) and flow["peer"] == 1
        assert flow["iteration_bytes"] == pytest.approx(GRADIENTS, rel=0.03)
        addresses, socket = {0: data_ip(0), 1: data_ip(1)}, state.folder / "h1" / "control.sock"
        links = Links({(1, 0): 1.0}, addresses, control=str(socket))
        assert links.rate(0, 1) is None and links.refresh()
        assert links.rate(0, 1) == pytest.approx(400e6 / 8 * 1448 / 1514, rel=0.01)
        assert links.is_slow(1, 0) and not links.is_slow(0, 1)
        finish(live, follow)


@pytest.mark.root
@pytest.mark.timeout(90)
@LEAVES_NOTHING
def test_what_is_learnt_does_not_depend_on_the_schedule(state: RunState) -> None:
    pytest.importorskip("torch", reason=NO_TORCH)
    options = Options(("cubic", "stagger"), iterations=10, alone=False)
    result = measure(parse(small("ddp"), "f"), options, state, Quiet())
    for run in result.runs:
        first, second = run.jobs[0].losses
        assert len(first) == result.scenario.warmup + 10 and first != second
        assert first[0] != first[-1]
    assert result.runs[1].evidence.rate_writes > 0 and result.curves_apart("a") == {}


def test_what_a_job_that_trains_has_no_use_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'jobs.0..sockets.: .*"ddp" has none'):
        parse(small("ddp").replace(KIND, KIND + "sockets = 2\n"), "f")
    with pytest.raises(ConfigError, match=r'jobs.0..model.: is for kind "ddp"; "ring" has none'):
        parse(small("ddp").replace(KIND, 'kind = "ring"\nmodel = "vgg"\n'), "f")
