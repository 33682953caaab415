# SPDX-License-Identifier: Apache-2.0
"""What the daemon's own reader finds in the records of four ranks, played by the harness, whose two
channels go round in different orders."""

import os
import socket
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from bench.nccl_ranks import Found
from registering import Registrar
from waiting import settle

from flowslot_shm.layout import SLOT, Collective, Message, Role, State
from flowslot_shm.writer import cookie_of
from flowslotd.sockets import borrow, is_tcp

from .test_harness import ORDERS, assert_right, chunks_sent, long, prepared, ring, sockets

RANKS, CHANNELS, SOCKETS = 4, 2, 4
FLOWS = RANKS * CHANNELS * SOCKETS
DEFAULT = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
OURS = "reno" if DEFAULT != "reno" else "cubic"
PART = ["role", "rank", "peer", "channel"]
Slot = tuple[int, int]
"""Number of a record, and in it."""
States = list[Any]
"""Of one slot, as it was found again and again."""


@dataclass
class Seen:
    """`enlisted`: sockets under the daemon's congestion control, by cookie; `found`: what the
    harness says."""

    slots: dict[Slot, States] = field(default_factory=lambda: defaultdict(list))
    enlisted: set[int] = field(default_factory=set)
    bells: list[tuple[int, int, Message]] = field(default_factory=list)
    found: list[Found] = field(default_factory=list)

    def of(self, role: Role) -> dict[Slot, States]:
        return {at: states for at, states in self.slots.items() if states[-1]["role"] == role}

    def sends(self) -> set[int]:
        return {int(states[-1]["sock_cookie"]) for states in self.of(Role.RING).values()}

    def look(self, daemon: Registrar) -> None:
        """On the daemon's own thread: there, no record is closed meanwhile."""
        records = list(daemon.server.records.values())
        for record in records:
            record.reader.look()
            good = record.reader.good.view(SLOT)[:64, 0]
            for number in (good["state"] != State.FREE).nonzero()[0].tolist():
                states = self.slots[record.id, number]
                if not states or states[-1]["seq"] != good[number]["seq"]:
                    states.append(good[number].copy())
            assert not record.reader.faults.any()
        if len(self.sends()) == FLOWS and self.enlisted != self.sends():
            self.enlisted = {cookie for record in records for cookie in under(OURS, record.pid)}

    def bytes_sent(self) -> dict[tuple[int, int, int], dict[str, int]]:
        """By rank, channel and iteration, as its last state says."""
        sums: dict[tuple[int, int, int], dict[str, int]] = defaultdict(Counter)
        for states in self.of(Role.RING).values():
            for state in {int(state["iteration"]): state for state in states}.values():
                of = sums[int(state["rank"]), int(state["channel"]), int(state["iteration"])]
                for name in ("ready", "posted", "done", "iteration_total"):
                    of[name] += int(state[name])
        return sums


def under(name: str, pid: int) -> Iterator[int]:
    """Cookies of a process's TCP sockets that have this congestion control. None: it has ended."""
    try:
        pidfd, numbers = os.pidfd_open(pid), os.listdir(f"/proc/{pid}/fd")
    except (ProcessLookupError, FileNotFoundError):
        return
    try:
        for fd in numbers:
            with suppress(OSError), borrow(pidfd, int(fd)) as sock:
                raw = sock.getsockopt(6, socket.TCP_CONGESTION, 16) if is_tcp(sock) else b""
                if raw.split(b"\0")[0].decode() == name:
                    yield cookie_of(sock)
    finally:
        os.close(pidfd)


def watch(folder: Path, total: int, *more: object, **environment: str) -> Seen:
    """Run the ranks and look at their records all the while."""
    daemon, seen = Registrar(str(folder / "register.sock"), OURS, None), Seen()
    settings = {**sockets(SOCKETS, 1), **daemon.environment, "FLOWSLOT_JOB": "four", **environment}
    ranks = replace(prepared("flowslot"), ranks=RANKS, environment=settings)
    try:
        with ThreadPoolExecutor(1) as pool:
            run = pool.submit(ranks.run, ring(total, *more))
            settle(lambda: daemon.call(seen.look, daemon) or run.done(), 90)
        seen.found, seen.bells = run.result(), list(daemon.bells)
    finally:
        daemon.close()
    return seen


