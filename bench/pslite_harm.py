# SPDX-License-Identifier: Apache-2.0
"""What becomes of a ps-lite job when its neighbour comes to harm: `python -m bench.pslite_harm`.

Needs root. pslite-two-jobs under stagger, with a worker of job b on a host of its own. In turns:
nothing happens; that worker is killed in the middle of an iteration, while it sends at a reserved
rate; and random bytes are written into the records of b's workers, until the end. Told of each
turn: the mean iteration of job a before and after that moment, the one in which it happens by
itself, too, and after the kill how soon the switch process has nothing reserved for the dead worker
and its daemon no record of it.
"""

import argparse
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from flowslot_lab.processors import awake
from flowslot_lab.progress import Silent
from flowslot_lab.runner import LiveRun
from flowslot_lab.state import RunState, clean_dead

from .harm import (
    ALONE,
    OTHER,
    VICTIM,
    Vandal,
    in_mid_iteration,
    progress,
    reserved,
    scenario,
    worker,
)
from .lab_links import SCENARIO

TWO_JOBS = SCENARIO.with_name("pslite-two-jobs.toml")
HARMS = ("none", "killed", "random bytes")
SLOT_S = 0.06
MOST = {"slower": 1.05, "reserved_s": 2 * SLOT_S, "record_s": 5.0}
PATIENCE_S = 10.0


class Turn(NamedTuple):
    """`before`, `after`: mean iteration of job a, s; `during`: the first of those after.
    `reserved_s`, `record_s`: see above, or 0. `faulty`: slots of records in which the daemons found
    something wrong."""

    before: float
    during: float
    after: float
    reserved_s: float = 0.0
    record_s: float = 0.0
    faulty: int = 0


def kill(live: LiveRun) -> tuple[float, float]:
    """Seconds until nothing is reserved for the lonely worker any more, and until it is unknown."""
    assert live.plane is not None
    live.jobs.give_up(next(job for job in live.scenario.jobs if job.name == VICTIM))
    pid = worker(live, VICTIM, ALONE)
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    gone: dict[str, float] = {}
    while len(gone) < 2 and time.monotonic() < began + PATIENCE_S:
        if "record" not in gone:
            known = live.plane.ask(ALONE, "status")["records"]["registered"]
            if not known and not progress(live, ALONE, VICTIM):
                gone["record"] = time.monotonic() - began
        if "reserved" not in gone and reserved(live) == 0:
            gone["reserved"] = time.monotonic() - began
    return gone.get("reserved", PATIENCE_S), gone.get("record", PATIENCE_S)


def vandalise(live: LiveRun) -> Callable[[], None]:
    """Begin to write into the records of the victim's workers; returns what ends it."""
    vandals = [Vandal(worker(live, VICTIM, host), seed) for seed, host in enumerate(("h3", ALONE))]
    threads = [threading.Thread(target=vandal.write, args=(3600.0,)) for vandal in vandals]
    for thread in threads:
        thread.start()

    def end() -> None:
        for vandal, thread in zip(vandals, threads, strict=True):
            vandal.stop()
            thread.join()

    return end


def turn(state: RunState, harm: str, iterations: int) -> Turn:
    """One run; harm is done after a third of it."""
    waited = (0.0, 0.0)
    with LiveRun(scenario(TWO_JOBS), state, "stagger", iterations, use_switch=True) as live:
        assert live.plane is not None
        for done in live.follow(Silent()):
            if done > 2 * iterations / 3:
                break
        deadline = time.monotonic() + PATIENCE_S
        while not in_mid_iteration(live) and time.monotonic() < deadline:
            live.jobs.follow(0.0)
        if time.monotonic() >= deadline:
            raise RuntimeError("the worker was never seen to send in the middle of an iteration")
        at_ns = time.monotonic_ns()
        end = vandalise(live) if harm == "random bytes" else lambda: None
        if harm == "killed":
            waited = kill(live)
        try:
            while not live.jobs.follow():
                pass
        finally:
            end()
        status = [live.plane.ask(host, "status") for host in live.plane.daemons]
        if any(one["errors"] for one in status):
            raise RuntimeError(f"daemons: {[one['errors'] for one in status]}")
        job = next(job for job in live.scenario.jobs if job.name == OTHER)
        each = np.array([report.ends for report in live.jobs.reports(job) if report.ends])
    ends = each.max(axis=0)[live.scenario.warmup :]
    split = int(np.searchsorted(ends, at_ns))
    if not 2 <= split < len(ends) - 1:
        raise RuntimeError("no iterations before or after it: ask for more")
    times = np.diff(ends) / 1e9
    faulty = sum(one["records"]["faulty_slots"] for one in status)
    before, after = times[: split - 1], times[split - 1 :]
    return Turn(float(before.mean()), float(after[0]), float(after.mean()), *waited, faulty)


def main() -> int:
    """Print the table; exit status 1 when job a was slowed down or something of b stayed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=90)
    options = parser.parse_args()
    clean_dead()
    state = RunState.create()
    turns: dict[str, list[Turn]] = {harm: [] for harm in HARMS}
    try:
        with awake():
            for k in range(options.repeat):
                for harm in HARMS:
                    print(f"{k + 1}/{options.repeat}: {harm}", file=sys.stderr)
                    turns[harm].append(turn(state, harm, options.iterations))
    finally:
        state.clean()
    return report(turns)


def report(turns: dict[str, list[Turn]]) -> int:
    """The table; exit status."""
    usual = statistics.fmean(one.after for one in turns["none"])
    bad = False
    print(
        "harm          before (s)  after (s)  after/before (max)  after/none (max)   during (max)"
        "       faulty slots"
    )
    for harm, each in turns.items():
        before = statistics.fmean(one.before for one in each)
        after = statistics.fmean(one.after for one in each)
        own = [one.after / one.before for one in each]
        others = [one.after / usual for one in each]
        during = [one.during for one in each]
        print(
            f"{harm:12}  {before:10.4f}  {after:9.4f}  {statistics.fmean(own):.3f} ({max(own):.3f})"
            f"       {statistics.fmean(others):.3f} ({max(others):.3f})"
            f"      {statistics.fmean(during):.4f} ({max(during):.4f})"
            f"  {[one.faulty for one in each]}"
        )
        bad |= harm != "none" and max(statistics.fmean(own), after / usual) > MOST["slower"]
    for name in ("reserved_s", "record_s"):
        values = [getattr(one, name) for one in turns["killed"]]
        print(f"killed: {name} {statistics.fmean(values):.4f} (max {max(values):.4f})")
        bad |= max(values) > MOST[name]
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
