# SPDX-License-Identifier: Apache-2.0
"""Runs a scenario: every policy, repeat after repeat (A B C A B C), each on a fresh network."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from flowslot.policy.registry import get, names
from flowslot_lab.budget import Recorder
from flowslot_lab.jobset import JobSet, Stalled
from flowslot_lab.jobspec import iteration_times
from flowslot_lab.net import KERNEL_RTO_MS, Counters, Network
from flowslot_lab.plane import ControlPlane
from flowslot_lab.processors import awake
from flowslot_lab.procs import Process
from flowslot_lab.rivals import CUBIC, RIVALS
from flowslot_lab.state import RunState
from flowslot_lab.tools import LabError
from flowslot_scenario.job import Job
from flowslot_scenario.results import BASELINES, Evidence, JobRun, Results, Run
from flowslot_scenario.scenario import Scenario

_NEGOTIATED = tuple(name for name in names() if get(name).needs_arbiter)
DAEMON_POLICIES = ("static", "fair", *_NEGOTIATED, "mlcc", "mlcc-literal")
POLICIES = (*RIVALS, *DAEMON_POLICIES)
BACKENDS = ("bpf", "edt", "htb", "socket")
PACED_BY = tuple(f"{policy}@{name}" for policy in DAEMON_POLICIES for name in BACKENDS)
"""A policy whose daemons pace with one of them; without a name they choose themselves."""
ALONE_ITERATIONS = 10
ALONE_WARMUP = 3
PACED_RTO_MS = 20
"""Least retransmission timeout of sockets that our congestion control paces (bpf/consts.h)."""
_SCHEDULED = ("mlcc", "mlcc-literal")
_PACED = (*_NEGOTIATED, "static", *_SCHEDULED)


class RunFailed(Exception):
    """A run did not prove that it was real; says what is missing."""


class Watch(Protocol):
    """Shows how far the runs are."""

    def begin(self, label: str, total: int) -> None:
        """A run of `total` iterations of each job begins."""

    def advance(self, done: int) -> None:
        """The slowest job has done so many of them."""


@dataclass(frozen=True, slots=True)
class Options:
    """What `lab run` was asked for. `iterations`: measured ones per job and repeat; `per_rack`: a
    switch process for every rack instead of one for all links."""

    policies: tuple[str, ...]
    repeat: int = 1
    iterations: int | None = None
    use_switch: bool = True
    per_rack: bool = False
    alone: bool = True
    """Measure each distinct job alone, too."""
    budget: bool = False
    """Record where the time goes."""

    @property
    def stacked(self) -> bool:
        """Some daemon paces by queueing disciplines: then all runs have a network for that."""
        return any(policy.endswith(("@edt", "@htb")) for policy in self.policies)

    def measured(self, scenario: Scenario) -> int:
        """Measured iterations per job and repeat."""
        return self.iterations or math.ceil(scenario.iterations / self.repeat)


class LiveRun:
    """One policy on a fresh network: `with LiveRun(...) as live: live.run(watch)`.

    Everything is up when the block begins and gone when it ends, whatever happens inside.
    """

    def __init__(
        self,
        scenario: Scenario,
        state: RunState,
        policy: str,
        iterations: int,
        use_switch: bool,
        *,
        per_rack: bool = False,
        stacked: bool = False,
        budget: bool = False,
    ) -> None:
        """`per_rack`, `stacked`, `budget`: see Options."""
        self._budget = budget
        self.recorder: Recorder | None = None
        self.scenario = scenario
        self.state = state
        self.policy = policy
        self._kind, _, backend = policy.partition("@")
        self.iterations = iterations
        rival = RIVALS.get(policy)
        by_bpf = self._kind in _PACED and backend in {"", "bpf"}
        self.net = Network(
            scenario,
            state,
            stacked=stacked,
            rival=rival or CUBIC,
            timeout_ms=PACED_RTO_MS if by_bpf else KERNEL_RTO_MS,
        )
        self.plane: ControlPlane | None = None
        if rival is None:
            self.plane = ControlPlane(
                scenario,
                self.net,
                state,
                self._kind,
                use_switch,
                per_rack=per_rack,
                backend=backend or "auto",
                traced=budget,
            )
        self.jobs = JobSet(
            scenario,
            self.net,
            state,
            register=self.plane.register if self.plane is not None else lambda _host: "",
            iterations=scenario.warmup + iterations,
            logged=budget,
        )

    def __enter__(self) -> LiveRun:
        try:
            self.state.begin(f"{self.scenario.name}-{self.policy}")
            self.net.up()
            if self._budget:
                self.recorder = Recorder(self.net)
            if self.plane is not None:
                self.plane.start()
            self.jobs.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop and remove everything. Idempotent."""
        with contextlib.ExitStack() as stack:  # all of it, even if a part fails
            stack.callback(self.net.down)
            if self.plane is not None:
                stack.callback(self.plane.stop)
            stack.callback(self.jobs.stop)

    def processes(self) -> list[Process]:
        """All processes of the run."""
        relays = [path.process for path in self.net.delays]
        plane = self.plane.processes() if self.plane else []
        return [*plane, *self.jobs.processes(), *relays]

    def follow(self, watch: Watch, label: str = "") -> Iterator[int]:
        """From the start line to the last report; yields the iterations done, summed over jobs, a
        few times per second, so that a caller can look at the running system or break it.

        `label`: what the watch calls the run; the policy without one.
        """
        watch.begin(label or self.policy, self.scenario.warmup + self.iterations)
        self.jobs.go()
        done = False
        while not done:
            done = self.jobs.follow()
            if self.recorder is not None:
                self.recorder.drain()
            by_job = self.jobs.iterations_done()
            watch.advance(min(by_job))
            yield sum(by_job)

    def run(self, repeat: int, watch: Watch, label: str = "") -> Run:
        """Measure. Raises LabError, RunFailed when the run was not real, or Stalled."""
        before = self.net.counters()
        cpu_before = {process.name: process.cpu_s() for process in self.processes()}
        try:
            for _ in self.follow(watch, label):
                pass
        except Stalled as stalled:
            raise Stalled("; ".join([str(stalled), *self._complaints()])) from None
        # While all still runs: what it says of itself, and what the kernel says.
        after = self.net.counters()
        evidence = self.evidence(cpu_before, before, after)
        run = Run(
            policy=self.policy,
            repeat=repeat,
            evidence=evidence,
            jobs=[self._job_run(job) for job in self.scenario.jobs],
            retransmits=after.retransmits - before.retransmits,
            utilisation=self._utilisation(before, after),
        )
        self.check(evidence)
        if self.recorder is not None:
            run.budget = self.recorder.work_out(self.scenario, self.jobs, self.plane)
        return run

    def _complaints(self) -> list[str]:
        """What the daemons say of a run that has stopped, as far as they answer."""
        evidence = Evidence()
        if self.plane is not None:
            with contextlib.suppress(LabError, OSError, ValueError):
                self.plane.testify(evidence)
        return evidence.errors

    def evidence(self, cpu_before: dict[str, float], before: Counters, after: Counters) -> Evidence:
        """Ask the processes."""
        elapsed = after.at_s - before.at_s
        shares = after.ticks.since(before.ticks)
        evidence = Evidence(
            pids={process.name: process.pid for process in self.processes()},
            bytes_verified=sum(
                report.verified_bytes
                for job in self.scenario.jobs
                for report in self.jobs.reports(job)
            ),
            control_packets=after.control_packets,
            **shares._asdict(),
            cpu={p.name: (p.cpu_s() - cpu_before[p.name]) / elapsed for p in self.processes()},
        )
        evidence.losses = {path.loss.name: path.counts() for path in self.net.losses}
        evidence.delays = {path.delay.name: path.seen() for path in self.net.delays}
        evidence.marked, evidence.unmarked = self.net.marked()
        evidence.queues, evidence.protected_bytes = self.net.in_queues()
        evidence.learnt = self.net.learnt()
        if self.plane is not None:
            self.plane.testify(evidence)
        return evidence

    def check(self, evidence: Evidence) -> None:
        """Raises RunFailed unless the evidence is what the policy needs."""
        expected = expected_bytes(self.scenario, self.scenario.warmup + self.iterations)
        missing = []
        if evidence.bytes_verified != expected:
            missing.append(f"{evidence.bytes_verified} of {expected} received bytes verified")
        if self._kind in _NEGOTIATED and evidence.granted == 0:
            missing.append("no reservation was granted")
        if self._kind in _PACED and evidence.rate_writes == 0:
            missing.append("no rate was written to the kernel")
        for path, (came, lost) in evidence.losses.items():
            if not lost:
                missing.append(f"none of {came} packets were lost on {path}")
        idle = [path for path, relayed in evidence.delays.items() if not relayed.frames]
        missing += [f"no packet came to the relay of {path}" for path in idle]
        missing += self._missing_of_rival(evidence)
        switch = self.plane is not None and self.plane.use_switch
        if self._kind in _SCHEDULED and switch and evidence.scheduled == 0:
            missing.append("no schedule was accepted by a switch process")
        if not switch and (evidence.control_packets or evidence.grpc_connections):
            missing.append(
                f"{evidence.grpc_connections} gRPC connections and {evidence.control_packets} "
                "packets on the control network of a run without switch"
            )
        if missing:
            what = "; ".join([*missing, *evidence.errors])
            raise RunFailed(f"{self.scenario.name}, {self.policy}: {what}")

    def _missing_of_rival(self, evidence: Evidence) -> list[str]:
        """A rival whose mechanism shows no effect was not measured."""
        rival = RIVALS.get(self.policy)
        missing = []
        if evidence.unmarked > evidence.marked:
            missing.append(f"{evidence.unmarked} packets bore no ECN, {evidence.marked} did")
        if rival is not None and rival.learns and not evidence.learnt:
            missing.append("no flow has learnt how many bytes an iteration has: measure more")
        if rival is not None and rival.fair_queues:
            flows = max(self.scenario.flows_on_link().values())
            if evidence.queues < min(flows, 2):
                missing.append(f"{flows} flows had {evidence.queues} queues at a port")
        first = any(job.protected for job in self.scenario.jobs)
        if rival is not None and rival.priority and first and not evidence.protected_bytes:
            missing.append("no port has sent anything of a protected job")
        return missing

    def _job_run(self, job: Job) -> JobRun:
        reports = self.jobs.reports(job)
        start = reports[0].started - round(job.start_s * 1e9)
        return JobRun(
            job=job,
            ideal_s=self.scenario.ideal_s(job),
            times=iteration_times(reports, self.scenario.warmup),
            traces={
                rank: [((at - start) / 1e9, received) for at, received in report.trace]
                for rank, report in enumerate(reports)
            },
            losses=[report.losses for report in reports],
        )

    def _utilisation(self, before: Counters, after: Counters) -> dict[str, float]:
        elapsed = after.at_s - before.at_s
        return {
            link: (after.link_bytes[link] - sent) * 8 / elapsed / self.scenario.capacity_bps(link)
            for link, sent in before.link_bytes.items()
        }


