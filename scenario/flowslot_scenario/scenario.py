# SPDX-License-Identifier: Apache-2.0
"""Scenario files: hosts, links, jobs, and the physical limit that they imply.

name = "two-equal"
[links]                      # every host has one link to its switch
rate_mbps = 400
buffer_kb = 128              # of each switch port; 1 kB = 1000 bytes
uplink_mbps = 400            # between a rack's switch and the core; rate_mbps unless given
uplink_buffer_kb = 128       # of the ports at both its ends; buffer_kb unless given
[[hosts]]
name = "h1"                  # may set rate_mbps and buffer_kb of its own
rack = "r1"                  # every host has one, or none has
[[jobs]]
name = "a"
kind = "ring"                # or "nccl", "ddp"; "ps", with server = "h1";
                             # "pslite", with servers = ["h1"]
hosts = ["h1", "h2"]         # one worker each
bytes = 5_000_000            # ring: the tensor; else pushed, and pulled, by each worker
compute_s = 0.125

[[losses]]                   # if any: a path that loses packets at random
from_host = "h1"
to_host = "h2"
percent = 3

[[delays]]                   # if any: a path whose packets arrive later
from_host = "h1"
to_host = "h2"
us = 1000

Without racks there is one switch, `s1`: links `h1->s1`, `s1->h1`. With racks, each has a switch of
its name, and these meet in `core`: links `h1->r1`, `r1->h1`, uplinks `r1->core`, `core->r1`.

`slower = 3` runs the same thing three times slower: links carry a third, and computation, starts,
round trips and TCP's least timeout take three times as long. Bytes and buffers stay. What flowslot
has in ms (slots, leases, how often it looks) stays, too, and so does what it costs: these become
cheaper against an iteration, as on a machine three times as fast.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, NoReturn

from pydantic import Field, FiniteFloat

from flowslot.model.errors import ConfigError, why_unreadable
from flowslot.model.settings import (
    PRINTABLE,
    Settings,
    Text,
    one_of,
    read_toml,
    shortened,
    validate,
)
from flowslot.model.units import goodput
from flowslot_scenario import variants
from flowslot_scenario.fields import NAME, BufferKb, HostName, Iterations, RackName, RateMbps
from flowslot_scenario.job import Job
from flowslot_scenario.paths import Delay, HostPath, Loss

SWITCH = "s1"
"""The switch, where there are no racks."""
CORE = "core"
"""The switch between the racks."""
MAX_HOSTS = 200  # 10.77.0.250 is the switch's
MAX_JOBS = 64
_PS, _PSLITE, _NCCL = 'is for kind "ps"', 'is for kind "pslite"', 'is for kind "nccl"'
_OWN = 'is for kinds "ring" and "ps"'
_FOR_NCCL = dict.fromkeys(("channels", "threads", "iterations_by"), _NCCL)
_FOR_SERVERS = {
    "server": _PS,
    "barrier": _PS,
    "servers": _PSLITE,
    "library": _PSLITE,
    "keys": "is for kinds with servers",
}
_FOR_DDP = dict.fromkeys(("model", "program", "fusion_kb"), 'is for kind "ddp"')
_OF_OTHERS = {
    "ring": _FOR_SERVERS | _FOR_NCCL | _FOR_DDP,
    "ps": {"servers": _PSLITE, "library": _PSLITE} | _FOR_NCCL | _FOR_DDP,
    "pslite": {
        "server": _PS,
        "barrier": _PS,
        "sockets": 'is for kinds "ring", "ps" and "nccl"',
        "slice_kb": 'is for kinds "ring" and "nccl"',
        "protected": _OWN,
    }
    | _FOR_NCCL
    | _FOR_DDP,
    "nccl": _FOR_SERVERS | {"protected": _OWN} | _FOR_DDP,
    "ddp": _FOR_SERVERS
    | _FOR_NCCL
    | {
        "protected": _OWN,
        "sockets": 'is for kinds "ring", "ps" and "nccl"',
        "slice_kb": 'is for kinds "ring" and "nccl"',
    },
}
"""Fields that a kind of job has no use for, and whose they are."""


class Links(Settings):
    """What every link between a host and its switch is like, unless the host says otherwise, and
    every uplink of a rack; None: as the hosts' links."""

    rate_mbps: RateMbps
    buffer_kb: BufferKb
    uplink_mbps: RateMbps | None = None
    uplink_buffer_kb: BufferKb | None = None


