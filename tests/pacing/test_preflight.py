# SPDX-License-Identifier: Apache-2.0
"""`flowslot preflight` says what a daemon would change, and then that is what it changes."""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from flowslotd import config
from flowslotd.diagnose import diagnosis, preflight
from flowslotd.pace import devices, edt, guardian, htb
from flowslotd.pace.libbpf import TCX_EGRESS, Object, library, read
from flowslotd.pace.pacer import PacingError

from .conformance import MB, ON_DEVICES, Bench, set_rate
from .traffic import change, inside

pytestmark = pytest.mark.root

TOPOLOGY = """
[[hosts]]
name = "h1"
nics = [{ name = "eth0", addresses = ["10.79.0.1"], up = "h1-up", down = "h1-down" }]
[[links]]
name = "h1-up"
capacity_gbps = 0.2
[[links]]
name = "h1-down"
capacity_gbps = 0.2
"""
Load = Callable[..., config.Config]
PFIFO = "qdisc add dev eth0 root handle 7: pfifo"


@pytest.fixture
def loaded(tmp_path: Path) -> Callable[[str], config.Config]:
    """A configuration with these lines in its section about pacing."""

    def load(pacing: str, mode: str = "enforce") -> config.Config:
        (tmp_path / "topology.toml").write_text(TOPOLOGY)
        file = tmp_path / "flowslotd.toml"
        file.write_text(f'host = "h1"\nmode = "{mode}"\nuse_switch = false\n[pacing]\n{pacing}\n')
        return config.load(file)

    return load


ROOTS = {"htb": "htb f510:", "edt": "fq f520:"}
MORE = {
    "htb": {"below it a class and a TBF for each flow"},
    "edt": {"qdisc clsact", "a BPF filter at the egress of clsact"},
}


@ON_DEVICES
def test_what_is_announced_for_a_device_is_what_is_done(on: Bench, loaded: Load) -> None:
    pacer = on.pacer()
    changes = preflight.changes(loaded(f'backend = "{on.backend}"'), on.backend)
    said = {change.what for change in changes if change.where == "eth0"}
    root = ROOTS[on.backend]
    assert (
        said
        == {f"root qdisc {root} in place of the kernel's default (noqueue)"} | (MORE[on.backend])
    )
    assert set_rate(pacer, {on.flow(pacer): MB}) == 1
    shown = [one for one in on.host()["qdiscs"] if one["dev"] == "eth0"]
    assert {f"{one['kind']} {one['handle']}" for one in shown if one.get("root")} == {root}
    assert ("clsact" in {one["kind"] for one in shown}) == (on.backend == "edt")
    assert bool(on.host()["egress"]) == (on.backend == "edt")


@pytest.mark.parametrize("named", [False, True])
def test_a_foreign_qdisc_is_named(net: Any, loaded: Load, named: bool) -> None:
    change(f"tc -n {net.here}", PFIFO)
    with inside(net.here):
        for backend in ("htb", "edt"):
            settings = f'backend = "{backend}"' + ('\ndevices = ["eth0"]' if named else "")
            changes = preflight.changes(loaded(settings), backend)
            (found,) = [one for one in changes if one.where == "eth0"]
            assert found.when == "never"
            assert found.what.startswith("the daemon would not start: ") == named
            assert "eth0 has a root qdisc of its own, pfifo 7:, which stays" in found.what


@pytest.fixture
def verdict(net: Any) -> Iterator[Callable[[], None]]:
    """A program of somebody else's at tcx/egress of eth0; the call takes it away."""
    program = Object(read(edt.OBJECT))
    program.load()
    with inside(net.here):
        index = socket.if_nametoindex("eth0")
    with ExitStack() as stack:
        stack.callback(program.close)
        try:
            with inside(net.here):
                link = library().bpf_link_create(
                    program.program("flowslot_edt"), index, TCX_EGRESS, None
                )
        except OSError:
            pytest.skip("no tcx: Linux 6.6")
        owned = stack.enter_context(ExitStack())
        owned.callback(os.close, link)
        yield owned.close


def test_a_program_that_decides_before_clsact_is_named(
    net: Any, loaded: Load, verdict: Callable[[], None]
) -> None:
    def said() -> list[preflight.Change]:
        changes = preflight.changes(loaded('backend = "edt"'), "edt")
        return [one for one in changes if one.where == "eth0"]

    with inside(net.here):
        (found,) = said()
        assert found.when == "never"
        assert "eth0 has BPF programs at tcx/egress (by id: " in found.what
        (other,) = [one for one in devices.every() if one.name == "lo"]
        assert edt.changes_to(other, 0), "another device has none"
        assert htb.changes_to(devices.named("eth0"), 0), "nor does it matter to htb"
        verdict()
        assert len(said()) > 1


def test_sysctls_are_named(net: Any, loaded: Load) -> None:
    def sysctls(pacing: str) -> list[str]:
        with inside(net.here):
            changes = preflight.changes(loaded(pacing), "socket")
        return [change.what for change in changes if change.where == "sysctl"]

    with inside(net.here):
        now = Path(guardian.SYSCTL).read_text().strip()
    assert now != "0"
    assert sysctls('backend = "socket"') == [f"net.ipv4.tcp_tso_rtt_log: {now} becomes 0"]
    (stays,) = sysctls('backend = "socket"\nsysctls = false')
    assert stays == f"net.ipv4.tcp_tso_rtt_log stays {now}: pacing.sysctls is off"


def test_observing_is_said_and_still_lists(loaded: Load) -> None:
    observing = loaded('backend = "htb"', mode="observe")
    changes = preflight.changes(observing, "htb")
    assert any(change.where == "sockets" for change in changes)
    text = preflight.table(observing, diagnosis.diagnose("htb"), changes)
    assert "says mode = observe: none of this is done before it is enforce" in text


def test_a_device_that_is_not_there(loaded: Load) -> None:
    with pytest.raises(PacingError, match="there is no network device nowhere0"):
        preflight.changes(loaded('backend = "htb"\ndevices = ["nowhere0"]'), "htb")
