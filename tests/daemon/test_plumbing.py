# SPDX-License-Identifier: Apache-2.0
"""The small parts: control socket, notification, socket ownership, metrics, configuration."""

import asyncio
import itertools
import json
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from flowslot.errors import ConfigError
from flowslot_shm.layout import Message
from flowslotd import config
from flowslotd.clock import own_moment
from flowslotd.control import AlreadyRunning, Control
from flowslotd.daemon import Daemon
from flowslotd.domain import switches_of
from flowslotd.flowinfo import Ended
from flowslotd.metrics import Durations
from flowslotd.ownership import holds_socket
from flowslotd.pacing.base import KernelEvent
from flowslotd.progress import ROW
from flowslotd.sdnotify import Notifier
from flowslotd.slotloop import SlotLoop

from .conftest import TOPOLOGY

ROOT = Path(__file__).resolve().parents[2]


# -- control socket


async def talk(path, *lines):
    reader, writer = await asyncio.open_unix_connection(path)
    answers = []
    for line in lines:
        writer.write(line)
        await writer.drain()
        answer = await asyncio.wait_for(reader.readline(), 5)
        answers.append(json.loads(answer) if answer else None)
    writer.close()
    return answers


def serve(path, script, **handlers):
    """Run a control server and `script` beside it; returns its result and the bugs."""
    bugs = []

    async def run():
        readers = {"status": lambda: {"pid": 1}, **handlers}
        control = Control(
            path, readers, {"reload": lambda: {"done": True}}, lambda kind, e: bugs.append(kind)
        )
        await control.start()
        try:
            return await script()
        finally:
            await control.stop()

    return asyncio.run(run()), bugs


def test_control_answers_and_refuses_in_one_line_each(tmp_path):
    path = tmp_path / "control.sock"

    async def late():
        await asyncio.sleep(0)
        return {"late": True}

    def wrong():
        raise ConfigError("f.toml", "mode", "must be x")

    def broken():
        raise ZeroDivisionError("oops")

    async def script():
        assert stat.S_IMODE(path.stat().st_mode) == 0o666
        names = ("status", "late", "reload", "wrong", "broken", "nonsense")
        lines = [json.dumps({"cmd": name}).encode() + b"\n" for name in names]
        garbage = (b"\n", b"[1]\n", b"{}\n", b"\xff\xfe\n", b"[" * 4000 + b"\n")
        return await talk(path, *lines, *garbage)

    answers, bugs = serve(path, script, late=late, wrong=wrong, broken=broken)
    assert answers[:3] == [
        {"ok": True, "result": {"pid": 1}},
        {"ok": True, "result": {"late": True}},
        {"ok": True, "result": {"done": True}},
    ]
    assert [a["kind"] for a in answers[3:]] == ["config", "internal"] + ["request"] * 6
    assert answers[3]["error"] == "f.toml: field `mode`: must be x"
    known = "status, late, wrong, broken, reload"
    assert answers[5]["error"] == f"unknown command 'nonsense'; known: {known}"
    assert bugs == ["control command broken"]
    assert not path.exists()


def test_control_survives_long_lines_and_clients_that_vanish(tmp_path):
    path = tmp_path / "control.sock"

    async def script():
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b"x" * 100_000)
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
        for _ in range(100):
            _, writer = await asyncio.open_unix_connection(path)
            writer.write(b'{"cmd": "status"}\n')
            writer.close()
        return await talk(path, b'{"cmd": "status"}\n')

    answers, bugs = serve(path, script)
    assert answers == [{"ok": True, "result": {"pid": 1}}]
    assert bugs == []


def test_control_takes_over_from_the_dead_but_not_from_the_living(tmp_path):
    path = tmp_path / "control.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))

    async def script():
        other = Control(path, {}, {}, lambda kind, error: None)
        with pytest.raises(AlreadyRunning, match="another flowslotd answers on"):
            await other.start()
        await other.stop()
        return path.exists()

    left_alone, _ = serve(path, script)
    assert left_alone


