# SPDX-License-Identifier: Apache-2.0
"""The small parts: notification, units, socket ownership, metrics."""

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from flowslot_proto.systemd import Notifier
from flowslotd.metrics import Durations
from flowslotd.observe.binding import holds_socket

ROOT = Path(__file__).resolve().parents[2]


# -- systemd


def test_notifications_reach_systemd_at_an_abstract_address():
    address = f"@flowslot-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind("\0" + address[1:])
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
    needed = {"CAP_BPF", "CAP_NET_ADMIN", "CAP_PERFMON", "CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH"}
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
