# SPDX-License-Identifier: Apache-2.0
"""Policies are changed again and again while two jobs train: no connection may be lost, and no rate
may be left behind.

    python -m bench.policy_switches [--switches 50] [--pause 0.2] [--scenario two-equal]

In turns the switch process's policy and that of all daemons changes, as `flowslot policy set` does.
At the end daemons leave all flows alone. Exit status 1: a connection is not the one that it was, or
something is still paced.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

from flowslot.policy.registry import DEFAULT
from flowslot_lab.progress import Silent
from flowslot_lab.runner import LiveRun
from flowslot_lab.state import RunState, clean_dead
from flowslot_scenario.scenario import Scenario, load

SCENARIOS = Path(__file__).parents[1] / "lab" / "scenarios"
AT_THE_SWITCH = ("adadual", "cassini", "srsf-chunked", "srsf2", "stagger")
AT_HOSTS = ("static", "stagger", "mlcc", "adadual", "fair", "cassini")
LEFT_ALONE = "fair"
"""Under which daemons pace nothing."""
PATIENCE_S = 5.0


@dataclass(slots=True)
class Outcome:
    """`took`: s, of each change. `before`, `after`: connections of the jobs, by host. `paced`:
    flows that had a rate at the end, and `errors` of daemons."""

    took: list[float] = field(default_factory=list)
    before: dict[str, set[str]] = field(default_factory=dict)
    after: dict[str, set[str]] = field(default_factory=dict)
    paced: int = 0
    errors: list[str] = field(default_factory=list)


def connections(live: LiveRun, host: str) -> set[str]:
    """Both ends of each connection between jobs' processes, as the kernel knows them."""
    space = f"--net=/run/netns/{live.net.hosts[host]}"
    command = ["nsenter", space, "ss", "-tnHO", "state", "established", "dst", "10.78.0.0/16"]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {" ".join(line.split()[2:4]) for line in shown.splitlines()}


def paced(live: LiveRun) -> int:
    """Flows that have a rate."""
    assert live.plane is not None
    flows = [flow for host in live.net.hosts for flow in live.plane.ask(host, "flows")["flows"]]
    return sum(flow["rate"] is not None for flow in flows)


def play(
    live: LiveRun, switches: int, pause_s: float, look: Callable[[], None] = lambda: None
) -> Outcome:
    """Change policies `switches` times while the jobs of a run train, then pace all flows once
    more, `look`, and leave all alone. The run must be long enough; it goes on afterwards."""
    assert live.plane is not None
    outcome, hosts = Outcome(), list(live.net.hosts)
    turns = cycle((True, False))
    here, there = cycle(AT_THE_SWITCH), cycle(AT_HOSTS)
    outcome.before = {host: connections(live, host) for host in hosts}
    for _ in range(switches):
        began = time.monotonic()
        if next(turns):
            live.plane.set_policy(next(here))
        else:
            policy = next(there)
            for host in hosts:
                live.plane.set_policy(policy, host)
        outcome.took.append(time.monotonic() - began)
        until = began + pause_s
        while time.monotonic() < until:
            live.jobs.follow(max(until - time.monotonic(), 0.01))
    for host in hosts:
        live.plane.set_policy(DEFAULT, host)
    deadline = time.monotonic() + PATIENCE_S
    while not paced(live):
        if time.monotonic() > deadline:
            raise RuntimeError(f"no flow has a rate {PATIENCE_S:g} s after the last change")
        live.jobs.follow(0.05)
    look()
    for host in hosts:
        live.plane.set_policy(LEFT_ALONE, host)
    outcome.paced = paced(live)
    outcome.after = {host: connections(live, host) for host in hosts}
    for host in hosts:
        errors = live.plane.ask(host, "status")["errors"]
        outcome.errors += [f"{host}: {errors}"] if errors else []
    return outcome


def measure(scenario: Scenario, switches: int, pause_s: float) -> Outcome:
    """A whole run of its own."""
    state = RunState.create()
    try:
        with LiveRun(scenario, state, "stagger", 10_000, use_switch=True) as live:
            progress = live.follow(Silent())
            for done in progress:
                if done >= 4:
                    break
            return play(live, switches, pause_s)
    finally:
        state.clean()


def main() -> int:
    """Print what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--switches", type=int, default=50)
    parser.add_argument("--pause", type=float, default=0.2, help="s")
    parser.add_argument("--scenario", default="two-equal")
    options = parser.parse_args()
    clean_dead()
    scenario = load(SCENARIOS / f"{options.scenario}.toml")
    found = measure(scenario, options.switches, options.pause)
    lost = {host: found.before[host] ^ found.after[host] for host in found.before}
    slowest = max(found.took)
    print(f"{len(found.took)} changes of policy, the slowest {slowest * 1e3:.0f} ms")
    print(f"connections: {sum(map(len, found.before.values()))}, lost or new: {lost}")
    print(f"flows still paced: {found.paced}; errors: {found.errors or 'none'}")
    return 1 if any(lost.values()) or found.paced or found.errors else 0


if __name__ == "__main__":
    sys.exit(main())
