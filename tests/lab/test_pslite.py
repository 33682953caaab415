# SPDX-License-Identifier: Apache-2.0
"""Real ps-lite jobs beside each other: what is seen of them, and what becomes of the others when
one comes to harm."""

import itertools
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from bench.harm import (
    ALONE,
    OTHER,
    VICTIM,
    Vandal,
    in_mid_iteration,
    progress,
    record_of,
    reserved,
    scenario,
    worker,
)

from flowslot_lab.runner import LiveRun
from flowslot_lab.state import RunState

from .conftest import SCENARIOS, Quiet
from .test_fail_open import controls, finish, wait

pytestmark = [pytest.mark.root, pytest.mark.timeout(180)]
ITERATIONS = 20
Start = Callable[..., LiveRun]
TWO_JOBS = SCENARIOS / "pslite-two-jobs.toml"
SHARE = 1_500_000
"""What a worker of these jobs sends to each server in an iteration, and gets back."""


@pytest.fixture
def start(nothing_left: None, state: RunState) -> Iterator[Start]:
    with ExitStack() as stack:

        def run(*changes: str, policy: str = "stagger") -> LiveRun:
            jobs = scenario(TWO_JOBS, *changes)
            return stack.enter_context(LiveRun(jobs, state, policy, ITERATIONS, use_switch=True))

        yield run


def test_what_is_ready_sent_and_acknowledged_is_seen_as_it_happens(start: Start) -> None:
    live = start(policy="fair")
    seen: dict[tuple[object, ...], list[tuple[int, ...]]] = {}
    counts = ("iteration", "ready_bytes", "sent_bytes", "acked_bytes")
    follow = live.follow(Quiet())
    for _ in follow:
        for host, job in itertools.product(live.plane.daemons, "ab"):
            for flow in progress(live, host, job):
                key = (job, host, flow["role"], flow["destination"].partition(":")[0])
                seen.setdefault(key, []).append(tuple(flow[name] for name in counts))
    address = {name: f"10.78.0.{i + 1}" for i, name in enumerate(live.plane.daemons)}
    expected = {
        key
        for job, workers in (("a", ("h3", "h4")), ("b", ("h3", "h5")))
        for at, server in itertools.product(workers, ("h1", "h2"))
        for key in ((job, at, "push", address[server]), (job, server, "pull", address[at]))
    }
    assert set(seen) == expected
    for rows in seen.values():
        assert [row[0] for row in rows] == sorted(row[0] for row in rows)
        assert rows[-1][0] >= ITERATIONS
        for _, ready, sent, acked in rows:
            assert acked <= sent <= ready < 2 * SHARE
        assert any(0 < row[3] < SHARE for row in rows)  # on its way
        assert (SHARE, SHARE, SHARE) in {row[1:] for row in rows}  # and there, to the byte
    for host in live.plane.daemons:
        assert live.plane.ask(host, "status")["records"]["faulty_slots"] == 0
    finish(live, follow)


@pytest.mark.parametrize("library", ["flowslot-calm", "calm"])
def test_data_connections_are_paced_whoever_speaks_for_them(start: Start, library: str) -> None:
    live = start(f"jobs.library={library}")
    follow = live.follow(Quiet())
    processes = {"h1": 2, "h2": 2, "h3": 2, "h4": 1, "h5": 1}  # without schedulers
    flows = {host: 2 * count for host, count in processes.items()}

    def paced(host: str) -> int:
        shown = [flow for job in "ab" for flow in progress(live, host, job)]
        return sum(flow["rate"] is not None for flow in shown)

    wait(follow, "all flows are paced", lambda: {host: paced(host) for host in flows} == flows)
    for host, count in processes.items():
        assert len([name for name in controls(live, host) if name.startswith("fs_")]) == 1
        status = live.plane.ask(host, "status")
        assert status["records"]["registered"] == (count if library == "flowslot-calm" else 0)
    finish(live, follow)


def test_fail_open_worker_killed_in_mid_iteration(start: Start) -> None:
    live = start()
    follow = live.follow(Quiet())
    wait(follow, "it is in the middle of an iteration", lambda: in_mid_iteration(live))
    live.jobs.give_up(next(job for job in live.scenario.jobs if job.name == VICTIM))
    os.kill(worker(live, VICTIM, ALONE), signal.SIGKILL)
    wait(follow, "its reservation is gone", lambda: reserved(live) == 0)
    wait(follow, "its flows are gone", lambda: not progress(live, ALONE, VICTIM))
    assert live.plane.ask(ALONE, "status")["records"]["registered"] == 0
    finish(live, follow, but=VICTIM)
    for host in live.plane.daemons:
        assert live.plane.ask(host, "status")["errors"] == {}


def test_fail_open_random_bytes_in_a_live_record(start: Start) -> None:
    live = start()
    follow = live.follow(Quiet())
    wait(follow, "both send", lambda: all(progress(live, "h3", job) for job in "ab"))
    victims = [worker(live, VICTIM, "h3"), worker(live, VICTIM, ALONE)]
    vandals = [Vandal(pid, seed) for seed, pid in enumerate(victims)]
    for _ in follow:
        for vandal in vandals:
            vandal.write(0.05)
    finish(live, follow)  # what its record says is nothing that the job itself goes by
    for host in ("h3", "h5"):
        assert live.plane.ask(host, "status")["records"]["faulty_slots"] > 0
    assert {flow["role"] for flow in progress(live, "h3", OTHER)} == {"push"}
    for host in live.plane.daemons:
        assert live.plane.ask(host, "status")["errors"] == {}
    assert all(record_of(pid) for pid in victims)