def kind(policy: str) -> str:
    """Without the back end's name."""
    return policy.partition("@")[0]


def expected_bytes(scenario: Scenario, iterations: int) -> int:
    """Payload bytes that all receivers of a scenario must verify in so many iterations."""
    per_iteration = 0
    for job in scenario.jobs:
        # Each worker receives as much as it sends; servers receive what all workers push.
        parts = job.workers * (2 if job.server_hosts else 1)
        per_iteration += job.sent_bytes * parts
    return per_iteration * iterations


def planned(scenario: Scenario, options: Options) -> int:
    """Iterations of each job, in all runs that `measure` makes."""
    runs = len(options.policies) * options.repeat
    alone_runs = len(_alone_runs(scenario, options))
    return runs * (scenario.warmup + options.measured(scenario)) + alone_runs * (
        ALONE_WARMUP + ALONE_ITERATIONS
    )


def measure(scenario: Scenario, options: Options, state: RunState, watch: Watch) -> Results:
    """All runs of all policies, interleaved, and each distinct job alone.

    MLCC may stop altogether: that is a result, and the others go on without it. Raises LabError,
    or RunFailed, for anything else that fails.
    """
    iterations = options.measured(scenario)
    runs: list[Run] = []
    stalled: dict[str, str] = {}
    with awake():
        for repeat, policy in itertools.product(range(1, options.repeat + 1), options.policies):
            if policy not in stalled:
                live = LiveRun(
                    scenario,
                    state,
                    policy,
                    iterations,
                    options.use_switch,
                    per_rack=options.per_rack,
                    stacked=options.stacked,
                    budget=options.budget,
                )
                label = f"{policy}, repeat {repeat} of {options.repeat}"
                try:
                    with live:
                        runs.append(live.run(repeat, watch, label))
                except Stalled as error:
                    if kind(policy) not in _SCHEDULED:
                        raise
                    stalled[policy] = str(error)
        result = Results(scenario, runs, {}, stalled=stalled)
        if runs and options.alone:
            result.alone = alone(result, options, state, watch)
    return result


