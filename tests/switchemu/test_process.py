# SPDX-License-Identifier: Apache-2.0
"""The switch process: configuration, signals, systemd."""

import contextlib
import os
import signal
import socket
import subprocess
from pathlib import Path
from unittest.mock import Mock

import pytest
from switchproc import LINKS, PROGRAM, Peer, Switch, topology
from waiting import settle

from flowslot_cli.client import CommandError, ask
from flowslot_switch.config import load
from flowslot_switch.main import SwitchProcess


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [PROGRAM, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ('name = "s1"\nlisten = "nowhere"', ["switch.toml", "`listen`", "host:port"]),
        ('name = "s1"\n[arbiter]\ntarget = 1.5', ["`arbiter.target`", "1.5"]),
        ('name = "s9"', ["`name`", "must be one of: s1"]),
        ('name = "s1"\npolicy = "mlcc"', ["`policy`", "no arbiter decides by"]),
        ('name = "s1"\n[[classes]]\njobs = "a"\nfloor = 2', ["`classes[0].floor`", "2"]),
        ('name = "s1"\ntopology = "none.toml"', ["none.toml", "cannot be read"]),
        ('name = "s1"\ntopology = "bad.toml"', ["bad.toml", "`links[0].capacity_gbps`"]),
        ('name = "s1"\ntopology = "a\\u0000b"', ["`topology`", "printable", '"a\\u0000b"']),
        ('name = "s1"\n[arbiter]\ntarget = 1e-320', ["`arbiter.target`", "equal to 0.01"]),
        ('name = "s1"\n[arbiter]\nfloor_share = 1e-320', ["`arbiter.floor_share`", "0.001"]),
        (f'name = "s1"\nruntime_dir = "/{"a" * 90}"', ["`runtime_dir`", "at most 90 bytes"]),
        (f'name = "s1"\nruntime_dir = "{"a" * 90}"', ["`runtime_dir`", "at most 90 bytes"]),
        (b"\xaf", ["switch.toml", "cannot be read: not UTF-8 text"]),
    ],
)
def test_bad_configuration_is_one_clear_line_and_status_2(
    tmp_path: Path, config: str | bytes, parts: list[str]
) -> None:
    file = tmp_path / "switch.toml"
    file.write_bytes(config.encode() if isinstance(config, str) else config)
    (tmp_path / "topology.toml").write_text(topology(7400))
    (tmp_path / "bad.toml").write_text(topology(7400).replace("= 0.4", "= -1", 1))
    result = run("--config", file)
    assert result.returncode == 2
    [line] = result.stderr.splitlines()
    assert [part for part in parts if part not in line] == []


def test_usage_errors_are_status_2(tmp_path: Path) -> None:
    assert run().returncode == 2
    assert run("--name", "s1").returncode == 2
    assert run("--topology", tmp_path / "none", "--name", "s1").returncode == 2
    (tmp_path / "topology.toml").write_text(topology(7400))
    bad = run("--topology", tmp_path / "topology.toml", "--name", "s1", "--listen", "x")
    assert bad.returncode == 2 and "command line: field `listen`" in bad.stderr


def test_an_address_that_cannot_be_had_is_a_failure(switch: Switch) -> None:
    switch.configure('runtime_dir = "run"\n[tls]\ninsecure = true\n')
    for address in (switch.address, "a..b:7400"):
        result = run("--config", switch.config, "--listen", address)
        assert result.returncode == 1
        [line] = result.stderr.splitlines()
        assert f"cannot listen on {address}" in line
        assert list((switch.config.parent / "run").iterdir()) == [], "no socket is left"


def test_overrides_replace_the_file(switch: Switch, tmp_path: Path) -> None:
    with Switch(tmp_path) as other:
        other.start("--topology", switch.topology, "--name", "s1", "--listen", other.address)
        assert other.describe().pid == other.pid != switch.describe().pid


def test_sigterm_closes_streams_and_ends_with_0(switch: Switch) -> None:
    with switch.channel() as channel:
        peer = Peer(channel, 1).hello().fence()
        switch.signal(signal.SIGTERM)
        code, details = peer.status()
    assert (code.name, details) == ("UNAVAILABLE", "the switch process stops")
    assert switch.process.wait(timeout=30) == 0
    assert "Traceback" not in switch.log.read_text()


