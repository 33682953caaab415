# SPDX-License-Identifier: Apache-2.0
"""What is learnt of a job from outside: `python -m bench.enlisted [JOB ..]`.

Ranks of stock PyTorch with Gloo, in the lab's network, know nothing of flowslot. One rank is
enlisted when they have trained for some time (`flowslot enlist --pid`), or its control group was
from the beginning. Printed: after how many iterations the daemon knew, within 3 % from then on,
what that rank sends, and how long it takes; how wrong that is in the end; what is left after
`flowslot release`.
`--record FOLDER`: no daemon; what the kernel's counters say, every 2 ms, to be replayed.
Needs root, and PyTorch.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from socket import socket
from typing import NamedTuple, TypeVar

from flowslot_cli.client import CommandError, ask
from flowslot_lab.net import NIC, Network, data_ip
from flowslot_lab.plane import ControlPlane
from flowslot_lab.processors import awake
from flowslot_lab.procs import Process, start, stop
from flowslot_lab.state import RunState, clean_dead
from flowslot_scenario.scenario import load
from flowslot_shm.writer import cookie_of
from flowslotd import sockets

T = TypeVar("T")
SCENARIO = Path(__file__).parents[1] / "lab" / "scenarios" / "ring4-two-jobs.toml"


class Pattern(NamedTuple):
    """An iteration: bytes of each bucket; computation before each of them and after the last one
    (s). `overlap`: it does not wait for buckets before the last one has begun. `jitter`: computing
    takes up to so much longer or shorter, as a part."""

    sizes: list[int]
    rests: list[float]
    ranks: int = 2
    overlap: bool = False
    jitter: float = 0.0


PATTERNS = {
    "one all-reduce": Pattern([4_000_000], [0.12, 0.0]),
    "buckets, one by one": Pattern([1_000_000] * 4, [0.06, 0.01, 0.01, 0.01, 0.02]),
    "buckets, overlapped": Pattern([2_000_000] * 4, [0.08, 0.03, 0.03, 0.03, 0.0], overlap=True),
    "buckets, apart": Pattern([2_000_000] * 3, [0.1, 0.04, 0.04, 0.15]),
    "unequal buckets": Pattern([400_000, 3_000_000, 1_000_000], [0.1, 0.1, 0.06, 0.1]),
    "short iterations": Pattern([500_000], [0.04, 0.0]),
    "long iterations": Pattern([20_000_000], [1.5, 0.0]),
    "jitter": Pattern([2_000_000], [0.15, 0.0], jitter=0.1),
    "three ranks": Pattern([3_000_000], [0.12, 0.0], ranks=3),
    "four ranks, buckets": Pattern([1_000_000] * 3, [0.1, 0.02, 0.02, 0.0], ranks=4),
}
WAYS = ("pid", "cgroup")
WITHIN = 0.03
"""Learnt: so near to what was measured in the job."""
SOON, GIVE_UP = 5, 20
"""Iterations: the bound, and until a run ends."""
EVERY_S = 0.002
"""Of a recording: from one look to the next."""
_PORT = 29500


class Found(NamedTuple):
    """How many iterations had begun, from enlisting or from the first one on, when each was learnt
    (None: never), and errors at the end, as parts. `left`: what release left behind, in words."""

    bytes_after: int | None
    period_after: int | None
    bytes_error: float
    period_error: float
    left: str


# -- the job ---------------------------------------------------------------------------------------


def work(rank: int, pattern: Pattern) -> None:
    """Train for ever; a line for each iteration: when it began, and what was sent until then."""
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    first = f"tcp://{data_ip(0)}:{_PORT}"
    dist.init_process_group("gloo", init_method=first, rank=rank, world_size=pattern.ranks)
    tensors = [torch.ones(size // 4) for size in pattern.sizes]
    chance = random.Random(1)  # the same for all ranks
    print("ready", flush=True)
    sys.stdin.readline()
    while True:
        print(json.dumps([time.monotonic(), _sent()]), flush=True)
        slower = 1 + chance.uniform(-pattern.jitter, pattern.jitter)
        begun = []
        for rest, tensor in zip(pattern.rests, tensors, strict=False):
            time.sleep(rest * slower)
            begun.append(dist.all_reduce(tensor, async_op=True))
            if not pattern.overlap:
                begun.pop().wait()
        for one in begun:
            one.wait()
        time.sleep(pattern.rests[-1] * slower)


def _sent() -> int:
    """By all connections of this process."""
    infos = _ask(os.getpid(), sockets.look).values()
    return sum(info.sent - info.resent + info.unsent for info in infos)


def _ask(pid: int, question: Callable[[socket], T]) -> dict[int, T]:
    """What the TCP sockets of a process say, by descriptor."""
    found = {}
    pidfd = os.pidfd_open(pid)
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError), sockets.borrow(pidfd, int(name)) as sock:
            if sockets.is_tcp(sock):
                found[int(name)] = question(sock)
    os.close(pidfd)
    return found


class Rank:
    """One process of the job. `group`: the control group that it begins in."""

    def __init__(
        self, state: RunState, space: str, rank: int, pattern: str, group: Path | None
    ) -> None:
        command = [sys.executable, "-m", "bench.enlisted", "rank", str(rank), pattern]
        environment = {"GLOO_SOCKET_IFNAME": NIC, "OMP_NUM_THREADS": "1"}
        self.process: Process = start(
            state, f"rank-{rank}", space, command, pipes=True, environment=environment
        )
        if group is not None:
            (group / "cgroup.procs").write_text(str(self.process.pid))
        self.seen: list[tuple[float, int]] = []
        assert self.process.popen.stdout is not None and self.process.popen.stdin is not None
        self._out, self._in = self.process.popen.stdout, self.process.popen.stdin

    def ready(self) -> None:
        if self._out.readline() != b"ready\n":
            raise RuntimeError(self.process.tail())
        os.set_blocking(self._out.fileno(), False)

    def go(self) -> None:
        self._in.write(b"\n")
        self._in.flush()

    def iterations(self) -> int:
        """That have begun."""
        while line := self._out.readline():
            at, sent = json.loads(line)
            self.seen.append((at, sent))
        return len(self.seen)

    def measured(self) -> tuple[float, float]:
        """Period and bytes of the last iterations."""
        steps = [
            (b[0] - a[0], b[1] - a[1]) for a, b in zip(self.seen, self.seen[1:], strict=False)
        ][-8:]
        return statistics.mean(s[0] for s in steps), statistics.median(s[1] for s in steps)


# -- what is around it -----------------------------------------------------------------------------


@contextmanager
def group() -> Iterator[Path]:
    """A control group of its own."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, kind, *_ = line.split()
        if kind == "cgroup2":
            made = Path(where) / f"fse{os.getpid()}"
            made.mkdir()
            try:
                yield made
            finally:
                made.rmdir()
            return
    raise RuntimeError("no control groups of version 2 are mounted")


