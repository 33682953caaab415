# SPDX-License-Identifier: Apache-2.0
"""The harness drives a network plugin as NCCL does: ours, and the stand-in for NCCL's transport.

`make nccl-check` runs the long ones too: all sockets and threads by all versions, the largest
sizes, and everything under sanitizers.
"""

import os
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from bench.nccl_ranks import HARNESS, NCCL_PATCH, PLUGIN, Found, Ranks, build

from ..pacing.traffic import inside

VERSIONS = range(6, 13)
ORDERS = ((0, 1, 2, 3), (0, 2, 1, 3))
CALLS = ("listen", "connect", "accept", "isend", "irecv", "test", "close")
DURING = ("isend", "irecv", "test", "close")
"""Calls that a rank makes many times: the fault comes in the middle of a transfer."""
NO_RESULT = ("rendezvous", "limit", "other")
LIBRARIES = {"flowslot": "libnccl-net-flowslot.so", "standin": "libnccl-net-standin.so"}
TIMEOUT_S = 2
SO_TIMESTAMPNS, ETHERTYPE_IP = 35, 0x0800
long = pytest.mark.skipif("NCCL_CHECK" not in os.environ, reason="`make nccl-check` runs it")


def prepared(name: str, sanitize: str = "") -> Ranks:
    folder = build(HARNESS, sanitize)
    if name == "flowslot":
        if not (NCCL_PATCH / PLUGIN).is_dir():
            pytest.skip("nccl_patch/plugin is not there")
        build(PLUGIN, sanitize)
    return Ranks(folder / LIBRARIES[name], folder / "nccl-harness")


@pytest.fixture(params=LIBRARIES)
def ranks(request: pytest.FixtureRequest) -> Ranks:
    return prepared(request.param)


@pytest.fixture
def ours() -> Ranks:
    return prepared("flowslot")


