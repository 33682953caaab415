# SPDX-License-Identifier: Apache-2.0
"""Scenario files: hosts, links, jobs, and the physical limit that they imply.

name = "two-equal"
[links]                      # one switch, every host has one link to it
rate_mbps = 400
buffer_kb = 128              # of each switch port; 1 kB = 1000 bytes
[[hosts]]
name = "h1"                  # may set rate_mbps and buffer_kb of its own
[[jobs]]
name = "a"
kind = "ring"                # or "ps", with server = "h1"
hosts = ["h1", "h2"]         # one worker each
bytes = 5_000_000            # ring: the tensor; ps: pushed, and pulled, by each worker
compute_s = 0.125
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import AfterValidator, Field, FiniteFloat

from flowslot.errors import ConfigError, why_unreadable
from flowslot.settings import PRINTABLE, Settings, Text, read_toml, shortened, validate
from flowslot.units import goodput
from flowslot_scenario import variants

SWITCH = "s1"
WORD_BYTES = 2
"""Jobs send 16-bit numbers, as small as gradients often are: keys of odd sizes stripe evenly."""
MAX_HOSTS = 200  # 10.77.0.250 is the switch's
MAX_JOBS = 64


def _name(text: str) -> str:
    if not re.fullmatch("[a-z][a-z0-9-]*", text):
        rule = 'must begin with a letter from a to z and hold only a-z, 0-9 and "-"'
        raise ValueError(f'{rule}, got "{shortened(text)}"')
    return text


NAME = AfterValidator(_name)
HostName = Annotated[str, Field(max_length=12), PRINTABLE, NAME]  # d-<name> fits an interface name
JobName = Annotated[str, Field(max_length=31), PRINTABLE, NAME]
# No limits of the lab: beyond these, a number is a mistake, or what it leads to overflows.
RateMbps = Annotated[FiniteFloat, Field(ge=1, le=1e6)]
BufferKb = Annotated[FiniteFloat, Field(ge=2, le=1e6)]  # a packet fits into 2 kB
Iterations = Annotated[int, Field(ge=0, le=1_000_000)]


class Links(Settings):
    """What every link between a host and the switch is like, unless the host says otherwise."""

    rate_mbps: RateMbps
    buffer_kb: BufferKb


class Host(Settings):
    """A host; None: as in `[links]`."""

    name: HostName
    rate_mbps: RateMbps | None = None
    buffer_kb: BufferKb | None = None


class Job(Settings):
    """A training job: compute, then communicate, again and again."""

    name: JobName
    kind: Literal["ring", "ps"]
    hosts: tuple[Text, ...] = Field(min_length=1)
    server: Text | None = None
    bytes: Annotated[int, Field(ge=1, le=10_000_000_000)]
    sockets: Annotated[int, Field(ge=1, le=64)] = 1
    slice_kb: Annotated[FiniteFloat, Field(ge=1, le=1e6)] = 50.0
    keys: Annotated[int, Field(ge=1, le=65_536)] = 64
    barrier: bool = False
    compute_s: Annotated[FiniteFloat, Field(ge=0, le=30)]
    jitter: Annotated[FiniteFloat, Field(ge=0, le=0.5)] = 0.02
    start_s: Annotated[FiniteFloat, Field(ge=0, le=3600)] = 0.0

    @property
    def workers(self) -> int:
        """Number of workers (a parameter server is none)."""
        return len(self.hosts)

    @property
    def processes(self) -> tuple[str, ...]:
        """The host of every process by rank: the workers, then the server if there is one."""
        return self.hosts if self.server is None else (*self.hosts, self.server)

    @property
    def slices(self) -> int:
        """Slices in which one socket's part of a chunk is forwarded: about `slice_kb` each.

        Of a parameter server's: its keys, each striped over all sockets.
        """
        if self.kind == "ps":
            return self.keys
        section = self.bytes / (self.workers * self.sockets)
        return max(1, round(section / (self.slice_kb * 1000)))

    @property
    def slice_bytes(self) -> int:
        """Size of a slice (ring) or of a key's stripe (ps): whole words, rounded up."""
        parts = self.sockets * self.slices * (self.workers if self.kind == "ring" else 1)
        return WORD_BYTES * -(-self.bytes // (WORD_BYTES * parts))

    @property
    def sent_bytes(self) -> int:
        """Payload bytes that each worker sends in an iteration."""
        whole = self.slice_bytes * self.slices * self.sockets
        return 2 * (self.workers - 1) * whole if self.kind == "ring" else whole

    def link_bytes(self) -> dict[str, int]:
        """Payload bytes of one iteration on each directed link."""
        load: dict[str, int] = {}

        def add(host: str, sent: int, received: int) -> None:
            for link, n in ((up(host), sent), (down(host), received)):
                load[link] = load.get(link, 0) + n

        for host in self.hosts:
            add(host, self.sent_bytes, self.sent_bytes)
        if self.server is not None:
            total = self.sent_bytes * self.workers
            add(self.server, total, total)
        return load

    def flows_on(self) -> dict[str, int]:
        """Number of flows that can use each directed link."""
        flows: dict[str, int] = {}

        def add(host: str, count: int) -> None:
            for link in (up(host), down(host)):
                flows[link] = flows.get(link, 0) + count

        for host in self.hosts:
            add(host, self.sockets)
        if self.server is not None:
            add(self.server, self.sockets * self.workers)
        return flows

    def compute_ns(self, seed: int, iteration: int) -> int:
        """Length of a computation phase: the same on every worker, and whoever asks."""
        return compute_ns(seed, self.name, self.compute_s, self.jitter, iteration)

    def same_as(self, other: Job) -> bool:
        """Whether the two differ in nothing but name and start."""
        plain = {"name": "x", "start_s": 0.0}
        return self.model_copy(update=plain) == other.model_copy(update=plain)


def compute_ns(seed: int, job: str, compute_s: float, jitter: float, iteration: int) -> int:
    """Length of the computation phase in an iteration of a job: normal, seeded, at least 0."""
    generator = np.random.default_rng([seed, zlib.crc32(job.encode()), iteration])
    factor = 1.0 + jitter * float(generator.standard_normal())
    return round(compute_s * max(0.0, factor) * 1e9)


def up(host: str) -> str:
    """Name of the directed link from a host to the switch."""
    return f"{host}->{SWITCH}"


def down(host: str) -> str:
    """Name of the directed link from the switch to a host."""
    return f"{SWITCH}->{host}"


class Link(Settings):
    """Resolved link of a host, both directions alike."""

    rate_mbps: float
    buffer_bytes: int

    @property
    def capacity_bps(self) -> float:
        """Bits per second on the wire."""
        return self.rate_mbps * 1e6


class Scenario(Settings):
    """A scenario file."""

    name: Annotated[str, Field(max_length=40), PRINTABLE, NAME]
    description: Text = ""
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 1
    iterations: Annotated[Iterations, Field(ge=1)] = 100
    warmup: Iterations = 5
    rtt_us: Annotated[FiniteFloat, Field(ge=0, le=1e6)] = 20.0
    rto_min_ms: Annotated[int, Field(ge=1, le=1000)] | None = None
    """Least retransmission timeout between hosts; the kernel's (200 ms) unless given."""
    links: Links
    hosts: tuple[Host, ...] = Field(min_length=2, max_length=MAX_HOSTS)
    jobs: tuple[Job, ...] = Field(min_length=1, max_length=MAX_JOBS)

    def link_of(self, host: str) -> Link:
        """The link between a host and the switch."""
        own = next(h for h in self.hosts if h.name == host)
        return Link(
            rate_mbps=own.rate_mbps or self.links.rate_mbps,
            buffer_bytes=round((own.buffer_kb or self.links.buffer_kb) * 1000),
        )

    def capacity_bps(self, link: str) -> float:
        """Wire rate of a directed link."""
        src, _, dst = link.partition("->")
        return self.link_of(dst if src == SWITCH else src).capacity_bps

    def index(self, host: str) -> int:
        """Position of a host in the file: its addresses follow from it."""
        return [h.name for h in self.hosts].index(host)

    def ideal_s(self, job: Job) -> float:
        """Iteration time at the physical limit, in seconds (formula: `explain_ideal`)."""
        times = self._link_times(job)
        if job.kind == "ring":
            rounds = 2 * (job.workers - 1)
            return job.compute_s + max(times.values()) + rounds * self.rtt_us / 1e6
        if job.barrier:
            # Pushes all end before pulls begin: the busiest link of each way, one after the other.
            assert job.server is not None
            return job.compute_s + times[down(job.server)] + times[up(job.server)]
        return job.compute_s + max(times.values())

    def _link_times(self, job: Job) -> dict[str, float]:
        return {n: b / goodput(self.capacity_bps(n)) for n, b in job.link_bytes().items()}

    def explain_ideal(self, job: Job) -> str:
        """The formula of `ideal_s` with this job's numbers."""
        times = self._link_times(job)
        link = max(times, key=lambda name: times[name])
        text = f"{job.name}: {job.compute_s:g} s compute + "
        share = (
            f"{job.link_bytes()[link] / 1e6:g} MB / ({self.capacity_bps(link) / 1e6:g} Mbit/s "
            f"x 1448/1514) on {link}"
        )
        text += share if not (job.barrier and job.server) else f"push and pull in turn, 2 x {share}"
        if job.kind == "ring":
            text += f" + {2 * (job.workers - 1)} round trips of {self.rtt_us:g} us"
        return f"{text} = {self.ideal_s(job):.4f} s"

    def flows_on_link(self) -> dict[str, int]:
        """Number of flows of all jobs that can use each directed link."""
        total: dict[str, int] = {}
        for job in self.jobs:
            for link, count in job.flows_on().items():
                total[link] = total.get(link, 0) + count
        return total


def load(path: Path, changes: Iterable[str] = ()) -> Scenario:
    """Read and check a scenario file, some values changed (see `variants`).

    Raises ConfigError (also when the file cannot be read).
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), "", f"cannot be read: {why_unreadable(error)}") from None
    return parse(text, str(path), changes)


def parse(text: str, source: str, changes: Iterable[str] = ()) -> Scenario:
    """Parse a scenario; ConfigError names the file, the field and what would be right."""
    data = read_toml(text, source)
    variants.apply(data, changes)
    scenario = validate(data, source, Scenario)
    _Checker(scenario, source).check()
    return scenario


class _Checker:
    """What goes beyond one field."""

    def __init__(self, scenario: Scenario, source: str) -> None:
        self._scenario = scenario
        self._source = source

    def check(self) -> None:
        hosts = [host.name for host in self._scenario.hosts]
        self._unique("host", hosts, "hosts")
        if SWITCH in hosts:
            at = f"hosts[{hosts.index(SWITCH)}].name"
            self._fail(at, f'"{SWITCH}" is the name of the switch; give the host another one')
        self._unique("job", [job.name for job in self._scenario.jobs], "jobs")
        for i, job in enumerate(self._scenario.jobs):
            self._check_job(job, f"jobs[{i}]", hosts)

    def _check_job(self, job: Job, at: str, hosts: list[str]) -> None:
        for k, host in enumerate(job.hosts):
            self._known(host, hosts, f"{at}.hosts[{k}]")
            if host in job.hosts[:k]:
                self._fail(f"{at}.hosts[{k}]", f'"{host}" has a worker already; name each once')
        if job.kind == "ring":
            self._check_ring(job, at)
        elif job.server is None:
            self._fail(f"{at}.server", 'is required for kind "ps": the parameter server\'s host')
        else:
            self._known(job.server, hosts, f"{at}.server")
            if job.server in job.hosts:
                self._fail(f"{at}.server", "must be a host of its own, not one of the workers'")

    def _check_ring(self, job: Job, at: str) -> None:
        if job.workers < 2:
            self._fail(f"{at}.hosts", "must name at least 2 hosts for a ring")
        for key in ("server", "keys", "barrier"):
            if key in job.model_fields_set:
                self._fail(f"{at}.{key}", 'is for kind "ps"; a ring has none')

    def _unique(self, kind: str, names: list[str], field: str) -> None:
        for i, name in enumerate(names):
            if name in names[:i]:
                first = f"{field}[{names.index(name)}].name"
                problem = f'{kind} "{name}" is already at `{first}`; name each once'
                self._fail(f"{field}[{i}].name", problem)

    def _known(self, host: str, hosts: list[str], field: str) -> None:
        if host not in hosts:
            listed = ", ".join(hosts[:8]) + (", ..." if len(hosts) > 8 else "")
            self._fail(field, f'no host is called "{shortened(host)}"; must be one of: {listed}')

    def _fail(self, field: str, problem: str) -> None:
        raise ConfigError(self._source, field, problem)
