# SPDX-License-Identifier: Apache-2.0
"""Mutual TLS on the daemon's side: what is wrong is said once, and changed files cost no lease."""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tlsfiles
from switchproc import topology
from tlsfiles import TlsSwitch
from waiting import until

from flowslot.model.errors import ConfigError
from flowslot_cli import render
from flowslotd import config
from flowslotd.diagnose import diagnosis

from .hosts import Host, negotiating

SLOT_MS = 500
ODD_KEY = """-----BEGIN EC PRIVATE KEY-----
MD4CAQEEDjhg2UB7c0Fd1PMb37nyoAcGBSuBBAAGoSADHgAEm1uTCexUxNuwWUKi
Dypla6rKjJ8B/MUMyXLRJQ==
-----END EC PRIVATE KEY-----
"""
"""On a curve that no library takes any more (secp112r1)."""
FAR = topology(7400).replace("127.0.0.1", "192.0.2.1")


@pytest.fixture
def switch(tmp_path: Path) -> Iterator[TlsSwitch]:
    with TlsSwitch(tmp_path, SLOT_MS, 5) as process:
        yield process


@pytest.fixture
def load(tmp_path: Path, write: Any) -> Any:
    """Of h1, beside whose configuration the files are that one could name in it."""
    tlsfiles.make(tmp_path)
    (tmp_path / "odd.key").write_text(ODD_KEY)
    begin = 'host = "h1"\nmode = "enforce"\n'
    return lambda text, network=FAR: config.load(write(begin + text, network))


@pytest.mark.parametrize(
    ("text", "field", "words"),
    [
        ("", "tls", "192.0.2.1:7400 is reached over a network"),
        ('[tls]\nca = "ca.pem"', "tls.certificate", "missing, because there is tls.ca"),
        ('[tls]\nkey = "k"\ninsecure = true', "tls.insecure", "together with tls.key"),
        (tlsfiles.section("h3"), "tls.certificate", "h3.pem cannot be read: No such file"),
        (tlsfiles.section("h2"), "tls.certificate", 'is for "h2"; must be for "h1"'),
        (tlsfiles.section("h1").replace("h1.key", "h2.key"), "tls.key", "not the key of"),
        (tlsfiles.section("h1").replace("h1.key", "odd.key"), "tls.key", "no private key in PEM"),
        (tlsfiles.section("h1").replace("ca.pem", "h1.key"), "tls.ca", "no certificate in PEM"),
    ],
)
def test_a_section_that_is_wrong_names_its_field(
    load: Any, text: str, field: str, words: str
) -> None:
    with pytest.raises(ConfigError) as error:
        load(text)
    assert error.value.field == field and words in error.value.problem


@pytest.mark.parametrize(
    "text",
    ["[tls]\ninsecure = true", "use_switch = false", 'policy = "static"', tlsfiles.section("h1")],
)
def test_what_is_safe_or_wanted_is_accepted(load: Any, text: str) -> None:
    load(text)
    load("", topology(7400))


def test_status_and_doctor_show_what_is_insecure(load: Any) -> None:
    for text, status, shown in (
        ("[tls]\ninsecure = true", "warn", "insecure"),
        (tlsfiles.section("h1"), "ok", "certificate of h1, until 20"),
    ):
        loaded = load(text)
        finding = diagnosis.tls(loaded.settings.tls, loaded.tls)
        assert (finding.status, shown in finding.detail) == (status, True)
    assert render._tls({"mode": "loopback"}) == []
    [(_, row)] = render._tls({"mode": "insecure"})
    assert "anybody may pretend" in row
    rows = render._tls({"mode": "mutual", "certificate": "h1", "ends": "2030", "error": "bad"})
    assert [text for _, text in rows] == ["certificate of h1, until 2030", "[red]bad[/red]"]


def domain(folder: Path, files: str) -> Host:
    names = (("ca", "ca.pem"), ("certificate", "h1.pem"), ("key", "h1.key"))
    tls = ", ".join(f'{field} = "{Path(files) / file}"' for field, file in names)
    return Host(folder, "h1", tls=f"{{{tls}}}")


@pytest.mark.parametrize(
    ("bad", "here", "there"),
    [
        (("", "expired"), "certificate: this certificate has expired on", "has expired"),
        # The switch is not even shown a certificate:
        (("other", "other"), "its certificate is not accepted here: ", ""),
        (("", "other"), "this certificate is not from a CA in tls.ca", "local issuer certificate"),
    ],
)
async def test_a_daemon_with_bad_files_is_told_why_and_gets_nothing(
    tmp_path: Path, switch: TlsSwitch, bad: tuple[str, str], here: str, there: str
) -> None:
    switch.start()
    (tmp_path / "files").mkdir()

    def copy(ca: str, own: str) -> None:
        for file, folder in (("ca.pem", ca), ("h1.pem", own), ("h1.key", own)):
            shutil.copy(tmp_path / folder / file, tmp_path / "files" / file)

    copy(*bad)
    host = domain(tmp_path, "files")
    async with negotiating(host):
        host.demand(1, "h1->s1", "s1->h2")
        await until(lambda: here in host.error, here)
        assert "\n" not in host.error and host.state == "fallback"
        copy("", "")  # taken at the next attempt, without a restart
        await until(lambda: host.state == "switch", "let in")
    if there:
        log = switch.logged("rejected")
        assert there in log and log.count("rejected") == 1


async def test_all_certificates_are_replaced_under_load_and_no_lease_is_lost(
    tmp_path: Path, switch: TlsSwitch
) -> None:
    switch.start().wait_recovered()
    host, other = domain(tmp_path, ""), tmp_path / "other"
    (session,) = host.source.host.sessions

    async def load() -> None:
        for inc in range(5):
            host.demand(1, "h1->s1", "s1->h2", remaining=10**7 + inc, inc=1)
            assert await asyncio.to_thread(switch.describe)  # a handshake with what is there
            await asyncio.sleep(0.02)

    async with negotiating(host):
        host.demand(1, "h1->s1", "s1->h2")
        await until(lambda: host.state == "switch" and host.rate(1) > 0, "granted")
        number = session.session
        await load()
        with (tmp_path / "ca.pem").open("ab") as both:
            both.write((other / "ca.pem").read_bytes())
        await load()
        for names in (("s1.key", "s1.pem"), ("h1.key", "h1.pem"), ("ca.pem",)):
            for name in names:
                shutil.copy(other / name, tmp_path / name)
            await load()
        assert host.said["reservations"]["expired"] == 0
        assert session.session == number, "the stream goes on as it began"
        assert host.rate(1) > 0
        # A new stream has the new files.
        switch.kill()
        switch.start()
        await until(lambda: host.state == "switch" and session.session != number, "back")
