# SPDX-License-Identifier: Apache-2.0
"""Real ps-lite jobs beside each other: what is seen of them, and what becomes of the others when
one comes to harm."""

import itertools
import os
import signal
from collections.abc import Callable, Iterator

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

from flowslot_lab.runner import LiveRun, expected_bytes
from flowslot_lab.state import RunState
from flowslot_scenario.scenario import Scenario

from .conftest import SCENARIOS, Quiet
from .test_fail_open import controls, wait

pytestmark = [pytest.mark.root, pytest.mark.timeout(180)]
ITERATIONS = 20
Start = Callable[..., LiveRun]
TWO_JOBS = SCENARIOS / "pslite-two-jobs.toml"
SHARE = 1_500_000
"""What a worker of these jobs sends to each server in an iteration, and gets back."""


@pytest.fixture
def start(nothing_left: None, state: RunState) -> Iterator[Start]:
    running: list[LiveRun] = []

    def run(*changes: str, policy: str = "stagger") -> LiveRun:
        live = LiveRun(scenario(TWO_JOBS, *changes), state, policy, ITERATIONS, use_switch=True)
        live.__enter__()
        running.append(live)
        return live

    yield run
    for live in running:
        live.close()


def verified(live: LiveRun, job: str) -> None:
    """All of a job's bytes were checked by who received them."""
    alone: Scenario = live.scenario.model_copy(
        update={"jobs": tuple(it for it in live.scenario.jobs if it.name == job)}
    )
    done = sum(report.verified_bytes for report in live.jobs.reports(alone.jobs[0]))
    assert done == expected_bytes(alone, live.scenario.warmup + live.iterations)


def test_what_is_ready_sent_and_acknowledged_is_seen_as_it_happens(start: Start) -> None:
    live = start(policy="fair")
    seen: dict[tuple[object, ...], list[tuple[int, ...]]] = {}
    counts = ("iteration", "ready_bytes", "sent_bytes", "acked_bytes")
    for _ in live.follow(Quiet()):
        for host, job in itertools.product(("h1", "h2", "h3", "h4", "h5"), "ab"):
            for flow in progress(live, host, job):
                key = (job, host, flow["role"], flow["destination"].partition(":")[0])
                seen.setdefault(key, []).append(tuple(flow[name] for name in counts))
    address = {name: f"10.78.0.{i + 1}" for i, name in enumerate(("h1", "h2", "h3", "h4", "h5"))}
    expected = {
        key
        for job, workers in (("a", ("h3", "h4")), ("b", ("h3", "h5")))
        for at, server in itertools.product(workers, ("h1", "h2"))
        for key in (
            (job, at, "push", address[server]),
            (job, server, "pull", address[at]),
        )
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
    for job in "ab":
        verified(live, job)


@pytest.mark.parametrize("library", ["flowslot-calm", "calm"])
def test_data_connections_are_paced_whoever_speaks_for_them(start: Start, library: str) -> None:
    live = start(f"jobs.library={library}")
    follow = live.follow(Quiet())
    hosts = ("h1", "h2", "h3", "h4", "h5")
    flows = {"h1": 4, "h2": 4, "h3": 4, "h4": 2, "h5": 2}

    def known() -> bool:
        return all(
            sum(flow["rate"] is not None for job in "ab" for flow in progress(live, host, job))
            == flows[host]
            for host in hosts
        )

    wait(follow, "all flows are paced", known)
    for host in hosts:
        assert len([name for name in controls(live, host) if name.startswith("fs_")]) == 1
        status = live.plane.ask(host, "status")
        processes = {"h1": 2, "h2": 2, "h3": 2, "h4": 1, "h5": 1}[host]  # without schedulers
        assert status["records"]["registered"] == (processes if library == "flowslot-calm" else 0)
    for _ in follow:
        pass
    for job in "ab":
        verified(live, job)


def test_fail_open_worker_killed_in_mid_iteration(start: Start) -> None:
    live = start()
    follow = live.follow(Quiet())
    wait(follow, "it is in the middle of an iteration", lambda: in_mid_iteration(live))
    live.jobs.give_up(next(job for job in live.scenario.jobs if job.name == VICTIM))
    os.kill(worker(live, VICTIM, ALONE), signal.SIGKILL)
    wait(follow, "its reservation is gone", lambda: reserved(live) == 0)
    wait(follow, "its flows are gone", lambda: not progress(live, ALONE, VICTIM))
    assert live.plane.ask(ALONE, "status")["records"]["registered"] == 0
    for _ in follow:
        pass
    verified(live, OTHER)
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
    for job in "ab":
        verified(live, job)  # what its record says is nothing that the job itself goes by
    for host in ("h3", "h5"):
        status = live.plane.ask(host, "status")
        assert status["records"]["faulty_slots"] > 0
    assert {flow["role"] for flow in progress(live, "h3", OTHER)} == {"push"}
    for host in live.plane.daemons:
        assert live.plane.ask(host, "status")["errors"] == {}
    assert all(record_of(pid) for pid in victims)
