# SPDX-License-Identifier: Apache-2.0
"""The patches insert, and nothing else; and what they call does what it says.

NCCL itself is not here: nccl_patch/patch/README.md says how the patches are checked against it.
"""

import re
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import settle

from flowslot_shm.layout import State, Transport

ROOT = Path(__file__).parents[2]
PATCHES = ROOT / "nccl_patch" / "patch"
INCLUDE = [PATCHES, PATCHES.parent, ROOT / "shm"]
VERSIONS = ["2.11.4", "2.30.7"]
SAID = re.compile(r"flowslot_nccl_hooks::(\w+)\(")


@pytest.mark.parametrize("version", VERSIONS)
def test_hunks_only_insert_and_quote_nothing(version: str) -> None:
    lines = (PATCHES / f"nccl-{version}.patch").read_text().splitlines()
    left = 0
    for line in lines:
        if hunk := re.fullmatch(r"@@ -\d+,0 \+\d+(?:,(\d+))? @@", line):
            assert left == 0
            left = int(hunk[1] or 1)
        elif not line.startswith(("diff -U0 a/", "--- a/", "+++ b/")):
            assert line.startswith("+"), line
            left -= 1
    assert left == 0
    added = [line[1:] for line in lines if line[0] == "+" and line[:3] != "+++"]
    assert all("flowslot" in line or "info->" in line for line in added)  # nothing else


@pytest.mark.parametrize("version", VERSIONS)
def test_a_patch_is_pinned_to_the_files_that_it_changes(version: str) -> None:
    patched = re.findall(r"^\+\+\+ b/(\S+)", (PATCHES / f"nccl-{version}.patch").read_text(), re.M)
    sums = [line.split() for line in (PATCHES / f"nccl-{version}.sha256").read_text().splitlines()]
    assert sorted(name for _, name in sums) == sorted(patched)
    assert all(re.fullmatch("[0-9a-f]{64}", one) for one, _ in sums)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_patch_calls_all_that_there_is(version: str) -> None:
    called = set(SAID.findall((PATCHES / f"nccl-{version}.patch").read_text()))
    assert called == {"Enqueued", "Connecting", "Connected", "Add", "Posted", "Done", "Closed"}


