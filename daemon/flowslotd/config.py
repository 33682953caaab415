# SPDX-License-Identifier: Apache-2.0
"""The daemon's configuration file, and what it refers to."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, FiniteFloat

from flowslot.arbiter import TARGET
from flowslot.model.errors import ConfigError, FlowslotError, why_unreadable
from flowslot.model.settings import PathText, Settings, one_of, parse_toml
from flowslot.model.slot import SlotGrid
from flowslot.model.topology import Topology, parse_topology
from flowslot.model.topology_file import Name
from flowslot.model.units import MILLISECOND, Nanos
from flowslot.policy import registry
from flowslot.policy.base import FLOOR_SHARE
from flowslot.policy.job_classes import JobClass
from flowslot.policy.registry import PolicySpec
from flowslot_proto.files import SocketFolder, read_text
from flowslot_proto.tls import TlsFiles, TlsSettings, open_files

_log = logging.getLogger(__name__)
DeviceName = Annotated[str, Field(pattern=r"^[^/\s:]{1,127}$")]
"""Alternative names are longer than names."""


class PacingSettings(Settings):
    """How flows are paced. `hard`: no top-up beyond the reserved rate. `devices`, for `edt` and
    `htb`: those that all flows leave by (the ports of a bond, say); none: what a flow's route says.
    `sysctls`: whether `edt` and `socket` may set one (net.ipv4.tcp_tso_rtt_log)."""

    backend: Literal["auto", "bpf", "edt", "htb", "socket", "none"] = "auto"
    hard: bool = False
    devices: list[DeviceName] = Field(default_factory=list, max_length=64)
    sysctls: bool = True


class StaticSettings(Settings):
    """For policy `static`: how many flows can use each link (by its name)."""

    flows_on_link: dict[Name, Annotated[int, Field(ge=1, le=1_000_000)]] = Field(
        default_factory=dict
    )


class ArbiterSettings(Settings):
    """The daemon's own arbiter, used when no switch process holds its links."""

    target: Annotated[FiniteFloat, Field(ge=0.01, le=1)] = TARGET
    floor_share: Annotated[FiniteFloat, Field(ge=0.001, le=1)] = FLOOR_SHARE


class UnpatchedSettings(Settings):
    """Jobs that report nothing themselves. `pslite`: whether processes of ps-lite are found, their
    progress is read from the kernel, and, where flows are paced, their sockets enlisted."""

    pslite: bool = False


class DaemonSettings(Settings):
    """`flowslotd --config FILE`."""

    host: Name
    instance: Name | None = None
    mode: Literal["observe", "enforce"] = "observe"
    policy: Name = "stagger"
    topology: PathText = "topology.toml"
    runtime_dir: SocketFolder = "/run/flowslot"
    slot_ms: Annotated[FiniteFloat, Field(ge=5, le=1000)] = 60.0
    horizon: Annotated[int, Field(ge=1, le=1000)] = 10
    use_switch: bool = True
    tls: TlsSettings = TlsSettings()
    pacing: PacingSettings = PacingSettings()
    static: StaticSettings = StaticSettings()
    arbiter: ArbiterSettings = ArbiterSettings()
    classes: Annotated[tuple[JobClass, ...], Field(max_length=64)] = ()
    """Of jobs, as in the switch process's configuration: for the daemon's own arbiter."""
    unpatched: UnpatchedSettings = UnpatchedSettings()
    trace_file: PathText | None = None
    """For measurements: where to write when demands, grants and rates came (flowslotd/trace.py)."""

    def enforces(self, spec: PolicySpec) -> bool:
        """Whether flows of this host are paced, under this policy."""
        return (
            self.mode == "enforce"
            and spec.host_policy is not None
            and self.pacing.backend != "none"
        )


