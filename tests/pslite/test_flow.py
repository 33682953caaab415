# SPDX-License-Identifier: Apache-2.0
"""What the patch makes of messages in other orders than those of ps-lite's own programs."""

import os
import re
import socket
import subprocess
from pathlib import Path

import pytest

from flowslotd.observe.passive.nodes import node_of

from .conftest import ROOT

KEYS = range(4)
PUSH, PULL = "push", "pull"
Message = tuple[str, int]


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = ROOT / "build" / "pslite" / "flowslot"
    to = tmp_path_factory.mktemp("flow") / "flow"
    here = Path(__file__).with_name("flow.cc")
    folders = [f"-I{ROOT / 'pslite_patch'}", f"-I{ROOT / 'shm'}", f"-isystem{built / 'include'}"]
    warnings = ["-Wall", "-Wextra", "-Werror"]
    command = ["g++", "-std=c++14", *warnings, *folders, here, "-o", to, "-lzmq", "-pthread"]
    subprocess.run(list(map(str, command)), check=True)
    return to


def iterations(program: Path, lines: list[str]) -> list[int]:
    """After each message."""
    done = subprocess.run(
        [program], input="\n".join(lines), capture_output=True, text=True, check=True
    )
    return [int(number) for number in re.findall(r"iteration (\d+),", done.stderr)]


def both(program: Path, messages: list[Message]) -> tuple[list[int], list[int]]:
    """Iterations of worker and server after each of the worker's requests, which are answered in
    order."""
    worker = [f"ready {key} 100" if kind == PUSH else "" for kind, key in messages]
    server = [f"pushed {key}" if kind == PUSH else f"ready {key} 100" for kind, key in messages]
    return iterations(program, [line for line in worker if line]), iterations(program, server)


def all_keys(*kinds: str) -> list[Message]:
    return [(kind, key) for key in KEYS for kind in kinds]


INIT_PUSH = all_keys(PUSH) + 10 * all_keys(PUSH, PULL)
INIT_PULL = all_keys(PULL) + 10 * all_keys(PUSH, PULL)
SEVERAL_PULLS = 5 * all_keys(PULL) + 10 * all_keys(PUSH, PULL)
ALL_PUSHES_FIRST = 10 * (all_keys(PUSH) + all_keys(PULL))
VALIDATION = 2 * (5 * all_keys(PUSH, PULL) + all_keys(PULL)) + all_keys(PUSH, PULL)
LATE = 10 * [(PUSH, 0), (PULL, 3), (PULL, 0), *((PUSH, k) for k in KEYS[1:]), (PULL, 1), (PULL, 2)]
"""Another worker is slower: key 3 is answered when the next iteration has begun."""
NOW_AND_THEN = all_keys(PUSH, PULL) + 4 * (3 * all_keys(PUSH) + all_keys(PULL))
"""Local steps, whose results are pulled after every third."""
BACKWARDS = all_keys(PUSH) + 10 * [(kind, key) for key in reversed(KEYS) for kind in (PUSH, PULL)]


@pytest.mark.parametrize(
    ("messages", "last"),
    [
        (INIT_PUSH, 10),
        (INIT_PULL, 9),
        (SEVERAL_PULLS, 9),
        (ALL_PUSHES_FIRST, 9),
        (VALIDATION, 10),
        (LATE, 9),
        (NOW_AND_THEN, 12),
        (BACKWARDS, 10),
    ],
)
def test_both_ends_number_iterations_alike(
    program: Path, messages: list[Message], last: int
) -> None:
    worker, server = both(program, messages)
    assert worker[-1] == server[-1] == last
    assert worker == sorted(worker)
    # And not only at the end: when a worker has pushed all keys of an iteration, all that it pulls
    # is of that one.
    pushed = 0
    for (kind, _), at in zip(messages, server, strict=True):
        pushed += kind == PUSH
        if kind == PULL and pushed and pushed % len(KEYS) == 0:
            assert at == pushed // len(KEYS) - 1


