# SPDX-License-Identifier: Apache-2.0
"""How soon training goes on when a worker of four is killed, and when one comes (SDCC, Fig. 9):
`python -m bench.torch_membership [WAY ..]`. Needs torch.

WAY: ours; `torchrun`, which starts all workers anew (4 agents with a worker each, c10d rendezvous,
the model's state in a file after each iteration), as it comes; `tuned`, the same with short
timeouts. All train one model on Gloo over the loopback interface. Printed: from the
kill until all survivors have completed an iteration without the dead one; from a new process's
start until all have completed one with it; the longest pause of the others meanwhile.
Exit status 1: of ours, survivors pause for more than 5 s.
"""

import argparse
import contextlib
import itertools
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from flowslot_lab import models
from flowslot_torch.membership import Membership
from flowslot_torch.program import Program
from flowslot_torch.torch_engine import GlooTransport
from flowslot_torch.training import Training

WORKERS, VICTIM, NEWCOMER = 4, 3, 4
MODEL = "vgg"
BOUND_S, LIMIT_S = 5.0, 120.0
SOME = 10
"""Iterations between two events."""
TUNED = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=5"
"""With 1, 1 and 1 four workers did not come together."""
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}
"""In the agents' store torchrun's new workers find the addresses of those before them, when the
membership has changed (torch 2.13): they never come together."""
WAYS = ("ours", "torchrun", "tuned")


class Log:
    """A worker's own file: a line per complete iteration. Beside it is one with its process."""

    def __init__(self, path: str) -> None:
        Path(path).with_suffix(".pid").write_text(str(os.getpid()))
        self._file = Path(path).open("a", buffering=1)  # noqa: SIM115 - until the process ends

    def complete(self, world: int) -> None:
        self._file.write(f"{time.monotonic()} {world}\n")


def work_ours(worker: int, log: Log, port: int) -> None:
    """Train for ever."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)

    def make(epoch: int, about: Mapping[int, str]) -> GlooTransport:
        return GlooTransport(store, worker, sorted(about), epoch=epoch)

    members = None if worker == NEWCOMER else range(WORKERS)
    membership = Membership(store, worker, make, members=members)
    model, program = models.make(MODEL, 1), Program()
    training = Training(model, _optimizer, program, membership.transport, membership=membership)
    while True:
        models.loss_of(model, MODEL, 1, worker, training.iteration).backward()
        training.step()
        log.complete(len(program.connection.ranks))


def work_torchrun(log: Log, path: Path) -> None:
    """The same, as torchrun's workers do: what they know is in a file."""
    dist.init_process_group("gloo")
    rank, iteration = dist.get_rank(), 0
    model = models.make(MODEL, 1)
    optimizer = _optimizer(model.parameters())
    if path.exists():
        state = torch.load(path, weights_only=True)
        iteration = state["iteration"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    ddp = DistributedDataParallel(model)
    while True:
        optimizer.zero_grad()
        models.loss_of(ddp, MODEL, 1, rank, iteration).backward()
        optimizer.step()
        iteration += 1
        if rank == 0:
            whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({"iteration": iteration, **whole}, path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)
        log.complete(dist.get_world_size())


def _optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)


class Job:
    """Workers of one way, each a process with its agent, if there are agents."""

    def __init__(self, way: str, folder: Path) -> None:
        self._way, self._folder = way, folder
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self._port = _free_port()
        if way == "ours":
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            self._port = self._store.port

    def start(self, worker: int) -> None:
        options = [str(worker), self._way, str(self._folder), str(self._port)]
        command = [sys.executable, "-m", "bench.torch_membership", "--work", *options]
        if self._way != "ours":
            meet = f"--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:{self._port} --rdzv-id=bench"
            conf = f"is_host={'true' if worker == 0 else 'false'}"
            agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes=3:4", *meet.split()]
            if self._way == "tuned":
                conf += f",{TUNED}"
                agent += ["--monitor-interval=0.1"]
            agent += [f"--rdzv-conf={conf}", "--max-restarts=9", "--nproc-per-node=1"]
            command = [*agent, *command[1:]]
        environment = {**os.environ, **ENVIRONMENT}
        with (self._folder / f"{worker}.err").open("ab") as out:
            self.processes[worker] = subprocess.Popen(
                command, env=environment, stdout=out, stderr=out
            )

    def kill(self, worker: int) -> None:
        """It and its agent, as where a host dies."""
        agent = self.processes.pop(worker)
        agent.kill()
        agent.wait()
        path = self._folder / f"{worker}.pid"
        if self._way != "ours" and path.exists():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(path.read_text()), signal.SIGKILL)

    def lines(self, worker: int) -> list[tuple[float, int]]:
        """When an iteration was complete, of how many workers."""
        path = self._folder / f"{worker}.log"
        rows = path.read_text().splitlines()[:-1] if path.exists() else []  # one may be half there
        parts = [row.split() for row in rows]
        return [(float(at), int(world)) for at, world in parts]

    def after(self, began: float, world: int, count: int) -> list[list[float]]:
        """Waits until all workers have completed so many iterations of that world since then:
        when they did. TimeoutError."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            found = [
                [at for at, size in self.lines(worker) if at > began and size == world]
                for worker in self.processes
            ]
            if all(len(one) >= count for one in found):
                return found
            time.sleep(0.05)
        said = (self._folder / "0.err").read_text()[-2000:]
        raise TimeoutError(f"{self._way}: no {count} iterations of {world} workers\n{said}")

    def end(self) -> None:
        for worker in list(self.processes):
            self.kill(worker)


def measure(way: str) -> tuple[float, float, float]:
    """Seconds: see the module. Infinite: they did not go on within LIMIT_S, or never got so far."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job(way, Path(folder))
        removed = added = pause = math.inf
        try:
            for worker in range(WORKERS):
                job.start(worker)
            job.after(0.0, WORKERS, SOME)
            killed = time.monotonic()
            job.kill(VICTIM)
            removed = max(one[0] for one in job.after(killed, WORKERS - 1, SOME)) - killed
            started = time.monotonic()
            others = list(job.processes)
            job.start(NEWCOMER)
            added = max(one[0] for one in job.after(started, WORKERS, SOME)) - started
            pause = 0.0
            for worker in others:
                times = [started, *(at for at, _ in job.lines(worker) if at > started)]
                pause = max(pause, *(b - a for a, b in itertools.pairwise(times)))
        except TimeoutError as error:
            print(error, file=sys.stderr)
        finally:
            job.end()
        return removed, added, pause


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _work(worker: str, way: str, folder: str, port: str) -> None:
    torch.set_num_threads(1)
    log = Log(f"{folder}/{worker}.log")
    work: Callable[[], None] = lambda: work_torchrun(log, Path(folder) / "state")  # noqa: E731
    if way == "ours":
        work = lambda: work_ours(int(worker), log, int(port))  # noqa: E731
    work()


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("ways", nargs="*", metavar="WAY", help=f"of {', '.join(WAYS)}")
    parser.add_argument("--work", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        _work(*options.work)
        return 0
    if unknown := set(options.ways) - set(WAYS):
        parser.error(f"WAY: must be of {', '.join(WAYS)}; is {', '.join(sorted(unknown))}")
    good = True
    print("| | one removed | one added | the others' pause then |\n| --- | --- | --- | --- |")
    for way in options.ways or WAYS:
        removed, added, pause = measure(way)
        print(f"| {way} | {removed:.1f} s | {added:.1f} s | {pause:.1f} s |", flush=True)
        good = good and (way != "ours" or max(removed, pause) <= BOUND_S)
    return not good


if __name__ == "__main__":
    sys.exit(main())
