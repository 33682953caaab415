# SPDX-License-Identifier: Apache-2.0
"""Where an iteration's time goes: what is charged to what, and that what is recorded is true."""

import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from flowslot_lab import budget, flowlog
from flowslot_lab.net import Network, data_ip
from flowslot_lab.packets import (
    NOTHING,
    Ints,
    Steps,
    by_flow,
    in_order,
    passed,
    positions,
    shares,
)
from flowslot_lab.runner import LiveRun
from flowslot_lab.state import RunState
from flowslot_lab.tap import RECORD, Records
from flowslot_scenario.budget import CAUSES, STEPS, JobBudget, Link, busiest, charge
from flowslot_scenario.scenario import load

from .conftest import LEAVES_NOTHING, SCENARIOS, TWO_EQUAL, Quiet

MINE, OTHER = 0, 1


def at_a_link(*flows: dict[str, float], unused: float, granted: float = np.inf) -> dict[str, float]:
    """What job MINE loses in a second at a link that these flows cross."""
    plain = {"job": MINE, "carried": 0.0, "in_force": 0.0, "open": 1, "ready": 1}
    plain |= {"elsewhere": 0, "at_receiver": 0, "in_process": 0}

    def column(name: str, kind: type) -> np.ndarray:
        return np.array([[(plain | flow)[name] for flow in flows]]).astype(kind)

    link = Link(
        seconds=np.ones(1),
        unused=np.array([unused]),
        granted=np.array([granted]),
        job=column("job", int)[0],
        carried=column("carried", float),
        in_force=column("in_force", float),
        open=column("open", bool),
        ready=column("ready", bool),
        elsewhere=column("elsewhere", bool),
        at_receiver=column("at_receiver", bool),
        in_process=column("in_process", bool),
    )
    lost = dict(zip(CAUSES, charge(link, MINE).tolist(), strict=True))
    return {cause: pytest.approx(part) for cause, part in lost.items() if part > 1e-9}


def test_others_bytes_are_what_a_job_waits_for() -> None:
    other = {"job": OTHER, "carried": 0.6}
    assert at_a_link({"carried": 0.4}, other, unused=0.0) == {"others": 0.6}
    assert at_a_link({"ready": 0, "open": 0}, other, unused=0.4) == {}


def test_what_nobody_has_granted_comes_first() -> None:
    flow = {"carried": 0.3, "in_force": 0.3}
    assert at_a_link(flow, unused=0.7, granted=0.3) == {"not_granted": 0.7}
    # Topped up beyond what was granted.
    assert at_a_link({"carried": 0.9, "in_force": 0.3}, unused=0.1, granted=0.3) == {
        "not_granted": 0.1
    }
    assert at_a_link(flow, unused=0.7, granted=0.8) == {"not_granted": 0.2, "not_in_force": 0.5}


def test_a_rate_that_its_flow_cannot_use_is_lost_to_who_waits() -> None:
    waiting = {"carried": 0.5, "in_force": 0.5}
    idle = {"job": OTHER, "ready": 0, "in_force": 0.5}
    held_up = {"job": OTHER, "elsewhere": 1, "in_force": 0.5, "carried": 0.1}
    assert at_a_link(waiting, idle, unused=0.5, granted=1.0) == {"holder_idle": 0.5}
    assert at_a_link(waiting, held_up, unused=0.4, granted=1.0) == {
        "others": 0.1,
        "holder_idle": 0.4,
    }


def test_what_is_in_force_and_not_sent() -> None:
    def lost(**flow: float) -> dict[str, float]:
        return at_a_link({"in_force": 1.0, "carried": 0.5} | flow, unused=0.5, granted=1.0)

    assert lost() == {"window": 0.5}
    assert lost(in_process=1) == {"processor": 0.5}
    assert lost(at_receiver=1, in_process=1) == {"receiver": 0.5}
    shut, late = {"at_receiver": 1, "in_process": 1}, {"in_process": 1}
    assert at_a_link(shut, {}, {}, late, unused=1.0) == {
        "receiver": 0.25,
        "window": 0.5,
        "processor": 0.25,
    }
    assert lost(ready=0) == {"dependency": 0.5}
    assert lost(elsewhere=1) == {}  # it waits for another link
    assert at_a_link({}, unused=1.0) == {"window": 1.0}  # TCP: nobody grants


def test_sequence_numbers_go_on_beyond_their_end() -> None:
    base = 2**32 - 1000
    numbers = np.array([base, base + 900, 800, 300, 2000], np.int64).astype(np.uint32)
    assert positions(numbers, base).tolist() == [0, 900, 1800, 1300, 3000]


def test_what_comes_after_a_hole_has_arrived_once_that_is_filled() -> None:
    starts, ends = np.array([[100, 300, 500, 100, 200, 400], [200, 400, 600, 200, 300, 500]])
    assert in_order(starts, ends).tolist() == [200, 200, 200, 200, 400, 600]
    assert not in_order(starts[:0], ends[:0]).size
    starts, ends = np.array([[-500, 0, 100], [-300, 100, 200]])  # a late copy comes first
    assert in_order(starts, ends).tolist() == [0, 100, 200]


