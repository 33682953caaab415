# SPDX-License-Identifier: Apache-2.0
"""One process of a training job: `python -m flowslot_lab.job SPEC.json`.

Computes (sleeps, with the same seeded jitter on all workers of the job), communicates over real
TCP, and does it again. See `jobspec` for how it talks with the lab.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from flowslot_lab.collectives import Collective, MakeFlow, PsServer, PsWorker, Ring
from flowslot_lab.connect import Links, establish
from flowslot_lab.content import CorruptionError
from flowslot_lab.jobspec import JobSpec, Report
from flowslot_lab.nccl import NcclWorker, Rank
from flowslot_lab.pslite import Node, PsLiteScheduler, PsLiteServer, PsLiteWorker
from flowslot_lab.wire import Flow, Loop, PeerGone
from flowslot_scenario import job as jobs
from flowslot_shm.client import JobClient
from flowslot_shm.layout import Role

_ROLES = {"ring": Role.RING, "push": Role.PUSH, "pull": Role.PULL}
_ENDLESS = 1 << 40


def say(event: str, **values: object) -> None:
    """One line to the lab."""
    print(json.dumps({"event": event, **values}), flush=True)


def compute_ns(spec: JobSpec, iteration: int) -> int:
    """Length of the computation phase: the same on every worker of the job."""
    return jobs.compute_ns(spec.seed, spec.job, spec.compute_s, spec.jitter, iteration)


def flow_maker(spec: JobSpec) -> MakeFlow:
    """Reports to the host's daemon, or to nobody when the lab runs without daemons."""
    if not spec.register:
        return lambda _sock, _peer, _channel, _role: None
    flows = spec.sockets * (len(spec.addresses) - 1 if spec.is_server else 1)
    client = JobClient(spec.register, spec.job, spec.rank, slots=flows)

    def make(sock: socket.socket, peer: int, channel: int, role: str) -> Flow:
        return client.flow(sock, peer, channel, _ROLES[role])

    return make


def connect(spec: JobSpec) -> tuple[Links, Links]:
    """This rank's connections: (opened, accepted)."""
    ranks = len(spec.addresses)
    if spec.kind == "ring":
        return establish(spec, [(spec.rank + 1) % ranks], [(spec.rank - 1) % ranks])
    if spec.is_server:
        return establish(spec, [], list(range(ranks - 1)))
    return establish(spec, [ranks - 1], [])


class Clock(Protocol):
    """Waits for a process, and keeps its trace."""

    tracing: bool

    @property
    def trace(self) -> list[tuple[int, int]]:
        """(monotonic ns, bytes received)."""
        ...

    def sleep_until(self, at_ns: int) -> None:
        """Compute."""


class Serving(Protocol):
    """What a process does that is no worker."""

    verified: int

    def serve(self, iterations: int) -> None:
        """Returns when that many iterations (from the first) have been sent back."""


def worker(spec: JobSpec) -> tuple[Collective, Clock]:
    """Meet the job's other processes. Raises OSError when they do not come in time."""
    if spec.kind == "pslite":
        node = Node(spec)
        return PsLiteWorker(spec, node), node
    if spec.kind == "nccl":
        rank = Rank(spec)
        return NcclWorker(spec, rank), rank
    if spec.kind == "ddp":
        from flowslot_lab.ddp import DdpWorker, Timer  # noqa: PLC0415 - torch is an extra

        timer = Timer(spec.sent_bytes)
        return DdpWorker(spec, timer), timer
    out, into = connect(spec)
    loop, make_flow = Loop(spec.log), flow_maker(spec)
    if spec.kind == "ring":
        return Ring(spec, out, into, loop, make_flow), loop
    return PsWorker(spec, out, loop, make_flow), loop


def server(spec: JobSpec) -> tuple[Serving, Clock]:
    """As `worker`, for all other ranks."""
    if spec.kind == "pslite":
        node = Node(spec)
        if spec.is_server:
            return PsLiteServer(spec, node), node
        return PsLiteScheduler(spec.iterations), node
    _, into = connect(spec)
    loop = Loop(spec.log)
    return PsServer(spec, into, loop, flow_maker(spec)), loop


def work(spec: JobSpec, collective: Collective, clock: Clock, report: Report) -> None:
    """Compute and communicate until killed; report after the measured iterations."""
    at = report.started
    for iteration in range(_ENDLESS):
        until = at + compute_ns(spec, iteration)
        collective.prepare(iteration)
        clock.sleep_until(until)
        collective.communicate(iteration)
        at = time.monotonic_ns()
        if iteration < spec.iterations:
            report.ends.append(at)
            say("iteration", n=iteration + 1)
        collective.verify(iteration)
        if iteration + 1 == spec.iterations:
            report.losses = list(collective.losses)
            finish(report, collective.verified, clock)


def cpu_s() -> float:
    """Processor time of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def finish(report: Report, verified: int, clock: Clock) -> None:
    """Complete and send the report."""
    report.verified_bytes = verified
    report.cpu_s = cpu_s() - report.cpu_s
    report.trace = clock.trace
    clock.tracing = False
    say("done", **asdict(report))


def run(spec: JobSpec) -> None:
    """The life of a job process."""
    collective = serving = None
    clock: Clock
    if spec.is_worker:
        collective, clock = worker(spec)
    else:
        serving, clock = server(spec)
    say("ready")
    start_ns = int(sys.stdin.readline()) + round(spec.start_s * 1e9)
    clock.sleep_until(start_ns)
    report = Report(started=start_ns, cpu_s=cpu_s())
    if collective is not None:
        work(spec, collective, clock, report)
    elif serving is not None:
        serving.serve(spec.iterations)
        finish(report, serving.verified, clock)
        serving.serve(_ENDLESS)


def main() -> int:
    """Exit status: 0 ended by its peers after its report, 1 otherwise."""
    spec = JobSpec.read(Path(sys.argv[1]))
    try:
        run(spec)
    except (CorruptionError, PeerGone, OSError) as error:
        print(f"{spec.job} rank {spec.rank}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    status = 1
    try:
        status = main()
    except Exception:
        traceback.print_exc()
    finally:  # an ordinary exit would wait for ps-lite's threads, and these for their peers
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
