# SPDX-License-Identifier: Apache-2.0
"""Runs a scenario: every policy, repeat after repeat (A B C A B C), each on a fresh network."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from flowslot_lab.jobset import JobSet, Stalled
from flowslot_lab.jobspec import iteration_times
from flowslot_lab.net import Counters, LabError, Network
from flowslot_lab.plane import ControlPlane
from flowslot_lab.processors import awake
from flowslot_lab.procs import Process
from flowslot_lab.state import RunState
from flowslot_scenario.job import Job
from flowslot_scenario.results import BASELINES, Evidence, JobRun, Results, Run
from flowslot_scenario.scenario import Scenario

DAEMON_POLICIES = ("static", "fair", "stagger", "mlcc", "mlcc-literal")
POLICIES = (*BASELINES, *DAEMON_POLICIES)
BACKENDS = ("bpf", "edt", "htb", "socket")
PACED_BY = tuple(f"{policy}@{name}" for policy in DAEMON_POLICIES for name in BACKENDS)
"""A policy whose daemons pace with one of them; without a name they choose themselves."""
ALONE_ITERATIONS = 10
ALONE_WARMUP = 3
_NEGOTIATED = ("stagger",)
_SCHEDULED = ("mlcc", "mlcc-literal")
_PACED = ("stagger", "static", *_SCHEDULED)


class RunFailed(Exception):
    """A run did not prove that it was real; says what is missing."""


class Watch(Protocol):
    """Who wants to see how far the runs are."""

    def begin(self, label: str, total: int) -> None:
        """A run of `total` iterations (over all jobs) begins."""

    def advance(self, done: int) -> None:
        """So many of them are done."""


@dataclass(frozen=True, slots=True)
class Options:
    """What `lab run` was asked for. `iterations`: measured ones per job and repeat; `per_rack`: a
    switch process for every rack instead of one for all links."""

    policies: tuple[str, ...]
    repeat: int = 1
    iterations: int | None = None
    use_switch: bool = True
    per_rack: bool = False

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
    ) -> None:
        """`per_rack`, `stacked`: see Options."""
        self.scenario = scenario
        self.state = state
        self.policy = policy
        self._kind, _, backend = policy.partition("@")
        self.iterations = iterations
        baseline = self._kind not in DAEMON_POLICIES
        self.net = Network(
            scenario, state, stacked=stacked, congestion_control=policy if baseline else "cubic"
        )
        self.plane: ControlPlane | None = None
        if not baseline:
            self.plane = ControlPlane(
                scenario,
                self.net,
                state,
                self._kind,
                use_switch,
                per_rack=per_rack,
                backend=backend or "auto",
            )
        self.jobs = JobSet(
            scenario,
            self.net,
            state,
            register=self.plane.register if self.plane is not None else lambda _host: "",
            iterations=scenario.warmup + iterations,
        )

    def __enter__(self) -> LiveRun:
        try:
            self.state.begin(f"{self.scenario.name}-{self.policy}")
            self.net.up()
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
        return [*(self.plane.processes() if self.plane else []), *self.jobs.processes()]

    def follow(self, watch: Watch) -> Iterator[int]:
        """From the start line to the last report; yields the iterations done, a few times per
        second, so that a caller can look at the running system or break it.
        """
        watch.begin(self.policy, len(self.scenario.jobs) * (self.scenario.warmup + self.iterations))
        self.jobs.go()
        done = False
        while not done:
            done = self.jobs.follow()
            watch.advance(self.jobs.iterations_done())
            yield self.jobs.iterations_done()

    def run(self, repeat: int, watch: Watch) -> Run:
        """Measure. Raises LabError, RunFailed when the run was not real, or Stalled."""
        before = self.net.counters()
        cpu_before = {process.name: process.cpu_s() for process in self.processes()}
        try:
            for _ in self.follow(watch):
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
        network_busy, stolen = after.ticks.since(before.ticks)
        evidence = Evidence(
            pids={process.name: process.pid for process in self.processes()},
            bytes_verified=sum(
                report.verified_bytes
                for job in self.scenario.jobs
                for report in self.jobs.reports(job)
            ),
            control_packets=after.control_packets,
            network_busy=network_busy,
            stolen=stolen,
            cpu={p.name: (p.cpu_s() - cpu_before[p.name]) / elapsed for p in self.processes()},
        )
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
                )
                try:
                    with live:
                        runs.append(live.run(repeat, watch))
                except Stalled as error:
                    if kind(policy) not in _SCHEDULED:
                        raise
                    stalled[policy] = str(error)
        result = Results(scenario, runs, {}, stalled=stalled)
        if runs:
            result.alone = alone(result, options, state, watch)
    return result


def alone(result: Results, options: Options, state: RunState, watch: Watch) -> dict[str, float]:
    """Mean iteration time (s) of each job alone under the best baseline, by name.

    The only job of a scenario was alone already; for the others, short runs with each baseline
    that was asked for (cubic when none was).
    """
    scenario = result.scenario
    baselines = [policy for policy in options.policies if policy in BASELINES]
    if len(scenario.jobs) == 1 and baselines:
        means = [
            sum(run.jobs[0].times.mean() for run in result.runs if run.policy == policy)
            for policy in baselines
        ]
        return {scenario.jobs[0].name: float(min(means)) / options.repeat}
    times: dict[str, float] = {}
    for job in scenario.jobs:
        twin = next((name for name in times if _same(scenario, name, job)), None)
        if twin is not None:
            times[job.name] = times[twin]
            continue
        single = scenario.model_copy(
            update={"jobs": (job.model_copy(update={"start_s": 0.0}),), "warmup": ALONE_WARMUP}
        )
        means = []
        for policy in baselines or ["cubic"]:
            with LiveRun(
                single, state, policy, ALONE_ITERATIONS, False, stacked=options.stacked
            ) as live:
                means.append(float(live.run(1, watch).jobs[0].times.mean()))
        times[job.name] = min(means)
    return times


def _same(scenario: Scenario, name: str, job: Job) -> bool:
    return next(j for j in scenario.jobs if j.name == name).same_as(job)
