# SPDX-License-Identifier: Apache-2.0
"""The job processes of one run: start them together, follow them, collect their reports."""

from __future__ import annotations

import json
import os
import selectors
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

from flowslot_lab import nccl, pslite
from flowslot_lab.jobspec import JobSpec, Report
from flowslot_lab.jobspec import environment_of_torch as of_torch
from flowslot_lab.net import Network, data_ip
from flowslot_lab.procs import Process, start, stop
from flowslot_lab.rivals import PROTECTED_TOS
from flowslot_lab.state import RunState
from flowslot_lab.tools import LabError
from flowslot_scenario.job import Job
from flowslot_scenario.scenario import Scenario

_READY_S = 30.0
_STALL_S, _STALL_IDEALS = 60.0, 4.0
"""So long, and so many times what all jobs need one after the other, a job may be silent."""
_FIRST_PORT = 20000
_ENVIRONMENTS = {"pslite": pslite.environment, "nccl": nccl.environment, "ddp": of_torch}


class Stalled(LabError):
    """A job makes no progress; says which, and for how long."""


@dataclass(slots=True)
class _Worker:
    job: Job
    rank: int
    process: Process
    ready: bool = False
    buffer: bytes = b""
    iterations: int = 0
    report: Report | None = None
    heard_s: float = 0.0


