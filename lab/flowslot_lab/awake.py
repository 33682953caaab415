# SPDX-License-Identifier: Apache-2.0
"""Keeps the processors awake while something is measured."""

import contextlib
import struct
from collections.abc import Iterator
from pathlib import Path

_LATENCY = Path("/dev/cpu_dma_latency")


@contextlib.contextmanager
def awake() -> Iterator[None]:
    """Ask the kernel (PM QoS) to poll when idle, for as long as the block lasts.

    A virtual processor that halts is given back to the hypervisor, which may take milliseconds to
    bring it back: every policy would be measured with that noise. Hosts with jobs to run do not
    sleep either. The request ends with this process at the latest; without the device, or the
    right to use it, nothing changes.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            request = stack.enter_context(_LATENCY.open("wb", buffering=0))
            request.write(struct.pack("=i", 0))
        yield
