# SPDX-License-Identifier: Apache-2.0
"""Random scenarios: unequal jobs on shared links, from a seed and a number.

| what | drawn |
| --- | --- |
| hosts | 2 to 8 |
| racks | 1 to 3, at most one for each host; hosts go round; one rack: no uplinks |
| rate of the hosts' links | 60 to 400 Mbit/s, and at most 1000 Mbit/s of all hosts together |
| rate of the uplinks | of all hosts of the largest rack together, divided by 1 to 2 |
| buffers, of all ports | 32 kB to 4 MB |
| jobs | 1 to 4; two of three are rings, the others parameter servers |
| hosts of a job | 2 to all, at random; a parameter server is at the first of them |
| sockets of a job | 1 to 4 |
| iteration of a job alone | 80 to 600 ms |
| duty: the part of it in which the job's busiest link works | 0.2 to 0.7 |
| start of a job | within its first iteration |

Numbers of hosts, racks, jobs and sockets, and the duty, are uniform; rates, buffers and iterations
uniform in their logarithm. A draw counts if the busiest link's sum of duties is 0.4 to
1.6; others are drawn again.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from flowslot.model.units import goodput
from flowslot_scenario.job import Job
from flowslot_scenario.scenario import Host, Links, Scenario

HOSTS, RACKS, JOBS, SOCKETS = (2, 8), (1, 3), (1, 4), (1, 4)
RATE_MBPS, BUFFER_KB = (60.0, 400.0), (32.0, 4000.0)
TOTAL_MBPS = 1000.0
"""Of all hosts' links together: what two processors emulate with some idle time left (1,600 kept
them busy for more than 80 % of the time). Our daemons may still keep the others busy."""
PERIOD_S, DUTY, OVERSUBSCRIPTION = (0.08, 0.6), (0.2, 0.7), (1.0, 2.0)
LOAD = (0.4, 1.6)
RINGS = 2 / 3
_PROBE_BYTES = 10_000_000
"""Long enough that rounding up to slices does not show."""


def draw(seed: int, number: int) -> Scenario:
    """Draw `number` (from 1) of a seed."""
    rng = np.random.default_rng([seed, number])
    while True:
        found = _once(rng, f"mix-{seed}-{number}")
        if LOAD[0] <= load(found) <= LOAD[1]:
            return found


def load(scenario: Scenario) -> float:
    """The busiest link's sum of duties: how much of the time it would work if nobody waited."""
    links = scenario.directed_links()
    sums = dict.fromkeys(links, 0.0)
    for job in scenario.jobs:
        for link, size in scenario.link_bytes(job).items():
            sums[link] += size / goodput(links[link].capacity_bps) / scenario.ideal_s(job)
    return max(sums.values())


def _once(rng: np.random.Generator, name: str) -> Scenario:
    count = _whole(rng, HOSTS)
    racks = _whole(rng, (RACKS[0], min(RACKS[1], count)))
    rate = _log(rng, (RATE_MBPS[0], min(RATE_MBPS[1], TOTAL_MBPS / count)))
    uplinks = {}
    if racks > 1:
        shared = rate * math.ceil(count / racks) / rng.uniform(*OVERSUBSCRIPTION)
        uplinks["uplink_mbps"] = round(max(shared, RATE_MBPS[0]), 1)
    hosts = tuple(
        Host(name=f"h{i + 1}", rack=f"r{i % racks + 1}" if racks > 1 else None)
        for i in range(count)
    )
    plain = Scenario(
        name=name,
        seed=int(rng.integers(2**31)),
        links=Links(rate_mbps=round(rate, 1), buffer_kb=round(_log(rng, BUFFER_KB), 1), **uplinks),
        hosts=hosts,
        jobs=(Job(name="probe", kind="ring", hosts=("h1", "h2"), bytes=1, compute_s=0.0),),
    )
    jobs = tuple(_job(rng, plain, f"j{k + 1}") for k in range(_whole(rng, JOBS)))
    return plain.model_copy(update={"jobs": jobs})


def _job(rng: np.random.Generator, on: Scenario, name: str) -> Job:
    """A job that has the links of `on` for itself."""
    names = [host.name for host in on.hosts]
    places = tuple(rng.permutation(names)[: _whole(rng, (2, len(names)))].tolist())
    period, duty = _log(rng, PERIOD_S), rng.uniform(*DUTY)
    ring = rng.uniform() < RINGS
    where: dict[str, Any] = {"kind": "ring", "hosts": places}
    if not ring:
        where = {"kind": "ps", "server": places[0], "hosts": places[1:]}
    probe = Job(name=name, bytes=_PROBE_BYTES, sockets=_whole(rng, SOCKETS), compute_s=0.0, **where)
    links = on.directed_links()
    takes = max(
        size / goodput(links[link].capacity_bps) for link, size in on.link_bytes(probe).items()
    )
    return probe.model_copy(
        update={
            "bytes": max(round(_PROBE_BYTES * duty * period / takes), 1),
            "compute_s": round((1 - duty) * period, 4),
            "start_s": round(float(rng.uniform(0, period)), 4),
        }
    )


def _whole(rng: np.random.Generator, between: tuple[int, int]) -> int:
    return int(rng.integers(between[0], between[1] + 1))


def _log(rng: np.random.Generator, between: tuple[float, float]) -> float:
    return float(np.exp(rng.uniform(*np.log(between))))


def as_toml(scenario: Scenario) -> str:
    """A scenario file of it."""
    plain = scenario.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    tables = {key: value for key, value in plain.items() if isinstance(value, dict)}
    lists = {key: plain[key] for key in ("hosts", "jobs")}
    top = {key: value for key, value in plain.items() if key not in tables | lists}
    parts = [_keys(top)]
    parts += [f"[{name}]\n{_keys(table)}" for name, table in tables.items()]
    parts += [f"[[{name}]]\n{_keys(one)}" for name, ones in lists.items() for one in ones]
    return "\n".join(parts)


def _keys(table: dict[str, Any]) -> str:
    # A name, a number or a list of names is written in JSON as in TOML.
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())
