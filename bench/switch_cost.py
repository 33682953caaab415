# SPDX-License-Identifier: Apache-2.0
"""What a busy switch process costs: `python -m bench.switch_cost` (root: it makes a network
namespace, in which each daemon has an address of its own).

64 daemons talk to the real flowslot-switch over gRPC, all in one process (see bench.switch_load).
Each has about 100 flows that the arbiter tells apart. A phase is a job's communication: it begins
on all its hosts within 2 ms, with a demand for each of its flows, and ends with another one, that
gives back what was granted. Which jobs there are:
- `racks`: 4 hosts have 11 jobs together, with 3 flows from each host to each other one. Each job
  has a phase in 1.1 s: 10 phases a second at each daemon, 160 over all.
- `wide`: 4 jobs on all 64 hosts, with a flow to each of 25 others, in 0.4 s: 10 at each daemon, and
  10 over all, each with 1,600 flows.
- `few`: as `racks`, but 10 phases a second over all.

Processor time is the switch process's, by /proc, after all have joined. Beside it what a decision
costs (`step`), in an arbiter with the hosts, jobs and flows of `racks`: when all flows have news,
and when two jobs that share the hosts of one rack have, 72 of 6,336 flows: one ends its phase, and
the other one begins. In each rack two jobs are active, so others' turn may come in that decision
as well.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.negotiation import _cpu_s, _describe, _of_switches
from bench.negotiation_client import topology_text
from bench.switch_load import DAEMONS, LOADS, address
from flowslot.arbiter import Arbiter, ArbiterConfig
from flowslot.model.units import MILLISECOND, Nanos, goodput
from flowslot.policy import registry
from flowslot.protocol.messages import Ack, Demand, Grant, Hello

PORT, WARM_UP_S = 7411, 2.0
LOAD = LOADS["racks"]
RACKS = DAEMONS // LOAD.ranks


def measure(seconds: float = 8.0) -> dict[str, Any]:
    """For bench.run: each load, and the step."""
    parts: dict[str, dict[str, Any]] = {name: alone(name, seconds) for name in LOADS}
    parts["step"] = step()
    return {f"{part}_{key}": value for part, d in parts.items() for key, value in d.items()}


# --- the whole process


def alone(name: str, seconds: float) -> dict[str, Any]:
    """One load, in a network namespace of its own."""
    command = ["unshare", "--net", sys.executable, "-m", "bench.switch_cost", "--inside", name]
    command += ["--seconds", str(seconds)]
    ran = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    result: dict[str, Any] = json.loads(ran.stdout)
    return result


def inside(name: str, seconds: float) -> dict[str, Any]:
    """The same, in the present namespace."""
    for command in [
        "link set lo up",
        *(f"addr add {address(i)}/32 dev lo" for i in range(DAEMONS)),
    ]:
        subprocess.run(["ip", *command.split()], check=True)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.joinpath("topology.toml").write_text(topology_text(DAEMONS, [PORT]))
        file = folder / "switch.toml"
        file.write_text(f'name = "s1"\nlisten = "0.0.0.0:{PORT}"\ntls.insecure = true\n')
        program = Path(sys.executable).with_name("flowslot-switch")
        switch = subprocess.Popen([program, "--config", file], stderr=subprocess.DEVNULL)
        stack.callback(switch.wait, timeout=10)
        stack.callback(switch.terminate)
        _describe(PORT)
        load = [sys.executable, "-m", "bench.switch_load", name, str(PORT)]
        driver = subprocess.Popen([*load, str(seconds + WARM_UP_S + 0.5)], stdout=subprocess.PIPE)
        time.sleep(WARM_UP_S)
        before, cpu = _describe(PORT), _cpu_s([switch])
        time.sleep(seconds)
        after, cpu_after = _describe(PORT), _cpu_s([switch])
        said = json.loads(driver.communicate()[0])
    return {
        "cpu_share": round((cpu_after[0] - cpu[0]) / seconds, 3),
        **_of_switches([before], [after], seconds),
        **said,
    }


# --- one decision


def step(rounds: int = 30) -> dict[str, float]:
    """Processor time of a decision when all flows have news, and when 1 % of them have, in ms."""
    whole, part = _Racks(), _Racks()
    everybody = [whole.say(range(RACKS), everyone=True) for _ in range(rounds)][rounds // 5 :]
    for _ in range(rounds // 5):
        part.say(range(RACKS), everyone=True)
    few = [part.say([k % RACKS]) for k in range(RACKS * rounds // 4)]
    of_whole, of_part = (np.array(some).ravel() / 1e6 for some in (everybody, few))
    return {
        "whole_ms": float(of_whole.mean()),
        "whole_p90_ms": float(np.percentile(of_whole, 90)),
        "part_ms": float(of_part.mean()),
        "part_p90_ms": float(np.percentile(of_part, 90)),
        "part_of_whole": float(of_part.mean() / of_whole.mean()),
    }


class _Racks:
    """An arbiter of all racks, with a session for each host. Of a rack's jobs two are active, and
    with each news of the rack, the first one of these ends and the one after the second begins."""

    def __init__(self) -> None:
        make = registry.get("stagger").allocator
        assert make is not None
        config = ArbiterConfig(recovery=False, coalesce_ns=Nanos(4 * MILLISECOND))
        rates = np.full(DAEMONS * 2, goodput(10e9))
        self._arbiter = Arbiter(rates, config, make(registry.PolicyOptions()))
        self._now, self._first = Nanos(0), [0] * RACKS
        for host in range(DAEMONS):
            self._arbiter.hello(self._now, Hello(f"h{host}", host))
        self._rng = np.random.default_rng(1)

    def say(self, racks: Sequence[int], *, everyone: bool = False) -> tuple[int, int]:
        """There is news of the jobs of these racks that begin or end, or of `everyone` there. What
        the decision took, and the one after what it lowered has been acknowledged, ns."""
        self._pass(Nanos(self._now + 3 * MILLISECOND))
        for host in range(DAEMONS):
            self._arbiter.heartbeat(self._now, host)
        for rack in racks:
            ends, self._first[rack] = self._first[rack], (self._first[rack] + 1) % LOAD.jobs
            jobs = range(LOAD.jobs) if everyone else (ends, (ends + 2) % LOAD.jobs)
            for host in range(rack * LOAD.ranks, (rack + 1) * LOAD.ranks):
                self._arbiter.demand(self._now, host, self._demands(host, jobs))
        first, self._now = self._decide(), Nanos(self._now + MILLISECOND // 10)
        return first, self._decide()

    def _pass(self, until: Nanos) -> None:
        """What time alone makes the arbiter decide, it decides when that time comes."""
        while (due := self._arbiter.next_wakeup(self._now)) < until:
            self._now = due
            self._decide()
            self._now = min(Nanos(due + MILLISECOND // 10), until)
            self._decide()  # on what was acknowledged
        self._now = until

    def _decide(self) -> int:
        begun = time.process_time_ns()
        sent = self._arbiter.step(self._now)
        took = time.process_time_ns() - begun
        for session, grants in sent.items():
            self._arbiter.ack(self._now, session, [_ack(g) for g in grants if g.must_ack])
        return took

    def _demands(self, host: int, jobs: Sequence[int]) -> list[Demand]:
        rack, here = divmod(host, LOAD.ranks)
        demands = []
        for job in jobs:
            active = (job - self._first[rack]) % LOAD.jobs < 2
            for k in range(LOAD.others * LOAD.each):
                to = rack * LOAD.ranks + (here + 1 + k // LOAD.each) % LOAD.ranks
                demands.append(
                    Demand(
                        flow=job * LOAD.others * LOAD.each + k,
                        inc=1,
                        job=f"job{rack}-{job}",
                        links=(2 * host, 2 * to + 1),
                        remaining=int(self._rng.uniform(1e6, 1e7)) if active else 0,
                        wait_ns=int(self._rng.uniform(0, 2e8)),
                        period_ns=300 * MILLISECOND,
                        next_in_ns=50 * MILLISECOND,
                        next_bytes=5_000_000,
                    )
                )
        return demands


def _ack(grant: Grant) -> Ack:
    return Ack(grant.flow, grant.inc, grant.seq)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--load", choices=[*LOADS, "step"], help="only this one")
    parser.add_argument("--inside", choices=LOADS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        json.dump(inside(args.inside, args.seconds), sys.stdout)
        return
    for name in [args.load] if args.load else [*LOADS, "step"]:
        values = step() if name == "step" else alone(name, args.seconds)
        print(f"{name}:", *(f"  {key}: {value}" for key, value in values.items()), sep="\n")


if __name__ == "__main__":
    main()
