# SPDX-License-Identifier: Apache-2.0
"""The profiler, driven as NCCL drives one. Each job is a process: it keeps one record."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from waiting import settle

from flowslot_shm.layout import State, Transport

HELPERS = Path(__file__).parents[1] / "helpers"
HERE = Path(__file__).parent
VERSIONS = range(1, 7)

HEAD = """
import ctypes, os, sys
sys.path.insert(0, {helpers!r})
from nccl_profiler import *
LIBRARY, VERSION = sys.argv[1], int(sys.argv[2])
def pause(): print("ready", flush=True); sys.stdin.readline()
"""


class Job:
    """A script that plays NCCL; it waits at each `pause()`."""

    def __init__(self, library: Path, version: int, script: str, **environment: str) -> None:
        base = {k: v for k, v in os.environ.items() if not k.startswith(("FLOWSLOT_", "SLURM_"))}
        text = HEAD.format(helpers=str(HELPERS)) + script
        self.process = subprocess.Popen(
            [sys.executable, "-c", text, str(library), str(version)],
            env=base | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def until_pause(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if line != "ready\n":
            assert self.process.stderr is not None
            raise AssertionError(line + self.process.stderr.read())

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> tuple[str, str]:
        out, err = self.process.communicate("\n\n\n\n\n\n\n\n", timeout=60)
        assert self.process.returncode == 0, err
        return out, err


ITERATIONS = """
comm = Communicator(LIBRARY, VERSION, rank=2)
assert comm.mask.value == COLLECTIVE_KIND | P2P_KIND | OP_KIND | STEP_KIND
for iteration in range(4):
    one = comm.all_reduce(250_000, 0x1000)
    pause()
    two = comm.all_reduce(750_000, 0x2000)
    for loss in range(3):
        comm.all_reduce(1, 0x3000)  # no tensor: begins nothing
    pause()
    comm.send(one, [300_000, 75_000])
    comm.send(one, [500], sends=0)
    comm.send(two, [1_125_000])
    comm.stop(comm.start(GROUP_KIND))
    pause()
comm.finalize()
pause()
"""
SENT, TENSORS = 1_500_000, 4_000_012
"""Bytes of an iteration."""


def seen(daemon: Any) -> list[tuple[int, ...]]:
    """Of each flow: iteration, ready, posted, done, total."""
    (record,) = settle(lambda: list(daemon.server.records.values()))
    names = ["iteration", "ready", "posted", "done", "iteration_total"]
    slots = [slot for slot in record.reader.snapshot() if slot["state"] != State.FREE]
    assert all((slot["rank"], slot["transport"]) == (2, Transport.RDMA) for slot in slots)
    assert not record.reader.faults.any()
    return [tuple(map(int, slot[names].item())) for slot in slots]


@pytest.mark.parametrize("version", VERSIONS)
def test_tensors_are_ready_when_they_are_enqueued(
    profiler: Path, start_daemon: Callable[..., Any], version: int
) -> None:
    daemon = start_daemon()
    job = Job(profiler, version, ITERATIONS, **daemon.environment, FLOWSLOT_TOTALS="1")
    for iteration in range(4):
        total = SENT if iteration > 2 else 0
        for ready, sent in ((SENT * 1_000_000 // TENSORS, 0), (SENT, 0), (SENT, SENT)):
            job.until_pause()
            if iteration > 0:  # in the first one nothing is known
                assert seen(daemon) == [(iteration, ready, sent, sent, total)]
            job.go_on()
    settle(lambda: seen(daemon) == [] or None)
    _, said = job.end()
    assert said == (
        "flowslot: rank 2: 20 collectives, 16000048 bytes ready, at most 6900000 to send, "
        "6000000 sent, 0 operations sent more than they said\n"
    )


def test_the_job_is_named_alike_on_all_hosts(
    profiler: Path, start_daemon: Callable[..., Any]
) -> None:
    script = "comm = Communicator(LIBRARY, VERSION)\ncomm.send(comm.all_reduce(9), [9])\npause()"
    of_torch = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none"}
    for more, name in (
        (of_torch, "10.0.0.1:29500"),
        (of_torch | {"TORCHELASTIC_RUN_ID": "run7"}, "run7"),
        (of_torch | {"SLURM_JOB_ID": "4711", "TORCHELASTIC_RUN_ID": "run7"}, "4711"),
        (of_torch | {"SLURM_JOB_ID": "4711", "FLOWSLOT_JOB": "bert"}, "bert"),
    ):
        daemon = start_daemon(path=f"/tmp/flowslot-{os.getpid()}-{name[:4]}.sock")
        job = Job(profiler, 6, script, **daemon.environment, **more)
        job.until_pause()
        assert settle(lambda d=daemon: [r.job for r in d.server.records.values()]) == [name]
        job.end()


@pytest.mark.parametrize("version", VERSIONS)
def test_nothing_of_another_process_is_followed(profiler: Path, version: int) -> None:
    """With PXN events have other processes' contexts and parents; handles may come late."""
    script = """
comm = Communicator(LIBRARY, VERSION)
mine = comm.all_reduce(100)
for parent in (mine, 0x7fff00001000, 12345678, 1 << 60):
    comm.send(parent, [400], pid=1)
    comm.stop(parent)
    comm.record(parent, STEP_SENT, 4000)
comm.send(mine, [400])
context, comm.context = comm.context, c_void_p(0x7fff00001008)
assert comm.start(STEP_KIND, mine) is None
assert comm.all_reduce(100) is None
comm.send(mine, [1000])
comm.context = context
comm.finalize()
comm.finalize()  # again: nothing is left
assert comm.all_reduce(100) is None
"""
    _, said = Job(profiler, version, script, FLOWSLOT_TOTALS="1").end()
    assert "1 collectives, 400 bytes ready, at most 400 to send, 400 sent" in said


