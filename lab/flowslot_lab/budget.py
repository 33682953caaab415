# SPDX-License-Identifier: Apache-2.0
"""Where the time of a measured run has gone, from three records that share one clock: packets where
links end (`tap`), what jobs' senders had ready (`flowlog`), and daemons' demands, grants and rates
(flowslotd/trace.py, whose file format stands here again: rooms side by side import nothing).

Time is cut into bins of 1 ms. A link that is ahead in a bin makes up for the bins just before: what
emulates it comes late, and then sends faster for a moment.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from flowslot.model.units import goodput
from flowslot_lab import flowlog
from flowslot_lab.jobset import JobSet
from flowslot_lab.net import Network
from flowslot_lab.plane import ControlPlane
from flowslot_lab.tap import RECORD, Records, Tap
from flowslot_lab.tools import LabError
from flowslot_scenario.budget import STEPS, Floats, JobBudget, Link, busiest, charge, settle
from flowslot_scenario.scenario import Scenario

Ints = npt.NDArray[np.int64]
BIN_NS = 1_000_000
MAKES_UP = 3
"""Bins."""
FULL = 0.05
"""A link with less to spare is full."""
_SEGMENT, _HEADERS = 1448, 66
_ASKED, _GRANTED, _IN_FORCE = 1, 2, 3
_HEADER = np.dtype([("magic", "S8"), ("capacity", "u8"), ("written", "u8")])
_TRACE = np.dtype([("ns", "i8"), ("id", "u8"), ("rate", "f8"), ("kind", "u8")])


@dataclass(frozen=True, slots=True)
class Steps:
    """A quantity that changes at moments: `values[i]` from `at[i]` (ns) on; before, `first`."""

    at: Ints
    values: Floats
    first: float = 0.0

    def on(self, moments: Ints) -> Floats:
        """Its values then."""
        i = np.searchsorted(self.at, moments, "right") - 1
        if not len(self.at):
            return np.full(len(moments), self.first)
        return np.where(i < 0, self.first, self.values[i])

    def reaches(self, value: float) -> int | None:
        """When it is first so large, if it only grows; None: never."""
        i = int(np.searchsorted(self.values, value))
        return int(self.at[i]) if i < len(self.at) else None


NOTHING = Steps(np.zeros(0, np.int64), np.zeros(0))


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
            packets[link] = _by_flow(tap.records())
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
        return _Analysis(scenario, flows, packets, warm, last).budgets()


def _back(link: str) -> str:
    """The other direction."""
    a, _, b = link.partition("->")
    return f"{b}->{a}"


def _key(src: int, dst: int, sport: int, dport: int) -> int:
    return src << 40 | dst << 32 | sport << 16 | dport


def _by_flow(records: Records) -> dict[int, Records]:
    """Packets by the flow that they are of."""
    if not len(records):
        return {}
    src, dst, sport, dport = (
        records[name].astype(np.int64) for name in ("src", "dst", "sport", "dport")
    )
    key = src << 40 | dst << 32 | sport << 16 | dport  # as _key
    order = np.argsort(key, kind="stable")
    records, key = records[order], key[order]
    cuts = np.flatnonzero(np.diff(key)) + 1
    firsts = np.concatenate(([0], cuts))
    return dict(zip(key[firsts].tolist(), np.split(records, cuts), strict=True))


def _positions(numbers: npt.NDArray[np.uint32], base: int) -> Ints:
    """Sequence numbers as bytes after `base`, beyond 2**32 too."""
    if not len(numbers):
        return np.zeros(0, np.int64)
    first = (int(numbers[0]) - base + 2**31) % 2**32 - 2**31
    steps = np.diff(numbers).astype(np.uint32).view(np.int32).astype(np.int64)
    return np.concatenate(([first], first + np.cumsum(steps)))


def _in_order(starts: Ints, ends: Ints) -> Ints:
    """Up to where bytes have come without a hole, after each packet. What precedes the first byte
    seen, or byte 0, has come."""
    have, later = max(min(starts.tolist(), default=0), 0), list[tuple[int, int]]()
    found = np.empty(len(starts), np.int64)
    for i, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        if start > have:
            heapq.heappush(later, (start, end))
        else:
            have = max(have, end)
            while later and later[0][0] <= have:
                have = max(have, heapq.heappop(later)[1])
        found[i] = have
    return found


def _growing(at: npt.NDArray[np.uint64], positions: Ints, first: float = 0.0) -> Steps:
    return Steps(at.astype(np.int64), np.maximum.accumulate(positions).astype(np.float64), first)


_NO_PACKETS = np.zeros(0, RECORD)


def _flow(scenario: Scenario, job: int, path: Path, packets: dict[str, dict[int, Records]]) -> Flow:
    log = flowlog.read(path)
    records = log.records
    src, dst = (int(address.rpartition(".")[2]) for address in (log.src, log.dst))
    names = [host.name for host in scenario.hosts]
    links = scenario.path(names[src - 1], names[dst - 1])
    begins = records[records["ready"] == flowlog.BEGIN]
    notes = records[records["ready"] != flowlog.BEGIN]
    key, back = _key(src, dst, log.sport, log.dport), _key(dst, src, log.dport, log.sport)
    sent, come = (packets[links[i]].get(key, _NO_PACKETS) for i in (0, -1))
    sent, come = sent[sent["len"] > 0], come[come["len"] > 0]
    acks = packets[_back(links[0])].get(back, _NO_PACKETS)
    acks = acks[acks["syn"] == 0]  # whose windows are not scaled
    base = 0
    if len(begins):
        before = acks[acks["ns"] < begins["ns"][0]]
        base = int(before["ack"][-1]) if len(before) else int(sent["seq"][0]) if len(sent) else 0
        sent, come = (some[some["ns"] >= begins["ns"][0]] for some in (sent, come))
    starts = _positions(come["seq"], base)
    allowed = _positions(acks["ack"], base) + (acks["window"].astype(np.int64) << log.scale)
    return Flow(
        job=job,
        links=links,
        cookie=log.cookie,
        begins=begins["ns"],
        totals=np.cumsum(begins["posted"]),
        ready=Steps(notes["ns"], notes["ready"].astype(np.float64)),
        posted=Steps(notes["ns"], notes["posted"].astype(np.float64)),
        sent=_growing(sent["ns"], _positions(sent["seq"], base) + sent["len"]),
        arrived=_growing(come["ns"], _in_order(starts, starts + come["len"])),
        allowed=_growing(acks["ns"], allowed, np.inf),
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
    """Of one run, from `first` to `last` (ns)."""

    def __init__(
        self,
        scenario: Scenario,
        flows: list[Flow],
        packets: dict[str, dict[int, Records]],
        first: int,
        last: int,
    ) -> None:
        self._scenario, self._flows = scenario, flows
        self._links = scenario.directed_links()
        self._edges = np.arange(first, last, BIN_NS)
        self._mids = self._edges[:-1] + BIN_NS // 2
        self._grants = any(len(flow.granted.at) for flow in flows)
        self._unused = {link: self._idle(link, packets[link]) for link in self._links}
        self._open = np.zeros((len(self._mids), len(flows)), np.bool_)
        for i, flow in enumerate(flows):
            self._phases(i, flow)
        self._left = np.stack([f.ready.on(self._mids) > f.arrived.on(self._mids) for f in flows], 1)
        self._left &= self._open

    def _parts(self, link: str, packets: Records) -> Floats:
        """Parts of a link's capacity that these packets took, by bin."""
        size = packets["len"].astype(np.int64)
        size += np.maximum(-(-size // _SEGMENT), 1) * _HEADERS
        counts, _ = np.histogram(packets["ns"].astype(np.int64), self._edges, weights=size)
        return np.asarray(counts * 8e9 / BIN_NS / self._links[link].capacity_bps, np.float64)

    def _idle(self, link: str, packets: dict[int, Records]) -> Floats:
        """Parts of a link's capacity that nothing took, by bin."""
        carried = np.zeros(len(self._mids))
        mine = {flow.key: flow for flow in self._flows if link in flow.links}
        for key, some in packets.items():
            part = self._parts(link, some)
            carried += part
            if key in mine:
                mine[key].carried[link] = part
        unused = np.maximum(1.0 - carried, 0.0)
        for i in np.flatnonzero(carried > 1.0).tolist():
            ahead = carried[i] - 1.0
            for before in range(i - 1, max(i - 1 - MAKES_UP, -1), -1):
                part = min(ahead, unused[before])
                unused[before] -= part
                ahead -= part
        return unused

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
