# SPDX-License-Identifier: Apache-2.0
"""What patched ps-lite reports is what its application has sent, to the byte, on data connections
only."""

import itertools
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from registering import Registrar
from waiting import settle

from flowslot_shm.layout import Role, Transport

from .conftest import ROOT, SCHEDULER, PsJob, pairs, training, used

VALUE, KEYS, REPEAT = 100_000, 10, 20
"""Bytes of a key's value, keys per server, iterations after the first one, which only pushes."""
SERVERS, WORKERS = (8, 10), (9, 11)
MODES = {"push and pull": 1, "push": 2}


def benchmark(mode: str, repeat: int = REPEAT, **more: Any) -> PsJob:
    environment = {"NUM_KEY_PER_SERVER": str(KEYS)} | more.pop("environment", {})
    return PsJob("test_benchmark", (VALUE, repeat, MODES[mode]), environment=environment, **more)


def expected(
    mode: str, each: int = VALUE * KEYS, repeat: int = REPEAT
) -> dict[tuple[int, int], tuple[int, int, int, int]]:
    """See PsJob.totals. `each`: bytes of an iteration, from a worker to a server."""
    found = {}
    for worker, server in itertools.product(WORKERS, SERVERS):
        pulls = repeat if mode == "push and pull" else 0
        found[worker, server] = (repeat, *[each * (repeat + 1)] * 3)
        found[server, worker] = (pulls, *[each * pulls] * 3)
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("variant", ["flowslot", "flowslot-calm"])
def test_totals_are_the_applications_without_a_daemon(variant: str, mode: str) -> None:
    with benchmark(mode, variant=variant) as job:
        assert job.wait() == [0] * 5, job.said
        assert job.totals() == expected(mode)


def test_totals_of_thousands_of_keys() -> None:
    keys = {"NUM_KEY_PER_SERVER": "3000"}
    with PsJob("test_benchmark", (1000, 3, MODES["push and pull"]), environment=keys) as job:
        assert job.wait() == [0] * 5, job.said
        assert job.totals() == expected("push and pull", 1000 * 3000, 3)


@pytest.mark.parametrize("congestion_control", ["", "reno", "nonexistent"])
def test_totals_are_the_applications_with_a_daemon(
    start_daemon: Callable[..., Registrar], congestion_control: str
) -> None:
    daemon = start_daemon(congestion_control)
    environment = daemon.environment | {"FLOWSLOT_JOB": "bert"}
    with benchmark("push and pull", environment=environment) as job:
        assert job.wait() == [0] * 5, job.said
        assert job.totals() == expected("push and pull")
    settle(lambda: len(daemon.left) >= 4, 10)
    jobs = [(record.job, record.rank) for record in daemon.left]
    assert sorted(jobs) == [("bert", node) for node in sorted((*SERVERS, *WORKERS))]


def test_a_job_has_one_name_however_its_nodes_spell_the_scheduler(
    start_daemon: Callable[..., Registrar],
) -> None:
    daemon = start_daemon()
    spelled = {"DMLC_PS_ROOT_URI": "localhost"}
    with benchmark("push", environment=daemon.environment, of_workers=spelled) as job:
        assert job.wait() == [0] * 5, job.said
    settle(lambda: len(daemon.left) >= 4, 10)
    assert {record.job for record in daemon.left} == {f"pslite-{SCHEDULER}-{job.port}"}


@pytest.mark.root
def test_data_connections_are_enlisted_and_no_others(
    start_daemon: Callable[..., Registrar],
) -> None:
    daemon = start_daemon("reno")  # not what connections have by default
    with benchmark("push and pull", repeat=10**6, environment=daemon.environment) as job:
        settle(
            lambda: (
                len(used(daemon.server)) == 8 and job.sockets("reno") == pairs(used(daemon.server))
            ),
            60,
        )
        slots, found = used(daemon.server), job.sockets()
        assert pairs(slots, "rank", "peer") == set(expected("push")) and len(slots) == 8
        for slot in slots:
            role = Role.PUSH if slot["rank"] in WORKERS else Role.PULL
            assert (slot["role"], slot["transport"]) == (role, Transport.TCP)
        mine = pairs(slots)
        assert {(there, here) for here, there in mine} == mine  # each from both ends
        assert mine < found
        assert job.sockets("reno") == mine
        scheduled = {ports for ports in found if job.port in ports}
        assert scheduled and not scheduled & mine


