# SPDX-License-Identifier: Apache-2.0
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flowslot_lab import cli
from flowslot_lab.cli import app

from .conftest import SCENARIOS, TWO_HOSTS


def invoke(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, args)
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (TWO_HOSTS.replace('name = "h2"', 'name = "h1"'), "field `hosts[1].name`: host"),
        ("name = ", "not valid TOML"),
        (TWO_HOSTS.replace("400", "-1"), "field `links.rate_mbps`: must be greater than or equal"),
        ("name = " + "[" * 20_000, "not valid TOML: arrays or tables are nested too deeply"),
        (b"\xaf", "cannot be read: not UTF-8 text"),
    ],
)
def test_a_bad_scenario_is_one_line_and_status_2(
    tmp_path: Path, text: str | bytes, problem: str
) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    status, output = invoke("run", str(path))
    assert status == 2
    assert output.startswith(f"flowslot lab: {path}: {problem}")
    assert output.count("\n") == 1


def test_a_missing_scenario_is_status_2(tmp_path: Path) -> None:
    status, output = invoke("run", str(tmp_path / "none.toml"))
    assert (status, output) == (
        2, f"flowslot lab: {tmp_path}/none.toml: cannot be read: No such file or directory\n",
    )  # fmt: skip


@pytest.mark.parametrize(
    "change", ["jobs.bytes=1979-05-27", "jobs.c.x=1", "jobs.x=" + "[" * 20_000]
)
def test_a_bad_variant_is_one_line_and_status_2(change: str) -> None:
    status, output = invoke("run", str(SCENARIOS / "two-equal.toml"), "--set", change)
    assert status == 2
    assert output.startswith("flowslot lab: ")
    assert output.count("\n") == 1


def test_an_unknown_policy_is_status_2() -> None:
    status, output = invoke("run", str(SCENARIOS / "two-equal.toml"), "--policy", "cubic,magic")
    assert status == 2
    assert 'no policy is called "magic"; of: cubic, reno, bbr, static, fair, stagger' in output


@pytest.mark.parametrize(
    ("scenario", "options", "problem"),
    [
        (
            "two-equal",
            (),
            "two-equal has no racks: give every host a `rack`, or use --switches one",
        ),
        ("ring4-two-jobs", ("--no-switch",), "has no meaning with --no-switch; leave one out"),
    ],
)
def test_a_switch_process_per_rack_needs_racks_and_switches(
    scenario: str, options: tuple[str, ...], problem: str
) -> None:
    status, output = invoke(
        "run", str(SCENARIOS / f"{scenario}.toml"), "--switches", "per-rack", *options
    )
    assert (status, output) == (2, f"flowslot lab: --switches per-rack: {problem}\n")


def test_without_root_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    status, output = invoke("run", str(SCENARIOS / "two-equal.toml"), "--policy", "cubic")
    assert (status, output) == (
        1, "flowslot lab: needs root for its network namespaces: run it as root or with sudo\n",
    )  # fmt: skip


def test_list_shows_scenarios_and_their_limits() -> None:
    status, output = invoke("list", str(SCENARIOS))
    assert status == 0
    assert "ps-incast.toml: a parameter server" in output
    assert "6.4 MB / (400 Mbit/s x 1448/1514) on h1->s1 = 0.1538 s" in output


@pytest.mark.parametrize(
    "figure", ["x.bmp", "file/x.png", "file/missing/x.png", "folder.png", "x" * 300 + ".png"]
)
def test_a_figure_that_cannot_be_written_is_found_out_first(tmp_path: Path, figure: str) -> None:
    scenario = str(SCENARIOS / "two-equal.toml")
    (tmp_path / "file").touch()
    (tmp_path / "folder.png").mkdir()
    status, output = invoke("run", scenario, "--figure", str(tmp_path / figure))
    assert status == 2
    assert output.startswith("flowslot lab: --figure") and output.count("\n") == 1


def test_a_figure_may_go_where_a_directory_has_to_be_made(tmp_path: Path) -> None:
    cli._check_figure(tmp_path / "results/today/x.png")


@pytest.mark.parametrize("logs", ["file", "file/logs", "x" * 300])
def test_logs_that_cannot_be_kept_are_found_out_first(tmp_path: Path, logs: str) -> None:
    (tmp_path / "file").touch()
    scenario = str(SCENARIOS / "two-equal.toml")
    status, output = invoke("run", scenario, "--keep-logs", str(tmp_path / logs))
    assert status == 2
    assert output.startswith("flowslot lab: --keep-logs") and output.count("\n") == 1


def test_listing_a_directory_without_scenarios_is_status_2(tmp_path: Path) -> None:
    status, output = invoke("list", str(tmp_path))
    assert status == 2 and "no scenario files" in output


def test_logs_that_cannot_be_kept_do_not_stop_the_cleaning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "ROOT", tmp_path / "runs")
    monkeypatch.setattr(cli, "clean_dead", list)
    (tmp_path / "taken").write_text("a file, not a directory")
    ending = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    before = [signal.getsignal(number) for number in ending]
    with cli._run_state(tmp_path / "taken") as state:
        assert state.path.is_dir()
    assert not state.path.exists()
    assert "--keep-logs" in capsys.readouterr().err
    assert [signal.getsignal(number) for number in ending] == before
