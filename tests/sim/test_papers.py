# SPDX-License-Identifier: Apache-2.0
"""`flowslot sim paper`: published figures beside ours."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flowslot.model.errors import ConfigError
from flowslot.policy.mltcp import Aggressiveness
from flowslot_sim.cli import app
from flowslot_sim.papers import adadual, mlcc, mltcp
from flowslot_sim.papers.cells import compare


def test_a_figure_agrees_within_two_standard_deviations() -> None:
    ours = [9.0, 10.0, 11.0]  # sd 1
    assert compare("t", "c", 12.0, ours).agrees is True
    assert compare("t", "c", 12.1, ours).agrees is False
    assert compare("t", "c", 7.9, ours).why == "2.1 sd off"
    assert compare("t", "c", None, ours).agrees is None
    assert compare("t", "c", 100.0, [100.4]).agrees and not compare("t", "c", 100.0, [101.0]).agrees


def test_deviations_are_named() -> None:
    assert adadual.setup("none") == adadual.Setup()
    assert adadual.setup("recount, whole_ms") == adadual.Setup(recount=True, whole_ms=True)
    assert adadual.setup("all").fitted and not adadual.setup("all").unsorted
    with pytest.raises(ConfigError, match=r'no deviation is called "recounts"'):
        adadual.setup("recounts")


def test_the_trace_is_the_papers() -> None:
    jobs = adadual.trace(3, adadual.Setup())
    assert len(jobs) == 160 and len({job.name for job in jobs}) == 160
    for workers, count in ((1, 80), (2, 14), (4, 26), (8, 30), (16, 8), (32, 2)):
        assert sum(job.workers == workers for job in jobs) == count
    assert all(1000 <= job.iterations <= 6000 for job in jobs)
    assert all(0 <= job.arrival_ns < 1200 * 10**9 for job in jobs)
    assert jobs == adadual.trace(3, adadual.Setup()) != adadual.trace(4, adadual.Setup())
    rounded = adadual.trace(3, adadual.Setup(whole_ms=True))
    assert all(phase.compute_ns % 10**6 == 0 for job in rounded for phase in job.phases)


def test_four_jobs_on_four_servers_are_slower_as_equation_5_says() -> None:
    """Equal jobs stay in step: four transfers at once, in every iteration."""
    how = adadual.Setup()
    for cell, (volume, _, forward, backward) in zip(
        adadual.introduction(how), adadual.MODELS, strict=True
    ):
        compute, size = (forward + backward) / 1e3, volume * 1e6
        alone = compute + 669e-6 + how.b * size
        together = compute + 669e-6 + (4 * how.b + 3 * adadual.ETA) * size
        assert cell.ours_mean == pytest.approx(together / alone, rel=1e-6)
        assert cell.published == pytest.approx(2.288, abs=1e-3) and cell.agrees is False


def test_counting_bytes_again_is_what_makes_waiting_jobs_fast(monkeypatch) -> None:
    """On a small trace: with the switch Ada-SRSF gains, without it does not come near."""
    monkeypatch.setattr(adadual, "ITERATIONS", (20, 60))
    monkeypatch.setattr(adadual, "ARRIVALS_S", 12)
    honest, counted = adadual.setup("none"), adadual.setup("recount")
    for seed in range(2):
        gain = [
            adadual.measure("SRSF(1)", seed, how)[1] / adadual.measure("LWF-1", seed, how)[1]
            for how in (honest, counted)
        ]
        assert gain[1] > 1.05 * gain[0]


@pytest.mark.parametrize("name", adadual.NAMES)
def test_every_deviation_changes_what_is_measured(name: str, monkeypatch) -> None:
    """On a small trace, alone. Equality decides something only where transfers are of a size for
    it, which those of no two models of the paper are: twice as large, where eta is 0."""
    monkeypatch.setattr(adadual, "ITERATIONS", (20, 60))
    monkeypatch.setattr(adadual, "ARRIVALS_S", 12)
    if name == "on_equal":
        large, small = adadual.MODELS[:2]
        monkeypatch.setattr(adadual, "MODELS", ((200.0, *large[1:]), (100.0, *small[1:])))
        monkeypatch.setattr(adadual, "ETA", 0.0)
    none, alone = (adadual.measure("LWF-1", 0, adadual.setup(text)) for text in ("none", name))
    assert alone != none


def test_the_command_prints_cells(monkeypatch) -> None:
    monkeypatch.setattr(adadual, "ITERATIONS", (2, 6))  # seconds instead of minutes
    monkeypatch.setattr(adadual, "ARRIVALS_S", 2)
    arguments = ["paper", "adadual", "--seeds", "2", "--deviations", "all"]
    done = CliRunner().invoke(app, [*arguments, "-o", "json", "--processes", "2"])
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert data["paper"] == "adadual" and data["deviations"] == list(adadual.LAST_VERSION)
    printed = [c for c in data["cells"] if c["table"] in ("IV", "V") and ": " in c["cell"]]
    assert len(printed) == 32 and {c["published"] for c in printed} >= {2881.6, 1098.57, 7578.7}
    keys = {"table", "cell", "published", "ours_mean", "ours_sd", "seeds", "agrees", "why"}
    assert all(set(cell) == keys for cell in data["cells"])
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0 and "Fig. 5" in done.stdout


def test_adadual_may_ask_everywhere_and_beside_several() -> None:
    assert adadual.ada(adadual.Setup()).every is False
    rule = adadual.ada(adadual.Setup(every=True, ways=3))
    assert rule.every and rule.ways == 3 and "every" not in adadual.NAMES


def test_two_equal_jobs_shift_as_the_model_says() -> None:
    """Shift(D) of MLTCP; another slope shifts by its own formula."""
    cells = mltcp.model()
    assert len(cells) == 5 and all(cell.agrees and cell.published is None for cell in cells)
    assert len({round(cell.ours_mean) for cell in cells}) == 5
    steeper = Aggressiveness(slope=3.5, intercept=0.25)
    assert mltcp.shift(0.1, 0.5, 0.2, steeper) > mltcp.shift(0.1, 0.5, 0.2, Aggressiveness())
    assert mltcp.shift(0.0, 0.5, 0.2, steeper) == mltcp.shift(0.2, 0.5, 0.2, steeper) == 0.0


def test_mltcp_takes_turns_and_fair_does_not() -> None:
    name = "two jobs, each half the time"
    ours, plain = mltcp.measure(name, "mltcp", 1), mltcp.measure(name, "fair", 1)
    assert ours.converged < 30 and plain.converged == mltcp.ITERATIONS
    assert ours.overlap < 0.05 * plain.overlap


def test_mlccs_cells_say_what_stalled_and_go_on(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(mlcc, "SPEED_GBPS", (10.0,))
    small = replace(mlcc.large(20), jobs=12, iterations=(4, 8))
    monkeypatch.setattr(mlcc, "large", lambda servers, block: small)
    bed = replace(mlcc.testbed(10.0), jobs=6, iterations=(4, 8), arrivals_s=10.0)
    monkeypatch.setattr(mlcc, "testbed", lambda gbps: bed)
    monkeypatch.setattr(mlcc, "cloud", lambda: bed)
    keep = tmp_path / "runs"
    arguments = ["paper", "mlcc", "--seeds", "2", "--servers", "20", "-o", "json"]
    arguments += ["--processes", "1", "--keep", str(keep)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert any("mlcc-prototype" in cell["cell"] for cell in data["cells"])
    kept = keep.read_bytes().splitlines(keepends=True)
    assert len(kept) == 2 * (8 + 5 + 2)
    keep.write_bytes(b"".join(kept[:-3]) + kept[-3][:40])  # as if it had been killed
    again = json.loads(CliRunner().invoke(app, arguments).stdout)["cells"]
    assert keep.read_bytes().splitlines(keepends=True) == kept
    timed = "Fig. 15b"
    assert [x for x in again if x["table"] != timed] == [
        x for x in data["cells"] if x["table"] != timed
    ]
    cells = {(c["table"], c["cell"].split(":")[0]): c for c in data["cells"]}
    assert cells["Fig. 15a", "mlcc against mcs"]["published"] == 0.336
    assert cells["Fig. 15a", "mlcc against ccml"]["published"] == 0.233
    assert "95 % interval" in cells["Fig. 15a", "mlcc against mcs"]["why"]
    strict = cells["Fig. 15a", "mlcc-strict against mcs"]
    assert "given up in 2 of 2 runs (livelock: no byte" in strict["why"]
    assert strict["agrees"] is False and strict["ours_mean"] < 0
    decision = next(c for c in data["cells"] if c["table"] == "Fig. 15b")
    assert decision["published"] == 1.5 and decision["ours_mean"] > 0
    assert data["external"] and any("Fig. 10" in text for text in data["not run"])
