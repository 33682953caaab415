# SPDX-License-Identifier: Apache-2.0
"""A job of several sockets beside a small one of one socket, on two hosts: each job's iteration
time in those that it has where every socket has the same rate (`fair`), as under TCP.

`python -m bench.sockets`: simulated, three seeds. `python -m bench.sockets --lab [WORD...]`: those
with the first small job on real TCP, under `fair` (daemons only watch) and `stagger`.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from flowslot_lab import runner
from flowslot_lab.progress import Silent
from flowslot_lab.state import RunState
from flowslot_scenario.results import Run
from flowslot_scenario.scenario import Scenario, load
from flowslot_sim.runner import Options, simulate

KINDS = {"ring": 'hosts = ["h1", "h2"]', "ps": 'hosts = ["h1"]\nserver = "h2"'}
SOCKETS = (1, 4, 16)
SMALL = ((1_000_000, 0.05), (500_000, 0.01), (2_000_000, 0.1))
"""Bytes, and seconds of computation, of the small job."""
LARGE = 6_000_000, 0.1
NETWORK = """
name = "sockets"
warmup = 5
[links]
rate_mbps = 400
buffer_kb = 256
[[hosts]]
name = "h1"
[[hosts]]
name = "h2"
"""
JOB = """
[[jobs]]
name = "{name}"
kind = "{kind}"
{hosts}
bytes = {size}
sockets = {sockets}
compute_s = {compute}
"""
SEEDS, ITERATIONS, LAB_ITERATIONS = 3, 60, 40


def scenario(kind: str, sockets: int, small: tuple[int, float]) -> Scenario:
    """Two hosts, two jobs."""
    jobs = (("large", sockets, LARGE), ("small", 1, small))
    text = NETWORK + "".join(
        JOB.format(name=name, kind=kind, hosts=KINDS[kind], size=size, sockets=n, compute=compute)
        for name, n, (size, compute) in jobs
    )
    with TemporaryDirectory() as folder:
        file = Path(folder) / "sockets.toml"
        file.write_text(text)
        return load(file)


def worst(runs: Sequence[Run]) -> dict[str, float]:
    """By job: mean iteration time in those under `fair`, in the worst pair of runs. `runs`: first
    ours, then `fair`, again and again."""
    found: dict[str, float] = {}
    for ours, fair in zip(runs[::2], runs[1::2], strict=True):
        for job, same in zip(ours.jobs, fair.jobs, strict=True):
            ratio = float(np.mean(job.times) / np.mean(same.times))
            found[job.job.name] = max(found.get(job.job.name, 0.0), ratio)
    return found


def simulated(kind: str, sockets: int, small: tuple[int, float]) -> dict[str, float]:
    """See `worst`: of three seeds."""
    options = Options(("stagger", "fair"), seeds=SEEDS, iterations=ITERATIONS)
    return worst(simulate(scenario(kind, sockets, small), options).runs)


def in_the_lab(kind: str, sockets: int, small: tuple[int, float]) -> dict[str, float]:
    """See `worst`: of one repeat."""
    state = RunState.create()
    try:
        options = runner.Options(("stagger", "fair"), iterations=LAB_ITERATIONS, alone=False)
        return worst(runner.measure(scenario(kind, sockets, small), options, state, Silent()).runs)
    finally:
        state.clean()


def cases() -> Iterator[tuple[str, int, tuple[int, float]]]:
    """All scenarios."""
    return itertools.product(KINDS, SOCKETS, SMALL)


def main(words: Sequence[str]) -> None:
    """A line for each; in the lab, of those that all of the words are in."""
    lab, words = "--lab" in words, [word for word in words if word != "--lab"]
    for kind, sockets, small in cases():
        if (lab and small != SMALL[0]) or any(word not in (kind, str(sockets)) for word in words):
            continue
        found = (in_the_lab if lab else simulated)(kind, sockets, small)
        times = ", ".join(f"{job} {ratio:.3f}" for job, ratio in found.items())
        size, compute = small
        print(f"{kind}, {sockets} sockets, {size} bytes in {compute} s: {times}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