@dataclass(frozen=True, slots=True)
class Config:
    """A configuration that was read and checked as a whole."""

    file: Path
    topology_file: Path
    settings: DaemonSettings
    topology: Topology
    tls: TlsFiles | None = None
    """None: plaintext."""

    @property
    def instance(self) -> str:
        """Tells this daemon from others on the same kernel."""
        return self.settings.instance or self.settings.host

    @property
    def grid(self) -> SlotGrid:
        """The slots."""
        slot_ns = Nanos(round(self.settings.slot_ms * MILLISECOND))
        return SlotGrid(slot_ns, self.settings.horizon)

    @property
    def runtime_dir(self) -> Path:
        """Where the sockets are."""
        return Path(self.settings.runtime_dir)

    @property
    def switches(self) -> list[str]:
        """The switch processes that hold links which flows of this host may cross."""
        if not self.settings.use_switch:
            return []
        links = sorted(self.topology.links_crossed(self.settings.host))
        held = (self.topology.links[link].switch for link in links)
        return list(dict.fromkeys(switch for switch in held if switch))

    @property
    def listens(self) -> list[str]:
        """Where this daemon hears other daemons: one endpoint, or none."""
        host = self.topology.hosts[self.settings.host]
        feedback = registry.get(self.settings.policy).feedback
        return [host.daemon] if host.daemon and feedback else []

    @property
    def addresses(self) -> set[str]:
        """This host's, as the topology says."""
        host = self.topology.hosts[self.settings.host]
        return {address for nic in host.nics for address in nic.addresses}

    def remark(self) -> None:
        """Log what the topology says, and perhaps does not mean."""
        for remark in self.topology.remarks:
            _log.warning("%s: %s", self.topology_file, remark)


FIXED = ("instance", "runtime_dir", "slot_ms", "horizon", "pacing", "trace_file")
"""What only a restart changes: sockets, slots and programs in the kernel depend on it."""


def load(file: Path) -> Config:
    """Read the configuration and its topology. Raises ConfigError (file, field, what is right)."""
    settings = parse_toml(read_text(file), str(file), DaemonSettings)
    topology_file = file.parent / settings.topology
    try:
        text = topology_file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        problem = f"cannot read {topology_file}: {why_unreadable(error)}"
        raise ConfigError(str(file), "topology", problem) from None
    topology = parse_topology(text, str(topology_file))
    return _complete(Config(file, topology_file, settings, topology))


def with_policy(old: Config, name: str) -> Config:
    """The same under another policy. Raises ConfigError."""
    settings = old.settings.model_copy(update={"policy": name})
    return _complete(replace(old, settings=settings))


def _complete(config: Config) -> Config:
    """Checked as a whole, with its certificates. Raises ConfigError."""
    file, settings, topology = config.file, config.settings, config.topology
    spec = _check(settings, topology, file)
    asks = settings.enforces(spec) and (spec.needs_arbiter or spec.feedback)
    reached = config.switches if asks else []
    settings.tls.check(str(file), [topology.switches[name].address for name in reached])
    return replace(config, tls=open_files(settings.tls, str(file), file.parent, settings.host))


def load_again(old: Config) -> tuple[Config, list[str]]:
    """What the file says now, and names of what has changed. Raises ConfigError."""
    new = load(old.file)
    return new, changed(old, new)


def changed(old: Config, new: Config) -> list[str]:
    """Names of what a reload changes. Raises ConfigError for what needs a restart."""
    names = [
        name
        for name in DaemonSettings.model_fields
        if getattr(old.settings, name) != getattr(new.settings, name)
    ]
    for name in names:
        if name in FIXED:
            raise ConfigError(str(new.file), name, "cannot change while running; restart flowslotd")
    if old.topology.settings != new.topology.settings:
        names.append("topology links")
    return names


def _check(settings: DaemonSettings, topology: Topology, file: Path) -> PolicySpec:
    source = str(file)
    if settings.host not in topology.hosts:
        hint = one_of(settings.host, topology.hosts)
        problem = f'no host is called "{settings.host}" in {settings.topology}; {hint}'
        raise ConfigError(source, "host", problem)
    for link in settings.static.flows_on_link:
        if link not in topology.link_index:
            hint = one_of(link, topology.link_index)
            problem = f'no link is called "{link}" in {settings.topology}; {hint}'
            raise ConfigError(source, f"static.flows_on_link.{link}", problem)
    if settings.policy == "mltcp":
        problem = "mltcp is the kernel's, not a daemon's: `flowslot mltcp on`, and any other policy"
        raise ConfigError(source, "policy", problem)
    try:
        return registry.get(settings.policy)
    except FlowslotError as error:
        raise ConfigError(source, "policy", str(error)) from None
