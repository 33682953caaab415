# SPDX-License-Identifier: Apache-2.0
"""How long decisions take: a host policy's decide(), and an arbiter's step(), for 100 flows; and
what of the latter the fair reference takes (one look), for few flows, many, and hostile ones.

The arbiter's flows belong to 10 jobs on 20 links. Every job's progress differs from step to step,
and one job of ten goes idle or comes back each time, so that gangs are planned anew and grants
are lowered, acknowledged and raised: what is measured is a busy arbiter, not one at rest.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from flowslot.arbiter import TARGET, Arbiter, ArbiterConfig
from flowslot.model.units import MILLISECOND, Nanos, goodput
from flowslot.policy import registry
from flowslot.policy.base import AllocationState, Keys, View
from flowslot.policy.fair_reference import FairReference
from flowslot.policy.job_links import of
from flowslot.protocol.messages import Ack, Demand, Hello

FLOWS, LINKS, JOBS = 100, 20, 10


def percentiles(samples_ns: list[int]) -> dict[str, float]:
    """p50, p90, p99 and mean in ms."""
    ms = np.array(samples_ns) / 1e6
    p50, p90, p99 = np.percentile(ms, (50, 90, 99))
    mean = float(ms.mean())
    return {"p50_ms": p50, "p90_ms": p90, "p99_ms": p99, "mean_ms": mean, "samples": len(ms)}


def timed(function: Callable[[], object], samples_ns: list[int]) -> object:
    begin = time.perf_counter_ns()
    result = function()
    samples_ns.append(time.perf_counter_ns() - begin)
    return result


def decide(policy: str = "stagger", flows: int = FLOWS, rounds: int = 1000) -> dict[str, float]:
    """Time of one HostPolicy.decide() with all flows granted at different rates."""
    return percentiles(decide_ns(policy, flows, rounds))


def decide_ns(policy: str = "stagger", flows: int = FLOWS, rounds: int = 1000) -> list[int]:
    """Of each of them, after a tenth to warm up."""
    rng = np.random.default_rng(1)
    links = 2 * flows
    view = View(
        slot=0,
        horizon=10,
        capacity=np.full(links, goodput(10e9)),
        flow=np.arange(flows, dtype=np.uint64),
        paths=rng.integers(0, links, (flows, 2)).astype(np.int32),
        job=np.arange(flows) % JOBS,
        job_names=[f"job{j}" for j in range(JOBS)],
        remaining=rng.uniform(0, 1e7, flows),
        guaranteed=np.ones(flows, dtype=np.bool_),
    )
    make = registry.get(policy).host_policy
    assert make is not None
    decider = make(registry.PolicyOptions())
    samples: list[int] = []
    for k in range(rounds):
        granted = replace(view, grants=rng.uniform(0, 1e8, flows), ceilings=np.full(flows, 1e9))
        timed(lambda k=k, v=granted: decider.decide(Nanos(k), v), samples)  # type: ignore[misc]
    return samples[rounds // 10 :]


def _path(flow: int, links: int) -> tuple[int, int]:
    """Up and down link; each link has flows of several jobs."""
    half = links // 2
    return 2 * ((flow // JOBS) % half), 2 * ((flow * 7 + flow // JOBS) % half) + 1


def _demands(flows: int, links: int, round_: int) -> list[Demand]:
    rng = np.random.default_rng(round_)
    demands = []
    for f in range(flows):
        job = f % JOBS
        active = (job + round_) % JOBS != 0
        demands.append(
            Demand(
                flow=f,
                inc=round_ + 1,
                job=f"job{job}",
                links=_path(f, links),
                remaining=int(rng.uniform(1e6, 1e7)) if active else 0,
                cap=math.inf,
                wait_ns=int(rng.uniform(0, 2e8)),
                period_ns=300 * MILLISECOND,
                next_in_ns=50 * MILLISECOND,
                next_bytes=5_000_000,
            )
        )
    return demands


def step(flows: int = FLOWS, links: int = LINKS, rounds: int = 500) -> dict[str, float]:
    """Time of one Arbiter.step() that has something to decide."""
    samples, grants = step_ns(flows, links, rounds)
    return {**percentiles(samples), "grants_per_step": grants}


def step_ns(flows: int = FLOWS, links: int = LINKS, rounds: int = 500) -> tuple[list[int], float]:
    """Of each of them, after some to warm up; and how many grants they make in the mean."""
    allocator = registry.get("stagger").allocator
    assert allocator is not None
    config = ArbiterConfig(recovery=False, max_flows_per_session=max(flows, 1))
    arbiter = Arbiter(np.full(links, goodput(10e9)), config, allocator(registry.PolicyOptions()))
    arbiter.hello(Nanos(0), Hello("h1", 1))
    samples: list[int] = []
    grants = 0
    for k in range(rounds):
        now = Nanos(k * 10 * MILLISECOND)
        arbiter.heartbeat(now, 1)
        arbiter.demand(now, 1, _demands(flows, links, k))
        for pause in (0, 1):  # the second one raises what the first one has made room for
            at = Nanos(now + pause * MILLISECOND)
            sent = timed(lambda at=at: arbiter.step(at), samples)  # type: ignore[misc]
            assert isinstance(sent, dict)
            answers = [g for g in sent.get(1, ()) if g.must_ack]
            grants += len(sent.get(1, ()))
            arbiter.ack(at, 1, [Ack(g.flow, g.inc, g.seq) for g in answers])
    return samples[rounds // 10 :], grants / len(samples)


@dataclass(frozen=True)
class Sends:
    """`flows` of `jobs` that cross `hops` of `links`, each with a number of bytes between the two
    of `size` in an iteration of `period_ms`, in the first half of it."""

    flows: int
    jobs: int
    links: int
    hops: int
    size: tuple[float, float]
    period_ms: float


USUAL = Sends(flows=256, jobs=64, links=64, hops=4, size=(1e6, 20e6), period_ms=300)
MANY = Sends(flows=1024, jobs=64, links=128, hops=4, size=(1e6, 20e6), period_ms=300)
TINY = Sends(flows=2048, jobs=2048, links=128, hops=8, size=(10, 100), period_ms=16)
LOOK_MS = 4.0


def look(sends: Sends, rounds: int = 100) -> dict[str, float]:
    """Time of one FairReference.look(), every LOOK_MS of the jobs' time."""
    rng = np.random.default_rng(1)
    paths = np.array(
        [rng.choice(sends.links, sends.hops, replace=False) for _ in range(sends.flows)], np.int32
    )
    job = np.sort(rng.integers(0, sends.jobs, sends.flows)).astype(np.int64)
    following = rng.uniform(*sends.size, sends.flows)
    phase = rng.uniform(0, sends.period_ms, sends.jobs)
    unbounded, ones, none = (
        np.full(sends.flows, np.inf),
        np.ones(sends.flows),
        np.zeros(sends.flows),
    )
    reference = FairReference()
    samples: list[int] = []
    for k in range(rounds):
        now = k * LOOK_MS
        on = ((now + phase) % sends.period_ms < sends.period_ms / 2)[job]
        state = AllocationState(
            paths=paths,
            capacity=np.full(sends.links + 1, TARGET * goodput(10e9)),
            goodput=np.append(np.full(sends.links, goodput(10e9)), np.inf),
            job=job,
            job_names=[f"job{j}" for j in range(sends.jobs)],
            jobs=Keys.lasting(sends.jobs),
            flow=np.arange(sends.flows, dtype=np.uint64),
            aggregate=np.arange(sends.flows),
            aggregates=Keys.lasting(sends.flows),
            remaining=np.where(on, following, 0.0),
            cap=unbounded,
            sockets=ones,
            wait_ns=np.where(on, 1e6, 0.0),
            period_ns=none,
            due_ns=none,
            next_bytes=following,
            idle_ns=np.where(on, 0.0, 1e6),
            goal=none,
        )
        at = Nanos(int(now * MILLISECOND))
        timed(lambda s=state, at=at: reference.look(s, at, of(s)), samples)  # type: ignore[misc]
    return percentiles(samples[rounds // 2 :])


def measure() -> dict[str, float]:
    """All figures, flat."""
    parts = {
        "decide": decide(),
        "step": step(),
        "step_6400_flows": step(6400, 256, rounds=20),
        "look": look(USUAL),
        "look_many": look(MANY),
        "look_tiny": look(TINY),
    }
    return {f"{part}_{key}": value for part, d in parts.items() for key, value in d.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    output = parser.parse_args().output
    results = measure()
    if output == "json":
        print(json.dumps(results, indent=2))
        return 0
    for name, value in results.items():
        print(f"{name:32} {value:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