ITERATIONS, TOTAL = 3, 3_000_001
EVEN = 3_200_000
"""All ranks and channels send the same."""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    options = ["--iterations", ITERATIONS, "--compute-ms", 700]
    seen = watch(tmp_path_factory.mktemp("ranks"), TOTAL, *options)
    assert_right(seen.found, TOTAL, ITERATIONS)
    return seen


def neighbours(rank: int, channel: int) -> tuple[int, int]:
    order = ORDERS[channel % len(ORDERS)]
    at = order.index(rank)
    return order[at - 1], order[(at + 1) % len(order)]


def test_ranks_channels_and_their_order_are_known_from_the_first_message(seen: Seen) -> None:
    """At most they are not known for a moment; never wrong, nor another channel's."""
    expected = Counter()
    for rank in range(RANKS):
        for channel in range(CHANNELS):
            before, after = neighbours(rank, channel)
            expected[Role.RECEIVE, rank, before, channel] = 1
            expected[Role.RING, rank, after, channel] = SOCKETS
    assert Counter(states[-1][PART].item() for states in seen.slots.values()) == expected
    for states in seen.slots.values():
        for state in states:
            for name in PART:
                assert state[name] in (states[-1][name], -1)
    assert {int(s[-1]["collective"]) for s in seen.slots.values()} == {Collective.ALL_REDUCE}


def test_only_connections_that_send_data_are_enlisted(seen: Seen) -> None:
    assert len(seen.sends()) == FLOWS
    assert seen.enlisted == seen.sends()


def test_what_is_sent_is_what_is_received_and_reported(seen: Seen) -> None:
    """To the byte, in each iteration but the last, after which the connections end."""
    sums = seen.bytes_sent()
    for channel in range(CHANNELS):
        for at, rank in enumerate(ORDERS[channel]):
            sent = chunks_sent(TOTAL, CHANNELS, channel, RANKS, at)
            for iteration in range(ITERATIONS - 1):
                of = sums[rank, channel, iteration]
                assert {of[name] for name in ("ready", "posted", "done")} == {sent}


def test_trees_are_told_from_rings(tmp_path: Path) -> None:
    """A tree's connection has no role, and none is a ring's rank before; numbers are apart."""
    options = ["--channels", 3, "--trees", 1, "--iterations", 2, "--compute-ms", 500]
    seen = watch(tmp_path, EVEN, *options)
    assert_right(seen.found, EVEN, 2)
    expected: Counter[tuple[int, ...]] = Counter()
    for rank in range(RANKS):
        for channel in range(3):
            before, after = neighbours(rank, channel)
            tree = channel == 2
            expected[int(Role.RECEIVE), rank, before, -1 if tree else channel] += 1
            role = Role.UNKNOWN if tree else Role.RING
            expected[int(role), rank, after, 0 if tree else channel] += SOCKETS
    assert Counter(states[-1][PART].item() for states in seen.slots.values()) == expected


@long
@pytest.mark.parametrize("how", ["bytes", "pauses"])
def test_iterations_are_right_from_the_fourth_on_and_ring_twice(tmp_path: Path, how: str) -> None:
    iterations, sent = 200, 2 * (RANKS - 1) * EVEN // RANKS
    told = {"FLOWSLOT_ITERATION_BYTES": str(sent)} if how == "bytes" else {}
    seen = watch(tmp_path, EVEN, "--iterations", iterations, "--compute-ms", 60, **told)
    assert_right(seen.found, EVEN, iterations)
    right: Counter[int] = Counter()
    for (rank, _, iteration), of in seen.bytes_sent().items():
        whole = of["ready"] == of["iteration_total"] == sent // CHANNELS
        right[rank] += whole and 3 <= iteration < iterations
    assert min(right.values()) >= 0.95 * CHANNELS * (iterations - 3)
    rung = Counter(seen.bells)
    for flow in seen.of(Role.RING):
        assert rung[*flow, Message.BEGIN] <= iterations
        assert rung[*flow, Message.END] <= iterations + 1  # closing