def sockets(number: int, threads: int) -> dict[str, str]:
    return {
        "NCCL_SOCKET_NTHREADS": str(threads),
        "NCCL_NSOCKS_PERTHREAD": str(number // max(threads, 1)),
    }


def chunks_sent(total: int, channels: int, channel: int, ranks: int, position: int) -> int:
    """What a ring all-reduce sends from one position: all chunks but one, twice, but not alike."""
    part = total * (channel + 1) // channels - total * channel // channels
    size = [part * (k + 1) // ranks - part * k // ranks for k in range(ranks)]
    return sum(size[(position - step) % ranks] for step in range(2 * (ranks - 1)))


def assert_right(found: list[Found], total: int, iterations: int = 1) -> None:
    """Sums, bytes to the byte, and nothing left behind."""
    for rank, one in enumerate(found):
        report = one.report
        assert one.status == 0, (rank, report.get("errors"), report.get("hung"), one.said)
        assert report["ok"] and report["sums_right"] and report["gpu_refused"]
        before = report["before"]
        for this_round in report["rounds"]:
            left = {name: this_round[name] for name in before}
            assert left == before, "descriptors or threads were left behind"
            comms = this_round["comms"]
            for channel, comm in enumerate(comms):
                order = ORDERS[channel % 2] if len(found) == 4 else range(len(found))
                position = list(order).index(rank)
                expected = [
                    iterations * chunks_sent(total, len(comms), channel, len(found), at)
                    for at in (position, position - 1)
                ]
                assert [comm["sent"], comm["received"]] == expected
                assert comm["to"] == order[(position + 1) % len(found)]


def ring(total: int, *more: object, channels: int = 2) -> list[object]:
    orders = ",".join("-".join(map(str, order)) for order in ORDERS)
    return ["--orders", orders, "--channels", channels, "--bytes", total, *more]


HARD = ("--outstanding", 32, "--null-handles")


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_three_times(ranks: Ranks, version: int) -> None:
    # Slices of 4 KiB: many requests at once, and received in slots that are larger than most.
    options = ring(400_001, "--version", version, "--rounds", 3, "--iterations", 2, *HARD)
    found = replace(ranks, ranks=4).run([*options, "--slice", 4096])
    assert_right(found, 400_001, iterations=2)


@pytest.mark.parametrize(("number", "threads"), [(1, 0), (4, 0), (64, 0), (1, 1), (4, 4), (8, 4)])
def test_sockets_and_threads(ranks: Ranks, number: int, threads: int) -> None:
    environment = sockets(number, threads)
    found = replace(ranks, ranks=4, environment=environment).run(ring(3_000_001, *HARD))
    assert_right(found, 3_000_001)


@pytest.mark.parametrize("total", [0, 1, 7, 130])
def test_messages_of_next_to_nothing(ranks: Ranks, total: int) -> None:
    found = replace(ranks, ranks=4).run(ring(total, "--iterations", 20, *HARD))
    assert_right(found, total, iterations=20)


def test_ipv6(ranks: Ranks) -> None:
    there = {"NCCL_SOCKET_FAMILY": "AF_INET6"}
    assert_right(replace(ranks, environment=there).run(["--bytes", 100_000]), 100_000)


def test_strangers_that_connect_first_delay_nobody(ranks: Ranks) -> None:
    found = ranks.run(["--strays", 1000, "--bytes", 100_000])
    assert_right(found, 100_000)
    if "NCCL_CHECK" in os.environ:
        assert all(one.report["rounds"][0]["comms"][0]["connect_s"] < 0.1 for one in found)


@pytest.mark.parametrize("call", CALLS)
def test_killed_peer_is_an_error(ours: Ranks, call: str) -> None:
    fault = ["--die-at", call, "--fault-after", 20 if call in DURING else 1]
    survivor, dead = ours.run(["--bytes", 100_000_000], {1: fault})
    assert dead.status == -9
    first = survivor.report["errors"][0]
    # The harness knows of the death, too, but leaves it two seconds to the plugin to say so.
    assert first["call"] not in NO_RESULT and first["result"] != 0, first
    assert survivor.report["rounds"][0]["threads"] == survivor.report["before"]["threads"]
    assert survivor.report["rounds"][0]["descriptors"] == survivor.report["before"]["descriptors"]
    if "NCCL_CHECK" in os.environ:
        assert first["at"] - dead.fault["at"] < 1.0
        assert survivor.report["close_s"] < 1.0


@pytest.mark.parametrize("call", ["isend", "irecv", "test"])
def test_stopped_peer_is_an_error_after_the_timeout(ours: Ranks, call: str) -> None:
    short = replace(ours, environment={"FLOWSLOT_NCCL_TIMEOUT": "1"})
    fault = ["--stall-at", call, "--fault-after", 20]
    survivor, _ = short.run(["--bytes", 100_000_000, "--limit", 10], {1: fault})
    first = survivor.report["errors"][0]
    assert first["call"] not in NO_RESULT and first["result"] != 0, first


def test_peer_that_computes_for_long_is_none(ours: Ranks) -> None:
    short = replace(ours, environment={"FLOWSLOT_NCCL_TIMEOUT": "1"})
    found = short.run(["--bytes", 100_000], {1: ["--compute-ms", 2000]})
    assert_right(found, 100_000)


def test_peer_without_the_plugin_is_an_error(ours: Ranks) -> None:
    other = {1: prepared("standin").plugin}
    warn = {"NCCL_DEBUG": "WARN"}
    with_plugin, without = replace(ours, others=other, environment=warn).run([])
    first = with_plugin.report["errors"][0]
    assert first["call"] == "connect" and first["result"] != 0
    assert first["since_progress_s"] < 2.0
    assert "plugin" in with_plugin.said
    assert without.status == 1


@pytest.mark.root
@pytest.mark.parametrize("threads", [0, 1])
@pytest.mark.parametrize("gone", ["host", "isend", "accept"])
def test_silent_peer_is_an_error_after_the_timeout(
    ours: Ranks, two_hosts: list[str], gone: str, threads: int
) -> None:
    """Its host vanishes, or it stops in a call. The timeout begins with the last that came from it,
    as seen on the wire; a stopped process's kernel still acknowledges."""
    environment = {"NCCL_SOCKET_IFNAME": "eth0", "FLOWSLOT_NCCL_TIMEOUT": str(TIMEOUT_S)}
    environment |= sockets(2, threads)
    before = [["ip", "netns", "exec", name] for name in two_hosts]
    hosts = replace(ours, environment=environment, before=before, root="10.9.0.1")
    options = ["--bytes", 200_000, "--iterations", 4000, "--compute-ms", 5, "--limit", 20]
    after = 50 if gone in DURING else 1
    fault = [] if gone == "host" else ["--stall-at", gone, "--fault-after", after]
    cut = f"sleep 2; ip -n {two_hosts[1]} link set eth0 down" if gone == "host" else ":"
    with heard_from("10.9.0.2", two_hosts[0]) as heard, subprocess.Popen(["sh", "-c", cut]):
        survivor, _ = hosts.run(options, {1: fault})
        first = survivor.report["errors"][0]
        assert first["call"] not in NO_RESULT and first["result"] != 0, first
        silent = first["at"] - heard[-1]
    assert silent >= 0.9 * TIMEOUT_S
    if "NCCL_CHECK" in os.environ:
        assert silent <= 1.1 * TIMEOUT_S


@contextmanager
def heard_from(address: str, namespace: str) -> Iterator[list[float]]:
    """When payload came from there over eth0: seconds of the monotonic clock."""
    times: list[float] = []
    ended = threading.Event()
    behind = time.time() - time.monotonic()
    with inside(namespace):
        wire = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(ETHERTYPE_IP))
        wire.bind(("eth0", ETHERTYPE_IP))
    wire.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    wire.settimeout(0.05)

    def listen() -> None:
        while not ended.is_set():
            with suppress(TimeoutError):
                packet, [(_, _, stamp)], *_ = wire.recvmsg(128, 64)
                head, size = packet[0] % 16 * 4, int.from_bytes(packet[2:4])
                empty = size == head + packet[head + 12] // 16 * 4
                if packet[12:16] == socket.inet_aton(address) and not empty:
                    seconds, ns = struct.unpack("qq", stamp)
                    times.append(seconds + ns / 1e9 - behind)

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        yield times
    finally:
        ended.set()
        thread.join()
        wire.close()


MUTANTS = {
    "nothing": ("(out)->pci_path = NULL;", "(out)->pci_path = NULL;"),
    "bytes in another place": ("request->data + at, size}", "request->data + at / 2, size}"),
    "done before it is": ("if (request->told && request->left == 0)", "if (request->told)"),
    "a descriptor is left": ("    close(listener->fd);\n    free(listener);\n    return NET_OK;",
                             "    free(listener);\n    return NET_OK;"),
    "the room instead of the size": ("request->size = request->header;", ";"),
}  # fmt: skip


@pytest.mark.parametrize("what", MUTANTS)
def test_harness_finds_what_is_wrong(tmp_path: Path, what: str) -> None:
    good, bad = MUTANTS[what]
    ranks, folder = prepared("standin"), NCCL_PATCH / HARNESS
    sources = {path.name: path.read_text() for path in folder.glob("standin*.c")}
    assert sum(source.count(good) for source in sources.values()) == 1
    for name, source in sources.items():
        (tmp_path / name).write_text(source.replace(good, bad))
    mutant = tmp_path / "mutant.so"
    command = ["gcc", "-std=c11", "-D_GNU_SOURCE", "-O1", "-fPIC", "-pthread", "-shared"]
    command += ["-fvisibility=hidden", "-Wl,-z,nodelete"]
    command += [f"-I{folder}", *(str(tmp_path / name) for name in sources)]
    subprocess.run([*command, "-o", str(mutant)], check=True)
    ranks = replace(ranks, plugin=mutant, environment=sockets(4, 0))
    with nullcontext() if what == "nothing" else pytest.raises(AssertionError):
        for _ in range(1 if what == "nothing" else 5):  # bytes may be in time by chance
            assert_right(ranks.run(["--bytes", 3_000_001]), 3_000_001)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--version", "13", "--version: must be a whole number in 6 to 12, is '13'"),
        ("--orders", "0-0", "--orders: must name each of 2 ranks once, is '0-0'"),
        ("--die-at", "regMr", "--die-at: must be listen, connect,"),
        ("--outstanding", "33", "--outstanding: must be a whole number in 1 to 32, is '33'"),
    ],
)
def test_wrong_option_is_named(option: str, value: str, said: str) -> None:
    for one in prepared("standin").run([option, value]):
        assert one.status == 2 and said in one.said


