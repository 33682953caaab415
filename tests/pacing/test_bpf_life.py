# SPDX-License-Identifier: Apache-2.0
"""Our congestion control comes and goes: several daemons, killed daemons, clean ends."""

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowslotd.pace.bpf import BpfPacer, unique_name
from flowslotd.pace.pacer import PacingError

from .conformance import MB, apply, entry, set_rate

pytestmark = pytest.mark.root


def test_two_daemons_on_one_kernel(pacer: BpfPacer, flows: Callable[..., Any]) -> None:
    other = BpfPacer("test", slots=64)
    other.open()
    try:
        assert other.congestion_control != pacer.congestion_control
        mine, its = flows(), flows()
        mine.enlist(pacer.congestion_control)
        its.enlist(other.congestion_control)
        assert apply(pacer, entry(mine, 5 * MB), entry(its, 5 * MB)) == 1
        assert set_rate(other, {mine: 2 * MB, its: 2 * MB}) == 1
        assert mine.comes_to(5 * MB)
        assert its.comes_to(2 * MB)
        mine.enlist(other.congestion_control)  # as a job does when it has a new daemon
        assert [event.kind for event in pacer.events()][-1] == "closed"
        assert set_rate(other, {mine: 3 * MB}) == 1
        assert mine.comes_to(3 * MB)
    finally:
        other.close()
    assert its.exceeds(50 * MB)


def test_leaving_restores_the_socket(pacer: BpfPacer, enlisted: Callable[..., Any]) -> None:
    flow = enlisted()
    set_rate(pacer, {flow: MB})
    assert flow.comes_to(MB)
    flow.enlist("reno")
    assert flow.exceeds(50 * MB)
    assert pacer.counters().cookie.size == 0


def test_jobs_need_no_privileges(pacer: BpfPacer, net: Any) -> None:
    select = (
        "import os, socket; os.setgid(65534); os.setuid(65534); "
        f"socket.socket().setsockopt(6, 13, {pacer.congestion_control.encode()!r})"
    )
    subprocess.run([sys.executable, "-c", select], check=True)


LOADER = """
import sys, time
from flowslotd.pace.pacer import PaceEntry, pack
from flowslotd.pace.bpf import BpfPacer
pacer = BpfPacer("victim", slots=64)
if sys.argv[1] == "without-link":
    load = pacer._load
    pacer._load = lambda elf, link: load(elf, link=False)
pacer.open()
print(pacer.congestion_control, flush=True)
cookie = int(sys.stdin.readline())
entry = PaceEntry(cookie, 2e6, 2e6, True, 0)
print(pacer.apply(pack([entry]), time.monotonic_ns() + 1_500_000_000), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("how", ["link", "without-link"])
def test_fail_open_when_the_daemon_is_killed(
    flows: Callable[..., Any], from_here: Any, how: str
) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", LOADER, how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None and child.stdout is not None
    try:
        name = child.stdout.readline().strip()
        assert name in from_here.names()
        programs = {
            int(line.split()[1])
            for info in Path(f"/proc/{child.pid}/fdinfo").iterdir()
            for line in info.read_text().splitlines()
            if line.startswith("prog_id:")
        }
        assert programs
        flow = flows()
        flow.enlist(name)
        print(flow.cookie, file=child.stdin, flush=True)
        assert child.stdout.readline() == "1\n"
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.communicate()
    assert from_here.soon(lambda: name not in from_here.names())
    assert flow.exceeds(50 * MB)  # past the deadline
    flow.stop()
    assert from_here.soon(lambda: not programs & loaded())


def loaded() -> set[int]:
    """Ids of all BPF programs in the kernel."""
    import json

    shown = subprocess.run(["bpftool", "-j", "prog", "show"], check=True, capture_output=True)
    return {program["id"] for program in json.loads(shown.stdout)}


def test_closing_leaves_nothing(flows: Callable[..., Any], from_here: Any) -> None:
    pacer = BpfPacer("test", slots=64)
    gc.collect()  # what earlier tests have left must not go between two counts
    before = len(os.listdir("/proc/self/fd"))
    pacer.open()
    assert pacer.congestion_control in from_here.names()
    flow = flows()
    flow.enlist(pacer.congestion_control)
    set_rate(pacer, {flow: MB})
    assert flow.comes_to(MB)
    pacer.close()
    assert pacer.congestion_control not in from_here.names()
    assert flow.exceeds(50 * MB)
    flow.stop()
    assert len(os.listdir("/proc/self/fd")) == before
    pacer.close()  # harmless
    pacer.open()  # and it can start again
    pacer.close()


def test_names_fit_the_kernel() -> None:
    for instance in ("", "h1", "a very long instance name", "späße/:"):
        name = unique_name(instance)
        assert len(name.encode()) <= 15
        assert name.replace("_", "").replace("-", "").isalnum()
    assert len({unique_name("x") for _ in range(20)}) > 1


def test_a_foreign_object_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = tmp_path / "flowslot.bpf.o"
    monkeypatch.setattr("flowslotd.pace.libbpf.PLACES", (tmp_path,))
    with pytest.raises(PacingError, match="make -C bpf"):
        BpfPacer("test").open()
    wrong.write_bytes(b"\x7fELF nothing else")
    with pytest.raises(PacingError, match="rebuild"):
        BpfPacer("test").open()
    wrong.write_bytes(b"\x7fELF fs_placeholder_\0")
    with pytest.raises(PacingError, match="refuses"):
        BpfPacer("test").open()
