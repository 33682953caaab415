# SPDX-License-Identifier: Apache-2.0
import io
import signal
from pathlib import Path

import pytest
from pytest import MonkeyPatch
from rich.console import Console
from typer.testing import CliRunner

from flowslot_lab import cli
from flowslot_lab.cli import app
from flowslot_lab.progress import Bar

from .conftest import SCENARIOS, TWO_HOSTS


def invoke(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, args)
    return result.exit_code, result.output


TWO_EQUAL = str(SCENARIOS / "two-equal.toml")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (TWO_HOSTS.replace('name = "h2"', 'name = "h1"'), "field `hosts[1].name`: host"),
        ("name = ", "not valid TOML"),
        (b"\xaf", "cannot be read: not UTF-8 text"),
        (None, "cannot be read: No such file or directory\n"),
    ],
)
def test_a_bad_scenario_is_one_line_and_status_2(
    tmp_path: Path, text: str | bytes | None, problem: str
) -> None:
    path = tmp_path / "bad.toml"
    if text is not None:
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    status, output = invoke("run", str(path))
    assert status == 2
    assert output.startswith(f"flowslot lab: {path}: {problem}")
    assert output.count("\n") == 1


@pytest.mark.parametrize(
    ("scenario", "options", "problem"),
    [
        ("two-equal", ("--set", "jobs.c.x=1"), ""),
        (
            "two-equal",
            ("--policy", "cubic,magic"),
            '--policy: no policy is called "magic"; of: cubic, reno, bbr, cubic+rto5, ',
        ),
        (
            "two-equal",
            ("--switches", "per-rack"),
            "--switches per-rack: two-equal has no racks: give every host a `rack`, or use "
            "--switches one\n",
        ),
        (
            "ring4-two-jobs",
            ("--switches", "per-rack", "--no-switch"),
            "--switches per-rack: has no meaning with --no-switch; leave one out\n",
        ),
        (
            "nccl-ring-loss",
            ("--budget",),
            "--budget: counts packets that `losses` drop as well; leave one out\n",
        ),
        (
            "nccl-ring",
            ("--budget",),
            '--budget: cannot look into jobs of kind "nccl"; leave it out\n',
        ),
        (
            "ddp-two-jobs",
            ("--budget",),
            '--budget: cannot look into jobs of kind "ddp"; leave it out\n',
        ),
    ],
)
def test_a_bad_option_is_one_line_and_status_2(
    scenario: str, options: tuple[str, ...], problem: str
) -> None:
    status, output = invoke("run", str(SCENARIOS / f"{scenario}.toml"), *options)
    assert status == 2
    assert output.startswith(f"flowslot lab: {problem}")
    assert output.count("\n") == 1


@pytest.mark.parametrize(
    ("option", "path"),
    [
        ("--figure", "x.bmp"),
        ("--figure", "file/x.png"),
        ("--figure", "file/missing/x.png"),
        ("--figure", "folder.png"),
        ("--figure", "x" * 300 + ".png"),
        ("--keep-logs", "file"),
        ("--keep-logs", "file/logs"),
        ("--keep-logs", "x" * 300),
    ],
)
def test_what_cannot_be_written_is_found_out_first(tmp_path: Path, option: str, path: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder.png").mkdir()
    status, output = invoke("run", TWO_EQUAL, option, str(tmp_path / path))
    assert status == 2
    assert output.startswith(f"flowslot lab: {option}") and output.count("\n") == 1


def test_without_root_one_clear_line(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert invoke("run", TWO_EQUAL, "--policy", "cubic") == (
        1, "flowslot lab: needs root for its network namespaces: run it as root or with sudo\n",
    )  # fmt: skip


def test_list_shows_scenarios_and_their_limits() -> None:
    status, output = invoke("list", str(SCENARIOS))
    assert status == 0
    assert "ps-incast.toml: a parameter server" in output
    assert "6.4 MB / (400 Mbit/s x 1448/1514) on h1->s1 = 0.1538 s" in output


def test_a_figure_may_go_where_a_directory_has_to_be_made(tmp_path: Path) -> None:
    cli._check_figure(tmp_path / "results/today/x.png")


def test_listing_a_directory_without_scenarios_is_status_2(tmp_path: Path) -> None:
    status, output = invoke("list", str(tmp_path))
    assert status == 2 and "no scenario files" in output


def test_logs_that_cannot_be_kept_do_not_stop_the_cleaning(
    tmp_path: Path, monkeypatch: MonkeyPatch, capsys: pytest.CaptureFixture[str]
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


@pytest.mark.parametrize("terminal", [True, False])
def test_how_far_the_runs_are_is_a_bar_on_a_terminal_and_a_line_for_each_run_elsewhere(
    terminal: bool,
) -> None:
    text = io.StringIO()
    with Bar("small", 30, Console(file=text, force_terminal=terminal, width=120)) as bar:
        bar.begin("prediction", 0)
        for label in ("cubic, repeat 1 of 2", "cubic, repeat 2 of 2"):
            bar.begin(label, 15)
            bar.advance(6)
        bar._bar.refresh()
    if terminal:
        assert "small cubic, repeat 2 of 2, iteration 6/15" in text.getvalue()
        assert " 70%" in text.getvalue()
    else:
        assert text.getvalue() == (
            "small: prediction\nsmall: cubic, repeat 1 of 2\nsmall: cubic, repeat 2 of 2\n"
        )
