# SPDX-License-Identifier: Apache-2.0
"""Long paths: what a relay has arrives later, whole, in order; what it cannot hold is counted."""

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from waiting import settle

from flowslot_lab import delay as delays
from flowslot_lab.net import Network, data_ip
from flowslot_lab.predict import NoPrediction, predict
from flowslot_lab.runner import LiveRun, Options, RunFailed, expected_bytes
from flowslot_lab.state import RunState
from flowslot_lab.tools import LabError
from flowslot_scenario.results import Evidence, Relayed, Results
from flowslot_scenario.scenario import parse
from flowslot_scenario.table import print_result

from .conftest import LEAVES_NOTHING, TWO_EQUAL, TWO_HOSTS, Quiet
from .test_results import make_run

US = 20_000
LONG = TWO_HOSTS + f'[[delays]]\nfrom_host = "h1"\nto_host = "h2"\nus = {US}\n'
_ROOT = Path(__file__).parents[2]
_RECEIVE = """
import socket, struct, sys, time
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
sock.bind((sys.argv[1], 7000))
sock.settimeout(5)
print("ready", flush=True)
for _ in range(int(sys.argv[2])):
    number, sent = struct.unpack("!QQ", sock.recv(2000)[:16])
    print(number, time.monotonic_ns() - sent)
"""
_SEND = """
import socket, struct, sys, time
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for number in range(int(sys.argv[2])):
    sock.sendto(struct.pack("!QQ", number, time.monotonic_ns()).ljust(1400), (sys.argv[1], 7000))
    if number % 8 == 7:
        time.sleep(0.001)
"""


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    subprocess.run(["make", "-s", "-C", _ROOT / "lab/relay"], check=True)


@pytest.fixture
def net(nothing_left: None, state: RunState) -> Iterator[Network]:
    net = Network(parse(LONG, "f"), state)
    try:
        net.up()
        yield net
    finally:
        net.down()


def inside(net: Network, host: str, script: str, *args: str) -> list[str]:
    return ["nsenter", f"--net=/run/netns/{net.hosts[host]}", sys.executable, "-c", script, *args]


@pytest.mark.root
def test_packets_of_one_direction_arrive_later_and_in_order(net: Network) -> None:
    (path,) = net.delays
    assert path.round_trip_us >= US
    assert path.seen().frames == 0  # those that measured it do not count
    with pytest.raises(
        LabError, match=f"h1 to h2: a round trip takes .* us, not {US + 500_000} us"
    ):
        path.measure(net.hosts["h1"], data_ip(1), US + 500_000)
    for source, to, least in (("h1", "h2", US), ("h2", "h1", 0)):
        before = path.seen().frames
        address = data_ip(net.scenario.index(to))
        command = inside(net, to, _RECEIVE, address, "400")
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as receiver:
            assert receiver.stdout.readline() == "ready\n"
            subprocess.run(inside(net, source, _SEND, address, "400"), check=True)
            came = [tuple(map(int, line.split())) for line in receiver.stdout]
        assert [number for number, _ in came] == list(range(400))
        assert min(took for _, took in came) >= least * 1000
        # A few more: the hosts ask for each other's hardware addresses.
        assert (path.seen().frames - before) // 400 == (source == "h1")
    seen = path.seen()
    assert (seen.dropped, seen.round_trip_us) == (0, path.round_trip_us)
    path.stop()
    with pytest.raises(LabError, match="relay-long0 has ended"):
        path.seen()


@pytest.mark.root
@pytest.mark.timeout(60)
@LEAVES_NOTHING
def test_super_packets_pass_whole(state: RunState) -> None:
    with LiveRun(parse(LONG, "f"), state, "reno", 8, use_switch=False) as live:
        run = live.run(1, Quiet())
    (seen,) = run.evidence.delays.values()
    assert run.evidence.bytes_verified == 2 * 9 * 500_000
    assert run.jobs[0].times.min() > US / 1e6 + run.jobs[0].job.compute_s
    packets = 9 * 500_000 / 1448
    assert seen.frames < packets  # and acknowledgements, of the other direction, are among these
    assert seen.dropped == 0