class JobSet:
    """All processes of all jobs of a scenario."""

    def __init__(
        self,
        scenario: Scenario,
        net: Network,
        state: RunState,
        *,
        register: Callable[[str], str],
        iterations: int,
        logged: bool = False,
    ) -> None:
        """`register(host)`: the registration socket of the host's daemon, or "". `logged`: senders
        write down what they do, in `flow_logs`."""
        self._logged = logged
        self._scenario = scenario
        self._net = net
        self._state = state
        self._register = register
        self._iterations = iterations
        self._selector = selectors.DefaultSelector()
        one_by_one = sum(scenario.ideal_s(job) for job in scenario.jobs)
        self._patience_s = _STALL_S + _STALL_IDEALS * one_by_one
        self.workers: list[_Worker] = []
        self._given_up: set[str] = set()

    def start(self) -> None:
        """Start every process; they connect to each other and wait."""
        for number, job in enumerate(self._scenario.jobs):
            for rank, host in enumerate(job.processes):
                name = f"job-{job.name}-{rank}"
                path = self._state.folder / f"{name}.json"
                spec = self._spec(number, job, rank)
                spec.write(path)
                command = [sys.executable, "-m", "flowslot_lab.job", str(path)]
                netns = self._net.hosts[host]
                more = _ENVIRONMENTS[job.kind](spec) if job.kind in _ENVIRONMENTS else {}
                process = start(self._state, name, netns, command, pipes=True, environment=more)
                worker = _Worker(job, rank, process)
                self.workers.append(worker)
                assert process.popen.stdout is not None
                os.set_blocking(process.popen.stdout.fileno(), False)
                self._selector.register(process.popen.stdout, selectors.EVENT_READ, worker)
        self._wait(lambda: all(w.ready for w in self.workers), _READY_S, "become ready")

    def _spec(self, number: int, job: Job, rank: int) -> JobSpec:
        return JobSpec(
            job=job.name,
            kind=job.kind,
            rank=rank,
            workers=job.workers,
            servers=len(job.server_hosts),
            addresses=tuple(data_ip(self._scenario.index(host)) for host in job.processes),
            port=_FIRST_PORT + number,
            sockets=job.sockets,
            slices=job.slices,
            slice_bytes=job.slice_bytes,
            barrier=job.barrier,
            compute_s=job.compute_s,
            jitter=job.jitter,
            seed=self._scenario.seed,
            iterations=self._iterations,
            start_s=job.start_s,
            register=self._register(job.processes[rank]),
            library=self._library(job),
            tos=PROTECTED_TOS if job.protected else 0,
            log=str(self._log_of(job, rank)) if self._logged else "",
            channels=job.channels,
            threads=job.threads,
            iterations_by=job.iterations_by,
            sent_bytes=job.sent_bytes,
            tensor_bytes=job.bytes,
            model=job.model,
            program=job.program,
            fusion_kb=job.fusion_kb,
            host_rates=tuple(self._scenario.link_of(host).capacity_bps for host in job.hosts),
            racks=tuple(self._scenario.host(host).rack or "" for host in job.hosts),
        )

    def _library(self, job: Job) -> str:
        """All ranks of an NCCL job have the same plugin: ours, where a host of theirs has us."""
        if job.kind != "nccl":
            return job.library
        return "flowslot" if any(map(self._register, job.processes)) else "standin"

    def _log_of(self, job: Job, rank: int) -> Path:
        return self._state.folder / f"flow-{job.name}-{rank}"

    def flow_logs(self, job: Job) -> list[Path]:
        """The files that a job's senders write."""
        names = [self._log_of(job, rank).name for rank in range(len(job.processes))]
        return [path for name in names for path in sorted(self._state.folder.glob(f"{name}.*"))]

    def go(self, delay_s: float = 0.1) -> None:
        """The start line for all processes, at the same moment."""
        at_ns = time.monotonic_ns() + round(delay_s * 1e9)
        for worker in self.workers:
            assert worker.process.popen.stdin is not None
            worker.process.popen.stdin.write(f"{at_ns}\n".encode())
            worker.process.popen.stdin.flush()
        for worker in self.workers:
            worker.heard_s = at_ns / 1e9 + worker.job.start_s

    def give_up(self, job: Job) -> None:
        """From now on its processes may end, and are not waited for: some of them were killed."""
        self._given_up.add(job.name)

    def _expected(self) -> list[_Worker]:
        return [worker for worker in self.workers if worker.job.name not in self._given_up]

    def follow(self, timeout_s: float = 0.2) -> bool:
        """Hear the processes for a while; True when all reports are here. Raises LabError, Stalled
        when a job has been silent for too long."""
        self._hear(timeout_s)
        silent_since = time.monotonic() - self._patience_s
        for job in self._scenario.jobs:
            mine = [worker for worker in self._expected() if worker.job is job]
            busy = any(worker.report is None for worker in mine)
            if busy and all(worker.heard_s < silent_since for worker in mine):
                raise Stalled(f"job {job.name} made no progress for {self._patience_s:.0f} s")
        return all(worker.report is not None for worker in self._expected())

    def iterations_done(self) -> list[int]:
        """Iterations completed by the slowest worker of each job."""
        return [
            min(w.iterations for w in self.workers if w.job is job and w.rank < job.workers)
            for job in self._scenario.jobs
        ]

    def reports(self, job: Job) -> list[Report]:
        """The reports of a job's processes, by rank."""
        mine = [w.report for w in self.workers if w.job is job]
        assert all(report is not None for report in mine)
        return [report for report in mine if report is not None]

    def processes(self) -> list[Process]:
        """One per rank and job."""
        return [worker.process for worker in self.workers]

    def stop(self) -> None:
        """Kill what still runs: after their reports, jobs run on until they are stopped."""
        stop(worker.process for worker in self.workers)
        self._selector.close()

    def _wait(self, finished: Callable[[], bool], limit_s: float, what: str) -> None:
        deadline = time.monotonic() + limit_s
        while not finished():
            if time.monotonic() > deadline:
                names = ", ".join(w.process.name for w in self.workers if not w.ready)
                raise LabError(f"{names} did not {what} within {limit_s:g} s")
            self._hear(0.2)

    def _hear(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            worker: _Worker = key.data
            data = os.read(key.fd, 1 << 20)
            if not data:
                self._selector.unregister(key.fileobj)
                self._ended(worker)
                continue
            *lines, worker.buffer = (worker.buffer + data).split(b"\n")
            for line in lines:
                worker.heard_s = max(worker.heard_s, time.monotonic())
                self._event(worker, json.loads(line))

    def _ended(self, worker: _Worker) -> None:
        """After all reports a process may end because its peers were stopped; not before."""
        expected = self._expected()
        if worker in expected and not all(w.report is not None for w in expected):
            worker.process.popen.wait()
            status = worker.process.popen.returncode
            reason = worker.process.tail() or "it left no message"
            raise LabError(f"{worker.process.name} ended with status {status}: {reason}")

    @staticmethod
    def _event(worker: _Worker, event: dict[str, object]) -> None:
        kind = event.pop("event")
        if kind == "ready":
            worker.ready = True
        elif kind == "iteration":
            assert isinstance(event["n"], int)
            worker.iterations = event["n"]
        elif kind == "done":
            known = {field.name for field in fields(Report)}
            worker.report = Report(**{k: v for k, v in event.items() if k in known})  # type: ignore[arg-type]