@long
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("number", [1, 4, 8, 64])
@pytest.mark.parametrize("threads", [0, 1, 4])
def test_all_sockets_threads_and_versions(
    ours: Ranks, version: int, number: int, threads: int
) -> None:
    if threads > number:
        pytest.skip("fewer sockets than threads")
    options = ring(5_000_001, "--version", version, "--rounds", 3, "--iterations", 2, *HARD)
    found = replace(ours, ranks=4, environment=sockets(number, threads)).run(options)
    assert_right(found, 5_000_001, iterations=2)


@long
@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6"])
@pytest.mark.parametrize("total", [2**20, 2**24 + 1, 2**28])
def test_large_tensors(ours: Ranks, total: int, family: str) -> None:
    environment = {"NCCL_SOCKET_FAMILY": family, **sockets(4, 0)}
    found = replace(ours, ranks=4, environment=environment).run(ring(total, *HARD))
    assert_right(found, total)


@long
@pytest.mark.parametrize("threads", [0, 4])
def test_idle_costs_next_to_nothing(ours: Ranks, threads: int) -> None:
    options = ["--iterations", 3, "--compute-ms", 2000]
    for one in replace(ours, environment=sockets(4, threads)).run(options):
        assert one.report["idle_cpu_s"] <= 0.005 * one.report["idle_s"]


@long
@pytest.mark.parametrize("sanitize", ["address", "thread"])
@pytest.mark.parametrize("version", [6, 9, 12])
@pytest.mark.parametrize(("number", "threads"), [(1, 0), (8, 0), (8, 4)])
@pytest.mark.parametrize("name", LIBRARIES)
def test_under_sanitizers(
    name: str, number: int, threads: int, version: int, sanitize: str
) -> None:
    ranks = replace(prepared(name, sanitize), ranks=4, environment=sockets(number, threads))
    options = ring(1_000_001, "--version", version, "--rounds", 2, "--iterations", 2, *HARD)
    assert_right(ranks.run([*options, "--slice", 65536]), 1_000_001, iterations=2)


@long
@pytest.mark.parametrize("sanitize", ["address", "thread"])
@pytest.mark.parametrize("call", CALLS)
def test_killed_peer_under_sanitizers(call: str, sanitize: str) -> None:
    ranks = replace(prepared("flowslot", sanitize), environment=sockets(4, 1))
    fault = ["--die-at", call, "--fault-after", 20 if call in DURING else 1]
    survivor, _ = ranks.run(["--bytes", 20_000_000], {1: fault})
    assert survivor.status == 1 and "Sanitizer" not in survivor.said, survivor.said