class Lab:
    """The network, and with `daemons` one on each host, that paces."""

    def __init__(self, stack: ExitStack, daemons: bool) -> None:
        stack.enter_context(awake())
        self.state = RunState.create()
        stack.callback(self.state.clean)
        self.state.begin("enlisted")
        scenario = load(SCENARIO)
        self.net = Network(scenario, self.state)
        stack.callback(self.net.down)
        self.net.up()
        self._stack = stack
        if daemons:
            plane = ControlPlane(scenario, self.net, self.state, "stagger", use_switch=False)
            stack.callback(lambda: stop(plane.daemons.values(), grace_s=3.0))
            plane.start()

    @property
    def control(self) -> Path:
        """Of the first rank's daemon."""
        return self.state.folder / next(iter(self.net.hosts)) / "control.sock"

    def ranks(self, pattern: str, at: Path | None) -> list[Rank]:
        """They are connected, and wait."""
        ranks = []
        spaces = list(self.net.hosts.values())[: PATTERNS[pattern].ranks]
        for number, space in enumerate(spaces):
            ranks.append(Rank(self.state, space, number, pattern, at if number == 0 else None))
            self._stack.callback(stop, [ranks[-1].process])
        for rank in ranks:
            rank.ready()
        return ranks


def observe(pattern: str, way: str) -> Found:
    """One run."""
    with ExitStack() as stack:
        at = stack.enter_context(group()) if way == "cgroup" else None
        lab = Lab(stack, daemons=True)
        ranks = lab.ranks(pattern, at)
        before = _ask(ranks[0].process.pid, sockets.tuning)
        if at is not None:
            ask(lab.control, "enlist", cgroup=str(at))
        for rank in ranks:
            rank.go()
        if at is None:
            while ranks[0].iterations() < 5:
                time.sleep(0.01)
            ask(lab.control, "enlist", pid=ranks[0].process.pid)
        return _learn(lab.control, ranks[0], before)


