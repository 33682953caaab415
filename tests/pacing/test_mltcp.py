# SPDX-License-Identifier: Apache-2.0
"""MLTCP: its rule, which is plain C (bpf/mltcp.h), and the congestion controls in this kernel."""

import ctypes
import shutil
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from flowslot.model.errors import FlowslotError
from flowslot.policy.mltcp import Aggressiveness
from flowslotd.diagnose import probe
from flowslotd.pace.libbpf import built
from flowslotd.pace.mltcp import NAMES, OBJECT, ONE, Line, app, registered, turn_off, turn_on

from .traffic import DATA, THERE, Net, inside, names

HEADER = Path(__file__).parents[2] / "bpf" / "mltcp.h"
MS, MB = 1_000_000, 1_000_000
SOURCE = """
#include <linux/types.h>
#include "mltcp.h"
void begin(struct mltcp *m) { mltcp_init(m, 1000); }
void idle(struct mltcp *m, __u64 now) { m->idle_ns = now; }
int sends(struct mltcp *m, __u64 acked, __u64 now) { return mltcp_send(m, acked, now); }
__u32 f(struct mltcp *m, __u64 acked, __u32 a, __u32 b) { return mltcp_f(m, acked, a, b); }
__u32 scaled(struct mltcp *m, __u32 n, __u32 f) { return mltcp_scaled(m, n, f); }
__u32 defaults(int i) { return i ? MLTCP_INTERCEPT : MLTCP_SLOPE; }
"""
COMPILER = shutil.which("cc") or shutil.which("clang")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler: bpf/mltcp.h is C")


