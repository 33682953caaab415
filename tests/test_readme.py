# SPDX-License-Identifier: Apache-2.0
"""What the README tells people to write is accepted by the programs that read it."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flowslot_cli.main import app

README = Path(__file__).parents[1] / "README.md"


@pytest.fixture
def configured(tmp_path: Path) -> Path:
    """The README's configuration files, in one directory."""
    blocks = re.findall(
        r"```toml\n(# /etc/flowslot/([\w-]+\.toml).*?)```", README.read_text(), re.S
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