def test_sends_and_more_than_was_said(profiler: Path) -> None:
    script = """
comm = Communicator(LIBRARY, VERSION)
fields = dict(count=1000, type=b"ncclFloat32", peer=1, buffer=0x9000)
send = comm.start(P2P_KIND, None, "p2p", function=SEND, **fields)
comm.start(P2P_KIND, None, "p2p", function=RECEIVE, **fields)
op = comm.start(OP_KIND, send, "op", pid=os.getpid(), steps=1, chunk=4000, sends=1)
for size in (4000, 1):
    step = comm.start(STEP_KIND, op)
    comm.record(step, STEP_SENT, size)
    comm.record(step, STEP_SENT, size)  # said again
    comm.stop(step)
    comm.stop(step)
comm.stop(op)
comm.finalize()
"""
    _, said = Job(profiler, 6, script, FLOWSLOT_TOTALS="1").end()
    assert "1 collectives, 4000 bytes ready, at most 4000 to send, 4001 sent, 1 operations" in said


def test_an_operation_may_have_more_steps_than_are_remembered(profiler: Path) -> None:
    script = """
comm = Communicator(LIBRARY, VERSION)
comm.send(comm.all_reduce(100), [2] * 70_000)
comm.finalize()
"""
    _, said = Job(profiler, 6, script, FLOWSLOT_TOTALS="1").end()
    assert "400 bytes ready, at most 140000 to send, 140000 sent, 0 operations" in said