def test_a_burst_after_a_pause_has_taken_the_link_before() -> None:
    at, takes = np.array([100, 1000, 1001, 1002, 1500]), np.full(5, 100.0)
    ends = passed(at, takes, 1000.0)
    assert ends.tolist() == [100, 802, 902, 1002, 1500]
    assert shares(ends, takes, np.array([0, 500, 1000, 1500])).tolist() == [0.2, 0.596, 0.204]


def test_a_link_is_early_by_a_burst_at_most() -> None:
    at, takes = np.full(10, 1000), np.full(10, 100.0)
    assert passed(at, takes, 250.0).tolist() == [750] * 7 + [800, 900, 1000]
    assert shares(at[:0].astype(float), takes[:0], np.array([0, 10, 20])).tolist() == [0, 0]


def test_a_link_that_carries_packets_of_several_flows_without_a_pause_is_full() -> None:
    # In bursts of eight, as at a slow link that makes up for late timers.
    sizes = np.random.default_rng(1).uniform(0.2e6, 0.5e6, 800)
    due = np.cumsum(sizes)
    at = due[np.minimum(np.arange(800) // 8 * 8 + 7, 799)].astype(np.int64)
    ends = passed(at, sizes, 8e6)
    edges = np.arange(8_000_000, int(due[-1]) - 8_000_000, 1_000_000)
    assert shares(ends, sizes, edges) == pytest.approx(1.0, abs=1e-5)
    mine = np.arange(800) % 3 == 0
    parts = shares(ends[mine], sizes[mine], edges) + shares(ends[~mine], sizes[~mine], edges)
    assert parts == pytest.approx(1.0, abs=1e-5)


def records(at: Ints, payload: Ints) -> Records:
    made = np.zeros(len(at), RECORD)
    made["ns"], made["len"] = at, payload
    return made


def test_a_slow_link_that_carries_bursts_of_two_flows_is_not_idle() -> None:
    scenario = TWO_EQUAL.model_copy(
        update={"links": TWO_EQUAL.links.model_copy(update={"rate_mbps": 25})}
    )
    link, burst = "h1->s1", 10 * 1514
    assert scenario.directed_links()[link].capacity_bps == 25e6
    takes_ns = round(1514 * 8 / 25e6 * 1e9)
    due = np.arange(1, 401) * takes_ns  # without a pause; they come out by tens
    at = due[np.arange(400) // 10 * 10 + 9]
    flows = [
        budget.Flow(0, (link,), key, *(np.zeros(0, np.int64),) * 2, *(NOTHING,) * 5, key=key)
        for key in (1, 2)
    ]
    packets = {name: {} for name in scenario.directed_links()}
    packets[link] = {key: records(at[key - 1 :: 2], np.full(200, 1448)) for key in (1, 2)}
    window = 20_000_000, 120_000_000
    found = budget._Analysis(scenario, flows, packets, dict.fromkeys(packets, burst), window)
    assert found._unused[link] == pytest.approx(0.0, abs=1e-4)
    assert found._unused["s1->h1"] == pytest.approx(1.0)
    both = [flow.carried[link] for flow in flows]
    assert sum(both) == pytest.approx(1.0, abs=1e-4)
    assert [float(one.mean()) for one in both] == pytest.approx([0.5, 0.5], abs=0.01)
    # A link that is idle for half of the time is not full because of its bursts.
    for key in (1, 2):
        packets[link][key] = packets[link][key][::2]
    found = budget._Analysis(scenario, flows, packets, dict.fromkeys(packets, burst), window)
    assert float(found._unused[link].mean()) == pytest.approx(0.5, abs=0.01)


def test_steps() -> None:
    steps = Steps(np.array([10, 20]), np.array([1.0, 5.0]))
    assert steps.on(np.array([9, 10, 19, 20, 99])).tolist() == [0, 1, 1, 5, 5]
    assert (steps.reaches(1), steps.reaches(2), steps.reaches(6)) == (10, 20, None)


def test_busiest_links_are_those_that_take_longest() -> None:
    incast = load(SCENARIOS / "ps-incast.toml")
    server = incast.jobs[0].server_hosts[0]
    assert set(busiest(incast, incast.jobs[0])) == {f"{server}->s1", f"s1->{server}"}
    assert len(busiest(TWO_EQUAL, TWO_EQUAL.jobs[0])) == 4


def test_a_senders_log_is_read_as_it_was_written(tmp_path: Path) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    with server, socket.create_connection(server.getsockname()) as sock:
        log = flowlog.FlowLog(tmp_path / "log", sock)
        log.begin(500)
        log.note(200, 100)
        assert len(flowlog.read(tmp_path / "log").records) == 0
        log.begin(700)
        found = flowlog.read(tmp_path / "log")
        assert (found.src, found.dport) == ("127.0.0.1", server.getsockname()[1])
        assert found.records["ready"].tolist() == [flowlog.BEGIN, 200]
        assert found.records["posted"].tolist() == [500, 100]


READS_LATE = """
import socket, sys, time
with socket.create_server((sys.argv[1], 5000)) as server:
    print("listening", flush=True)
    sock, _ = server.accept()
    sock.recv(1, socket.MSG_PEEK)
    time.sleep(1)
    while sock.recv(1 << 16):
        pass
"""
SENDS = """
import socket, sys
from pathlib import Path
from flowslot_lab.flowlog import FlowLog
size = int(sys.argv[3])
with socket.create_connection((sys.argv[1], 5000)) as sock:
    log = FlowLog(Path(sys.argv[2]), sock)
    log.begin(size)
    sock.sendall(bytes(size))
    log.note(size, size)
    log.begin(0)
"""


@pytest.mark.root
@LEAVES_NOTHING
def test_a_receiver_that_does_not_read_is_known_by_its_window(
    state: RunState, tmp_path: Path
) -> None:
    size, log, net = 2_000_000, tmp_path / "log", Network(TWO_EQUAL, state)
    net.up()
    try:
        recorder = budget.Recorder(net)

        def python(host: str, code: str, *arguments: str) -> list[str]:
            space = f"--net=/run/netns/{net.hosts[host]}"
            return ["nsenter", space, sys.executable, "-c", code, *arguments]

        at = python("h2", READS_LATE, data_ip(1))
        with subprocess.Popen(at, stdout=subprocess.PIPE) as reader:
            assert reader.stdout is not None
            reader.stdout.readline()
            sender = python("h1", SENDS, data_ip(1), str(log), str(size))
            subprocess.run(sender, check=True)
        packets = {}
        for link, tap in recorder.taps.items():
            tap.drain(end=True)
            packets[link] = by_flow(tap.records())
    finally:
        net.down()
    flow = budget._flow(TWO_EQUAL, 0, log, packets)
    silence = int(np.argmax(np.diff(flow.sent.at)))
    before, after = flow.sent.at[silence : silence + 2]
    assert after - before > 500 * budget.BIN_NS
    sent = flow.sent.values[silence]
    meanwhile = np.linspace(before, after, 52)[1:-1].astype(np.int64)
    assert (flow.allowed.on(meanwhile)[5:-5] - sent < 1448).all()
    assert flow.allowed.on(np.array([after])) - sent >= 1448
    assert 1448 < sent < size / 2
    assert flow.sent.values[-1] == flow.arrived.values[-1] == size


@pytest.mark.root
@pytest.mark.timeout(200)
@LEAVES_NOTHING
def test_a_live_budget_is_of_what_the_kernel_counted(state: RunState) -> None:
    scenario = TWO_EQUAL.model_copy(update={"warmup": 2})
    with LiveRun(scenario, state, "stagger", 8, True, budget=True) as live:
        before = live.net.counters()
        run = live.run(1, Quiet())
        after = live.net.counters()
        recorder = live.recorder
        assert recorder is not None
        for link, tap in recorder.taps.items():
            tap.drain(end=True)
            seen = tap.records()
            seen = seen[(seen["ns"] >= before.at_s * 1e9) & (seen["ns"] < after.at_s * 1e9)]
            size = seen["len"].astype(int)
            size += np.maximum(-(-size // 1448), 1) * 66
            counted = after.link_bytes[link] - before.link_bytes[link]
            assert size.sum() == pytest.approx(counted, rel=0.02)
    assert [job.name for job in run.budget] == ["a", "b"]
    for job in run.budget:
        assert list(job.steps) == list(STEPS)
        assert 0 <= job.steps["first_byte"] < job.steps["last_byte"] < job.iteration_ms
        assert 0 <= sum(job.lost.values()) < job.iteration_ms
        again = JobBudget.read(job.to_json())
        assert again.name == job.name and again.lost == pytest.approx(job.lost, abs=1e-3)


@pytest.mark.root
@pytest.mark.timeout(200)
@LEAVES_NOTHING
def test_a_job_of_short_iterations_does_not_end_the_budget(state: RunState) -> None:
    """It has reported before the other one has ended an iteration, and goes on."""
    short, long = TWO_EQUAL.jobs
    short = short.model_copy(update={"bytes": short.bytes // 50, "compute_s": 0.005})
    long = long.model_copy(update={"compute_s": 0.4})
    scenario = TWO_EQUAL.model_copy(update={"warmup": 1, "jobs": (short, long)})
    with LiveRun(scenario, state, "cubic", 4, True, budget=True) as live:
        run = live.run(1, Quiet())
    assert [job.name for job in run.budget] == ["a", "b"]
    assert run.budget[0].iteration_ms < run.budget[1].iteration_ms / 4


def test_the_daemons_file_is_as_the_lab_reads_it() -> None:
    from flowslotd import trace

    assert (budget._HEADER, budget._TRACE) == (trace.HEADER, trace.RECORD)
    kinds = (trace.ASKED, trace.GRANTED, trace.IN_FORCE)
    assert kinds == (budget._ASKED, budget._GRANTED, budget._IN_FORCE)