@pytest.mark.root
def test_only_root_and_the_daemons_user_may_change_it(tmp_path):
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents:
        if parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o055)
    path = tmp_path / "control.sock"
    code = (
        "import os,socket,sys; os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "s=socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); f=s.makefile('rwb')\n"
        'for c in (b\'{"cmd":"status"}\\n\', b\'{"cmd":"reload"}\\n\'):\n'
        "  f.write(c); f.flush(); sys.stdout.write(f.readline().decode())\n"
    )

    async def script():
        run = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, str(path), stdout=subprocess.PIPE
        )
        out, _ = await run.communicate()
        return [json.loads(line) for line in out.splitlines()]

    answers, _ = serve(path, script)
    assert [a["ok"] for a in answers] == [True, False]
    assert answers[1]["kind"] == "permission"


# -- systemd


@pytest.mark.parametrize("abstract", [False, True])
def test_notifications_reach_systemd(tmp_path, abstract):
    address = f"@flowslot-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind("\0" + address[1:] if abstract else address)
        systemd.settimeout(5)
        notifier = Notifier(address)
        notifier.ready("fine")
        notifier.watchdog()
        notifier.reloading(5_000_000)
        notifier.stopping()
        heard = [systemd.recv(4096).decode() for _ in range(4)]
    assert heard == [
        "READY=1\nSTATUS=fine",
        "WATCHDOG=1",
        "RELOADING=1\nMONOTONIC_USEC=5000",
        "STOPPING=1",
    ]
    notifier.watchdog()  # systemd is gone: nothing happens
    Notifier("").ready("not started by systemd")


@pytest.mark.parametrize("unit", ["flowslotd.service", "flowslot-switch@.service"])
def test_units_are_sound(tmp_path, unit):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    text = (ROOT / "systemd" / unit).read_text()
    # The programs are installed elsewhere here: verify a copy that names where.
    programs = Path(sys.executable).parent
    (tmp_path / unit).write_text(text.replace("/usr/bin/flowslot", f"{programs}/flowslot"))
    run = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / unit)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stderr) == (0, "")


def test_the_daemon_unit_leaves_it_what_pacing_needs():
    unit = (ROOT / "systemd" / "flowslotd.service").read_text()
    bounding = re.search(r"^CapabilityBoundingSet=(.*)$", unit, re.M)
    needed = {"CAP_BPF", "CAP_NET_ADMIN", "CAP_PERFMON", "CAP_SYS_PTRACE"}
    assert needed <= set(bounding[1].split())
    for line in ("Type=notify", "Restart=always", "Nice=-10", "RuntimeDirectory=flowslot"):
        assert f"\n{line}\n" in unit
    assert "WatchdogSec=" in unit
    for harmful in ("ProtectKernelTunables=yes", "PrivateNetwork=yes", "PrivateUsers=yes"):
        assert harmful not in unit


# -- ownership


def test_a_socket_is_known_by_its_cookie():
    with socket.socket() as mine, socket.socket() as other:
        cookie = int.from_bytes(mine.getsockopt(socket.SOL_SOCKET, 57, 8), sys.byteorder)
        assert holds_socket(os.getpid(), mine.fileno(), cookie) is True
        assert holds_socket(os.getpid(), other.fileno(), cookie) is False
        assert holds_socket(os.getpid(), 1_000_000, cookie) is None
        assert holds_socket(os.getpid(), -1, cookie) is None
        assert holds_socket(0, 3, cookie) is None
        with open(os.devnull) as file:
            assert holds_socket(os.getpid(), file.fileno(), cookie) is False


def test_looking_at_a_socket_leaks_no_descriptor():
    before = len(os.listdir("/proc/self/fd"))
    with socket.socket() as mine:
        for _ in range(50):
            holds_socket(os.getpid(), mine.fileno(), 1)
    assert len(os.listdir("/proc/self/fd")) == before


# -- metrics


