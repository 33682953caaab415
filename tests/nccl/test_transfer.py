# SPDX-License-Identifier: Apache-2.0
"""Messages arrive whole and in order, or there is an error, soon."""

import pytest

from .conftest import Pair

VERSIONS = range(6, 13)
MIXED = "0,1,100,65536,65537,1000000,5"
REMOTE_ERROR = 6


def lanes(threads: int, each: int) -> dict[str, str]:
    return {"NCCL_SOCKET_NTHREADS": str(threads), "NCCL_NSOCKS_PERTHREAD": str(each)}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_transfers(pair: Pair, version: int) -> None:
    got = pair(version, lanes(0, 2), sizes=MIXED, count=35, room=77)
    assert got["bytes"] == 2 * 5 * sum(map(int, MIXED.split(",")))


@pytest.mark.parametrize(("threads", "each"), [(0, 1), (0, 4), (1, 8), (4, 1), (4, 16)])
def test_every_number_of_sockets_and_threads_transfers(pair: Pair, threads: int, each: int) -> None:
    settings = lanes(threads, each)
    assert pair(12, settings, sizes=MIXED, count=70, window=32)["bytes"] > 0
    assert pair(12, settings, size=0, count=40, window=32)["bytes"] == 0
    assert pair(12, settings, size=3_000_000, count=12, comms=2)["bytes"] == 2 * 2 * 36_000_000


def test_a_late_receiver_gets_what_waited_for_it(pair: Pair) -> None:
    settings = lanes(2, 2)
    assert pair(12, settings, size=500_000, count=40, window=32, late=200)["bytes"] > 0


def test_sockets_may_have_ipv6(pair: Pair) -> None:
    settings = {"NCCL_SOCKET_FAMILY": "AF_INET6", "FLOWSLOT_TOTALS": "1"}
    got = pair(8, settings, size=300_000)
    assert "[::1]:" in got.said
    assert got["bytes"] > 0


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("stage", ["listen", "connect", "accept", "send", "receive", "test"])
def test_a_killed_peer_is_an_error_soon(pair: Pair, threads: int, stage: str) -> None:
    got = pair(12, lanes(threads, 2), size=3_000_000, count=50, die=stage)
    assert got["error"] == REMOTE_ERROR
    assert "127.0.0.1:" in got.said  # it is named
    assert got["seconds"] < 10
    assert got.get("close", 0.0) < 10


@pytest.mark.parametrize("threads", [0, 2])
def test_a_stopped_peer_is_an_error_after_the_timeout(pair: Pair, threads: int) -> None:
    settings = lanes(threads, 1) | {"FLOWSLOT_NCCL_TIMEOUT": "1"}
    got = pair(12, settings, size=100_000, count=50, nap=1000, stop="test")
    assert got["error"] == REMOTE_ERROR
    assert got["seconds"] > 0.7
    assert "no sign of life for 1 s" in got.said


def test_connect_waits_until_the_other_end_accepts(pair: Pair) -> None:
    got = pair(12, lanes(0, 2), size=1000, shy=500)
    assert got["bytes"] == 2 * 8 * 1000
    assert got["setup"] > 0.4


def test_a_peer_that_accepts_after_the_timeout_is_no_error(pair: Pair) -> None:
    got = pair(12, lanes(0, 2) | {"FLOWSLOT_NCCL_TIMEOUT": "1"}, size=1000, nap=1000, shy=2500)
    assert got["bytes"] == 2 * 8 * 1000
    assert got["setup"] > 2.4


@pytest.mark.parametrize(
    ("peer", "said", "after"),
    [
        ({"die": "listen", "accept": 1}, "nobody has connected for 10 s", 10),
        ({"stop": "listen"}, "no sign of life for 1 s", 1),
    ],
)
def test_a_peer_that_never_comes_is_an_error(
    pair: Pair, peer: dict[str, object], said: str, after: int
) -> None:
    """It died before it connected to an end that only accepts, which has no sign of it: ten times
    the timeout. Or it stopped before it accepted."""
    got = pair(12, lanes(0, 2) | {"FLOWSLOT_NCCL_TIMEOUT": "1"}, nap=1000, **peer)
    assert got["error"] == REMOTE_ERROR
    assert said in got.said
    assert 0.9 * after < got["seconds"] < 2 * after


def test_what_a_peer_sent_before_it_closed_is_all_received(pair: Pair) -> None:
    """The receiver begins when the sender has closed."""
    got = pair(12, lanes(0, 2), size=20_000, count=4, late=300, oneway=1, leave=1)
    assert got["bytes"] == 80_000


@pytest.mark.parametrize(("alien", "name"), [(1, "127.0.0.1:4711"), (2, "a host")])
def test_a_host_without_the_plugin_is_named(pair: Pair, alien: int, name: str) -> None:
    got = pair(12, alien=alien, die="never")
    assert got["error"] == REMOTE_ERROR
    assert f"{name} does not use the plugin flowslot" in got.said


def test_strangers_delay_nobody(pair: Pair) -> None:
    got = pair(12, strays=900, size=1000)
    assert got["bytes"] == 2 * 8 * 1000
    assert got["setup"] < 5
    assert got.said.count("it speaks another protocol") == 1


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"NCCL_SOCKET_NTHREADS": "many"}, "NCCL_SOCKET_NTHREADS must be a number from 0 to 16"),
        ({"NCCL_SOCKET_FAMILY": "ipv4"}, "NCCL_SOCKET_FAMILY must be AF_INET or AF_INET6"),
        ({"FLOWSLOT_NCCL_TIMEOUT": "0"}, "FLOWSLOT_NCCL_TIMEOUT must be a number from 1 to"),
        (lanes(16, 64), "must be at most 64, got 1024"),
    ],
)
def test_a_bad_setting_is_named_and_left_out(
    pair: Pair, settings: dict[str, str], problem: str
) -> None:
    got = pair(12, settings, size=1000)
    assert problem in got.said
    assert got["bytes"] > 0


@pytest.mark.parametrize(
    ("choice", "works"),
    [("=lo", True), ("lo", True), ("l", True), ("=l", False), ("^lo,^", True), ("^=lo", True)],
)
def test_interfaces_are_chosen_as_nccl_does(pair: Pair, choice: str, works: bool) -> None:
    got = pair(12, {"NCCL_SOCKET_IFNAME": choice, "FLOWSLOT_TOTALS": "1"}, size=1000)
    excludes = choice.startswith("^")
    if works and excludes:
        assert "(127.0.0.1:" not in got.said
    elif works:
        assert "(127.0.0.1:" in got.said
    else:
        assert got["error"] == 3
        assert 'matches NCCL_SOCKET_IFNAME="=l"' in got.said