@pytest.mark.root
@LEAVES_NOTHING
def test_what_a_relay_cannot_hold_is_counted(
    state: RunState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delays, "_HELD_S", -1.0)  # the least memory: 1 MiB
    net = Network(parse(LONG, "f", ["delays.us=100000", "links.rate_mbps=10000"]), state)
    try:
        net.up()
        (path,) = net.delays
        flood = _SEND.replace("if number % 8 == 7", "if False")
        subprocess.run(inside(net, "h1", flood, data_ip(1), "3000"), check=True)
        counts = Path(path._counts)

        def quiet() -> bool:
            now = delays._Counts.from_buffer_copy(counts.read_bytes())
            return now.came == now.left + now.dropped

        settle(quiet, 5)
        seen = path.seen()
        now = delays._Counts.from_buffer_copy(counts.read_bytes())
    finally:
        net.down()
    assert seen.dropped > 0
    assert now.came + seen.dropped - now.dropped >= 3000  # none got lost without being counted
    assert 500 < now.left < 3000 * 1400 / 2**20 * 1000


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["x", "0", "2000000", "c"], "DELAY_US must be from 1 to 10000000, got 0"),
        (["x", "1ms", "2000000", "c"], "DELAY_US must be from 1 to 10000000, got 1ms"),
        (["x", "1", "1000", "c"], "MEMORY_BYTES must be from 1048576 to 1073741824, got 1000"),
        (["x", "1"], "usage: relay DEVICE DELAY_US MEMORY_BYTES COUNTS"),
    ],
)
def test_a_relay_explains_bad_arguments(arguments: list[str], problem: str) -> None:
    relay = _ROOT / "build/lab/relay"
    done = subprocess.run(
        [relay, *arguments], check=False, capture_output=True, text=True, timeout=10
    )
    assert done.returncode == 2
    assert problem in done.stderr


def test_counts_are_laid_out_as_the_relay_has_them() -> None:
    source = (_ROOT / "lab/relay/relay.c").read_text()
    body = source.partition("struct counts {")[2].partition("};")[0]
    names = [
        name.strip()
        for line in body.splitlines()
        if "uint64_t" in line
        for name in line.partition("uint64_t")[2].partition(";")[0].split(",")
    ]
    assert names == [field[0] for field in delays._Counts._fields_]
    assert ctypes.sizeof(delays._Counts) == 8 * len(names)


def test_a_table_tells_of_long_paths_and_of_dropped_frames(
    capsys: pytest.CaptureFixture[str],
) -> None:
    scenario = TWO_EQUAL.model_copy(update={"delays": parse(LONG, "f").delays})
    run = make_run("reno", 1, [[1.0], [1.0]])
    for dropped in (0, 7):
        run.evidence.delays["h1 to h2"] = Relayed(20_080.0, 1000, dropped, 40.0, 3_000.0, 10)
        print_result(Results(scenario, [run], {}), Console(width=200))
        text = capsys.readouterr().out
        assert "Round trip of h1 to h2, measured at the start: 20.08 ms." in text
        assert "late by 40 us, 3.0 ms at most; 1.00% of 1000 super-packets" in text
        assert ("that relay dropped 7 frames" in text) == (dropped == 7)
    assert run.evidence.to_json()["delays"]["h1 to h2"]["dropped"] == 7


def test_a_run_whose_relay_saw_nothing_fails(tmp_path: Path) -> None:
    scenario = parse(LONG, "f")
    live = LiveRun(scenario, RunState.create(tmp_path), "reno", 5, use_switch=False)
    good = Evidence(bytes_verified=expected_bytes(scenario, 6))
    good.delays = {"h1 to h2": Relayed(20_080.0, 1, 0, 0.0, 0.0, 0)}
    live.check(good)
    good.delays = {"h1 to h2": Relayed(20_080.0, 0, 0, 0.0, 0.0, 0)}
    with pytest.raises(RunFailed, match="no packet came to the relay of h1 to h2"):
        live.check(good)


def test_there_is_no_prediction(tmp_path: Path) -> None:
    options = Options(("reno",))
    with pytest.raises(NoPrediction, match="no long paths"):
        predict(Path("f"), [], parse(LONG, "f"), options, RunState.create(tmp_path))