class Host(Settings):
    """A host; None: as in `[links]`."""

    name: HostName
    rack: RackName | None = None
    rate_mbps: RateMbps | None = None
    buffer_kb: BufferKb | None = None

    @property
    def switch(self) -> str:
        """Name of the switch at the other end of its link."""
        return self.rack or SWITCH

    @property
    def up(self) -> str:
        """Name of the directed link from the host to its switch."""
        return f"{self.name}->{self.switch}"

    @property
    def down(self) -> str:
        """Name of the directed link from its switch to the host."""
        return f"{self.switch}->{self.name}"


def rack_up(rack: str) -> str:
    """Name of the directed link from a rack's switch to the core."""
    return f"{rack}->{CORE}"


def rack_down(rack: str) -> str:
    """Name of the directed link from the core to a rack's switch."""
    return f"{CORE}->{rack}"


class Link(Settings):
    """Resolved link of a host or of a rack, both directions alike."""

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
    rto_min_ms: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """Least retransmission timeout between hosts; the kernel's (200 ms) unless given."""
    slower: Annotated[FiniteFloat, Field(ge=1, le=50)] = 1.0
    """So many times slower than the file says; all other fields are as they are then."""
    links: Links
    hosts: tuple[Host, ...] = Field(min_length=2, max_length=MAX_HOSTS)
    jobs: tuple[Job, ...] = Field(min_length=1, max_length=MAX_JOBS)
    losses: tuple[Loss, ...] = Field(default=(), max_length=MAX_JOBS)
    delays: tuple[Delay, ...] = Field(default=(), max_length=MAX_JOBS)

    @property
    def title(self) -> str:
        """Its name, and whether it is slower than its file."""
        return self.name if self.slower == 1 else f"{self.name}, {self.slower:g} times slower"

    @property
    def racks(self) -> tuple[str, ...]:
        """Names of the racks, in the order of their first hosts; empty where there are none."""
        return tuple(dict.fromkeys(host.rack for host in self.hosts if host.rack is not None))

    def host(self, name: str) -> Host:
        """The host of that name. KeyError: there is none."""
        for host in self.hosts:
            if host.name == name:
                return host
        raise KeyError(name)

    def index(self, host: str) -> int:
        """Position of a host in the file: its addresses follow from it."""
        return [h.name for h in self.hosts].index(host)

    def path(self, src: str, dst: str) -> tuple[str, ...]:
        """Names of the directed links from one host to another one, in order.

        KeyError: no such host. ValueError: a host's path to itself crosses no link.
        """
        if src == dst:
            raise ValueError(f"{src} and {dst} are the same host")
        first, last = self.host(src), self.host(dst)
        if first.switch == last.switch:
            return (first.up, last.down)
        return (first.up, rack_up(first.switch), rack_down(last.switch), last.down)

    def round_trip_us(self, delay: Delay) -> float:
        """What the delays of both its directions add up to."""
        ends = {delay.from_host, delay.to_host}
        return sum(one.us for one in self.delays if {one.from_host, one.to_host} == ends)

    def held_by(self, per_rack: bool) -> dict[str, str]:
        """Which switch process holds each directed link: one for all, or each rack's own those that
        begin or end at its switch."""
        hosts = {link: host.switch for host in self.hosts for link in (host.up, host.down)}
        uplinks = {link: rack for rack in self.racks for link in (rack_up(rack), rack_down(rack))}
        return {link: rack if per_rack else SWITCH for link, rack in (hosts | uplinks).items()}

    def directed_links(self) -> dict[str, Link]:
        """Every directed link by name: of the hosts, then of the racks, in the file's order."""
        links: dict[str, Link] = {}
        for host in self.hosts:
            links[host.up] = links[host.down] = self._link_of(host)
        for rack in self.racks:
            links[rack_up(rack)] = links[rack_down(rack)] = self._uplink()
        return links

    def link_of(self, host: str) -> Link:
        """The link between a host and its switch. KeyError: no such host."""
        return self._link_of(self.host(host))

    def _link_of(self, host: Host) -> Link:
        return Link(
            rate_mbps=host.rate_mbps or self.links.rate_mbps,
            buffer_bytes=round((host.buffer_kb or self.links.buffer_kb) * 1000),
        )

    def _uplink(self) -> Link:
        links = self.links
        return Link(
            rate_mbps=links.uplink_mbps or links.rate_mbps,
            buffer_bytes=round((links.uplink_buffer_kb or links.buffer_kb) * 1000),
        )

    def capacity_bps(self, link: str) -> float:
        """Wire rate of a directed link. KeyError: no such link."""
        return self.directed_links()[link].capacity_bps

    def link_bytes(self, job: Job) -> dict[str, int]:
        """Payload bytes of one iteration of a job on each directed link that it uses."""
        return self._on_links((t.src, t.dst, t.sent_bytes) for t in job.transfers())

    def flows_on_link(self) -> dict[str, int]:
        """Number of flows of all jobs that can use each directed link."""
        transfers = (t for job in self.jobs for t in job.transfers())
        return self._on_links((t.src, t.dst, t.flows) for t in transfers)

    def _on_links(self, amounts: Iterable[tuple[str, str, int]]) -> dict[str, int]:
        """Sums over the links of (source, destination, amount), in the order of the links."""
        total: dict[str, int] = {}
        for src, dst, amount in amounts:
            for link in self.path(src, dst):
                total[link] = total.get(link, 0) + amount
        return {link: total[link] for link in self.directed_links() if link in total}

    def ideal_s(self, job: Job) -> float:
        """Iteration time at the physical limit, in seconds (formula: `explain_ideal`).

        A ring over links of unequal rates can be faster, by at most the time of a chunk: a worker
        that has received everything computes while its own last chunk waits for a slow link.
        """
        transfer_s = job.turns * max(self._link_times(job).values())
        return job.compute_s + transfer_s + job.rounds * self.rtt_us / 1e6

    def _link_times(self, job: Job) -> dict[str, float]:
        links = self.directed_links()
        return {
            name: sent / goodput(links[name].capacity_bps)
            for name, sent in self.link_bytes(job).items()
        }

    def explain_ideal(self, job: Job) -> str:
        """The formula of `ideal_s` with this job's numbers."""
        times = self._link_times(job)
        link = max(times, key=lambda name: times[name])
        text = f"{job.name}: {job.compute_s:g} s compute + "
        share = (
            f"{self.link_bytes(job)[link] / 1e6:g} MB / ({self.capacity_bps(link) / 1e6:g} Mbit/s "
            f"x 1448/1514) on {link}"
        )
        text += share if job.turns == 1 else f"push and pull in turn, {job.turns} x {share}"
        if job.rounds:
            text += f" + {job.rounds} round trips of {self.rtt_us:g} us"
        return f"{text} = {self.ideal_s(job):.4f} s"


