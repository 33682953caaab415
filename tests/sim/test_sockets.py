# SPDX-License-Identifier: Apache-2.0
"""A job of several sockets beside a small one: nobody is worse off than where each socket has the
same rate, as under TCP in the ideal."""

from pathlib import Path

import numpy as np
import pytest

from flowslot_scenario.scenario import Scenario, load
from flowslot_sim.runner import Options, simulate

WORST = 1.08
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
RING = """
[[jobs]]
name = "{name}"
kind = "ring"
hosts = ["h1", "h2"]
bytes = {size}
sockets = {sockets}
compute_s = {compute}
"""
PS = RING.replace('"ring"', '"ps"').replace('["h1", "h2"]', '["h1"]\nserver = "h2"')


def scenario(folder: Path, kind: str, sockets: int, small: tuple[int, float]) -> Scenario:
    size, compute = small
    file = folder / "sockets.toml"
    file.write_text(
        NETWORK
        + kind.format(name="large", size=6_000_000, sockets=sockets, compute=0.1)
        + kind.format(name="small", size=size, sockets=1, compute=compute)
    )
    return load(file)


def worst(scenario: Scenario, policy: str = "stagger") -> dict[str, float]:
    """Of three seeds: each job's mean iteration time, in those that it has under `fair`."""
    runs = simulate(scenario, Options((policy, "fair"), seeds=3, iterations=60)).runs
    found: dict[str, float] = {}
    for ours, fair in zip(runs[::2], runs[1::2], strict=True):
        for job, same in zip(ours.jobs, fair.jobs, strict=True):
            ratio = float(np.mean(job.times) / np.mean(same.times))
            found[job.job.name] = max(found.get(job.job.name, 0.0), ratio)
    return found


@pytest.mark.parametrize("kind", [RING, PS], ids=["ring", "ps"])
@pytest.mark.parametrize("sockets", [1, 4, 16])
@pytest.mark.parametrize("small", [(1_000_000, 0.05), (500_000, 0.01), (2_000_000, 0.1)])
def test_nobody_is_worse_off_than_under_tcp(
    tmp_path: Path, kind: str, sockets: int, small: tuple[int, float]
) -> None:
    found = worst(scenario(tmp_path, kind, sockets, small))
    assert max(found.values()) <= WORST, found
