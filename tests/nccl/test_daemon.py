# SPDX-License-Identifier: Apache-2.0
"""The real daemon beside real ranks: two on each of two hosts, whose channels go round in different
orders."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from waiting import settle

from .conftest import NOBODY
from .test_harness import prepared, ring, sockets

PROGRAMS = Path(sys.executable).parent
TOTAL, SOCKETS = 800_000, 2
RINGS = [(3, 0, 2, 1), (0, 1, 2, 0), (2, 1, 3, 1)]
"""Rank before, rank, peer, channel."""
TOPOLOGY = "".join(
    f"""
[[hosts]]
name = "h{i}"
nics = [{{ name = "eth0", addresses = ["10.9.0.{i}"], up = "h{i}->s", down = "s->h{i}" }}]
[[links]]
name = "h{i}->s"
capacity_gbps = 1
[[links]]
name = "s->h{i}"
capacity_gbps = 1
"""
    for i in (1, 2)
)
pytestmark = pytest.mark.root


@pytest.fixture
def daemon(two_hosts: list[str], tmp_path: Path) -> Iterator[Path]:
    """Its runtime directory."""
    runtime, file = tmp_path / "run", tmp_path / "flowslotd.toml"
    (tmp_path / "topology.toml").write_text(TOPOLOGY)
    file.write_text(f'host = "h1"\nruntime_dir = "{runtime}"\n')
    enter = ["nsenter", f"--net=/run/netns/{two_hosts[0]}"]
    command = [*enter, str(PROGRAMS / "flowslotd"), "--config", str(file)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None and "ready" in process.stderr.readline()
        try:
            yield runtime
        finally:
            process.terminate()


def ask(runtime: Path, *options: str) -> str:
    command = [str(PROGRAMS / "flowslot"), "jobs", "--runtime-dir", str(runtime), *options]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_flowslot_jobs_shows_where_each_flow_is_in_its_ring(
    two_hosts: list[str], daemon: Path
) -> None:
    """Flows to the other host: the others are none of the network's. The ranks go on until all was
    seen."""
    here = f"FLOWSLOT_SOCKET={daemon}/register.sock"
    there = f"FLOWSLOT_SOCKET={NOBODY['FLOWSLOT_SOCKET']}"
    before = [
        ["nsenter", f"--net=/run/netns/{two_hosts[rank // 2]}", "env", (here, there)[rank // 2]]
        for rank in range(4)
    ]
    settings = {"NCCL_SOCKET_IFNAME": "eth0", "FLOWSLOT_JOB": "four", **sockets(SOCKETS, 1)}
    ranks = replace(
        prepared("flowslot"), ranks=4, environment=settings, before=before, root="10.9.0.1"
    )
    options = ring(TOTAL, "--iterations", 4000, "--compute-ms", 300, "--limit", 100)

    def shown() -> list[dict[str, Any]]:
        jobs = json.loads(ask(daemon, "-o", "json"))["jobs"]
        flows = jobs[0]["progress"] if jobs else []
        known = [flow for flow in flows if flow["acked_bytes"] and flow["previous"] is not None]
        return known if len(known) == len(RINGS) * SOCKETS else []

    started = ranks.start(options)
    try:
        flows = settle(shown)
        text = ask(daemon)
        assert all(process.poll() is None for process in started)
    finally:
        for process in started:
            process.kill()
            process.communicate()
    places = [
        (flow["previous"], flow["rank"], flow["peer"], flow["channel"], flow["collective"])
        for flow in flows
    ]
    assert sorted(places) == sorted((*at, "all-reduce") for at in RINGS * SOCKETS)
    assert text.count(" all-reduce  3 to 0 to 2 #1 ") == SOCKETS
