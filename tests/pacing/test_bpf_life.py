# SPDX-License-Identifier: Apache-2.0
"""Our congestion control comes and goes: several daemons, killed daemons, clean ends."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pytest import MonkeyPatch
from registering import open_fds

from flowslotd.pace.bpf import BpfPacer, unique_name
from flowslotd.pace.pacer import PacingError

from .conformance import MB, Flows, set_rate
from .traffic import names

pytestmark = pytest.mark.root


def test_leaving_restores_the_socket_and_another_daemon_can_have_it(
    pacer: BpfPacer, enlisted: Flows
) -> None:
    flow = enlisted()
    set_rate(pacer, {flow: MB})
    assert flow.comes_to(MB)
    flow.enlist("reno")
    assert flow.exceeds(50 * MB)
    assert pacer.counters().cookie.size == 0
    other = BpfPacer("test", slots=64)
    other.open()
    try:
        flow.enlist(pacer.congestion_control)
        flow.enlist(other.congestion_control)  # as a job does when it has a new daemon
        assert "closed" not in [event.kind for event in pacer.events()], "the socket lives on"
        assert set_rate(pacer, {flow: MB}) == 0
        assert set_rate(other, {flow: 3 * MB}) == 1
        assert flow.comes_to(3 * MB)
    finally:
        other.close()


def test_jobs_need_no_privileges(pacer: BpfPacer, net: Any) -> None:
    select = (
        "import os, socket; os.setgid(65534); os.setuid(65534); "
        f"socket.socket().setsockopt(6, 13, {pacer.congestion_control.encode()!r})"
    )
    subprocess.run([sys.executable, "-c", select], check=True)


def test_closing_leaves_nothing(flows: Flows) -> None:
    pacer = BpfPacer("test", slots=64)
    before = open_fds()
    pacer.open()
    assert pacer.congestion_control in names()
    flow = flows()
    flow.enlist(pacer.congestion_control)
    set_rate(pacer, {flow: MB})
    pacer.close()
    assert pacer.congestion_control not in names()
    flow.stop()
    assert open_fds() == before
    pacer.close()  # harmless
    pacer.open()  # and it can start again
    pacer.close()


def test_names_fit_the_kernel() -> None:
    for instance in ("", "h1", "a very long instance name", "späße/:"):
        name = unique_name(instance)
        assert len(name.encode()) <= 15
        assert name.replace("_", "").replace("-", "").isalnum()
    assert len({unique_name("x") for _ in range(20)}) > 1


def test_a_foreign_object_is_refused(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    wrong = tmp_path / "flowslot.bpf.o"
    monkeypatch.setattr("flowslotd.pace.libbpf.PLACES", (tmp_path,))
    with pytest.raises(PacingError, match="make -C bpf"):
        BpfPacer("test").open()
    for content, why in ((b"nothing else", "rebuild"), (b"fs_placeholder_\0", "refuses")):
        wrong.write_bytes(b"\x7fELF " + content)
        with pytest.raises(PacingError, match=why):
            BpfPacer("test").open()
