# SPDX-License-Identifier: Apache-2.0
"""Where the time of a measured run has gone, from three records that share one clock: packets where
links end (`tap`), what jobs' senders had ready (`flowlog`), and daemons' demands, grants and rates
(flowslotd/trace.py, whose file format stands here again: rooms side by side import nothing).

Time is cut into bins of 1 ms. A packet takes a link for a while, until it comes out of it. Where
packets follow each other faster, they make up for time before: what emulates a link carries a burst
at once after a pause, and may be late.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from flowslot.model.units import goodput
from flowslot_lab import flowlog
from flowslot_lab.jobset import JobSet
from flowslot_lab.net import Network
from flowslot_lab.packets import (
    NO_PACKETS,
    NOTHING,
    Ints,
    Steps,
    by_flow,
    growing,
    in_order,
    key_of,
    passed,
    positions,
    shares,
)
from flowslot_lab.plane import ControlPlane
from flowslot_lab.tap import Records, Tap
from flowslot_lab.tools import LabError
from flowslot_scenario.budget import STEPS, Floats, JobBudget, Link, busiest, charge, settle
from flowslot_scenario.scenario import Scenario

BIN_NS, LATE_NS = 1_000_000, 3_000_000
FULL = 0.05
"""A link with less to spare is full."""
_SEGMENT, _HEADERS = 1448, 66
_ASKED, _GRANTED, _IN_FORCE = 1, 2, 3
_HEADER = np.dtype([("magic", "S8"), ("capacity", "u8"), ("written", "u8")])
_TRACE = np.dtype([("ns", "i8"), ("id", "u8"), ("rate", "f8"), ("kind", "u8")])


@dataclass(slots=True)
class Flow:
    """One direction of a connection of a job. Bytes are counted from its first phase on."""

    job: int
    links: tuple[str, ...]
    cookie: int
    begins: Ints
    totals: Ints
    """Bytes of its phases up to the end of each."""
    ready: Steps
    posted: Steps
    sent: Steps
    """By the host's NIC."""
    arrived: Steps
    """At the other host, without a hole."""
    allowed: Steps
    """By the receiver's window."""
    key: int = 0
    carried: dict[str, Floats] = field(default_factory=dict)
    """Parts of the capacity of each link."""
    ends: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    asked: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    granted: Steps = NOTHING
    """Of its aggregate: payload bytes/s."""
    in_force: Steps = NOTHING


class Recorder:
    """Taps on all links of a network that is up."""

    def __init__(self, net: Network) -> None:
        """Raises LabError."""
        other = {port: net.ports[_back(link)] for link, port in net.ports.items()}
        self.taps = {link: Tap(other[port]) for link, port in net.ports.items()}
        self._bursts = net.bursts

    def drain(self) -> None:
        """To be called a few times per second. Raises LabError."""
        for tap in self.taps.values():
            tap.drain()

    def work_out(
        self, scenario: Scenario, jobs: JobSet, plane: ControlPlane | None
    ) -> list[JobBudget]:
        """Once the jobs have reported. Raises LabError: too little was recorded."""
        packets = {}
        for link, tap in self.taps.items():
            tap.drain(end=True)
            packets[link] = by_flow(tap.records())
        flows = [
            _flow(scenario, j, path, packets)
            for j, job in enumerate(scenario.jobs)
            for path in jobs.flow_logs(job)
        ]
        flows = [flow for flow in flows if len(flow.begins)]
        if plane is not None:
            for host in plane.daemons:
                _negotiated(flows, plane.trace_of(host))
        warm = max(
            max(
                r.ends[scenario.warmup - 1] if scenario.warmup else r.started
                for r in jobs.reports(job)
                if r.ends
            )
            for job in scenario.jobs
        )
        # Who has reported goes on, until all have; then one after the other is stopped.
        reported = max(r.ends[-1] for job in scenario.jobs for r in jobs.reports(job) if r.ends)
        written = (
            max((f.ready.at[-1] for f in flows if f.job == j and len(f.ready.at)), default=0)
            for j in range(len(scenario.jobs))
        )
        last = min(reported, *written)
        if last - warm < 100 * BIN_NS:
            raise LabError("too little was recorded for a budget: ask for more iterations")
        return _Analysis(scenario, flows, packets, self._bursts, (warm, last)).budgets()


def _back(link: str) -> str:
    """The other direction."""
    a, _, b = link.partition("->")
    return f"{b}->{a}"


