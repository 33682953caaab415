# SPDX-License-Identifier: Apache-2.0
"""One process of a training job: `python -m flowslot_lab.job SPEC.json`.

Computes (sleeps, with the same seeded jitter on all workers of the job), communicates over real
TCP, and does it again. See `jobspec` for how it talks with the lab.
"""

from __future__ import annotations

import json
import resource
import socket
import sys
import time
from dataclasses import asdict
from pathlib import Path

from flowslot_lab.collectives import Collective, MakeFlow, PsServer, PsWorker, Ring
from flowslot_lab.connect import Links, establish
from flowslot_lab.content import CorruptionError
from flowslot_lab.jobspec import JobSpec, Report
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


def work(spec: JobSpec, collective: Collective, loop: Loop, report: Report) -> None:
    """Compute and communicate until killed; report after the measured iterations."""
    at = report.started
    for iteration in range(_ENDLESS):
        until = at + compute_ns(spec, iteration)
        collective.prepare(iteration)
        loop.sleep_until(until)
        collective.communicate(iteration)
        at = time.monotonic_ns()
        if iteration < spec.iterations:
            report.ends.append(at)
            say("iteration", n=iteration + 1)
        collective.verify(iteration)
        if iteration + 1 == spec.iterations:
            finish(report, collective.verified, loop)


def cpu_s() -> float:
    """Processor time of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def finish(report: Report, verified: int, loop: Loop) -> None:
    """Complete and send the report."""
    report.verified_bytes = verified
    report.cpu_s = cpu_s() - report.cpu_s
    report.trace = loop.trace
    loop.tracing = False
    say("done", **asdict(report))


def run(spec: JobSpec) -> None:
    """The life of a job process."""
    out, into = connect(spec)
    loop, make_flow = Loop(), flow_maker(spec)
    collective: Collective | None = None
    if spec.kind == "ring":
        collective = Ring(spec, out, into, loop, make_flow)
    elif not spec.is_server:
        collective = PsWorker(spec, out, loop, make_flow)
    else:
        server = PsServer(spec, into, loop, make_flow)
    say("ready")
    start_ns = int(sys.stdin.readline()) + round(spec.start_s * 1e9)
    loop.sleep_until(start_ns)
    report = Report(started=start_ns, cpu_s=cpu_s())
    if collective is not None:
        work(spec, collective, loop, report)
        return
    server.serve(spec.iterations)
    finish(report, server.verified, loop)
    server.serve(_ENDLESS)


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
    sys.exit(main())
