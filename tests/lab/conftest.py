# SPDX-License-Identifier: Apache-2.0
"""Shared by the lab's tests."""

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from leftovers import TOOL, Host
from scenariofiles import SCENARIOS, TWO_HOSTS, TWO_RACKS
from waiting import settle

from flowslot_lab.state import NETNS, ROOT, RunState
from flowslot_scenario.scenario import load

__all__ = ["SCENARIOS", "TOOL", "TWO_HOSTS", "TWO_RACKS"]
TWO_EQUAL = load(SCENARIOS / "two-equal.toml")


class Quiet:
    """A Watch that shows nothing. `total`: iterations that it was told of."""

    total = 0

    def begin(self, label: str, total: int) -> None:
        self.total += total

    def advance(self, done: int) -> None: ...


def traces(run_id: str) -> dict[str, list[str]]:
    """What exists of a run now: namespaces, processes, directories, devices of the host."""
    processes = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = path.read_bytes().replace(b"\0", b" ").decode()  # b"" of a zombie
            if f"/flowslot-lab/{run_id}/" in command:
                processes.append(command)
    known = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
    spaces = NETNS.iterdir() if NETNS.is_dir() else ()
    return {
        "namespaces": sorted(p.name for p in spaces if p.name.startswith(f"fl{run_id}-")),
        "processes": processes,
        "directories": [str(p) for p in (ROOT / run_id,) if p.exists()],
        "congestion_controls": [name for name in known.read_text().split() if run_id in name],
        "devices": [p.name for p in Path("/sys/class/net").iterdir() if run_id in p.name],
    }


KINDS = "namespaces", "processes", "directories", "congestion_controls", "devices"
NOTHING: dict[str, list[str]] = {kind: [] for kind in KINDS}


@pytest.fixture
def state() -> Iterator[RunState]:
    state = RunState.create()
    yield state
    state.clean()


@pytest.fixture
def host() -> Iterator[Host]:
    """To be asked for before anything is started: `host.left()` says what is left of it."""
    yield Host()
    if TOOL is None:
        pytest.skip("bpftool is missing: BPF programs, maps and links were not compared")


@pytest.fixture
def nothing_left(host: Host, state: RunState) -> Iterator[None]:
    """At the end, once the run is cleaned up, nothing is left of it."""
    yield
    state.clean()
    assert traces(state.id) == NOTHING
    assert host.left() == {}


LEAVES_NOTHING = pytest.mark.usefixtures("nothing_left")
Flowslot = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def flowslot() -> Iterator[Flowslot]:
    """Starts `flowslot ARGS` as a process; kills it at the end."""
    started = []

    def start(*args: str) -> subprocess.Popen[str]:
        program = [str(Path(sys.executable).with_name("flowslot")), *args]
        process = subprocess.Popen(
            program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def begin(
    flowslot: Flowslot, *options: str, scenario: str = "two-equal"
) -> tuple[subprocess.Popen[str], str]:
    """Start a long run; returns it and its id once its jobs exist."""
    file = SCENARIOS / f"{scenario}.toml"
    last = load(file).jobs[-1].name
    process = flowslot("lab", "run", str(file), "--iterations", "1000", "--no-predict", *options)

    def begun(journal: Path) -> bool:
        text = journal.read_text()
        return f"owner {process.pid} " in text and f" job-{last}-1\n" in text

    def journals() -> list[Path]:
        assert process.poll() is None, process.communicate()
        return list(filter(begun, ROOT.glob("[0-9a-f]*/journal")))

    return process, settle(journals, 60)[0].parent.name
