# SPDX-License-Identifier: Apache-2.0
"""A job hangs with megabytes to send, and another one shares its link: `python -m bench.hangs`.

Real jobs and daemons in the lab, once for each back end, way to hang, and moment. `goes` runs by
itself first; then `hangs` begins on the same NIC. Its peer stops to read (SIGSTOP), or its peer's
host loses its cable: before its first iteration, or after some. Then that ends.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from flowslot_lab.net import data_ip
from flowslot_lab.processors import awake
from flowslot_lab.runner import LiveRun
from flowslot_lab.state import RunState
from flowslot_lab.tools import LabError
from flowslot_scenario.scenario import load

BACKENDS = ("bpf", "edt", "htb", "socket")
WAYS = ("stops to read", "vanishes")
MOMENTS = ("first", "later")
SCENARIO = """
name = "hangs"
warmup = 1
[links]
rate_mbps = 400
buffer_kb = 256
[[hosts]]
name = "h1"
[[hosts]]
name = "h2"
[[hosts]]
name = "h3"
[[jobs]]
name = "hangs"
kind = "ring"
hosts = ["h1", "h2"]
bytes = 8_000_000
compute_s = 0.05
start_s = 3.0
[[jobs]]
name = "goes"
kind = "ring"
hosts = ["h1", "h3"]
bytes = 2_500_000
compute_s = 0.05
"""
ALONE_S, SETTLED_S, MEASURED_S, TOGETHER_S, BACK_S = 1.0, 2.0, 2.0, 1.5, 6.0
"""From when `goes` is measured alone; from the hang to when it is measured again, and for how long;
from its start to a hang that is not its first iteration's; the longest to wait for its grant."""
SLOT_S = 0.06
RATE = 400e6 / 8
LEAST = 1 / 25
"""Of the link: the floor of an active job of two is more (ADR 2), and a hung one has less."""


@dataclass(frozen=True, slots=True)
class Found:
    """`goes`: its iteration time, in those it had alone. `took_back`: the part of the link that was
    granted to `hangs` while it hung, median. `back_slots`: from its first byte to its grant."""

    goes: float
    took_back: float
    back_slots: float


class Hanging:
    """One run: see the module."""

    def __init__(self, live: LiveRun, way: str, moment: str) -> None:
        self._live, self._way, self._first = live, way, moment == "first"
        self._ends: list[float] = []

    def run(self) -> Found:
        """Raises LabError when the job does not hang, or `goes` is not there any more."""
        jobs = self._live.jobs
        if self._first and self._way == "stops to read":
            self._hang(True)
        jobs.go()
        begun = time.monotonic() + 0.1
        start = begun + 3.0
        self._follow(start - 0.05)
        alone = self._period(begun + ALONE_S, start - 0.05)
        if self._first and self._way == "vanishes":
            self._hang(True)
        if not self._first:
            self._follow(start + TOGETHER_S)
            if jobs.iterations_done()[0] < 1:
                raise LabError("the job never began")
            self._hang(True)
            start += TOGETHER_S
        before = jobs.iterations_done()[0]
        held: list[float] = []
        self._follow(start + SETTLED_S)
        self._follow(start + SETTLED_S + MEASURED_S, held)
        beside = self._period(start + SETTLED_S, start + SETTLED_S + MEASURED_S)
        if jobs.iterations_done()[0] > before + 1:
            raise LabError("the job does not hang")
        back = self._wait_back()
        return Found(beside / alone, sorted(held)[len(held) // 2] / RATE, back / SLOT_S)

    def _hang(self, hangs: bool) -> None:
        if self._way == "stops to read":
            (peer,) = (w for w in self._live.jobs.workers if w.job.name == "hangs" and w.rank == 1)
            peer.process.signal(signal.SIGSTOP if hangs else signal.SIGCONT)
            return
        space, state = self._live.net.control, "down" if hangs else "up"
        subprocess.run(
            ["nsenter", f"--net=/run/netns/{space}", "ip", "link", "set", "d-h2", state], check=True
        )

    def _follow(self, until: float, held: list[float] | None = None) -> None:
        while time.monotonic() < until:
            self._live.jobs.follow(0.02)
            done = self._live.jobs.iterations_done()[1]
            self._ends += [time.monotonic()] * (done - len(self._ends))
            if held is not None:
                held.append(self._granted())

    def _period(self, begin: float, end: float) -> float:
        """Mean of the iterations of `goes` that ended meanwhile."""
        ends = [at for at in self._ends if begin <= at <= end]
        if len(ends) < 2:
            raise LabError("the other job does not go on")
        return (ends[-1] - ends[0]) / (len(ends) - 1)

    def _flows(self) -> list[dict[str, Any]]:
        assert self._live.plane is not None
        flows: list[dict[str, Any]] = self._live.plane.ask("h1", "flows")["flows"]
        return [flow for flow in flows if flow["job"] == "hangs"]

    def _granted(self) -> float:
        return sum(flow["rate"] or 0.0 for flow in self._flows())

    def _acked(self) -> int:
        """What the kernel saw acknowledged."""
        space = self._live.net.hosts["h1"]
        command = ["nsenter", f"--net=/run/netns/{space}", "ss", "-tinHO", "dst", data_ip(1)]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return sum(map(int, re.findall(r"bytes_acked:(\d+)", text)))

    def _wait_back(self) -> float:
        """The job moves again: seconds from its first byte until it has a grant."""
        before = self._acked()
        self._hang(False)
        end, moved = time.monotonic() + BACK_S, 0.0
        while time.monotonic() < end:
            if not moved and self._acked() > before:
                moved = time.monotonic()
            if moved and self._granted() >= LEAST * RATE:
                return time.monotonic() - moved
            self._live.jobs.follow(0.001)
        raise LabError("its grant does not come back" if moved else "it does not move again")


def measure(state: RunState, backend: str, way: str, moment: str) -> Found:
    """One run. Raises LabError."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "hangs.toml"
        file.write_text(SCENARIO)
        scenario = load(file)
    stacked = backend in ("edt", "htb")
    with (
        awake(),
        LiveRun(scenario, state, f"stagger@{backend}", 100_000, True, stacked=stacked) as live,
    ):
        return Hanging(live, way, moment).run()


def cases(words: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """All, or those that all of the words are in."""
    for case in itertools.product(BACKENDS, WAYS, MOMENTS):
        if all(word in case for word in words):
            yield case


def main(words: Sequence[str]) -> None:
    """A line for each."""
    for case in cases(words):
        state = RunState.create()
        try:
            found = measure(state, *case)
            said = (
                f"goes on at {found.goes:.3f} of alone, {found.took_back:.2f} of the link held, "
                f"grant back after {found.back_slots:.1f} slots"
            )
        except LabError as error:
            said = f"not measured: {error}"
        finally:
            state.clean()
        print(f"{', '.join(case)}: {said}", flush=True)


if __name__ == "__main__":
    if os.geteuid() != 0:
        sys.exit("bench.hangs needs root")
    main(sys.argv[1:])