def test_durations_keep_the_last_samples_and_the_largest():
    durations = Durations(size=4)
    assert durations.summary()["p99_us"] == 0
    for ns in (9_000_000, 1000, 2000, 3000, 4000):
        durations.add(ns)
    summary = durations.summary()
    assert (summary["count"], summary["max_us"]) == (5, 9000)
    assert summary["p50_us"] == 2.5


# -- configuration


@pytest.fixture
def write(tmp_path):
    def write(text, topology=TOPOLOGY):
        (tmp_path / "topology.toml").write_text(topology)
        (tmp_path / "flowslotd.toml").write_text(text)
        return tmp_path / "flowslotd.toml"

    return write


def test_defaults_observe_and_change_nothing(write):
    loaded = config.load(write('host = "h1"'))
    assert loaded.settings.mode == "observe"
    assert loaded.instance == "h1"
    assert (loaded.grid.slot_ns, loaded.grid.horizon) == (60_000_000, 10)


@pytest.mark.parametrize(
    ("text", "field", "problem"),
    [
        ("", "host", "is required but missing"),
        ('host = "h9"', "host", 'no host is called "h9" in topology.toml; must be one of: h1, h2'),
        ('host = "h1"\nmod = "x"', "mod", "unknown key; did you mean `mode`?"),
        ('host = "h1"\nmode = "enfroce"', "mode", "must be 'observe' or 'enforce', got"),
        ('host = "h1"\npolicy = "stager"', "policy", "did you mean `stagger`?"),
        ('host = "h1"\nslot_ms = -1', "slot_ms", "must be greater than or equal to 5, got -1"),
        ('host = "h1"\n[pacing]\nhrd = true', "pacing.hrd", "did you mean `hard`?"),
        ('host = "h1"\n[static]\nflows_on_link = {"h1->s9" = 4}',
         "static.flows_on_link.h1->s9", "no link"),
        ('host = "h1"\n[static]\nflows_on_link = {"h1->s1" = 10000000000000000000}',
         "static.flows_on_link.h1->s1", "must be less than or equal to 1000000, got 1"),
        ('host = "h1"\n[arbiter]\ntarget = 1e-320',
         "arbiter.target", "must be greater than or equal to 0.01, got 1e-320"),
        ('host = "h1"\n[arbiter]\nfloor_share = 1e-320',
         "arbiter.floor_share", "must be greater than or equal to 0.001, got 1e-320"),
        ('host = "h1"\ntopology = "a\\u0000b"', "topology", "must hold printable characters only"),
        ('host = "h1"\nruntime_dir = "x\\u0000"', "runtime_dir", 'only, got "x\\u0000"'),
        (f'host = "h1"\nruntime_dir = "/tmp/{"é" * 60}"', "runtime_dir", "at most 90 bytes"),
        ('host = "h1"\ntopology = "no.toml"', "topology", "No such file or directory"),
        ("host = ", "", "not valid TOML"),
        ("host = " + "[" * 20_000, "", "nested too deeply"),
    ],
)  # fmt: skip
def test_a_bad_configuration_names_file_field_and_what_is_right(write, text, field, problem):
    with pytest.raises(ConfigError) as caught:
        config.load(write(text))
    assert caught.value.source.endswith("flowslotd.toml")
    assert caught.value.field == field
    assert problem in caught.value.problem


def test_an_error_in_the_topology_names_that_file(write):
    bad = TOPOLOGY.replace("capacity_gbps = 0.2", "capacity_gbps = -1")
    with pytest.raises(ConfigError, match=r"topology.toml: field `links\[3\].capacity_gbps`"):
        config.load(write('host = "h1"', bad))


def test_of_several_switch_processes_those_matter_that_flows_of_this_host_may_cross(write):
    several = TOPOLOGY.replace('name = "h1->s1"\ncap', 'name = "h1->s1"\nswitch = "s1"\ncap')
    several = several.replace('name = "s1->h1"\ncap', 'name = "s1->h1"\nswitch = "s2"\ncap')
    several = several.replace('name = "s1->h2"\ncap', 'name = "s1->h2"\nswitch = "s3"\ncap')
    several += "".join(
        f'[[switches]]\nname = "s{i}"\naddress = "127.0.0.1:740{i}"\n' for i in (1, 2, 3)
    )
    for host, expected in (("h1", ["s1", "s3"]), ("h2", ["s2"]), ("h3", ["s2", "s3"])):
        made = config.load(write(f'host = "{host}"\nmode = "enforce"', several))
        assert switches_of(made) == expected
    assert switches_of(config.load(write('host = "h1"'))) == []