def test_a_bad_reload_keeps_the_last_good_configuration(switch: Switch) -> None:
    before = switch.describe()
    good = switch.topology.read_text()
    for bad, topology_, told in (
        ("[arbiter]\ntarget = 7\n", good, "switch.toml"),
        ('listen = "127.0.0.1:1"\n', good, "field `listen`: is 127.0.0.1:"),
        ("[arbiter]\nslot_ms = 20\n", good, "`arbiter.slot_ms`: is 1000.0 and cannot change"),
        ("nonsense", good, "switch.toml"),
        ("", good.replace("capacity_gbps = 0.4", "capacity_gbps = 1e308"), "`links[0].capacity"),
    ):
        switch.log.write_text("")
        switch.configure(bad)
        switch.topology.write_text(topology_)
        switch.signal(signal.SIGHUP)
        assert told in switch.logged("not reloaded")
        after = switch.describe()
        assert (after.pid, after.links[0]) == (before.pid, before.links[0])


def test_a_reload_that_fails_otherwise_is_one_line_and_changes_nothing_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file, service = tmp_path / "topology.toml", Mock()
    file.write_text(topology(7400))
    process = SwitchProcess(None, lambda: load(None, "s1", file))
    before = process._config
    file.write_text(topology(7400).replace("= 0.4", "= 0.5"))
    monkeypatch.setattr("flowslot_switch.main.Runner", Mock(side_effect=MemoryError("no room")))
    process._reload(service)
    assert caplog.messages == ["not reloaded, going on as before: MemoryError('no room')"]
    assert process._config is before and not service.mock_calls


def test_a_good_reload_asks_all_daemons_for_hello(switch: Switch) -> None:
    pid = switch.describe().pid
    with switch.channel() as channel:
        peer = Peer(channel, 1).hello().fence()
        switch.config.write_text(f"{switch.config.read_text()}target = 0.5\n")
        switch.signal(signal.SIGHUP)
        code, details = peer.status()
    assert code.name == "UNAVAILABLE"
    assert "configuration has changed" in details
    reply = switch.describe()
    assert reply.pid == pid
    assert reply.links[0].reservable == pytest.approx(0.5 * reply.links[0].goodput)
    assert len(reply.links) == len(LINKS)


def test_a_policy_is_changed_without_ending_a_stream(switch: Switch) -> None:
    folder = switch.config.parent / "run"
    sock = folder / "control.sock"
    good = switch.config.read_text()
    with switch.channel() as channel:
        peer = Peer(channel, 1).hello().fence()
        switch.log.write_text("")
        switch.config.write_text(f'runtime_dir = "run"\n{good}')
        switch.signal(signal.SIGHUP)
        assert "`runtime_dir`: is None and cannot change" in switch.logged("not reloaded")
        for policy, told in (("srsf1", "reloaded"), ("static", 'no arbiter decides by "static"')):
            switch.log.write_text("")
            switch.config.write_text(f'policy = "{policy}"\n{good}')
            switch.signal(signal.SIGHUP)
            switch.logged(told)
            assert switch.describe().policy == "srsf1"
        switch.config.write_text(f'{good}\n[[classes]]\njobs = "a*"\nfloor = 0.2\n')
        switch.log.write_text("")
        switch.signal(signal.SIGHUP)
        switch.logged("reloaded")
        assert switch.describe().policy == "stagger"
        peer.fence()
    switch.kill()
    switch.config.write_text(f'runtime_dir = "run"\n{good}')
    switch.start()
    with switch.channel() as channel:
        peer = Peer(channel, 1).hello().fence()
        assert ask(sock, "set-policy", name="adadual")["policy"] == "adadual"
        assert ask(sock, "policy")["policy"] == switch.describe().policy == "adadual"
        with pytest.raises(CommandError, match='no policy is called "nope"'):
            ask(sock, "set-policy", name="nope")
        peer.fence()


def test_systemd_hears_ready_watchdog_reload_and_stop(tmp_path: Path) -> None:
    address = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener, Switch(tmp_path) as switch:
        listener.bind(address)
        listener.settimeout(0.1)
        heard = ""

        def hears(word: str) -> bool:
            nonlocal heard
            with contextlib.suppress(TimeoutError):
                heard += listener.recv(4096).decode() + "\n"
            return word in heard

        switch.start(env={**os.environ, "NOTIFY_SOCKET": address, "WATCHDOG_USEC": "200000"})
        for word in ("READY=1", "STATUS=s1: 4 links", "WATCHDOG=1"):
            settle(lambda word=word: hears(word), what=word)
        heard = ""
        switch.signal(signal.SIGHUP)
        for word in ("RELOADING=1", "READY=1"):
            settle(lambda word=word: hears(word), what=word)
        switch.signal(signal.SIGTERM)
        settle(lambda: hears("STOPPING=1"), what="STOPPING")
