# SPDX-License-Identifier: Apache-2.0
"""The clocks of a real host. Everything else is handed `now`."""

import time

from flowslot.model.units import Nanos


def monotonic() -> Nanos:
    """CLOCK_MONOTONIC in ns: what deadlines, durations and the BPF programs count in."""
    return Nanos(time.monotonic_ns())


def thread_cpu() -> int:
    """Processor time of this thread, ns: what it costs others, however long it took."""
    return time.thread_time_ns()


def wall() -> int:
    """CLOCK_REALTIME in ns: only aligns slots across hosts, and is shown."""
    return time.time_ns()
