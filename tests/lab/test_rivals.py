# SPDX-License-Identifier: Apache-2.0
"""Rivals that need more than a setting do what they are named for."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from waiting import settle

from flowslot_lab import rivals
from flowslot_lab.net import Network, Port, data_ip
from flowslot_lab.rivals import RIVALS
from flowslot_lab.runner import LiveRun, RunFailed
from flowslot_lab.state import RunState
from flowslot_lab.tools import run
from flowslot_scenario.results import Evidence, Run
from flowslot_scenario.scenario import Scenario, load

from .conftest import LEAVES_NOTHING, SCENARIOS, TWO_EQUAL, Quiet

INCAST = load(SCENARIOS / "ps-incast.toml", ["warmup=2"])
PRIORITY = load(SCENARIOS / "priority.toml", ["warmup=2"])
_SINK = """
import socket
listener = socket.create_server(("", 9000))
print(flush=True)
socks = [listener.accept()[0] for _ in range(2)]
import select
while True:
    for sock in select.select(socks, [], [])[0]:
        sock.recv(1 << 20)
"""
_SOURCE = """
import socket, sys
sock = socket.create_connection((sys.argv[1], 9000))
while True:
    sock.sendall(bytes(1 << 18))
"""


def measured(scenario: Scenario, state: RunState, policy: str, iterations: int = 8) -> Run:
    with LiveRun(scenario, state, policy, iterations, use_switch=False) as live:
        return live.run(1, Quiet())


@pytest.mark.root
@pytest.mark.timeout(200)
@LEAVES_NOTHING
def test_dctcp_backs_off_from_marks_and_loses_little(state: RunState) -> None:
    cubic = measured(INCAST, state, "cubic+rto5")
    dctcp = measured(INCAST, state, "dctcp")
    assert cubic.retransmits > 100 and not cubic.evidence.marked
    assert dctcp.evidence.marked > 100 > dctcp.evidence.unmarked
    assert dctcp.retransmits < cubic.retransmits


@contextmanager
def two_sources(net: Network) -> Iterator[None]:
    """Two hosts send to the third as fast as they can, over a connection each."""
    with ExitStack() as stack:
        hosts = list(net.hosts.values())
        for space, program in ((hosts[0], _SINK), (hosts[1], _SOURCE), (hosts[2], _SOURCE)):
            command = ["nsenter", f"--net=/run/netns/{space}", sys.executable, "-c", program]
            process = subprocess.Popen([*command, data_ip(0)], stdout=subprocess.PIPE)
            stack.callback(process.wait)
            stack.callback(process.kill)
            if program is _SINK:
                assert process.stdout is not None
                process.stdout.readline()
        yield


def time_out(net: Network) -> None:
    """Acknowledgements to the first source get lost for a while."""
    receiver, source, *_ = net.hosts.values()
    route = ["route", "add", "blackhole", data_ip(1)]

    def cut() -> bool:
        run(["ip", "-n", receiver, *route])
        time.sleep(0.05)
        run(["ip", "-n", receiver, route[0], "del", *route[2:]])
        shown = run(["nsenter", f"--net=/run/netns/{source}", "nstat", "-asz", "TcpExtTCPTimeouts"])
        return int(shown.split()[-2]) > 0

    settle(cut, 20, "a timeout")  # on a busy machine, the source may start late


def shares(port: Port, full: float) -> list[int]:
    """Bytes that the port's two busiest queues have sent in 2 s, the lesser first. `full`: bytes/s
    that the port can send."""
    before = rivals.sent(port.space, port.device)
    for _ in range(5):  # on a busy machine, a source may take seconds to start or to catch up
        time.sleep(2.0)
        after = rivals.sent(port.space, port.device)
        counts = [after[k] - before[k] for k in after if k >= rivals.FIRST_QUEUE]
        one, other = sorted(counts)[-2:]
        if one > 0.9 * other and one + other > 0.9 * 2.0 * full:
            break
        before = after
    return [one, other]


@pytest.mark.root
@LEAVES_NOTHING
def test_a_queue_per_flow_shares_a_port_evenly(state: RunState) -> None:
    net = Network(INCAST, state, rival=RIVALS["cubic+fq"])
    net.up()
    port = net.ports[INCAST.hosts[0].down]
    rate = INCAST.link_of("h1").rate_mbps * 1e6 / 8
    for _ in range(3):  # two connections may happen to share one of the 256 queues
        with two_sources(net):
            time_out(net)
            one, other = shares(port, rate)
        if one:
            break
    assert one > 0.9 * other
    assert one + other > 0.9 * 2.0 * rate  # and the port is not slower for that
    assert net.in_queues()[0] >= 2
    net.down()


@pytest.mark.root
@pytest.mark.timeout(200)
@LEAVES_NOTHING
def test_a_protected_job_is_as_fast_as_alone(state: RunState) -> None:
    prio = measured(PRIORITY, state, "prio", 15)
    plain = measured(PRIORITY, state, "cubic+rto5", 15)
    alone = measured(PRIORITY.model_copy(update={"jobs": PRIORITY.jobs[1:]}), state, "cubic+rto5")
    small, sharing, by_itself = (run.jobs[-1].times.mean() for run in (prio, plain, alone))
    assert small < 1.1 * by_itself < sharing
    assert prio.evidence.protected_bytes > 20 * 2_000_000 and not plain.evidence.protected_bytes


@pytest.mark.root
@LEAVES_NOTHING
def test_mltcp_learns_the_iterations_of_all_flows(state: RunState) -> None:
    """Each of eight flows knows from its third or fourth iteration on."""
    run = measured(TWO_EQUAL, state, "mltcp", 7)
    iterations = 7 + TWO_EQUAL.warmup
    assert 8 * (iterations - 6) <= run.evidence.learnt <= 8 * iterations


@pytest.mark.parametrize(
    ("policy", "evidence", "problem"),
    [
        ("dctcp", {"marked": 5}, ""),
        ("dctcp", {}, ""),  # no queue was so long
        ("dctcp", {"marked": 5, "unmarked": 9}, "9 packets bore no ECN, 5 did"),
        ("cubic+fq", {"queues": 2}, ""),
        ("cubic+fq", {"queues": 1}, "16 flows had 1 queues at a port"),
        ("prio", {"protected_bytes": 1}, ""),
        ("prio", {}, "no port has sent anything of a protected job"),
        ("mltcp", {"learnt": 1}, ""),
        ("mltcp-cubic", {}, "no flow has learnt how many bytes an iteration has"),
        ("cubic", {}, ""),
    ],
)
def test_a_rival_without_effect_was_not_measured(
    tmp_path, policy: str, evidence: dict[str, int], problem: str
) -> None:
    first = ["jobs.protected=true"] if policy == "prio" else []
    scenario = load(SCENARIOS / "ps-incast.toml", ["warmup=2", *first])
    live = LiveRun(scenario, RunState.create(tmp_path), policy, 1, use_switch=False)
    verified = 2 * 6_400_000 * 3
    if not problem:
        live.check(Evidence(bytes_verified=verified, **evidence))
        return
    with pytest.raises(RunFailed, match=problem):
        live.check(Evidence(bytes_verified=verified, **evidence))
