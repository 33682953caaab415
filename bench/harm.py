# SPDX-License-Identifier: Apache-2.0
"""Two ps-lite jobs in the lab, of which one comes to harm: for benchmarks and tests of what becomes
of the other one, and of what daemons and switch know."""

from __future__ import annotations

import mmap
import os
import random
import time
from pathlib import Path
from typing import Any

from flowslot_lab.runner import LiveRun
from flowslot_scenario.scenario import Scenario, parse

VICTIM, OTHER = "b", "a"
ALONE = "h5"
"""Where the victim has a worker, and the other job has nothing."""
LINK = f"{ALONE}->s1"


def scenario(two_jobs: Path, *changes: str) -> Scenario:
    """pslite-two-jobs, but that job b has its second worker on a host of its own."""
    text = two_jobs.read_text()
    head, jobs = text.split("[[jobs]]", 1)
    first, second = jobs.split("[[jobs]]")
    second = second.replace('"h4"]', f'"{ALONE}"]')
    text = f'{head}[[hosts]]\nname = "{ALONE}"\n\n[[jobs]]{first}[[jobs]]{second}'
    return parse(text, str(two_jobs), changes)


def worker(live: LiveRun, job: str, host: str) -> int:
    """Process id of a job's worker on a host."""
    return next(
        w.process.pid
        for w in live.jobs.workers
        if w.job.name == job and w.job.hosts[w.rank : w.rank + 1] == (host,)
    )


def progress(live: LiveRun, host: str, job: str) -> list[dict[str, Any]]:
    """The flows of a job that a host's daemon knows, as `flowslot jobs` shows them."""
    assert live.plane is not None
    jobs = live.plane.ask(host, "jobs")["jobs"]
    return [flow for it in jobs if it["job"] == job for flow in it["progress"]]


def reserved(live: LiveRun) -> float:
    """The most that is reserved for the victim's lonely worker in any of the next slots, payload
    bytes/s, as the switch process says."""
    assert live.plane is not None
    links = live.plane.ask("h1", "links")["links"]
    return float(max(next(one["load"] for one in links if one["name"] == LINK)))


def in_mid_iteration(live: LiveRun) -> bool:
    """That worker has sent less than half of an iteration, at a rate that was granted."""
    share = live.scenario.jobs[0].sent_bytes // len(live.scenario.jobs[0].servers)
    return reserved(live) > 0 and any(
        0 < flow["acked_bytes"] < share / 2 and flow["rate"]
        for flow in progress(live, ALONE, VICTIM)
    )


def record_of(pid: int) -> Path:
    """The progress record of a process, as a file."""
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if os.readlink(fd).startswith("/memfd:flowslot"):
                return fd
        except OSError:
            continue
    raise FileNotFoundError(f"process {pid} has no record")


class Vandal:
    """Writes random bytes into a record of somebody else's, all over it and again and again."""

    def __init__(self, pid: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._stopped = False
        fd = os.open(record_of(pid), os.O_RDWR)
        try:
            self._memory = mmap.mmap(fd, os.fstat(fd).st_size)
        finally:
            os.close(fd)

    def write(self, seconds: float) -> None:
        """For so long, or until it is told to stop; half of the time into the first slots, which
        are in use."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._stopped:
            for _ in range(8):
                room = len(self._memory) if self._random.random() < 0.5 else 64 + 4 * 256
                size = self._random.randint(1, 64)
                at = self._random.randrange(room - size)
                self._memory[at : at + size] = self._random.randbytes(size)
            time.sleep(0.005)

    def stop(self) -> None:
        """From any thread."""
        self._stopped = True
