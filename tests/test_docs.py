# SPDX-License-Identifier: Apache-2.0
"""What the documentation names is there: links, files, decisions. It stays short. What the README
tells people to write is accepted by the programs that read it."""

import os
import re
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flowslot_cli.main import app

ROOT = Path(__file__).parents[1]
PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md")})
DECISIONS = {int(page.name[:4]) for page in ROOT.glob("docs/adr/0*.md")}
CHANGELOG = ROOT / "CHANGELOG.md"


@cache
def files() -> tuple[str, ...]:
    """Paths of all files of the repository, without what is built or hidden."""
    found = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [
            name for name in folders if name[0] != "." and name not in ("build", "results")
        ]
        found += [f"{folder.removeprefix(str(ROOT))}/{name}" for name in names]
    return tuple(found)


def without_blocks(page: Path) -> str:
    """The text of a page, without blocks of code."""
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.S)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", without_blocks(page)):
        name, _, section = target.partition("#")
        found = page.parent / name if name else page
        assert found.exists(), target
        if section:
            titles = re.findall(r"^#+ (.*)$", found.read_text(), re.M)
            assert section in {re.sub(r"[^\w -]", "", t).lower().replace(" ", "-") for t in titles}


@pytest.mark.parametrize(
    "page", [p for p in PAGES if p != CHANGELOG], ids=lambda page: str(page.relative_to(ROOT))
)
def test_files_that_are_named_exist(page: Path) -> None:
    named = re.findall(r"`([\w./-]+\.(?:py|pxd|h|c|cc|toml|sh|patch|proto))`", without_blocks(page))
    gone = [name for name in named if not any(file.endswith(f"/{name}") for file in files())]
    # What an administrator writes, and another project's files.
    assert not set(gone) - {"zmq_van.h", "kv_app.h", "setup.py", "ps/ps.h"}, gone


def test_decisions_that_the_code_names_exist() -> None:
    for name in files():
        if name.endswith((".py", ".c", ".h", ".sh", ".toml")) and not name.endswith("vmlinux.h"):
            text = (ROOT / name[1:]).read_text()
            for number in re.findall(r"(?:\bADR |\badr/0+)(\d+)", text):
                assert int(number) in DECISIONS, name


def test_pages_that_are_to_stay_short_do() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 120
    assert len((ROOT / "docs/evaluation.md").read_text().split()) <= 2500


@pytest.fixture
def configured(tmp_path: Path) -> Path:
    """The README's configuration files, in one directory."""
    blocks = re.findall(
        r"```toml\n(# /etc/flowslot/([\w-]+\.toml).*?)```", (ROOT / "README.md").read_text(), re.S
    )
    for text, name in blocks:
        (tmp_path / name).write_text(text)
    topology = str(tmp_path / "topology.toml")
    made = CliRunner().invoke(app, ["certs", "init", str(tmp_path), "--topology", topology])
    assert made.exit_code == 0, made.output
    return tmp_path


@pytest.mark.parametrize("name", ["flowslotd.toml", "topology.toml", "switch-tor1.toml"])
def test_its_configuration_files_are_good(configured: Path, name: str) -> None:
    result = CliRunner().invoke(app, ["check-config", str(configured / name)])
    assert result.exit_code == 0, result.output
    assert "no problem" in result.output
