# SPDX-License-Identifier: Apache-2.0
"""`flowslot preflight` says what a daemon would change, and then that is what it changes."""

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowslotd import config, diagnosis, preflight
from flowslotd.pacing import PaceEntry, PacingError, guardian, make_pacer, pack

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


def test_what_is_announced_for_a_device_is_what_is_done(
    net: Any, from_here: Any, flows: Callable[..., Any], loaded: Callable[..., config.Config]
) -> None:
    flow = flows(busy=False)
    with from_here.inside(net.here):
        changes = preflight.changes(loaded('backend = "htb"'), "htb")
        said = {change.what for change in changes if change.where == "eth0"}
        assert said == {"root qdisc htb f510: in place of the kernel's default (noqueue)"}
        pacer = make_pacer("htb", "test")
        pacer.attach(flow.cookie, os.getpid(), flow.sock.fileno())
        entry = PaceEntry(flow.cookie, 1e6, 1e6, guaranteed=True, growth=0)
        assert pacer.apply(pack([entry]), time.monotonic_ns() + 10**12) == 1
        shown = subprocess.run(
            ["tc", "-j", "qdisc", "show", "dev", "eth0"], capture_output=True, check=True
        )
        root = next(one for one in json.loads(shown.stdout) if one.get("root"))
        assert (root["kind"], root["handle"]) == ("htb", "f510:")
        pacer.close()


def test_a_foreign_qdisc_is_named(
    net: Any, from_here: Any, loaded: Callable[..., config.Config]
) -> None:
    subprocess.run(["tc", "-n", net.here, *PFIFO.split()], check=True)
    with from_here.inside(net.here):
        for backend in ("htb", "edt"):
            changes = preflight.changes(loaded(f'backend = "{backend}"'), backend)
            (change,) = [one for one in changes if one.where == "eth0"]
            assert change.when == "never"
            assert "eth0 has a root qdisc of its own, pfifo 7:, which stays" in change.what


def test_sysctls_are_named(loaded: Callable[..., config.Config]) -> None:
    def sysctls(pacing: str) -> list[str]:
        changes = preflight.changes(loaded(pacing), "socket")
        return [change.what for change in changes if change.where == "sysctl"]

    now = Path(guardian.SYSCTL).read_text().strip()
    assert now != "0"
    assert sysctls('backend = "socket"') == [f"net.ipv4.tcp_tso_rtt_log: {now} becomes 0"]
    (stays,) = sysctls('backend = "socket"\nsysctls = false')
    assert stays == f"net.ipv4.tcp_tso_rtt_log stays {now}: pacing.sysctls is off"


def test_observing_is_said_and_still_lists(loaded: Callable[..., config.Config]) -> None:
    observing = loaded('backend = "htb"', mode="observe")
    changes = preflight.changes(observing, "htb")
    assert any(change.where == "sockets" for change in changes)
    text = preflight.table(observing, diagnosis.diagnose("htb"), changes)
    assert "says mode = observe: none of this is done before it is enforce" in text


def test_a_device_that_is_not_there(loaded: Callable[..., config.Config]) -> None:
    with pytest.raises(PacingError, match="there is no network device nowhere0"):
        preflight.changes(loaded('backend = "htb"\ndevices = ["nowhere0"]'), "htb")