@pytest.fixture(scope="module")
def rule(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """What the kernel runs, here."""
    folder = tmp_path_factory.mktemp("mltcp")
    source, library = folder / "rule.c", folder / "rule.so"
    source.write_text(SOURCE)
    command = [COMPILER, "-shared", "-fPIC", "-O1", f"-I{HEADER.parent}", "-o", library, source]
    subprocess.run(list(map(str, command)), check=True)
    return ctypes.CDLL(str(library))


class Learner:
    """A flow that sends and idles; all times made up."""

    def __init__(self, rule: ctypes.CDLL) -> None:
        self._rule, self._state = rule, ctypes.create_string_buffer(256)
        self.acked, self.now = 1000, MS
        rule.begin(self._state)

    def send(self, size: int, idle_ms: float) -> bool:
        """Send so much, then idle so long; whether what is sent next begins an iteration."""
        self.acked += size
        self._rule.idle(self._state, ctypes.c_uint64(self.now))
        self.now += round(idle_ms * MS)
        return bool(self._rule.sends(self._state, *map(ctypes.c_uint64, (self.acked, self.now))))

    def f(self, more: int = 0) -> float:
        """F, of so many bytes more."""
        line = Line.of(Aggressiveness())
        at = ctypes.c_uint64(self.acked + more)
        return float(self._rule.f(self._state, at, *line)) / ONE

    def known(self, size: int) -> bool:
        """Whether the bytes of an iteration are known, and are these."""
        first = Aggressiveness().intercept
        return self.f() == first and abs(self.f(size // 2) - 1.125) < 0.01 and self.f(size) == 2.0


@needs_compiler
def test_f_is_the_policys_and_one_before_iterations_are_known(rule: ctypes.CDLL) -> None:
    assert (rule.defaults(0), rule.defaults(1)) == Line.of(Aggressiveness())
    flow = Learner(rule)
    assert flow.f() == flow.f(5 * MB) == 1.0
    for _ in range(4):
        flow.send(4 * MB, 100)
    for ratio in np.linspace(0, 1, 11):
        sent = round(ratio * 4 * MB)
        assert flow.f(sent) == pytest.approx(float(Aggressiveness()(ratio)), abs=3 / ONE)
    assert flow.f(5 * MB) == 2.0
    assert flow.f(8 * MB) == 1.0, "an end was missed"


@needs_compiler
def test_an_iteration_is_known_after_two_alike(rule: ctypes.CDLL) -> None:
    flow = Learner(rule)
    assert flow.send(4 * MB, 100) and flow.f() == 1.0
    assert flow.send(4 * MB + 300_000, 100) and flow.known(4 * MB + 300_000)
    other = Learner(rule)
    for size in (4, 5, 4, 5, 4, 5):
        other.send(size * MB, 100)
        assert other.f(MB) == 1.0, "they do not repeat"


@needs_compiler
def test_waits_within_an_iteration_do_not_end_it(rule: ctypes.CDLL) -> None:
    """Rings wait for other hosts, thirty times here; none of that is the computation."""
    flow = Learner(rule)
    ends = []
    for _ in range(8):
        for _ in range(30):
            ends.append(flow.send(100_000, 2))
        ends.append(flow.send(1 * MB, 100))
    assert flow.known(4 * MB)
    assert sum(ends[4 * 31 :]) == 4 and all(ends[k * 31 - 1] for k in range(4, 9))


@needs_compiler
@pytest.mark.parametrize("pause_ms", [1_000, 60_000])
def test_a_long_pause_changes_nothing_once_iterations_are_known(
    rule: ctypes.CDLL, pause_ms: int
) -> None:
    flow = Learner(rule)
    for idle_ms in (100, 100, 100, 100, pause_ms, 100, 100):
        assert flow.send(4 * MB, idle_ms)
    assert flow.known(4 * MB)


@needs_compiler
def test_the_wait_before_training_is_forgotten(rule: ctypes.CDLL) -> None:
    flow = Learner(rule)
    flow.send(200, 500)  # who am I
    flow.send(300, 30_000)  # everybody is there
    for _ in range(5):
        flow.send(4 * MB, 100)
    assert flow.known(4 * MB)


@needs_compiler
def test_shorter_gaps_are_learnt_when_a_longer_one_does_not_come_again(rule: ctypes.CDLL) -> None:
    flow = Learner(rule)
    for _ in range(5):
        flow.send(4 * MB, 800)
    assert not flow.send(4 * MB, 100), "it might be a wait"
    for _ in range(40):
        flow.send(4 * MB, 100)
    assert flow.known(4 * MB)


@needs_compiler
def test_another_size_is_learnt_and_what_does_not_repeat_is_plain_tcp(rule: ctypes.CDLL) -> None:
    flow = Learner(rule)
    for size in (4, 4, 4, 9, 4):
        flow.send(size * MB, 100)
    assert flow.known(4 * MB), "one odd iteration"
    for _ in range(2):
        flow.send(8 * MB, 100)
    assert flow.known(8 * MB)
    for size in (1, 3, 1, 3):
        flow.send(size * MB, 100)
    assert flow.f(MB) == 1.0


@needs_compiler
def test_nothing_is_lost_by_rounding(rule: ctypes.CDLL) -> None:
    flow = Learner(rule)
    sums = [sum(rule.scaled(flow._state, 1, f) for _ in range(ONE)) for f in (256, 1024, 2047)]
    assert sums == [256, 1024, 2047]


# -- in the kernel ------------------------------------------------------------------------------


@pytest.fixture
def kernel() -> Iterator[None]:
    if built(OBJECT) is None:
        pytest.skip(f"{OBJECT} is not built: make -C bpf")
    if (found := probe.struct_ops()).status != "ok":
        pytest.skip(found.detail)
    if others := registered():
        pytest.skip(f"{', '.join(others)}: somebody uses it on this machine")
    yield
    turn_off()


@pytest.mark.root
def test_on_and_off(kernel: None) -> None:
    turn_on(Aggressiveness())
    assert set(NAMES) <= set(names())
    run = CliRunner()
    again = run.invoke(app, ["on"])
    assert isinstance(again.exception, FlowslotError) and "already" in str(again.exception)
    assert set(NAMES) <= set(names())
    assert run.invoke(app, ["off"]).stdout == "unregistered: mltcp_reno, mltcp_cubic\n"
    assert not set(NAMES) & set(names())
    assert "nothing" in run.invoke(app, ["off"]).stdout
    for wrong in ("17", "nan"):
        assert run.invoke(app, ["on", "--slope", wrong]).exit_code == 2
    assert run.invoke(app, ["on", "--intercept", "0"]).exit_code == 2
    assert not set(NAMES) & set(names())


class Bulk:
    """A connection that sends when it is told to. `peer` reads by itself."""

    def __init__(self, net: Net, congestion_control: str) -> None:
        with inside(net.there):
            server = socket.create_server((THERE, 0))
        with server, inside(net.here):
            self.sock = socket.socket()
            name = congestion_control.encode()
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
            self.sock.connect(server.getsockname())
            self.peer, _ = server.accept()
        self.sock.setblocking(False)
        self.peer.setblocking(False)
        self.left = self.received = 0

    def step(self) -> None:
        try:
            while self.left:
                self.left -= self.sock.send(DATA[: min(self.left, len(DATA))])
        except BlockingIOError:
            pass
        try:
            while size := len(self.peer.recv(1 << 18)):
                self.received += size
        except BlockingIOError:
            pass

    def iterate(self, size: int, idle_s: float) -> None:
        """Send so much, and idle."""
        self.left, until, deadline = size, self.received + size, time.monotonic() + 20
        while self.received < until:
            self.step()
            assert time.monotonic() < deadline
        time.sleep(idle_s)

    def close(self) -> None:
        self.sock.close()
        self.peer.close()


def ahead(net: Net, name: str, factor: float) -> float:
    """MB sent in an iteration for each one that a plain flow, which never ends, sends meanwhile;
    F is `factor`. NaN, which no comparison holds for: that one lost its first window, and did
    not compete."""
    turn_on(Aggressiveness(1 / ONE, factor))
    flow, plain = Bulk(net, name), Bulk(net, name.removeprefix("mltcp_"))
    try:
        for _ in range(4):
            flow.iterate(MB, 0.03)
        flow.left, plain.left, before = MB, 1 << 40, flow.received
        while flow.received < before + MB:
            flow.step()
            plain.step()
        return MB / plain.received if plain.received else nan
    finally:
        flow.close()
        plain.close()
        turn_off()


@pytest.mark.root
@pytest.mark.parametrize("name", NAMES)
def test_f_decides_who_is_ahead_once_iterations_are_known(
    net: Any, kernel: None, name: str
) -> None:
    """Quiet machine: 5 to 6 times as much. A busy one stops this process for longer than an
    iteration's gap, now and then: one of five tries has to be free of that."""
    net.shape(mbit=100, buffer=40_000)
    assert any(ahead(net, name, 8.0) > 2 * ahead(net, name, 1 / 8) for _ in range(5))


def kept(net: Net, name: str, idle_s: float) -> float:
    """What is left of the window after so long an idle time, once iterations are known."""
    flow = Bulk(net, name)
    try:
        for _ in range(4):
            flow.iterate(MB, idle_s)
        before = window(flow.sock)
        flow.iterate(1, 0.0)
        return window(flow.sock) / before
    finally:
        flow.close()


def window(sock: socket.socket) -> int:
    """Segments (tcpi_snd_cwnd)."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    return int(struct.unpack_from("=I", info, 80)[0])


@pytest.mark.root
@pytest.mark.parametrize("name", NAMES)
def test_a_window_outlives_the_computation(net: Any, kernel: None, name: str) -> None:
    """A machine that stops for as long as this one computes makes that a pause: five tries."""
    net.shape(mbit=100, buffer=40_000)
    turn_on(Aggressiveness())
    assert kept(net, name.removeprefix("mltcp_"), 0.3) < 0.8
    assert any(kept(net, name, 0.3) >= 0.95 for _ in range(5))
