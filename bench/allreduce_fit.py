# SPDX-License-Identifier: Apache-2.0
"""What k all-reduces at a time cost on the lab's links: `python -m bench.allreduce_fit`.

Fig. 2 of Q. Wang et al., Communication Contention Aware Scheduling: an all-reduce of M bytes lasts
a + b M alone, and k of them a + (k b + (k - 1) eta) M each. k equal rings of two servers send all
the time; they never compute, as the others would make use of that. a and b are fitted to sizes with
k = 1, then eta to all. The paper's links have 10 Gbit/s, and it prints a = 0.669 ms, b = 0.853
ms/MB, for eta no number (0.235 ms/MB is in the authors' code). These links are slower: only eta / b
can be compared. Needs root.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from bench.sockets import NETWORK
from flowslot_lab import runner
from flowslot_lab.progress import Silent
from flowslot_lab.state import RunState
from flowslot_scenario.scenario import Scenario, load

SIZES = (250_000, 500_000, 1_000_000, 2_000_000)
WAYS = (1, 2, 3, 4)
ITERATIONS = 60
JOB = """
[[jobs]]
name = "j{k}"
kind = "ring"
hosts = ["h1", "h2"]
bytes = {size}
compute_s = 0.0
"""


def scenario(ways: int, size: int) -> Scenario:
    """So many equal rings on two hosts."""
    network = NETWORK.replace("warmup = 5", "warmup = 0")  # all times are from one start
    text = network + "".join(JOB.format(k=k, size=size) for k in range(ways))
    with TemporaryDirectory() as folder:
        file = Path(folder) / "fit.toml"
        file.write_text(text)
        return load(file)


def measured(ways: int, size: int, policy: str) -> float:
    """Mean seconds of an all-reduce, of those that end while all jobs still send; without the
    first five."""
    options = runner.Options((policy,), iterations=ITERATIONS, alone=False)
    state = RunState.create()
    try:
        result = runner.measure(scenario(ways, size), options, state, Silent())
    finally:
        state.clean()
    jobs = [np.array(job.times) for job in result.runs[0].jobs]
    until = min(times.sum() for times in jobs)
    return float(np.mean(np.concatenate([t[np.cumsum(t) <= until][5:] for t in jobs])))


def fit(found: dict[tuple[int, int], float]) -> tuple[float, float, float]:
    """a (s), b and eta (s per byte) of seconds by (ways, size)."""
    alone = np.array([(1.0, size, s) for (k, size), s in found.items() if k == 1])
    (a, b), *_ = np.linalg.lstsq(alone[:, :2], alone[:, 2], rcond=None)
    rest = [((k - 1) * m, s - a - k * b * m) for (k, m), s in found.items() if k > 1]
    x, y = np.array(rest).T
    return float(a), float(b), float(x @ y / (x @ x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="reno")
    args = parser.parse_args()
    found = {}
    for ways in WAYS:
        for size in SIZES if ways == 1 else SIZES[1::2]:
            found[ways, size] = measured(ways, size, args.policy)
            print(f"k = {ways}, {size / 1e6:g} MB: {found[ways, size] * 1e3:.2f} ms", flush=True)
    a, b, eta = fit(found)
    per_mb = f"b {b * 1e9:.3f} ms/MB, eta {eta * 1e9:.3f} ms/MB, eta/b {eta / b:.3f}"
    print(f"a {a * 1e3:.3f} ms, {per_mb}")
    worst = max(abs((a + (k * b + (k - 1) * eta) * m) / s - 1) for (k, m), s in found.items())
    print(f"the fit is off by at most {worst:.1%}; as printed eta/b is 0.235/0.853 = 0.275")


if __name__ == "__main__":
    main()