def _flow(scenario: Scenario, job: int, path: Path, packets: dict[str, dict[int, Records]]) -> Flow:
    log = flowlog.read(path)
    records = log.records
    src, dst = (int(address.rpartition(".")[2]) for address in (log.src, log.dst))
    names = [host.name for host in scenario.hosts]
    links = scenario.path(names[src - 1], names[dst - 1])
    begins = records[records["ready"] == flowlog.BEGIN]
    notes = records[records["ready"] != flowlog.BEGIN]
    key, back = key_of(src, dst, log.sport, log.dport), key_of(dst, src, log.dport, log.sport)
    sent, come = (packets[links[i]].get(key, NO_PACKETS) for i in (0, -1))
    sent, come = sent[sent["len"] > 0], come[come["len"] > 0]
    acks = packets[_back(links[0])].get(back, NO_PACKETS)
    acks = acks[acks["syn"] == 0]  # whose windows are not scaled
    base = 0
    if len(begins):
        before = acks[acks["ns"] < begins["ns"][0]]
        base = int(before["ack"][-1]) if len(before) else int(sent["seq"][0]) if len(sent) else 0
        sent, come = (some[some["ns"] >= begins["ns"][0]] for some in (sent, come))
    starts = positions(come["seq"], base)
    allowed = positions(acks["ack"], base) + (acks["window"].astype(np.int64) << log.scale)
    return Flow(
        job=job,
        links=links,
        cookie=log.cookie,
        begins=begins["ns"],
        totals=np.cumsum(begins["posted"]),
        ready=Steps(notes["ns"], notes["ready"].astype(np.float64)),
        posted=Steps(notes["ns"], notes["posted"].astype(np.float64)),
        sent=growing(sent["ns"], positions(sent["seq"], base) + sent["len"]),
        arrived=growing(come["ns"], in_order(starts, starts + come["len"])),
        allowed=growing(acks["ns"], allowed, np.inf),
        key=key,
    )


def _negotiated(flows: Iterable[Flow], path: Path) -> None:
    """What a daemon wrote down of these flows. Raises LabError."""
    data = path.read_bytes()
    capacity, written = np.frombuffer(data, _HEADER, 1)[0].tolist()[1:]
    if written > capacity:
        raise LabError(f"{path}: records were overwritten; ask for fewer iterations")
    trace = np.frombuffer(data, _TRACE, written, _HEADER.itemsize)
    by_cookie = {flow.cookie: flow for flow in flows}
    groups: dict[tuple[int, tuple[str, ...]], list[Flow]] = {}
    for flow in by_cookie.values():
        groups.setdefault((flow.job, flow.links), []).append(flow)
    order = np.argsort(trace["id"], kind="stable")
    trace = trace[order]
    for part in np.split(trace, np.flatnonzero(np.diff(trace["id"])) + 1) if len(trace) else ():
        found = by_cookie.get(int(part["id"][0]))
        if found is None:
            continue
        kinds = [part[part["kind"] == kind] for kind in (_ASKED, _GRANTED, _IN_FORCE)]
        asked, granted, in_force = kinds
        if len(in_force):
            found.in_force = Steps(in_force["ns"], np.nan_to_num(in_force["rate"]))
        if len(asked) or len(granted):
            for flow in groups[found.job, found.links]:
                flow.asked = asked["ns"]
                flow.granted = Steps(granted["ns"], np.nan_to_num(granted["rate"]))


