# SPDX-License-Identifier: Apache-2.0
"""`flowslot certs init`: what it makes, keeps and refuses."""

import re
import stat
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509
from switchproc import topology
from typer.testing import CliRunner

from flowslot.model.errors import FlowslotError
from flowslot_cli.main import app
from flowslot_proto.tls import dns_names, utc_now

UNIT = Path(__file__).parents[2] / "systemd/flowslot-switch@.service"


def init(folder: Path, *options: str) -> str:
    result = CliRunner().invoke(app, ["certs", "init", str(folder), *options])
    if isinstance(result.exception, FlowslotError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def read(file: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(file.read_bytes())


def test_it_makes_a_ca_and_a_certificate_for_each(tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text(topology(7400))
    folder = tmp_path / "made"
    said = init(folder, "--topology", str(tmp_path / "t.toml"), "--days", "10")
    assert "copy ca.pem, h1.pem and h1.key" in said and 'key = "s1.key"' in said
    [user] = re.findall(r"^User=(.+)$", UNIT.read_text(), re.M)
    assert f"chown {user} s1.key" in said and f"chown {user} h1.key" not in said
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    ca = read(folder / "ca.pem")
    for name in ("h1", "h2", "s1"):
        made = read(folder / f"{name}.pem")
        made.verify_directly_issued_by(ca)
        assert dns_names(made) == (name,)
        assert made.not_valid_before_utc < utc_now()
        assert timedelta(9) < made.not_valid_after_utc - utc_now() < timedelta(11)
    for file in folder.glob("*.key"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert {file.name for file in folder.iterdir()} == {
        f"{name}.{end}" for name in ("ca", "h1", "h2", "s1") for end in ("pem", "key")
    }


def test_more_are_added_and_nothing_is_replaced_unless_it_is_wanted(tmp_path: Path) -> None:
    init(tmp_path, "--hosts", "h1")
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    said = init(tmp_path, "--hosts", "h1, h2")
    assert "h1: was there already" in said and "h2: made" in said
    assert all((tmp_path / name).read_bytes() == data for name, data in before.items())
    init(tmp_path, "--hosts", "h1", "--renew")
    changed = {name for name, data in before.items() if (tmp_path / name).read_bytes() != data}
    assert changed == {"h1.pem", "h1.key"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "give --topology FILE"),
        (("--hosts", "../h1"), "cannot be a DNS name"),
        (("--hosts", "ca"), "cannot be a DNS name"),
        (("--hosts", "a", "--switches", "a"), "a host and a switch process"),
        (("--topology", "/nowhere.toml"), "/nowhere.toml: cannot be read"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_made(
    tmp_path: Path, options: tuple[str, ...], words: str
) -> None:
    with pytest.raises(FlowslotError, match=words):
        init(tmp_path / "made", *options)
    assert not (tmp_path / "made").exists()


def test_half_a_ca_is_not_made_whole(tmp_path: Path) -> None:
    init(tmp_path, "--hosts", "h1")
    (tmp_path / "ca.key").unlink()
    with pytest.raises(FlowslotError, match=r"ca\.pem is there alone"):
        init(tmp_path, "--hosts", "h2")
    (tmp_path / "ca.key").write_bytes((tmp_path / "h1.key").read_bytes())
    with pytest.raises(FlowslotError, match="is not the key of"):
        init(tmp_path, "--hosts", "h2")
