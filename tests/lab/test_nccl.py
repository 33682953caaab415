# SPDX-License-Identifier: Apache-2.0
"""NCCL jobs of the lab: by our plugin under a daemon's policy, by the stand-in else; and paths that
lose packets."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from bench.harm import progress

from flowslot_lab import nccl
from flowslot_lab.jobspec import JobSpec
from flowslot_lab.net import Network, data_ip
from flowslot_lab.runner import LiveRun
from flowslot_lab.state import RunState
from flowslot_scenario.scenario import parse

from .conftest import LEAVES_NOTHING, TWO_HOSTS, Quiet
from .test_fail_open import controls, finish, wait

SMALL = TWO_HOSTS.replace('kind = "ring"', 'kind = "nccl"').replace(
    "sockets = 2", 'sockets = 2\nchannels = 2\niterations_by = "calls"'
)
LOSSY = SMALL + '[[losses]]\nfrom_host = "h1"\nto_host = "h2"\npercent = 3\n'
SENT = 500_000
_ROOT = Path(__file__).parents[2] / "nccl_patch"
_SOURCE = """
import socket, sys
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for _ in range(int(sys.argv[2])):
    sock.sendto(b"x", (sys.argv[1], 9))
"""


@pytest.fixture(scope="module")
def built() -> None:
    for folder in ("plugin", "harness"):
        subprocess.run(["make", "-s", "-C", _ROOT / folder], check=True)


@pytest.mark.root
@pytest.mark.timeout(60)
@pytest.mark.usefixtures("built")
@LEAVES_NOTHING
def test_under_a_daemon_our_plugin_reports_and_is_paced(state: RunState) -> None:
    with LiveRun(parse(SMALL, "f"), state, "stagger", 30, use_switch=False) as live:
        follow = live.follow(Quiet())

        def shown() -> list[dict[str, object]]:
            return [flow for flow in progress(live, "h1", "a") if flow["role"] != "receive"]

        wait(follow, "all sockets are paced", lambda: _paced(shown()) == 4)
        assert {flow["destination"].partition(":")[0] for flow in shown()} == {data_ip(1)}
        assert len([name for name in controls(live, "h1") if name.startswith("fs_")]) == 1
        finish(live, follow)


def _paced(flows: list[dict[str, object]]) -> int:
    return sum(flow["rate"] is not None for flow in flows)


@pytest.mark.root
@pytest.mark.timeout(60)
@pytest.mark.usefixtures("built")
@LEAVES_NOTHING
def test_without_daemons_it_is_the_standin_on_the_kernels_tcp(state: RunState) -> None:
    with LiveRun(parse(LOSSY, "f"), state, "reno", 10, use_switch=False) as live:
        assert not {control for control in controls(live, "h1") if control != "reno"}
        run = live.run(1, Quiet())
        maps = Path(f"/proc/{live.jobs.processes()[0].pid}/maps").read_text()
    assert "libnccl-net-standin" in maps and "libnccl-net-flowslot" not in maps
    assert run.evidence.bytes_verified == 2 * 11 * SENT
    (came, lost) = run.evidence.losses["h1 to h2"]
    assert came > 11 * SENT / 1448 and 0 < lost < came and run.retransmits
    (trace,) = (points for rank, points in run.jobs[0].traces.items() if rank == 0)
    assert trace == sorted(trace) and trace[-1][1] == 11 * SENT


@pytest.mark.root
@LEAVES_NOTHING
def test_a_lossy_path_loses_the_packets_that_the_seed_says(state: RunState) -> None:
    scenario = parse(LOSSY, "f", ["seed=7"])
    net = Network(scenario, state)
    net.up()
    (path,) = net.losses
    before = path.counts()[0]
    for source, to in (("h1", 1), ("h2", 0)):
        inside = ["nsenter", f"--net=/run/netns/{net.hosts[source]}", sys.executable, "-c", _SOURCE]
        subprocess.run([*inside, data_ip(to), "3000"], check=True)
    came, lost = path.counts()
    assert came - before >= 3000  # of one direction only, and answers by ICMP
    assert came < 5000
    assert lost == sum(_mixed(_mixed(n) ^ 7) < 0.03 * 2**32 for n in range(came))
    assert 0.02 < lost / came < 0.04
    net.down()


def _mixed(h: int) -> int:
    """Murmur3's finalizer."""
    h ^= h >> 16
    h = h * 0x85EBCA6B % 2**32
    h ^= h >> 13
    h = h * 0xC2B2AE35 % 2**32
    return h ^ h >> 16


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"NCCL_SOCKET_NTHREADS": "0", "NCCL_NSOCKS_PERTHREAD": "4"}),
        ({"threads": 2}, {"NCCL_SOCKET_NTHREADS": "2", "NCCL_NSOCKS_PERTHREAD": "2"}),
        ({"sockets": 1}, {"NCCL_NSOCKS_PERTHREAD": "1"}),
        # As in NCCL, the control socket carries all.
        ({"sockets": 1, "library": "standin"}, {"NCCL_NSOCKS_PERTHREAD": "0"}),
        ({"iterations_by": "bytes"}, {"FLOWSLOT_ITERATION_BYTES": str(2 * 2 * 4 * 3 * 5000)}),
        ({"register": "/x/register.sock"}, {"FLOWSLOT_SOCKET": "/x/register.sock"}),
        ({}, {"FLOWSLOT_SOCKET": "/nonexistent/register.sock"}),
    ],
)
def test_jobs_have_what_a_user_would_set(
    changes: dict[str, object], expected: dict[str, str], spec: Callable[..., JobSpec]
) -> None:
    assert expected.items() <= nccl.environment(spec(**changes)).items()


@pytest.fixture
def spec() -> Callable[..., JobSpec]:
    values = {
        "job": "j",
        "kind": "nccl",
        "rank": 0,
        "workers": 2,
        "servers": 0,
        "addresses": ("10.0.0.1", "10.0.0.2"),
        "port": 1,
        "sockets": 4,
        "slices": 3,
        "slice_bytes": 5000,
        "barrier": False,
        "compute_s": 0.0,
        "jitter": 0.0,
        "seed": 1,
        "iterations": 1,
        "start_s": 0.0,
        "register": "",
        "library": "flowslot",
        "channels": 2,
        "sent_bytes": 240_000,
    }

    def make(**changes: object) -> JobSpec:
        return JobSpec(**{**values, **changes})

    return make
