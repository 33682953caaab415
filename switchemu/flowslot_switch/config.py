# SPDX-License-Identifier: Apache-2.0
"""Configuration of an emulated switch."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import Field, FiniteFloat

from flowslot.arbiter import COALESCE_NS, LEASE_SLOTS, TARGET, ArbiterConfig
from flowslot.model.errors import ConfigError, FlowslotError
from flowslot.model.settings import PathText, Settings, one_of, parse_toml, validate
from flowslot.model.topology import Link, Topology, parse_topology
from flowslot.model.topology_file import Endpoint, Name
from flowslot.model.units import MILLISECOND, Nanos
from flowslot.policy import registry
from flowslot.policy.base import FLOOR_SHARE, Allocator
from flowslot.policy.job_classes import JobClass
from flowslot_proto.files import SocketFolder, read_text, socket_folder
from flowslot_proto.tls import TlsFiles, TlsSettings, open_files


class ArbiterSettings(Settings):
    """How the links are given out. Daemons must have the same `slot_ms`."""

    target: Annotated[FiniteFloat, Field(ge=0.01, le=1)] = TARGET
    floor_share: Annotated[FiniteFloat, Field(ge=0.001, le=1)] = FLOOR_SHARE
    lease_slots: Annotated[int, Field(ge=LEASE_SLOTS, le=100)] = LEASE_SLOTS
    slot_ms: Annotated[FiniteFloat, Field(ge=5, le=1000)] = 60.0
    horizon: Annotated[int, Field(ge=1, le=1000)] = 10


class SwitchSettings(Settings):
    """`flowslot-switch --config FILE`. `listen`: the address in the topology unless given.
    `policy`: by which links are given out. `classes`: of jobs, beside any policy. `runtime_dir`:
    where the control socket is, for `flowslot policy`; none: there is no socket. Relative paths
    begin at the file."""

    name: Name
    topology: PathText = "topology.toml"
    listen: Endpoint | None = None
    tls: TlsSettings = TlsSettings()
    arbiter: ArbiterSettings = ArbiterSettings()
    policy: Name = "stagger"
    classes: Annotated[tuple[JobClass, ...], Field(max_length=64)] = ()
    runtime_dir: SocketFolder | None = None


@dataclass(frozen=True, slots=True)
class SwitchConfig:
    """A configuration that was read and checked as a whole. `links`: those that we hold.

    `partial`: other switch processes hold other links of the topology. `tls` None: plaintext.
    """

    settings: SwitchSettings
    listen: str
    links: tuple[Link, ...]
    partial: bool
    runtime_dir: Path | None
    tls: TlsFiles | None = field(compare=False)
    topology: Topology = field(compare=False)
    _foreign: dict[str, frozenset[str]] = field(default_factory=dict, compare=False)

    def knows(self, host: str) -> bool:
        """The topology has such a host."""
        return host in self.topology.hosts

    def foreign(self, host: str) -> frozenset[str]:
        """Names of those of our links that no flow from this host crosses."""
        if host not in self._foreign:
            crossed = self.topology.links_crossed(host) if self.knows(host) else ()
            names = {self.topology.links[i].name for i in crossed}
            self._foreign[host] = frozenset({link.name for link in self.links} - names)
        return self._foreign[host]

    @property
    def slot_ns(self) -> Nanos:
        """Length of a slot."""
        return Nanos(round(self.settings.arbiter.slot_ms * MILLISECOND))

    def allocator(self, policy: str) -> Allocator:
        """What decides under this policy. Raises FlowslotError: no arbiter can."""
        settings = self.settings
        floor = settings.arbiter.floor_share
        options = registry.PolicyOptions(floor_share=floor, classes=settings.classes)
        if self.partial:
            options = registry.beside_others(options)
        return registry.allocator(policy, options)

    def arbiter(self, slot_origin_ns: Nanos) -> ArbiterConfig:
        """Settings of core's arbiter; `slot_origin_ns` on its clock."""
        return ArbiterConfig(
            target=self.settings.arbiter.target,
            lease_ns=Nanos(self.settings.arbiter.lease_slots * self.slot_ns),
            slot_ns=self.slot_ns,
            slot_origin_ns=slot_origin_ns,
            horizon=self.settings.arbiter.horizon,
            coalesce_ns=COALESCE_NS,
        )


def load(
    file: Path | None,
    name: str | None = None,
    topology_file: Path | None = None,
    listen: str | None = None,
) -> SwitchConfig:
    """Read the configuration and its topology. Raises ConfigError (file, field, what is right).

    The others are what the command line says instead of the file: without a file, it must give a
    name and a topology.
    """
    source = str(file) if file else "command line"
    if not file and not (name and topology_file):
        raise ConfigError(source, "", "give --config FILE, or both --topology and --name")
    said = parse_toml(read_text(file), source, SwitchSettings).model_dump() if file else {}
    given = {"name": name, "listen": listen}
    said |= {key: value for key, value in given.items() if value is not None}
    settings = validate(said, "command line", SwitchSettings)
    path = topology_file or Path(source).parent / settings.topology
    topology = parse_topology(read_text(path), str(path))
    if settings.name not in topology.switches:
        hint = one_of(settings.name, topology.switches)
        problem = f'no switch is called "{settings.name}" in {path}; {hint}'
        raise ConfigError(source, "name", problem)
    links = tuple(topology.links[i] for i in topology.switch_links(settings.name))
    if not links:
        raise ConfigError(str(path), "links", f'no link has switch = "{settings.name}"')
    address = settings.listen or topology.switches[settings.name].address
    settings.tls.check(source, [address])
    config = SwitchConfig(
        settings,
        address,
        links,
        any(link.switch not in (None, settings.name) for link in topology.links),
        _runtime_dir(settings, source),
        open_files(settings.tls, source, Path(source).parent, settings.name),
        topology,
    )
    try:
        config.allocator(settings.policy)
    except FlowslotError as error:
        raise ConfigError(source, "policy", str(error)) from None
    return config


def _runtime_dir(settings: SwitchSettings, source: str) -> Path | None:
    if settings.runtime_dir is None:
        return None
    folder = Path(source).parent / settings.runtime_dir
    try:
        socket_folder(str(folder))
    except ValueError as error:
        raise ConfigError(source, "runtime_dir", f"{folder} {error}") from None
    return folder