def alone(result: Results, options: Options, state: RunState, watch: Watch) -> dict[str, float]:
    """Mean iteration time (s) of each job alone under the best baseline, by name.

    The only job of a scenario was alone already; for the others, short runs with each baseline
    that was asked for (cubic when none was).
    """
    scenario = result.scenario
    runs = _alone_runs(scenario, options)
    means: dict[str, list[float]] = {job.name: [] for job in scenario.jobs}
    for job, policy in runs:
        single = scenario.model_copy(
            update={"jobs": (job.model_copy(update={"start_s": 0.0}),), "warmup": ALONE_WARMUP}
        )
        with LiveRun(
            single, state, policy, ALONE_ITERATIONS, False, stacked=options.stacked
        ) as live:
            run = live.run(1, watch, f"{job.name} alone, {policy}")
        means[job.name].append(float(run.jobs[0].times.mean()))
    if not runs:
        [job] = scenario.jobs
        for policy in _baselines(options):
            times = [run.jobs[0].times.mean() for run in result.runs if run.policy == policy]
            means[job.name].append(float(sum(times)) / options.repeat)
    return {job.name: min(means[_first_like(scenario, job).name]) for job in scenario.jobs}


def _alone_runs(scenario: Scenario, options: Options) -> list[tuple[Job, str]]:
    """Each distinct job with each policy that it is measured alone with."""
    baselines = _baselines(options)
    if not options.alone or (len(scenario.jobs) == 1 and baselines):
        return []
    distinct = [job for job in scenario.jobs if _first_like(scenario, job) is job]
    return [(job, policy) for job in distinct for policy in baselines or ["cubic"]]


def _baselines(options: Options) -> list[str]:
    return [policy for policy in options.policies if policy in BASELINES]


def _first_like(scenario: Scenario, job: Job) -> Job:
    return next(one for one in scenario.jobs if one.same_as(job))