def test_a_file_that_is_no_text_is_said_to_be_none(write):
    file = write('host = "h1"')
    (file.parent / "topology.toml").write_bytes(b"\xaf")
    with pytest.raises(ConfigError, match=r"`topology`: cannot read .*toml: not UTF-8 text$"):
        config.load(file)
    file.write_bytes(b"\xaf")
    with pytest.raises(ConfigError, match=r"toml: cannot be read: not UTF-8 text$"):
        config.load(file)


def test_a_reload_may_change_what_does_not_need_a_restart(write):
    old = config.load(write('host = "h1"'))
    new = config.load(write('host = "h1"\nmode = "enforce"\npolicy = "static"'))
    assert config.changed(old, new) == ["mode", "policy"]
    fixed = config.load(write('host = "h1"\nslot_ms = 20'))
    with pytest.raises(ConfigError, match="cannot change while running"):
        config.changed(old, fixed)
    moved = config.load(write('host = "h1"', TOPOLOGY.replace("= 0.2", "= 0.3")))
    assert config.changed(old, moved) == ["topology links"]


# -- the daemon around the slot loop, in this process


def run_for(daemon, condition):
    """Run a daemon until `condition` holds."""

    async def both():
        running = asyncio.create_task(daemon.run())
        for _ in range(1000):
            await asyncio.sleep(0.005)
            if condition() or running.done():
                break
        daemon._stop.set()
        await asyncio.wait_for(running, 10)

    asyncio.run(both())


def test_fail_open_a_bug_in_a_pass_lets_flows_go_and_the_daemon_lives(
    write, tmp_path, monkeypatch, caplog
):
    released = []
    monkeypatch.setattr(SlotLoop, "on_slot", lambda *_: 1 / 0)
    monkeypatch.setattr(SlotLoop, "release", lambda self: released.append(1))
    daemon = Daemon(config.load(write(f'host = "h1"\nslot_ms = 5\nruntime_dir = "{tmp_path}"')))
    run_for(daemon, lambda: daemon.metrics.errors["slot"] >= 5)
    assert daemon.metrics.errors["slot"] >= 5
    assert daemon.metrics.last_error == "slot: ZeroDivisionError: division by zero"
    assert len(released) >= 5
    assert sum("slot failed" in line for line in caplog.messages) == 1  # not once per slot
    assert not (tmp_path / "control.sock").exists()


def test_what_had_ended_before_it_was_watched_is_heard_of_with_the_pass(
    write, tmp_path, monkeypatch
):
    """Nothing wakes the daemon for it: the pacer only finds out as it is asked to watch."""
    late, heard = [], []

    def watch(now, what):
        late.append(KernelEvent("drained", 7))

    daemon = Daemon(config.load(write(f'host = "h1"\nruntime_dir = "{tmp_path}"')))
    daemon.engine = SimpleNamespace(
        loop=SimpleNamespace(on_events=watch, on_grants=watch, on_drained=lambda: None),
        pacer=SimpleNamespace(events=lambda: [late.pop()] if late else []),
        tell=lambda now: None,
    )
    monkeypatch.setattr(daemon.table, "drained", lambda flows: heard.extend(flows) or 0)
    daemon._at_events()
    daemon._on_grants(0, [])
    assert heard == [7, 7]