def test_a_record_follows_iterations(start_daemon: Callable[..., Registrar]) -> None:
    daemon = start_daemon()
    seen: dict[tuple[int, int], list[tuple[int, ...]]] = {}

    def look() -> bool:
        """On a busy machine looks are rare, and each may be at a beginning."""
        for slot in used(daemon.server):
            counts = ("iteration", "ready", "posted", "done", "iteration_total")
            row = tuple(int(slot[name]) for name in counts)
            seen.setdefault((int(slot["rank"]), int(slot["peer"])), []).append(row)
        # Nothing had to be put right.
        records = list(daemon.server.records.values())  # another thread adds some
        assert not any(record.reader.faults.any() for record in records)
        return bool(seen) and all(
            rows[-1][0] >= 20 and np.max(rows, axis=0)[1:4].all() for rows in seen.values()
        )

    with benchmark("push and pull", repeat=10**6, environment=daemon.environment):
        settle(look, 30)
    assert set(seen) == set(expected("push"))
    each = VALUE * KEYS
    for rows in seen.values():
        for iteration, ready, posted, done, total in rows:
            # What the iteration before has left counts, too.
            assert done <= posted <= ready < 2 * each
            if iteration > 2:  # the last two had the same
                assert each <= total < 2 * each


@pytest.mark.parametrize("variant", ["flowslot", "flowslot-calm"])
def test_servers_forget_a_worker_that_died_while_nothing_was_under_way(
    start_daemon: Callable[..., Registrar], variant: str
) -> None:
    """Otherwise ps-lite's servers abort."""
    daemon = start_daemon()

    def connections() -> set[tuple[int, int]]:
        """Of servers, to workers."""
        return {it for it in pairs(used(daemon.server), "rank", "peer") if it[0] in SERVERS}

    with training(variant, compute_s=4, environment=daemon.environment) as job:
        assert job.says("iteration")
        assert connections() == set(itertools.product(SERVERS, WORKERS))
        time.sleep(1)
        os.kill(job.pids[-1], signal.SIGKILL)
        settle(lambda: daemon.left and len(connections()) <= 2, 5)
        (left,) = (worker for worker in WORKERS if worker != daemon.left[0].rank)
        assert connections() == {(server, left) for server in SERVERS}
        assert not job.ended()


@pytest.mark.parametrize("daemon_is_there", [False, True])
def test_its_endless_program_goes_on(
    start_daemon: Callable[..., Registrar], daemon_is_there: bool
) -> None:
    """It says so after every ten rounds, and leaves its shared memory behind when it is killed."""
    before = set(Path("/dev/shm").glob("BytePS_ShM_*"))
    environment = {"NUM_KEY_PER_SERVER": "4"}
    if daemon_is_there:
        environment |= start_daemon("reno").environment
    try:
        one_each = PsJob("test_ipc_benchmark", (VALUE,), 1, 1, environment=environment)
        with one_each as job:  # with more, unpatched ps-lite's aborts, too
            assert all(job.says("Application goodput") for _ in range(3))
    finally:
        for left in set(Path("/dev/shm").glob("BytePS_ShM_*")) - before:
            left.unlink()


@pytest.fixture(scope="session")
def with_asan() -> str:
    """The patched ps-lite under AddressSanitizer. Half a minute, the first time."""
    subprocess.run([ROOT / "pslite_patch" / "build.sh", "--asan", "flowslot-calm"], check=True)
    return "flowslot-calm-asan"


@pytest.mark.timeout(400)
@pytest.mark.parametrize("congestion_control", [None, "", "reno"])
def test_address_sanitizer_finds_nothing_of_ours(
    with_asan: str, start_daemon: Callable[..., Registrar], congestion_control: str | None
) -> None:
    """ps-lite itself leaks at its end; and its benchmark's mode 1 keeps addresses of variables that
    have gone, so modes 0 and 2 are run here."""
    environment = {"NUM_KEY_PER_SERVER": "4", "ASAN_OPTIONS": "exitcode=0"}
    if congestion_control is not None:
        environment |= start_daemon(congestion_control).environment
    programs = [("test_benchmark", (VALUE, 10, mode)) for mode in (0, 2)]
    for program, arguments in [*programs, ("test_sparse_benchmark", (VALUE, VALUE // 2, 5))]:
        binary = ROOT / "build" / "pslite" / with_asan / "tests" / program
        assert b"__asan_init" in binary.read_bytes()
        with PsJob(program, arguments, variant=with_asan, environment=environment) as job:
            assert job.wait() == [0] * 5, job.said
            assert len(job.totals()) == 8
        for text in job.said:
            assert "ERROR: AddressSanitizer" not in text
            assert "flowslot_ps::" not in text  # in no stack of a leak either
