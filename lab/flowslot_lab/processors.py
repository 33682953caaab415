# SPDX-License-Identifier: Apache-2.0
"""Where the network is emulated, and that no processor sleeps while something is measured."""

import contextlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_LATENCY = Path("/dev/cpu_dma_latency")


class Ticks(NamedTuple):
    """What processors have had since the machine started: the network's, and of these idle; all of
    ours, and of these stolen: something was to run, and the hypervisor ran other machines."""

    network: int
    idle: int
    every: int
    stolen: int

    def since(self, before: "Ticks") -> tuple[float, float]:
        """Parts of the time in which the network's were busy, and in which all were stolen."""
        network, idle, every, stolen = (b - a for a, b in zip(before, self, strict=True))
        return 1.0 - idle / max(network, 1), stolen / max(every, 1)


def of_the_network() -> list[int]:
    """The processors that emulate wires, switch and network cards: half of them, at least one.

    That is done in interrupts, which take a processor away from whatever program it runs, unseen
    by the scheduler: workers were seen to stand still for 50 ms. Here the scheduler has some
    processors for the programs alone.
    """
    every = sorted(os.sched_getaffinity(0))
    return every[: max(1, len(every) // 2)]


def of_the_programs() -> list[int]:
    """The other processors: for those that must not wait. With a single one, the same."""
    every = os.sched_getaffinity(0)
    return sorted(every.difference(of_the_network()) or every)


def read_ticks() -> Ticks:
    """What the processors have had so far."""
    mine = {f"cpu{n}" for n in os.sched_getaffinity(0)}
    of_network = {f"cpu{n}" for n in of_the_network()}
    network = idle = every = stolen = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *ticks = line.split()
        if name in mine:
            every += sum(map(int, ticks[:8]))
            stolen += int(ticks[7])
        if name in of_network:
            network += sum(map(int, ticks[:8]))
            idle += int(ticks[3]) + int(ticks[4])
    return Ticks(network, idle, every, stolen)


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