def test_as_a_job_ends_all_its_processes_here_are_looked_at(write, tmp_path, monkeypatch):
    daemon = Daemon(config.load(write(f'host = "h1"\nruntime_dir = "{tmp_path}"')))
    rows, ended, touched = np.zeros(2, ROW), [Ended.FLOWS, Ended.JOB], []
    rows["cookie"] = 7, 8

    def drained(flows):
        rows["drained"][np.isin(rows["cookie"], list(flows))] = True
        return ended.pop(0)

    events = [[KernelEvent("drained", 7)], [KernelEvent("drained", 8)]]
    daemon.engine = SimpleNamespace(
        loop=SimpleNamespace(on_drained=lambda: None),
        pacer=SimpleNamespace(events=lambda: events.pop(0)),
    )
    daemon.table.rows = rows
    monkeypatch.setattr(daemon.table, "drained", drained)
    monkeypatch.setattr(daemon, "_soon", lambda lazy=False: None)
    monkeypatch.setattr(daemon, "_touch", lambda flows, lazy: touched.append((flows, lazy)))
    daemon._on_kernel()
    assert touched == [], "the other one goes on"
    daemon._on_kernel()
    assert touched == [([7, 8], False)]


def test_a_beginning_brings_the_pass_forward_that_an_end_called_for(write, tmp_path, monkeypatch):
    daemon = Daemon(config.load(write(f'host = "h1"\nruntime_dir = "{tmp_path}"')))
    called = []
    monkeypatch.setattr(
        daemon,
        "_at",
        lambda when, work: called.append(when) or SimpleNamespace(cancel=lambda: None),
    )
    record = SimpleNamespace(id=3)
    for message in (Message.END, Message.END, Message.BEGIN, Message.BEGIN, Message.END):
        daemon._rang(record, 0, message)
    assert len(called) == 2
    assert called[1] < called[0]
    assert list(daemon._take_touched()) == [record]
    daemon._rang(record, 0, Message.END)
    assert len(called) == 3


def test_slots_follow_the_wall_clock_and_lateness_is_kept(write, tmp_path):
    daemon = Daemon(config.load(write(f'host = "h1"\nslot_ms = 5\nruntime_dir = "{tmp_path}"')))
    first = time.time_ns() // 5_000_000
    run_for(daemon, lambda: daemon.metrics.slots >= 10)
    assert first < daemon.slot <= time.time_ns() // 5_000_000
    assert daemon.metrics.lateness.count == daemon.metrics.slots >= 10


def test_hosts_report_at_moments_of_their_own(write, tmp_path):
    moments = sorted(own_moment(i, 60_000_000) for i in range(8))
    assert moments[0] >= 15_000_000 and moments[-1] < 45_000_000
    assert all(b - a >= 1_500_000 for a, b in itertools.pairwise(moments))


def test_a_failed_start_leaves_nothing_behind(write, tmp_path):
    (tmp_path / "register.sock").write_text("not a socket")
    daemon = Daemon(config.load(write(f'host = "h1"\nruntime_dir = "{tmp_path}"')))
    with pytest.raises(OSError, match="not a socket"):
        asyncio.run(daemon.run())
    assert not (tmp_path / "control.sock").exists()
    assert (tmp_path / "register.sock").read_text() == "not a socket"


@pytest.mark.parametrize(
    ("text", "status", "error"),
    [
        ('mode = "enforec"', 2, "field `mode`: must be 'observe' or 'enforce', got \"enforec\""),
        ("capacity = 1", 2, "field `capacity`: unknown key; known keys: "),
        ('runtime_dir = "/proc/flowslot"', 1, "/proc/flowslot: No such file or directory"),
        ('runtime_dir = "/dev/null"', 1, "/dev/null: File exists"),
    ],
)
def test_errors_at_start_are_one_line_and_a_status(write, text, status, error):
    program = str(Path(sys.executable).with_name("flowslotd"))
    run = subprocess.run(
        [program, "--config", str(write(f'host = "h1"\n{text}'))],
        capture_output=True, text=True, check=False, timeout=30,
    )  # fmt: skip
    assert (run.returncode, run.stdout) == (status, "")
    assert run.stderr.startswith("flowslotd: ")
    assert error in run.stderr
    assert run.stderr.count("\n") == 1
