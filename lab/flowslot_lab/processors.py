# SPDX-License-Identifier: Apache-2.0
"""Where the network is emulated, and that no processor sleeps while something is measured."""

import contextlib
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

_LATENCY = Path("/dev/cpu_dma_latency")


class Ticks(NamedTuple):
    """What processors have had since the machine started: the network's and the programs', and of
    each of these idle; all of ours, and of these stolen: something was to run, and the hypervisor
    ran other machines."""

    network: int
    network_idle: int
    programs: int
    programs_idle: int
    every: int
    stolen: int

    def since(self, before: "Ticks") -> "Shares":
        """What they did in between."""
        spent = Ticks(*(b - a for a, b in zip(before, self, strict=True)))
        return Shares(
            (spent.network - spent.network_idle) / max(spent.network, 1),
            (spent.programs - spent.programs_idle) / max(spent.programs, 1),
            spent.stolen / max(spent.every, 1),
        )


class Shares(NamedTuple):
    """Parts of the time in which the network's processors, and the programs', were not idle (so
    what was stolen counts), and in which all were stolen."""

    network_busy: float
    programs_busy: float
    stolen: float


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
    seen = dict[int, list[int]]()
    for line in Path("/proc/stat").read_text().splitlines():
        name, *ticks = line.split()
        if name.startswith("cpu") and name != "cpu":
            seen[int(name[3:])] = [int(tick) for tick in ticks[:8]]

    def spent(processors: Iterable[int]) -> int:
        return sum(sum(seen.get(n, ())) for n in processors)

    def idle(processors: Iterable[int]) -> int:
        return sum(seen[n][3] + seen[n][4] for n in processors if n in seen)

    network, programs, every = of_the_network(), of_the_programs(), os.sched_getaffinity(0)
    return Ticks(
        spent(network),
        idle(network),
        spent(programs),
        idle(programs),
        spent(every),
        sum(seen[n][7] for n in every if n in seen),
    )


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
