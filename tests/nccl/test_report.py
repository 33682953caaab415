# SPDX-License-Identifier: Apache-2.0
"""What the daemon's own reader finds in the plugin's records."""

import os
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from registering import Registrar

from flowslot_shm.layout import Message, Role, State

from .conftest import Pair, arguments, build, compile_pair, environment

SIZE, COUNT = 500_000, 6
LANES = {"NCCL_SOCKET_NTHREADS": "0", "NCCL_NSOCKS_PERTHREAD": "2"}
Start = Callable[..., Registrar]
long = pytest.mark.skipif("NCCL_CHECK" not in os.environ, reason="`make nccl-check` runs it")
Seen = dict[tuple[int, int], dict[int, Any]]  # slot of a process: iteration: last state


@pytest.fixture
def watch(library: Path, program: Path) -> Callable[..., Seen]:
    """Runs a pair and looks at its records all the while, or at those slots that are `wanted`."""

    def run(
        daemon: Registrar,
        settings: dict[str, str],
        wanted: Callable[[Any], bool] = lambda slot: bool(slot["state"]),
        version: int = 12,
        **values: object,
    ) -> Seen:
        seen: Seen = {}
        command = [program, library, str(version), *arguments(values)]
        env = environment(settings | daemon.environment)
        with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL) as process:
            while process.poll() is None:
                for record in list(daemon.server.records.values()):
                    for number, slot in enumerate(record.reader.snapshot()):
                        if wanted(slot):
                            of = seen.setdefault((record.id, number), {})
                            of[int(slot["iteration"])] = slot.copy()
                    assert not record.reader.faults.any()
        assert process.returncode == 0
        return seen

    return run


def senders(seen: Seen) -> Seen:
    return {key: of for key, of in seen.items() if _last(of)["role"] == Role.RING}


def _last(of: dict[int, Any]) -> Any:
    return of[max(of)]


@pytest.mark.parametrize("late", [0, 400])
def test_ranks_and_peers_are_known(
    start_daemon: Start, watch: Callable[..., Seen], late: int
) -> None:
    """Those of a process that begins later, too: its peer does not wait for it."""
    settings = LANES | {"FLOWSLOT_JOB": "me"}
    seen = watch(start_daemon(), settings, size=SIZE, late=late, rest=200)
    names = ["role", "rank", "peer", "channel"]
    edges = {s[names].item() for s in map(_last, seen.values())}
    assert edges == {(role, a, 1 - a, 0) for role in (Role.RING, Role.RECEIVE) for a in (0, 1)}
    assert len(senders(seen)) == 2 * 2
    assert {bytes(_last(of)["job"]) for of in seen.values()} == {b"me"}


def test_sent_is_reported_to_the_byte(start_daemon: Start, watch: Callable[..., Seen]) -> None:
    run = {"size": SIZE, "count": COUNT, "iterations": 5, "pause": 100, "tell": 1, "rest": 300}
    seen = senders(watch(start_daemon(), LANES, **run, meet=1))
    for process in {process for process, _ in seen}:
        mine = [of for (owner, _), of in seen.items() if owner == process]
        last = [_last(of) for of in mine]
        assert {int(slot["iteration"]) for slot in last} == {104}
        for field in ("ready", "posted", "done", "iteration_total"):
            assert sum(int(slot[field]) for slot in last) == SIZE * COUNT


def test_a_flow_rings_twice_for_an_iteration(
    start_daemon: Start, watch: Callable[..., Seen]
) -> None:
    iterations = 12
    daemon = start_daemon()
    run = {"size": SIZE, "count": COUNT, "iterations": iterations, "pause": 100, "tell": 1}
    seen = senders(watch(daemon, LANES, **run, verify=0, rest=200))
    rung = Counter((record, slot, kind) for record, slot, kind in daemon.bells)
    for flow in seen:
        assert rung[*flow, Message.BEGIN] <= iterations
        assert rung[*flow, Message.END] <= iterations + 1  # closing


@pytest.mark.parametrize("how", ["told", "bytes", "collectives", "pauses"])
def test_iterations_are_counted(start_daemon: Start, watch: Callable[..., Seen], how: str) -> None:
    iterations = 20
    settings = {"FLOWSLOT_ITERATION_BYTES": str(SIZE * COUNT)} if how == "bytes" else {}
    run = {"size": SIZE, "count": COUNT, "iterations": iterations, "verify": 0, "rest": 200}
    run["meet"] = 1  # else a busy machine's late bytes count to the next iteration
    if how == "collectives":
        run["enqueue"] = 0
    pause = {"pauses": 150, "collectives": 1}.get(how, 10)
    seen = senders(watch(start_daemon(), settings, **run, pause=pause, tell=int(how == "told")))
    last = iterations - 1 + 100 * (how == "told")
    for of in seen.values():
        numbers = sorted(of)
        assert numbers[-1] >= last
        if how in {"told", "bytes"}:  # else a busy machine's pauses may end some of the first, too
            assert numbers[-1] == last
        # Known from the third on: announced as a whole.
        known = {number: int(of[number]["iteration_total"]) for number in numbers[-8:]}
        assert set(known.values()) <= {SIZE * COUNT}, known