def test_many_communicators_come_and_go(profiler: Path) -> None:
    script = """
for round in range(3):
    comms = [Communicator(LIBRARY, VERSION, comm=i) for i in range(300)]
    assert [c.context.value is not None for c in comms] == [True] * 256 + [False] * 44
    for c in comms:
        c.send(c.all_reduce(20_000), [100])
    for c in comms:
        if c.context.value:
            c.finalize()
"""
    _, said = Job(profiler, 6, script, FLOWSLOT_TOTALS="1").end()
    assert said.count(": 1 collectives, 80000 bytes ready") == 3 * 256


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_threads_do_not_disturb_each_other(
    tmp_path: Path, start_daemon: Callable[..., Any], sanitizer: str
) -> None:
    patch = HERE.parents[1] / "nccl_patch"
    sources = [HERE / "profiler_threads.c", *(patch / "profiler").glob("*.c")]
    include = [f"-I{path}" for path in (patch, patch / "profiler", patch.parent / "shm")]
    flags = ["-std=gnu11", "-g", "-O1", "-pthread", f"-fsanitize={sanitizer}", "-Wno-tsan"]
    flags += ["-fno-sanitize-recover=undefined", "-D_GNU_SOURCE", "-Wno-stringop-overread"]
    program = tmp_path / "threads"
    subprocess.run(["gcc", *flags, *include, *sources, "-o", program], check=True)
    environment = start_daemon().environment | {"FLOWSLOT_TOTALS": "1"}
    done = subprocess.run([program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:3000]
    assert (
        done.stderr.count(": 50 collectives, 20000000 bytes ready, at most 150000 to send, 150000 ")
        == 80
    )


# ---- Beside the network plugin -------------------------------------------------------------------


def test_the_network_plugin_is_told(
    profiler: Path, tmp_path: Path, start_daemon: Callable[..., Any]
) -> None:
    source, library = tmp_path / "plugin.c", tmp_path / "libnccl-net-flowslot.so"
    source.write_text(
        "#include <stdio.h>\n"
        "int flowslot_collective(unsigned long comm, unsigned long key, unsigned long bytes) {\n"
        'printf("%lu %d %lu\\n", comm, key != 0, bytes); fflush(stdout); return 1; }\n'
    )
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    daemon = start_daemon()
    script = f"""
ctypes.CDLL({str(library)!r})  # as NCCL does: its symbols are seen by nobody else
comm = Communicator(LIBRARY, VERSION, comm=5)
comm.send(comm.all_reduce(250), [300])
comm.send(comm.all_reduce(1000), [1300])
comm.finalize()
"""
    out, said = Job(profiler, 6, script, **daemon.environment, FLOWSLOT_TOTALS="1").end()
    assert out == "5 1 1000\n5 1 4000\n"
    assert "2 collectives, 5000 bytes ready, at most 1600 to send, 1600 sent" in said
    assert not daemon.server.records and not daemon.left  # the plugin keeps the record


def test_a_plugin_that_is_loaded_and_not_used_changes_nothing(
    profiler: Path, library: Path, start_daemon: Callable[..., Any]
) -> None:
    """NCCL keeps a plugin that has declined, or that NCCL_NET passes over."""
    daemon = start_daemon()
    script = f"ctypes.CDLL({str(library)!r})\n" + ITERATIONS
    job = Job(profiler, 6, script, **daemon.environment)
    for _ in range(3):
        job.until_pause()
        job.go_on()
    job.until_pause()
    assert [flow[0] for flow in seen(daemon)] == [1]
    job.end()


# ---- Another profiler ----------------------------------------------------------------------------

CHAIN = """
comm = Communicator(LIBRARY, VERSION)
print(comm.mask.value)
group = comm.start(GROUP_KIND)
if VERSION >= 5:
    comm.stop(comm.start(1 << 9, group))
fields = dict(function=ALL_REDUCE, type=b"ncclInt8", count=9)
one = comm.start(COLLECTIVE_KIND, group, "collective", **fields)
comm.stop(one)
comm.send(one, [7])
comm.finalize()
"""


def chained(folder: Path, version: int) -> Path:
    library = folder / f"other{version}.so"
    command = ["gcc", "-shared", "-fPIC", f"-DVERSION={version}", "-o", library]
    subprocess.run([*command, HERE / "chained.c"], check=True)
    return library


@pytest.mark.parametrize(("version", "theirs"), [(v, v) for v in VERSIONS] + [(6, 5)])
def test_another_profiler_hears_all(
    profiler: Path, tmp_path: Path, version: int, theirs: int
) -> None:
    log = tmp_path / "log"
    job = Job(
        profiler,
        version,
        CHAIN,
        FLOWSLOT_NCCL_PROFILER=str(chained(tmp_path, theirs)),
        CHAINED=str(log),
    )
    out, said = job.end()
    assert (out, said) == ("543\n" if version >= 5 else "31\n", "")
    i = 1003 if version >= 5 else 1002
    states = (
        [f"state 9 of {i + 2}: 7", f"stop {i + 2}"]
        if version >= 4
        else [
            f"state 0 of {i + 1}: 500",
            f"state 2 of {i + 1}: {500 if version == 1 else 507}",
            f"stop {i + 2}",
            f"state 3 of {i + 1}: 507",
        ]
    )
    assert log.read_text().splitlines() == [
        "init",
        *(["comm 77"] if version >= 5 else []),
        "start 1 parent 0 as 1001",
        *(["start 512 parent 1001 as 1002", "stop 1002"] if version >= 5 else []),
        f"start 2 parent 1001 as {i}",
        f"stop {i}",
        f"start 8 parent {i} as {i + 1}",
        f"start 16 parent {i + 1} as {i + 2}",
        *states,
        f"stop {i + 1}",
        "finalize",
    ]


@pytest.mark.parametrize(
    ("theirs", "problem"),
    [
        ("/nonexistent.so", "cannot open shared object file"),
        ("older", "has no ncclProfiler_v6, which this NCCL speaks"),
        ("itself", "is flowslot's own: name the other profiler"),
        ("fails", "chained: init failed with 3"),
    ],
)
def test_without_another_profiler_everything_goes_on(
    profiler: Path, tmp_path: Path, theirs: str, problem: str
) -> None:
    environment = {"CHAINED": str(tmp_path / "log"), "FLOWSLOT_TOTALS": "1"}
    path = {"older": chained(tmp_path, 4), "itself": profiler, "fails": chained(tmp_path, 6)}
    if theirs == "fails":
        environment["CHAINED_FAILS"] = "1"
    environment["FLOWSLOT_NCCL_PROFILER"] = str(path.get(theirs, theirs))
    _, said = Job(profiler, 6, CHAIN, **environment).end()
    first, *rest = said.splitlines()
    assert first.startswith("flowslot: FLOWSLOT_NCCL_PROFILER: ") and problem in first
    assert len(rest) == 1 and "1 collectives, 9 bytes ready, at most 7 to send, 7 sent" in rest[0]