@pytest.mark.parametrize("standard", ["gcc -std=c99", "g++ -std=c++11", "g++ -std=c++17"])
def test_headers_compile_where_nccl_is_built(tmp_path: Path, standard: str) -> None:
    header = "flowslot_nccl.h" if "c99" in standard else "flowslot_nccl_hooks.h"
    source = tmp_path / ("it.c" if "c99" in standard else "it.cc")
    source.write_text(f'#include "{header}"\nint main(void) {{ return 0; }}\n')
    flags = ["-D_GNU_SOURCE", "-pedantic", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden"]
    built = [*standard.split(), *flags, *(f"-I{i}" for i in INCLUDE)]
    out = tmp_path / "it.so"
    subprocess.run([*built, "-fPIC", "-shared", "-o", out, source], check=True)
    symbols = subprocess.run(["nm", "-D", out], check=True, capture_output=True, text=True).stdout
    assert (" W flowslot_iteration\n" in symbols) == ("++" in standard)


# ---- What is called ------------------------------------------------------------------------------


class Hooks:
    def __init__(self, program: Path, port: int, environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [program, str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"FLOWSLOT_JOB": "vgg", "FLOWSLOT_SOCKET": "/nonexistent"} | environment,
        )

    def __call__(self, *calls: str) -> list[int]:
        """The iteration after each."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("".join(f"{call}\n" for call in calls))
        self.process.stdin.flush()
        return [int(self.process.stdout.readline()) for _ in calls]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("hooks") / "hooks"
    command = ["g++", "-std=c++11", "-pthread", "-Wall", "-Wextra", "-Werror", "-o", str(out)]
    source = Path(__file__).parent / "hooks.cc"
    subprocess.run([*command, *(f"-I{i}" for i in INCLUDE), source], check=True)
    return out


@pytest.fixture
def start(program: Path) -> Iterator[Callable[..., tuple[Hooks, int]]]:
    with socket.create_server(("127.0.0.1", 0), backlog=200) as server:
        port = server.getsockname()[1]
        made: list[Hooks] = []

        def begin(**environment: str) -> tuple[Hooks, int]:
            made.append(Hooks(program, port, environment))
            return made[-1], port

        yield begin
        for one in made:
            one.process.communicate(timeout=20)
            assert one.process.returncode == 0


Start = Callable[..., tuple[Hooks, int]]


def seen(daemon: Any, port: int) -> dict[tuple[int, int, int], list[tuple[int, ...]]]:
    """By rank, peer and channel: iteration, ready, posted, done, total of each socket."""
    (record,) = settle(lambda: list(daemon.server.records.values()))
    assert record.job == "vgg"
    found: dict[tuple[int, int, int], list[tuple[int, ...]]] = {}
    names = ["iteration", "ready", "posted", "done", "iteration_total"]
    for slot in record.reader.snapshot():
        if slot["state"] == State.FREE:
            continue
        assert (slot["transport"], slot["dport"]) == (Transport.TCP, port)
        key = slot[["rank", "peer", "channel"]].item()
        found.setdefault(key, []).append(slot[names].item())
    assert not record.reader.faults.any()
    return found


def test_data_sockets_are_flows_and_control_sockets_are_not(
    start: Start, start_daemon: Callable[..., Any]
) -> None:
    daemon = start_daemon()
    hooks, port = start(**daemon.environment)
    hooks("connect 9 0 1 3 4", "connect 9 0 2 5 0")
    none = (0, 0, 0, 0, 0)
    assert seen(daemon, port) == {(0, 1, 3): [none] * 4, (0, 2, 5): [none]}
    hooks("post 0 0 128", "done 0 0 128", "post 0 3 700", "done 0 3 300", "post 1 0 50")
    assert seen(daemon, port) == {
        (0, 1, 3): [none, none, (0, 700, 700, 300, 0), none],
        (0, 2, 5): [(0, 50, 50, 0, 0)],
    }
    hooks("close 0")
    assert list(seen(daemon, port)) == [(0, 2, 5)]


def test_a_connection_that_nobody_announced_carries_no_data(
    start: Start, start_daemon: Callable[..., Any]
) -> None:
    daemon = start_daemon()
    hooks, port = start(**daemon.environment)
    hooks("connect 9 0 1 3 0", "connect 0 0 0 0 2", "post 1 1 10", "done 1 1 10", "close 1")
    assert seen(daemon, port) == {(0, 1, 3): [(0, 0, 0, 0, 0)]}


def test_communicators_without_flows_are_forgotten(start: Start) -> None:
    hooks, _ = start()
    hooks("connect 9 0 1 0 2", "connect 9 0 1 1 0", "connect 8 0 1 0 0", "close 0")
    assert hooks("communicators 0") == [2]
    hooks("close 1")
    assert hooks("communicators 0") == [1]
    hooks("close 2")
    assert hooks("communicators 0") == [0]


def iterate(*buffers: int) -> list[str]:
    """All-reduces of 1 MB each."""
    return [f"enqueue 9 {buffer} 1000000" for buffer in buffers]


def test_a_flow_is_ready_for_its_share_when_tensors_are_enqueued(
    start: Start, start_daemon: Callable[..., Any]
) -> None:
    """Two channels with other shares, an unused flow, another communicator that had one."""
    daemon = start_daemon()
    hooks, port = start(**daemon.environment)
    hooks("connect 9 0 1 0 0", "connect 9 0 1 1 0", "connect 9 0 3 2 0", "connect 8 0 1 0 0")
    hooks("enqueue 8 1 70000", "post 3 0 5000", "done 3 0 5000")
    shares = ((0, 900_000), (1, 600_000))
    move = [f"{what} {i} 0 {n}" for i, n in shares for what in ("post", "done")]
    for iteration in range(4):
        total = (900_000, 600_000) if iteration > 2 else (0, 0)
        assert hooks(*iterate(1)) == [iteration]
        some = (450_000, 300_000) if iteration else (0, 0)
        flows = seen(daemon, port)
        other = (5000, 5000, 5000) if iteration == 0 else (0, 0, 0)
        assert flows[0, 1, 0] == [(iteration, some[0], 0, 0, total[0]), (iteration, *other, 0)]
        assert flows[0, 1, 1] == [(iteration, some[1], 0, 0, total[1])]
        assert flows[0, 3, 2] == [(iteration, 0, 0, 0, 0)]
        hooks(*iterate(2), *move)
        whole = (900_000,) * 3
        assert seen(daemon, port)[0, 1, 0][0] == (iteration, *whole, total[0])


def test_what_is_late_counts_where_it_is_sent(
    start: Start, start_daemon: Callable[..., Any]
) -> None:
    """The application is ahead of the GPU, and the GPU of the network."""
    daemon = start_daemon()
    hooks, port = start(**daemon.environment)

    def one() -> tuple[int, ...]:
        return seen(daemon, port)[0, 1, 0][0]

    hooks("connect 9 0 1 0 0", *iterate(1, 2), "post 0 0 1000", "done 0 0 400")
    hooks(*iterate(1))
    assert one() == (1, 600 + 500, 600, 0, 0)
    hooks("post 0 0 700")  # more than was ready
    assert one() == (1, 1300, 1300, 0, 0)
    hooks(*iterate(2))
    assert one() == (1, 1600, 1300, 0, 0)
    hooks("done 0 0 600", "post 0 0 300", "done 0 0 400")
    for iteration in (2, 3):
        total = 1600 if iteration == 3 else 0
        hooks(*iterate(1))
        assert one() == (iteration, 600 + 500, 600, 0, total)
        hooks(*iterate(2), "post 0 0 1000", "done 0 0 1000")
        assert one() == (iteration, 1600, 1600, 1000, total)
    hooks("done 0 0 600")
    assert one() == (3, 1600, 1600, 1600, 1600)


def test_what_is_dealt_out_in_turns_is_never_left_over(
    start: Start, start_daemon: Callable[..., Any]
) -> None:
    """Five pieces of 1000 for two sockets: three and two, two and three."""
    daemon = start_daemon()
    hooks, port = start(**daemon.environment)
    hooks("connect 9 0 1 0 2")
    for iteration in range(8):
        hooks(*iterate(1))
        ready = 0 if iteration == 0 else 2000
        if iteration > 1:
            assert seen(daemon, port)[0, 1, 0] == [(iteration, ready, 0, 0, 0)] * 2
        for piece in range(5):
            to = 1 + (piece + iteration) % 2
            hooks(f"post 0 {to} 1000", f"done 0 {to} 1000")
        if iteration > 1:
            assert {flow[1] - flow[3] for flow in seen(daemon, port)[0, 1, 0]} == {0}


def test_the_application_says_which_iteration_it_is(
    start: Start, start_daemon: Callable[..., Any]
) -> None:
    daemon = start_daemon()
    hooks, port = start(**daemon.environment)
    hooks("connect 9 0 1 0 0", "iteration 0", *iterate(1, 1), "post 0 0 10", "done 0 0 10")
    hooks("iteration 0")  # it goes on
    assert seen(daemon, port)[0, 1, 0] == [(0, 10, 10, 10, 0)]
    hooks("iteration 5", *iterate(1))
    assert seen(daemon, port)[0, 1, 0] == [(5, 5, 0, 0, 0)]


@pytest.mark.parametrize(
    ("calls", "iterations"),
    [
        (iterate(1, 2, 3) * 3, [0, 0, 0, 1, 1, 1, 2, 2, 2]),
        (iterate(1, 2, 1, 3, 2, 1, 3, 2), [0, 0, 1, 1, 1, 2, 2, 2]),  # in any order
        (iterate(1, 2) + iterate(1, 7, 7, 2) + iterate(1, 7, 2, 1), [0, 0, 1, 1, 1, 1, 2, 2, 2, 3]),
        (iterate(9, 1, 1, 1, 1, 1, 1, 9, 9, 9), [0, 0, 1, 2, 3, 4, 5, 5, 5, 6]),  # away for long
        (["enqueue 9 1 65535"] * 3, [0, 0, 0]),  # no tensors
        (["enqueue 9 1 65536", "enqueue 8 1 65536", "enqueue 9 1 65537"], [0, 0, 0]),
        (iterate(*range(20_000)), [0] * 20_000),  # more than can be told apart
        ([*iterate(1), "iteration 7", *iterate(1, 1), "iteration 7", "iteration 3"],
         [0, 7, 7, 7, 7, 3]),
    ],
)  # fmt: skip
def test_where_iterations_begin(start: Start, calls: list[str], iterations: list[int]) -> None:
    hooks, _ = start()
    got: list[int] = []
    for i in range(0, len(calls), 100):
        got += hooks(*calls[i : i + 100])
    assert got == iterations


def test_collectives_that_come_no_more_make_room(start: Start) -> None:
    """Buffers were new each time, and are not any longer."""
    hooks, _ = start()

    def done(calls: list[str]) -> int:
        return [hooks(*calls[i : i + 100]) for i in range(0, len(calls), 100)][-1][-1]

    assert done(iterate(*range(100, 4100))) == 0
    assert done(iterate(*range(5000, 5200)) * 30) > 5  # 104 of them have no place at first
    hooks, _ = start()
    assert done(iterate(*range(1, 5001)) * 3) == 2  # 904 never have one


@pytest.mark.parametrize("call", ["enqueue 9 1 8", "poll 5000"])
def test_a_daemon_that_comes_later_is_heard_within_an_iteration(
    start: Start, start_daemon: Callable[..., Any], tmp_path: Path, call: str
) -> None:
    hooks, _ = start(FLOWSLOT_SOCKET=str(tmp_path / "later.sock"))
    hooks("connect 9 0 1 0 0")
    assert hooks("registered 0") == [0]
    daemon = start_daemon(path=str(tmp_path / "later.sock"))
    settle(lambda: hooks(call, "registered 0")[1] or None)
    if call.startswith("enqueue"):
        daemon.close()  # and one that goes
        assert hooks(call, "registered 0")[1] == 0


def test_more_sockets_than_slots_go_unreported(
    start: Start, start_daemon: Callable[..., Any]
) -> None:
    daemon = start_daemon()
    hooks, port = start(**daemon.environment)
    hooks(*(f"connect 9 0 {i} 0 64" for i in range(2)))
    hooks("connect 9 0 2 0 70", "post 2 70 5", "done 2 70 5", "close 2")  # of one connection, 64
    flows = seen(daemon, port)
    assert {key: len(found) for key, found in flows.items()} == {(0, 0, 0): 64, (0, 1, 0): 64}