def load(path: Path, changes: Iterable[str] = ()) -> Scenario:
    """Read and check a scenario file, some values changed (see `variants`).

    Raises ConfigError (also when the file cannot be read).
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), "", f"cannot be read: {why_unreadable(error)}") from None
    return parse(text, str(path), changes)


def parse(text: str, source: str, changes: Iterable[str] = ()) -> Scenario:
    """Parse a scenario; ConfigError names the file, the field and what would be right."""
    data = read_toml(text, source)
    variants.apply(data, changes)
    scenario = validate(data, source, Scenario)
    _Checker(scenario, source).check()
    return _dilated(scenario, source)


def _dilated(scenario: Scenario, source: str) -> Scenario:
    """As many times slower as it says. ConfigError: a value is beyond its bounds then."""
    k = scenario.slower
    if k == 1:
        return scenario
    data = scenario.model_dump(mode="json", exclude_unset=True)
    data["rtt_us"] = scenario.rtt_us * k
    if scenario.rto_min_ms is not None:
        data["rto_min_ms"] = round(scenario.rto_min_ms * k)
    for table in (data["links"], *data["hosts"]):
        for key in ("rate_mbps", "uplink_mbps"):
            if table.get(key) is not None:
                table[key] /= k
    for delay in data.get("delays", ()):
        delay["us"] *= k
    for job in data["jobs"]:
        for key in ("compute_s", "start_s"):
            job[key] = job.get(key, 0.0) * k
    return validate(data, f"{source}, {k:g} times slower", Scenario)


class _Checker:
    """What goes beyond one field."""

    def __init__(self, scenario: Scenario, source: str) -> None:
        self._scenario = scenario
        self._source = source

    def check(self) -> None:
        hosts = [host.name for host in self._scenario.hosts]
        self._unique("host", hosts, "hosts")
        for i, host in enumerate(hosts):
            self._no_switch(host, f"hosts[{i}].name", "host")
        self._check_racks(hosts)
        self._unique("job", [job.name for job in self._scenario.jobs], "jobs")
        self._check_paths(self._scenario.losses, "losses", hosts)
        self._check_paths(self._scenario.delays, "delays", hosts)
        for i, job in enumerate(self._scenario.jobs):
            self._check_job(job, f"jobs[{i}]", hosts)

    def _check_paths(self, paths: Sequence[HostPath], field: str, hosts: list[str]) -> None:
        for i, path in enumerate(paths):
            self._known(path.from_host, hosts, f"{field}[{i}].from_host")
            self._known(path.to_host, hosts, f"{field}[{i}].to_host")
            if path.from_host == path.to_host:
                self._fail(f"{field}[{i}].to_host", "must not be the host that the path begins at")
        self._unique("path", [path.name for path in paths], field, "")

    def _check_racks(self, hosts: list[str]) -> None:
        with_rack = [i for i, host in enumerate(self._scenario.hosts) if host.rack is not None]
        if not with_rack:
            for key in ("uplink_mbps", "uplink_buffer_kb"):
                if getattr(self._scenario.links, key) is not None:
                    problem = "is for uplinks of racks; give every host a `rack`, or leave it out"
                    self._fail(f"links.{key}", problem)
            return
        for i, host in enumerate(self._scenario.hosts):
            at = f"hosts[{i}].rack"
            if host.rack is None:
                one = f"hosts[{with_rack[0]}].rack"
                self._fail(at, f"is required, as there is `{one}`: all hosts have one, or none has")
            self._no_switch(host.rack, at, "rack")
            if host.rack in hosts:
                other = f"hosts[{hosts.index(host.rack)}].name"
                problem = f'"{host.rack}" is already at `{other}`; give the rack another name'
                self._fail(at, problem)

    def _no_switch(self, name: str, field: str, kind: str) -> None:
        """Links are called by what is at their ends."""
        if name in (SWITCH, CORE):
            self._fail(field, f'"{name}" is the name of a switch; give the {kind} another one')

    def _check_job(self, job: Job, at: str, hosts: list[str]) -> None:
        for k, host in enumerate(job.hosts):
            self._known(host, hosts, f"{at}.hosts[{k}]")
            if host in job.hosts[:k]:
                self._fail(f"{at}.hosts[{k}]", f'"{host}" has a worker already; name each once')
        for key in sorted(job.model_fields_set & _OF_OTHERS[job.kind].keys()):
            self._fail(f"{at}.{key}", f'{_OF_OTHERS[job.kind][key]}; "{job.kind}" has none')
        if not job.is_ring:
            self._check_servers(job, at, hosts)
        elif job.workers < 2:
            self._fail(f"{at}.hosts", "must name at least 2 hosts for a ring")
        if job.threads and job.sockets % job.threads:
            problem = f"must be a multiple of {job.threads}: each of `threads` has as many"
            self._fail(f"{at}.sockets", problem)

    def _check_servers(self, job: Job, at: str, hosts: list[str]) -> None:
        field = "server" if job.kind == "ps" else "servers"
        if not job.server_hosts:
            problem = f'is required for kind "{job.kind}": where the parameters are'
            self._fail(f"{at}.{field}", problem)
        for k, server in enumerate(job.server_hosts):
            each = f"{at}.{field}" if job.kind == "ps" else f"{at}.{field}[{k}]"
            self._known(server, hosts, each)
            if server in job.hosts:
                self._fail(each, "must be a host of its own, not one of the workers'")
            if server in job.servers[:k]:
                self._fail(each, f'"{server}" has a server already; name each once')
        if job.keys % len(job.server_hosts):
            problem = f"must be a multiple of {len(job.servers)}: all servers hold as many"
            self._fail(f"{at}.keys", problem)

    def _unique(self, kind: str, names: list[str], field: str, of: str = ".name") -> None:
        for i, name in enumerate(names):
            if name in names[:i]:
                first = f"{field}[{names.index(name)}]{of}"
                problem = f'{kind} "{name}" is already at `{first}`; name each once'
                self._fail(f"{field}[{i}]{of}", problem)

    def _known(self, host: str, hosts: list[str], field: str) -> None:
        if host not in hosts:
            self._fail(field, f'no host is called "{shortened(host)}"; {one_of(host, hosts)}')

    def _fail(self, field: str, problem: str) -> NoReturn:
        raise ConfigError(self._source, field, problem)