class _Analysis:
    """Of one run, in a window (ns)."""

    def __init__(
        self,
        scenario: Scenario,
        flows: list[Flow],
        packets: dict[str, dict[int, Records]],
        bursts: Mapping[str, int],
        window: tuple[int, int],
    ) -> None:
        self._scenario, self._flows = scenario, flows
        self._links = scenario.directed_links()
        self._edges = np.arange(*window, BIN_NS)
        self._mids = self._edges[:-1] + BIN_NS // 2
        self._bursts = bursts
        self._grants = any(len(flow.granted.at) for flow in flows)
        self._unused = {link: self._idle(link, packets[link]) for link in self._links}
        self._open = np.zeros((len(self._mids), len(flows)), np.bool_)
        for i, flow in enumerate(flows):
            self._phases(i, flow)
        self._left = np.stack([f.ready.on(self._mids) > f.arrived.on(self._mids) for f in flows], 1)
        self._left &= self._open

    def _idle(self, link: str, packets: dict[int, Records]) -> Floats:
        """Parts of a link's capacity that nothing took, by bin. What flows took: in `carried`."""
        mine = {flow.key: flow for flow in self._flows if link in flow.links}
        every = np.concatenate([NO_PACKETS, *packets.values()])
        whose = np.repeat(np.array([*packets], np.int64), [*map(len, packets.values())])
        order = np.argsort(every["ns"], kind="stable")
        every, whose = every[order], whose[order]
        size = every["len"].astype(np.int64)
        size += np.maximum(-(-size // _SEGMENT), 1) * _HEADERS
        bits_per_ns = self._links[link].capacity_bps / 1e9
        takes = size * 8 / bits_per_ns
        most = max(self._bursts[link] * 8 / bits_per_ns, LATE_NS)
        ends = passed(every["ns"].astype(np.int64), takes, most)
        for key, flow in mine.items():
            at = whose == key
            flow.carried[link] = shares(ends[at], takes[at], self._edges)
        return np.maximum(1.0 - shares(ends, takes, self._edges), 0.0)

    def _phases(self, i: int, flow: Flow) -> None:
        ends = []
        for begin, total in zip(flow.begins, flow.totals, strict=True):
            end = flow.arrived.reaches(total)
            ends.append(end or 0)
            at = (self._mids >= begin) & (self._mids < (end or self._mids[-1]))
            self._open[at, i] = True
        flow.ends = np.array(ends, np.int64)

    def _link(self, name: str) -> Link:
        at = [i for i, flow in enumerate(self._flows) if name in flow.links]
        flows = [self._flows[i] for i in at]
        mids, bins = self._mids, len(self._mids)
        capacity = goodput(self._links[name].capacity_bps)
        zeros = np.zeros(bins)
        full = {link: unused < FULL for link, unused in self._unused.items()}
        groups = {(flow.job, flow.links): flow for flow in flows}
        granted = sum((flow.granted.on(mids) for flow in groups.values()), zeros) / capacity
        sent, posted, allowed = (
            np.stack([steps.on(mids) for steps in every], 1)
            for every in zip(*((f.sent, f.posted, f.allowed) for f in flows), strict=True)
        )
        return Link(
            seconds=np.full(bins, BIN_NS / 1e9),
            unused=self._unused[name],
            granted=granted if self._grants else np.full(bins, np.inf),
            job=np.array([flow.job for flow in flows], np.intp),
            carried=np.stack([flow.carried.get(name, zeros) for flow in flows], 1),
            in_force=np.stack([flow.in_force.on(mids) / capacity for flow in flows], 1),
            open=self._open[:, at],
            ready=self._left[:, at],
            elsewhere=np.stack(
                [np.any([full[one] & ~full[name] for one in flow.links], 0) for flow in flows], 1
            ),
            at_receiver=allowed - sent < _SEGMENT,
            in_process=posted <= sent,
        )

    def budgets(self) -> list[JobBudget]:
        """Of all jobs."""
        scenario = self._scenario
        wanted = {link for job in scenario.jobs for link in busiest(scenario, job)}
        links = {name: self._link(name) for name in wanted}
        means = [self._mean_s(j) for j in range(len(scenario.jobs))]
        spanned = (self._edges[-1] - self._edges[0]) / 1e9
        counts = [spanned / mean for mean in means]
        budgets = settle(scenario, counts, means, lambda link, job: charge(links[link], job))
        for j, budget in enumerate(budgets):
            budget.steps = self._steps(j)
        return budgets

    def _mean_s(self, job: int) -> float:
        """Of the iterations that began in the window: from one beginning to the next."""
        mine = [flow.begins for flow in self._flows if flow.job == job]
        count = min(map(len, mine))
        begins = np.min([one[:count] for one in mine], axis=0)
        begins = begins[(begins >= self._edges[0]) & (begins <= self._edges[-1])]
        if len(begins) < 2:
            raise LabError("too little was recorded for a budget: ask for more iterations")
        return float(begins[-1] - begins[0]) / (len(begins) - 1) / 1e9

    def _steps(self, job: int) -> dict[str, float]:
        """Medians, ms."""
        found: dict[str, list[float]] = {step: [] for step in STEPS}
        for flow in self._flows:
            if flow.job != job:
                continue
            before = 0
            for begin, total, end in zip(flow.begins, flow.totals, flow.ends, strict=True):
                if self._edges[0] <= begin <= self._edges[-1] and end:
                    moments = (
                        _first(flow.asked, begin),
                        _positive(flow.granted, begin),
                        _positive(flow.in_force, begin),
                        flow.sent.reaches(before + 1),
                        end,
                    )
                    for step, at in zip(STEPS, moments, strict=True):
                        if at is not None and at <= end:
                            found[step].append(max(at - begin, 0) / 1e6)
                before = total
        return {step: float(np.median(values)) for step, values in found.items() if values}


def _first(at: Ints, begin: int) -> int | None:
    i = int(np.searchsorted(at, begin))
    return int(at[i]) if i < len(at) else None


def _positive(rate: Steps, begin: int) -> int | None:
    """When it is first more than nothing, from `begin` on."""
    if rate.on(np.array([begin]))[0] > 0:
        return begin
    i = int(np.searchsorted(rate.at, begin, "right"))
    later = np.flatnonzero(rate.values[i:] > 0)
    return int(rate.at[i + later[0]]) if len(later) else None