@pytest.mark.parametrize(
    ("before", "keys"),
    [
        pytest.param([0, 0, 1, 1, 2, 2, 3, 3], KEYS, id="each twice, as BytePS's plugins begin"),
        pytest.param([*KEYS, 0, 0, 1, 2, 3], KEYS, id="the first once too often"),
        pytest.param([*KEYS, 0, 3], KEYS, id="some are left out"),
        pytest.param([*KEYS, *KEYS], [0, 1, 2], id="one comes no more"),
        pytest.param([*KEYS, *KEYS], [*KEYS, 4], id="a new one"),
        pytest.param([*KEYS, 4, 5, *KEYS, *KEYS, 4, 5], KEYS, id="some now and then"),
        pytest.param([], range(3000), id="many"),
        pytest.param(range(3000), range(2999, -1, -1), id="many, backwards"),
        pytest.param([], range(20_000), id="too many"),
        pytest.param(range(0, 5 << 48, 1 << 48), range(0, 5 << 48, 1 << 48), id="far apart"),
    ],
)
def test_iterations_are_whole_again(program: Path, before: list[int], keys: list[int]) -> None:
    """Soon after something irregular."""
    pushed = [*before, *(key for _ in range(6) for key in keys)]
    worker, server = both(program, [(kind, key) for key in pushed for kind in (PUSH, PULL)])
    last = worker[-1]
    assert worker[-2 * len(keys) :] == [last - 1] * len(keys) + [last] * len(keys)
    assert server[1::2] == worker


def test_a_server_that_nobody_pushes_to_counts_what_it_sends(program: Path) -> None:
    pulls = 3 * all_keys(PULL)
    assert both(program, pulls)[1] == [0] * 4 + [1] * 4 + [2] * 4


def test_after_a_restart_a_server_counts_as_a_new_worker_does(program: Path) -> None:
    messages = 3 * all_keys(PUSH, PULL)
    server = [f"pushed {key}" if kind == PUSH else f"ready {key} 100" for kind, key in messages]
    counted = iterations(program, [*server, "restart 0", *server])
    assert counted[len(server) + 1 :] == counted[: len(server)]
    assert counted[-1] == 2


@pytest.mark.parametrize(
    "uri", ["10.0.0.1", "a" * 19, "a" * 20, "bert-large-pretrain-team-1.ml", "x" * 300]
)
def test_a_job_is_named_as_by_the_daemon_that_watches_from_outside(program: Path, uri: str) -> None:
    names = set()
    for port in ("9000", "9001"):
        settings = {"DMLC_ROLE": "worker", "DMLC_PS_ROOT_URI": uri, "DMLC_PS_ROOT_PORT": port}
        done = subprocess.run(
            [program, "name"], env=os.environ | settings, capture_output=True, text=True, check=True
        )
        node = node_of(b"".join(f"{k}={v}\0".encode() for k, v in settings.items()))
        assert node is not None
        assert node.job.decode() == done.stdout.strip()
        names.add(node.job)
    assert len(names) == 2


@pytest.mark.parametrize(
    ("uri", "connected"),
    [
        ("::ffff:127.0.0.3", []),
        ("127.0.0.3", ["127.0.0.4"]),
        ("sched", ["127.0.0.3"]),
        ("sched.team-a.svc.cluster.local", ["127.0.0.3", "127.0.0.3"]),
        ("sched", ["127.0.0.4"]),
        ("sched", ["127.0.0.3", "127.0.0.4"]),
        ("FE80::00:1", []),
    ],
)
def test_a_job_is_named_after_where_its_scheduler_is(
    program: Path, uri: str, connected: list[str]
) -> None:
    with socket.create_server(("", 0)) as everywhere:
        port = str(everywhere.getsockname()[1])
        settings = {"DMLC_ROLE": "worker", "DMLC_PS_ROOT_URI": uri, "DMLC_PS_ROOT_PORT": port}
        done = subprocess.run(
            [program, "name", *connected],
            env=os.environ | settings,
            capture_output=True,
            text=True,
            check=True,
        )
    node = node_of(b"".join(f"{k}={v}\0".encode() for k, v in settings.items()))
    assert node is not None
    assert done.stdout.strip() == node.named(set(connected)).decode()
    if len(set(connected)) == 1 and "sched" in uri:
        assert done.stdout.strip() == f"pslite-{connected[0]}-{port}"