@long
def test_all_iterations_are_right_that_the_application_tells(
    start_daemon: Start, watch: Callable[..., Seen]
) -> None:
    """From the fourth on: by then what one sends is known."""
    iterations = 200
    run = {"size": SIZE, "count": COUNT, "iterations": iterations, "pause": 40, "tell": 1}
    seen = senders(watch(start_daemon(), LANES, **run, meet=1, verify=0, rest=300))
    for process in {process for process, _ in seen}:
        mine = [of for (owner, _), of in seen.items() if owner == process]
        for number in range(103, 100 + iterations):
            for name in ("ready", "posted", "done", "iteration_total"):
                assert sum(int(of[number][name]) for of in mine) == SIZE * COUNT


@pytest.mark.parametrize("version", [10, 12])
def test_tensors_are_ready_when_they_are_enqueued(
    start_daemon: Start, watch: Callable[..., Seen], version: int
) -> None:
    run = {"size": SIZE, "count": COUNT, "iterations": 12, "enqueue": 100, "verify": 0}
    run["meet"] = 1  # else a busy machine's late bytes count to the next iteration
    daemon, one = start_daemon(), LANES | {"NCCL_NSOCKS_PERTHREAD": "1"}
    seen = watch(daemon, one, lambda slot: slot["ready"] > slot["posted"] == 0, version, **run)
    assert len(seen) == 2
    for of in seen.values():
        # One iteration tells what a tensor sends; the next one begins with it. In the first, what a
        # lane was given may be seen before the kernel has any. Who reads late sees an iteration
        # before all of its tensors are enqueued. A busy machine's pauses may end some of the first:
        # what is said then is less until four whole ones have come.
        first = of.pop(0, None)
        assert first is None or first["iteration_total"] == 0
        ready = [int(slot["ready"]) for slot in of.values()]
        assert ready.count(SIZE * COUNT) >= 3 and max(ready) == SIZE * COUNT
        assert not any(each % SIZE for each in ready)
        assert {int(slot["state"]) for slot in of.values()} == {State.ACTIVE}


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"SLURM_JOB_ID": "17", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, b"17"),
        ({"TORCHELASTIC_RUN_ID": "run", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, b"run"),
        ({"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, b"a:1"),
        ({"FLOWSLOT_JOB": "mine", "SLURM_JOB_ID": "17"}, b"mine"),
    ],
)
def test_a_job_has_the_same_name_everywhere(
    start_daemon: Start, watch: Callable[..., Seen], settings: dict[str, str], name: bytes
) -> None:
    seen = watch(start_daemon(), settings, size=SIZE, rest=200)
    assert {bytes(_last(of)["job"]) for of in seen.values()} == {name}


def test_communicators_of_the_same_ranks_are_told_apart(
    start_daemon: Start, watch: Callable[..., Seen]
) -> None:
    """By channels that both ends have in common. The second one sends twice as much."""
    run = {"size": SIZE, "count": COUNT, "iterations": 5, "pause": 100, "tell": 1, "rest": 300}
    seen = watch(start_daemon(), LANES, **run, comms=2, groups=2)
    sums: dict[tuple[int, int], Counter[str]] = {}
    for of in senders(seen).values():
        slot = _last(of)
        assert slot["iteration"] == 104
        to = sums.setdefault((int(slot["rank"]), int(slot["channel"])), Counter())
        for field in ("ready", "posted", "done", "iteration_total"):
            to[field] += int(slot[field])
    (other,) = {channel for _, channel in sums if channel != 0}
    assert other % 1024 == 0
    for rank in (0, 1):
        for channel, times in ((0, 1), (other, 2)):
            assert set(sums[rank, channel].values()) == {SIZE * COUNT * times}
    receivers = [_last(of) for of in seen.values() if _last(of)["role"] == Role.RECEIVE]
    assert sorted(int(slot["channel"]) for slot in receivers) == [0, 0, other, other]


def test_set_up_messages_are_not_reported(start_daemon: Start, watch: Callable[..., Seen]) -> None:
    """NCCL's own come without an event, as pair.c's all do. With a timeout of 1 s the plugin looks
    at all connections every 50 ms."""
    settings = {"NCCL_OOB_NET_ENABLE": "1", "FLOWSLOT_NCCL_TIMEOUT": "1"}
    assert not watch(start_daemon(), settings, size=SIZE, rest=300)


def test_no_daemon_no_harm_fail_open(pair: Pair) -> None:
    got = pair(12, LANES | {"FLOWSLOT_TOTALS": "1"}, size=SIZE, count=COUNT)
    assert f"{SIZE * COUNT} bytes, {SIZE * COUNT} done" in got.said


@long
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("how", [{"tell": 1}, {"enqueue": 3}, {"pause": 40}])
def test_reports_under_sanitizers(
    start_daemon: Start, tmp_path: Path, how: dict[str, int], threads: int, sanitizer: str
) -> None:
    library = build(sanitizer)
    program = compile_pair(tmp_path / "pair", f"-fsanitize={sanitizer}", "-g")
    run: dict[str, object] = {
        "size": 300_000,
        "count": COUNT,
        "iterations": 10,
        "comms": 2,
        "rest": 100,
    } | how
    lanes = LANES | {"NCCL_SOCKET_NTHREADS": str(threads)}
    done = subprocess.run(
        [program, library, "12", *arguments(run)],
        env=environment(lanes | start_daemon().environment),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0 and "Sanitizer" not in done.stderr, done.stderr
