# SPDX-License-Identifier: Apache-2.0
"""Real job processes over the loopback interface, without the lab's network."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from waiting import settle

from flowslot_lab.content import Content, CorruptionError
from flowslot_lab.job import compute_ns
from flowslot_lab.jobspec import JobSpec
from flowslot_lab.pslite import environment

ITERATIONS = 4
Start = Callable[..., list[subprocess.Popen[str]]]


def make_spec(kind: str, rank: int, ranks: int, **changes: Any) -> JobSpec:
    servers = {"ring": 0, "ps": 1, "pslite": 2}[kind]
    scheduler = kind == "pslite"
    values: dict[str, Any] = {
        "job": "j",
        "kind": kind,
        "rank": rank,
        "workers": ranks - servers - scheduler,
        "servers": servers,
        "addresses": tuple(f"127.0.0.{i + 1}" for i in range(ranks)),
        "port": 0,
        "sockets": 2,
        "slices": 3,
        "slice_bytes": 5000,
        "barrier": False,
        "compute_s": 0.001,
        "jitter": 0.02,
        "seed": 1,
        "iterations": ITERATIONS,
        "start_s": 0.0,
        "register": "",
        "library": "flowslot-calm",
    }
    return JobSpec(**{**values, **changes})


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    processes: list[subprocess.Popen[str]] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        unused_port = server.getsockname()[1]

    def run(specs: list[dict[str, Any]], kind: str) -> list[subprocess.Popen[str]]:
        for rank, changes in enumerate(specs):
            path = tmp_path / f"{rank}.json"
            spec = make_spec(kind, rank, len(specs), port=unused_port, **changes)
            spec.write(path)
            command = [sys.executable, "-m", "flowslot_lab.job", str(path)]
            pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
            env = os.environ | (environment(spec) if kind == "pslite" else {})
            processes.append(subprocess.Popen(command, text=True, env=env, **pipes))
        for process in processes:
            assert json.loads(process.stdout.readline()) == {"event": "ready"}
        for process in processes:
            process.stdin.write(f"{time.monotonic_ns()}\n")
            process.stdin.flush()
        return processes

    yield run
    for process in processes:
        process.kill()
        process.communicate()


def reports(processes: list[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    found = []
    for process in processes:
        for line in process.stdout:
            event = json.loads(line)
            if event["event"] == "done":
                found.append(event)
                break
        else:
            pytest.fail(process.stderr.read())
    return found


EACH = ITERATIONS * 2 * 3 * 5000
"""Of the slices of all sockets; of six keys of ps-lite."""
PSLITE = [EACH] * 3 + [3 * EACH // 2] * 2 + [0]
"""Three workers, two servers of three keys each, of what all workers push; a scheduler."""


@pytest.mark.parametrize(
    ("kind", "workers", "changes", "verified"),
    [
        *(("ring", n, {}, [2 * (n - 1) * EACH] * n) for n in (2, 3, 4)),
        *(("ps", 3, {"barrier": it}, [EACH] * 3 + [3 * EACH]) for it in (False, True)),
        *(
            ("pslite", 3, {"library": it, "slices": 6}, PSLITE)
            for it in ("flowslot-calm", "flowslot", "calm", "upstream")
        ),
    ],
)
def test_every_byte_is_verified(
    start: Start, kind: str, workers: int, changes: dict[str, Any], verified: list[int]
) -> None:
    done = reports(start([changes] * len(verified), kind))
    assert [report["verified_bytes"] for report in done] == verified
    others = len(verified) - workers
    assert [len(report["ends"]) for report in done] == [ITERATIONS] * workers + [0] * others
    assert [report["trace"][-1][1] for report in done[:workers]] == verified[:workers]


@pytest.mark.parametrize(("kind", "ranks"), [("ring", 3), ("ps", 3), ("pslite", 5)])
def test_wrong_content_is_noticed(start: Start, kind: str, ranks: int) -> None:
    changes = [{"slices": 4}, {"slices": 4, "seed": 2}, *[{"slices": 4}] * (ranks - 2)]
    processes = start(changes, kind)
    if kind == "pslite":  # whose other nodes wait for the first one to leave
        processes = settle(lambda: [it for it in processes if it.poll() is not None], 60)
    errors = [process.communicate()[1] for process in processes]
    assert any("CorruptionError: word" in error for error in errors)
    assert all(process.returncode == 1 for process in processes)


def test_every_kind_of_damage_is_noticed() -> None:
    content = Content(1, "j", 1000, 3)
    sums = np.zeros(1000, np.uint16)
    for rank in range(3):
        part = np.empty(1000, np.uint16)
        content.fill(part, rank, 7)
        sums += part
    constant = content.constant(range(3), 7)
    content.check(sums, 0, 3, constant)
    content.check(sums[100:200], 100, 3, constant)
    damaged = sums.copy()
    damaged[41] ^= 1 << 14
    with pytest.raises(CorruptionError, match="word 41 "):
        content.check(damaged, 0, 3, constant)
    with pytest.raises(CorruptionError, match="word 101 "):  # moved by one word
        content.check(sums[100:200], 101, 3, constant)
    with pytest.raises(CorruptionError):  # one rank missing
        content.check(sums, 0, 2, content.constant(range(2), 7))
    with pytest.raises(CorruptionError):  # left from the iteration before
        content.check(sums, 0, 3, content.constant(range(3), 8))


def test_compute_jitter_is_seeded_and_shared_by_the_workers() -> None:
    first, second = (make_spec("ring", rank, 2, compute_s=0.1) for rank in range(2))
    times = [compute_ns(first, i) for i in range(500)]
    assert times == [compute_ns(second, i) for i in range(500)]
    assert times != [
        compute_ns(make_spec("ring", 0, 2, compute_s=0.1, seed=2), i) for i in range(500)
    ]
    assert np.mean(times) == pytest.approx(0.1e9, rel=0.005)
    assert np.std(times) == pytest.approx(0.002e9, rel=0.15)
