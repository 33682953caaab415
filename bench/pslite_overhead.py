# SPDX-License-Identifier: Apache-2.0
"""What the ps-lite patches cost a job, and bring: `python -m bench.pslite_overhead`. Needs root.

One job of two servers and two workers in the lab, without computation, so that iterations are
nothing but communication. Ways of running it take turns:

  upstream        ps-lite as it is, no daemon
  flowslot        patched, beside daemons that observe
  calm            receive threads mended, no daemon
  flowslot-calm   the same, patched, beside daemons that observe
  outside         `calm`, beside daemons that observe it from outside

on links of 200 Mbit/s, which are the limit there, and on links so fast that the processors are.
Throughput of each is compared with that of another way, turn by turn: median and range of the
ratios, and their geometric mean with its standard error (as a part of it), because threads that
spin make a single turn chance. Exit status 1 when the median of a patched one is below 0.98.
"""

import argparse
import math
import statistics
import sys
from typing import NamedTuple

from flowslot_lab.processors import awake
from flowslot_lab.progress import Silent
from flowslot_lab.runner import LiveRun
from flowslot_lab.state import RunState, clean_dead
from flowslot_scenario.scenario import Scenario, load

from .lab_links import SCENARIO

LEAST = 0.98


class Way(NamedTuple):
    """`policy`: of the lab; `to`: the way that it is compared with."""

    library: str
    policy: str
    to: str = ""


WAYS = {
    "upstream": Way("upstream", "cubic"),
    "flowslot": Way("flowslot", "fair", "upstream"),
    "calm": Way("calm", "cubic", "upstream"),
    "flowslot-calm": Way("flowslot-calm", "fair", "calm"),
    "outside": Way("calm", "fair", "calm"),
}
PATCHED = ("flowslot", "flowslot-calm")
RATES = {200: 1, 10_000: 8}
"""Of links, Mbit/s: and how many times as many iterations, where threads do not spin."""


class Turn(NamedTuple):
    """MB/s that each worker pushes (and pulls); CPU, in cores, of a worker and of a daemon."""

    rate: float
    job_cpu: float
    daemon_cpu: float


def scenario(way: Way, rate_mbps: int) -> Scenario:
    """pslite-2s2w without computation."""
    changes = ["jobs.compute_s=0", f"jobs.library={way.library}", f"links.rate_mbps={rate_mbps}"]
    return load(SCENARIO.with_name("pslite-2s2w.toml"), changes)


def turn(state: RunState, way: Way, rate_mbps: int, iterations: int) -> Turn:
    """One run."""
    wanted = scenario(way, rate_mbps)
    with LiveRun(wanted, state, way.policy, iterations, use_switch=False) as live:
        run = live.run(1, Silent())
    cpu = run.evidence.cpu
    daemons = [used for name, used in cpu.items() if name.startswith("daemon-")]
    seconds = float(run.jobs[0].times.mean())
    return Turn(
        wanted.jobs[0].sent_bytes / seconds / 1e6,
        statistics.fmean((cpu["job-a-0"], cpu["job-a-1"])),
        statistics.fmean(daemons) if daemons else 0.0,
    )


def measure(ways: list[str], repeat: int, iterations: int) -> dict[int, dict[str, list[Turn]]]:
    """By rate of the links and by way: one turn after the other."""
    clean_dead()
    found: dict[int, dict[str, list[Turn]]] = {rate: {name: [] for name in ways} for rate in RATES}
    state = RunState.create()
    try:
        with awake():
            for k in range(repeat):
                for rate, longer in RATES.items():
                    for name in ways[:: -1 if k % 2 else 1]:  # nobody is always the first
                        print(f"{k + 1}/{repeat}: {name} at {rate} Mbit/s", file=sys.stderr)
                        n = iterations * (longer if "calm" in WAYS[name].library else 1)
                        found[rate][name].append(turn(state, WAYS[name], rate, n))
    finally:
        state.clean()
    return found


def ratios(turns: dict[str, list[Turn]], name: str) -> list[float]:
    """Throughput compared with that of the way that it stands beside, turn by turn."""
    pairs = zip(turns[name], turns[WAYS[name].to], strict=True)
    return [mine.rate / theirs.rate for mine, theirs in pairs]


def error(each: list[float]) -> float:
    """Standard error of the geometric mean of ratios, as a part of it; NaN of a single one."""
    if len(each) < 2:
        return math.nan
    return statistics.stdev(map(math.log, each)) / math.sqrt(len(each))


def _compared(ways: list[str]) -> set[str]:
    return {WAYS[name].to for name in ways}


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    options = parser.parse_args()
    # With whatever they are compared with.
    ways = [name for name in WAYS if name in options.ways or name in _compared(options.ways)]
    bad = False
    for rate, turns in measure(ways, options.repeat, options.iterations).items():
        print(f"links of {rate} Mbit/s")
        print(
            "way             MB/s (min to max)        worker  daemon (cores)  to         ratio"
            " (min to max)      mean, error"
        )
        for name in ways:
            way = WAYS[name]
            rates = [one.rate for one in turns[name]]
            line = (
                f"{name:14}  {statistics.median(rates):6.2f} ({min(rates):.2f} to {max(rates):.2f})"
            )
            worker = statistics.fmean(one.job_cpu for one in turns[name])
            daemon = statistics.fmean(one.daemon_cpu for one in turns[name])
            line = f"{line:40} {worker:6.3f}  {daemon:6.3f}"
            if way.to in ways:
                each = ratios(turns, name)
                median = statistics.median(each)
                line += f"          {way.to:9}  {median:.3f} ({min(each):.3f} to {max(each):.3f})"
                line += f"  {statistics.geometric_mean(each):.3f}, {error(each):.3f}"
                bad |= name in PATCHED and median < LEAST
            print(line)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
