# SPDX-License-Identifier: Apache-2.0
"""What is learnt of an enlisted job, from the kernel's counters to the flow's row. A real
connection; what the kernel counts of it is made up, and so is the time."""

import os
import random
import socket
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any, NamedTuple

import pytest
from seen import MS, Seen, at

from flowslot_shm.layout import Role
from flowslot_shm.writer import cookie_of
from flowslotd import sockets
from flowslotd.observe.passive.shadow import DATA_BYTES, Found, ShadowRecord
from flowslotd.sockets import Info

SPEED = 40_000  # bytes per ms
TICK_MS = 4
LAST, DELAYED_MS = 600, 40
"""Bytes of a burst's last segment, and how late their acknowledgement comes."""
SOON, WITHIN = 5, 0.03


class Train(NamedTuple):
    """`begins`: when each burst does, ms; `sizes`: bytes. Each is sent at SPEED."""

    begins: Sequence[float]
    sizes: Sequence[int]

    @classmethod
    def of(cls, pattern: Sequence[tuple[float, int]], seed: int, jitter: float) -> "Train":
        """60 iterations of (ms of computing, bytes to send) each."""
        chance, now = random.Random(seed), 0.0
        begins, sizes = [], []
        for pause, size in [*pattern] * 60:
            now += pause * (1 + chance.uniform(-jitter, jitter))
            begins.append(now)
            sizes.append(size)
            now += size / SPEED
        return cls(begins, sizes)

    def info(self, ms: float) -> Info:
        """As the kernel tells: the last acknowledgement is late, and time goes in ticks."""
        n = bisect_right(self.begins, ms)
        if n == 0:
            return Info(sockets.ESTABLISHED, 0, 1448, 0, 9999, 0, 0, 0, 0, 0)
        before, start, size = sum(self.sizes[: n - 1]), self.begins[n - 1], self.sizes[n - 1]
        now = min(round((ms - start) * SPEED), size)
        pending = now < size or ms < start + size / SPEED + DELAYED_MS
        acked = before + (max(now - LAST, 0) if pending else now)
        quiet = max(ms - start - size / SPEED, 0)
        busy = sum(self._busy(i, ms) for i in range(n))
        ticks = [int(value / TICK_MS) * TICK_MS for value in (quiet, busy)]
        return Info(
            sockets.ESTABLISHED, 0, 1448, int(pending), ticks[0], acked, size - now,
            ticks[1] * 1000, before + now, 0,
        )  # fmt: skip

    def _busy(self, i: int, ms: float) -> float:
        ends = [
            ms,
            self.begins[i] + self.sizes[i] / SPEED + DELAYED_MS,
            *self.begins[i + 1 : i + 2],
        ]
        return min(ends) - self.begins[i]


class Far(socket.socket):
    """A connection to another host, as far as anybody can tell."""

    def getsockname(self) -> tuple[str, int]:
        return "10.0.0.1", 5000

    def getpeername(self) -> tuple[str, int]:
        return "10.0.0.2", 6000


@pytest.fixture
def enlist(
    stack: ExitStack, clock: Any, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Train, float, float], None]:
    """Look at the only connection of a process from some time (ms) until another."""
    connection = stack.enter_context(Far())
    found = Found(os.getpid(), b"job", Role.UNKNOWN, (), ((7, cookie_of(connection)),))

    def run(train: Train, from_ms: float, until_ms: float) -> None:
        def told(*_: object) -> Info:
            return train.info((clock.ns - at(0)) / MS)

        clock.ns = at(from_ms)
        monkeypatch.setattr(sockets, "borrow", lambda *_: nullcontext(connection))
        monkeypatch.setattr(sockets, "peek", told)
        monkeypatch.setattr(sockets, "look", told)
        source = ShadowRecord(-1, found, lambda *_: None, lambda _: None)
        stack.callback(source.reader.close)
        stack.callback(source.close)
        source.have(found, clock.ns)
        while clock.ns < at(until_ms):
            source.look(clock.ns, "")
            seen.observer.observe(clock.ns, [source], None)
            posted = told().sent + told().unsent
            assert bool(seen.flows) == (posted > DATA_BYTES), seen.notes
            clock.ns = source.next_ns

    return run


JOBS: dict[str, list[tuple[float, int]]] = {
    "one all-reduce": [(120, 4_000_000)],
    "buckets": [(80, 1_000_000), (12, 1_000_000), (12, 1_000_000), (12, 500_000)],
    "buckets, apart": [(250, 2_000_000), (40, 2_000_000), (40, 2_000_000)],
    "in phases": [(100, 500_000), (3, 500_000), (3, 500_000), (3, 500_000)],
    "short": [(40, 400_000)],
    "long": [(1500, 20_000_000)],
    "two that are as far apart": [(90, 3_000_000), (90, 1_000_000)],
}


@pytest.mark.parametrize("jitter", [0.0, 0.1])
@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("late", [0.0, 0.3, 0.9])
def test_the_period_of_an_enlisted_job_is_known_after_five_iterations(
    name: str, jitter: float, late: float, enlist: Any, seen: Any
) -> None:
    pattern = JOBS[name]
    train, bursts = Train.of(pattern, 1, jitter), len(pattern)
    enlisted = 0.0
    if late:  # in the tenth iteration
        start, end = train.begins[9 * bursts], train.begins[10 * bursts]
        enlisted = start + late * (end - start)
    last = (SOON if not late else 10 + SOON) * bursts
    until = train.begins[last] + 21
    enlist(train, enlisted, until)
    steps = train.begins[last - 5 * bursts : last + 1 : bursts]
    truth = (steps[-1] - steps[0]) / (len(steps) - 1)
    assert seen["period"] == pytest.approx([truth * MS], rel=WITHIN if not jitter else 0.06)
    assert seen["target"] == pytest.approx([sum(size for _, size in pattern)], rel=WITHIN)
