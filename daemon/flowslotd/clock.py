# SPDX-License-Identifier: Apache-2.0
"""The clocks of a real host. Everything else is handed `now`."""

import time

from flowslot.model.slot import SlotClock, Tick
from flowslot.model.units import Nanos

GOLDEN = 0.6180339887498949


def monotonic() -> Nanos:
    """CLOCK_MONOTONIC in ns: what deadlines, durations and the BPF programs count in."""
    return Nanos(time.monotonic_ns())


def thread_cpu() -> int:
    """Processor time of this thread, ns: what it costs others, however long it took."""
    return time.thread_time_ns()


def wall() -> int:
    """CLOCK_REALTIME in ns: only aligns slots across hosts, and is shown."""
    return time.time_ns()


def own_moment(number: int, slot_ns: Nanos) -> Nanos:
    """How far into a slot host `number` (0, 1, ...) looks and reports, so that not all do at once.

    Between a quarter and three quarters of it, so that all clocks agree on the slot. The golden
    ratio spreads any number of hosts evenly.
    """
    return Nanos(int(slot_ns * (0.25 + 0.5 * (number * GOLDEN % 1.0))))


def read_slot(clock: SlotClock) -> tuple[Nanos, Tick]:
    """Both clocks read together, and the slot they are in."""
    now = monotonic()
    return now, clock.observe(now, wall())