def _learn(control: Path, rank: Rank, before: dict[int, sockets.Tuning]) -> Found:
    first = rank.iterations()
    after: list[int | None] = [None, None]
    errors = [1.0, 1.0]
    while rank.iterations() < first + GIVE_UP:
        time.sleep(0.02)
        jobs = ask(control, "jobs")["jobs"]
        if not jobs or len(rank.seen) < 4:
            continue
        period, sent = rank.measured()
        known = sum(f["iteration_bytes"] for f in jobs[0]["progress"]), jobs[0]["period_s"] or 0.0
        errors = [abs(known[0] / sent - 1), abs(known[1] / period - 1)]
        for i, error in enumerate(errors):
            if error > WITHIN:
                after[i] = None
            elif after[i] is None:
                after[i] = len(rank.seen) - first
    ask(control, "release")
    time.sleep(1.0)
    flows = ask(control, "flows")["flows"]
    left = [f"{len(flows)} flows"] if flows else []
    tunings = _ask(rank.process.pid, sockets.tuning)
    changed = sum(tunings[fd] != was for fd, was in before.items() if fd in tunings)
    if changed:
        left.append(f"{changed} sockets changed")
    return Found(after[0], after[1], errors[0], errors[1], " and ".join(left) or "nothing")


def record(pattern: str, iterations: int, path: Path) -> None:
    """A line for each look at the first rank's sockets that carry data: [ns, cookie, all of Info].
    In the last one, {"iterations": when each began (s), and what had been sent}."""
    with ExitStack() as stack:
        lab = Lab(stack, daemons=False)
        ranks = lab.ranks(pattern, None)
        for rank in ranks:
            rank.go()
        lines = []
        while ranks[0].iterations() < iterations:
            infos = _ask(ranks[0].process.pid, lambda sock: (cookie_of(sock), sockets.look(sock)))
            now = time.monotonic_ns()
            lines += [[now, cookie, *info] for cookie, info in infos.values() if info.state == 1]
            time.sleep(EVERY_S)
        told = {"pattern": pattern, "iterations": ranks[0].seen}
        path.write_text("\n".join(map(json.dumps, [*lines, told])) + "\n")


def main(arguments: argparse.Namespace) -> int:
    """All patterns, in both ways."""
    clean_dead()
    patterns = arguments.jobs or PATTERNS
    if arguments.record:
        for pattern in patterns:
            few = 30 if sum(PATTERNS[pattern].rests) < 1 else 12
            record(pattern, few, arguments.record / f"{pattern.replace(' ', '-')}.jsonl")
        return 0
    print("| job | enlisted by | bytes learnt after | wrong by | period | wrong by | left |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    good = True
    for pattern in patterns:
        for way in WAYS:
            try:
                found = observe(pattern, way)
            except (CommandError, RuntimeError) as error:
                print(f"{pattern}, {way}: {error}", file=sys.stderr)
                return 1
            late = [GIVE_UP if n is None else n for n in (found.bytes_after, found.period_after)]
            good &= max(late) <= SOON and found.left == "nothing"
            good &= max(found.bytes_error, found.period_error) <= WITHIN
            cells = (
                f"{late[0]} iterations", f"{found.bytes_error:.1%}",
                f"{late[1]} iterations", f"{found.period_error:.1%}", found.left,
            )  # fmt: skip
            print(f"| {pattern} | {way} | {' | '.join(cells)} |", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        work(int(sys.argv[2]), PATTERNS[sys.argv[3]])
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=f"of {', '.join(PATTERNS)}")
    parser.add_argument("--record", type=Path, metavar="FOLDER")
    sys.exit(main(parser.parse_args()))
