# SPDX-License-Identifier: Apache-2.0
"""The topology file: its model, and the checks that go beyond one field."""

import ipaddress
import re
from collections.abc import Collection
from itertools import chain, islice
from typing import Annotated

from pydantic import AfterValidator, Field, FiniteFloat

from flowslot.model.errors import ConfigError
from flowslot.model.settings import LISTED, PRINTABLE, Settings, Text, one_of, shortened, some


def normal_ip(address: str) -> str:
    """One spelling for an IPv4 or IPv6 address; IPv4-mapped IPv6 becomes IPv4."""
    ip = ipaddress.ip_address(address)
    mapped = getattr(ip, "ipv4_mapped", None)
    return str(mapped or ip)


def _ip(text: str) -> str:
    try:
        return normal_ip(text)
    except ValueError:
        problem = f'must be an IP address such as "10.78.0.1", got "{shortened(text)}"'
        raise ValueError(problem) from None


def split_endpoint(text: str) -> tuple[str, int]:
    """ "host:port" as (host, port); an IPv6 address stands in brackets."""
    host, _, port = text.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


_ENDPOINT = re.compile(r"(?:\[(?P<six>[^\[\]]+)\]|(?P<name>[\w.-]+)):(?P<port>[0-9]{1,5})")


def _endpoint(text: str) -> str:
    if _is_endpoint(text):
        return text
    problem = 'must be "host:port" (an IPv6 address in brackets) with a port from 1 to 65535, got'
    raise ValueError(f'{problem} "{shortened(text)}"{_meant(text)}')


def _is_endpoint(text: str) -> bool:
    found = _ENDPOINT.fullmatch(text)
    if not found or not 0 < int(found["port"]) < 65536:
        return False
    if found["six"]:
        return _is(ipaddress.IPv6Address, found["six"])
    # What ends in a number is an address: a name cannot.
    last = found["name"].rpartition(".")[2]
    return not last.isdecimal() or _is(ipaddress.IPv4Address, found["name"])


def _is(kind: type[ipaddress.IPv4Address | ipaddress.IPv6Address], text: str) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return True


def _meant(text: str) -> str:
    """A URL, a path or blanks around an endpoint; an IPv6 address without brackets."""
    bare = re.sub(r"^[a-zA-Z][\w+.-]*:/+", "", text.replace(" ", "")).partition("/")[0]
    host, _, port = bare.replace("[", "").replace("]", "").rpartition(":")
    for meant in (bare, f"[{host}]:{port}", f"{host}:{port}"):
        if meant != text and _is_endpoint(meant):
            return f'; did you mean "{shortened(meant)}"?'
    address = _is(ipaddress.IPv6Address, f"{host}:{port}")
    return f'; did you mean "[{host}:{port}]:PORT"?' if address else ""


def _reachable(endpoint: str) -> str:
    host, _ = split_endpoint(endpoint)
    if host in {"0.0.0.0", "::"}:
        raise ValueError(f"must be where other hosts reach it, which is not {host}")
    return endpoint


Name = Annotated[str, Field(min_length=1, max_length=64), PRINTABLE]
IpAddress = Annotated[Text, AfterValidator(_ip)]
Endpoint = Annotated[Text, AfterValidator(_endpoint)]
Reachable = Annotated[Endpoint, AfterValidator(_reachable)]
CapacityGbps = Annotated[FiniteFloat, Field(ge=0.001, le=1e6)]
"""1 Mbit/s to 1 Pbit/s: slow links that are emulated, and large ECMP groups."""
BufferKb = Annotated[FiniteFloat, Field(ge=1, le=1e8)]
"""A packet does not fit into less; 100 GB are more than deep-buffered switches have."""


class SwitchSettings(Settings):
    """One `flowslot-switch` process: where it listens."""

    name: Name
    address: Reachable


class NicSettings(Settings):
    """A network interface: its addresses and the directed links at its ends."""

    name: Name
    addresses: tuple[IpAddress, ...] = Field(min_length=1)
    up: Name
    down: Name
    rack: Name | None = None


class HostSettings(Settings):
    """A host, where its daemon listens (if it has one), and its NICs."""

    name: Name
    daemon: Reachable | None = None
    nics: tuple[NicSettings, ...] = Field(min_length=1)


class LinkSettings(Settings):
    """A directed link; an ECMP group is one link of summed capacity."""

    name: Name
    capacity_gbps: CapacityGbps
    buffer_kb: BufferKb = 128.0
    switch: Name | None = None


class RouteSettings(Settings):
    """The middle of every path from one rack to another."""

    from_rack: Name
    to_rack: Name
    links: tuple[Name, ...] = Field(min_length=1)


class PathSettings(Settings):
    """The whole path between two addresses, instead of the one that would be derived."""

    src: IpAddress
    dst: IpAddress
    links: tuple[Name, ...] = Field(min_length=1)


class TopologySettings(Settings):
    """The topology file."""

    switches: tuple[SwitchSettings, ...] = ()
    hosts: tuple[HostSettings, ...] = Field(min_length=1)
    links: tuple[LinkSettings, ...] = Field(min_length=1)
    routes: tuple[RouteSettings, ...] = ()
    paths: tuple[PathSettings, ...] = ()


class Checker:
    """Names are unique, and everything that is referred to exists. Raises ConfigError."""

    def __init__(self, settings: TopologySettings, source: str) -> None:
        self._settings = settings
        self._source = source
        self._first: dict[tuple[str, object], str] = {}
        self._switches = dict.fromkeys(switch.name for switch in settings.switches)
        self._links = dict.fromkeys(link.name for link in settings.links)

    def check(self) -> None:
        """Look at the whole file, in its order."""
        for i, switch in enumerate(self._settings.switches):
            self._once("switch", switch.name, f"switches[{i}].name")
        for i, link in enumerate(self._settings.links):
            self._once("link", link.name, f"links[{i}].name")
            if link.switch is not None:
                self._known("switch", link.switch, self._switches, f"links[{i}].switch")
        for i, host in enumerate(self._settings.hosts):
            self._once("host", host.name, f"hosts[{i}].name")
            for j, nic in enumerate(host.nics):
                self._check_nic(host.name, nic, f"hosts[{i}].nics[{j}]")
        for i, route in enumerate(self._settings.routes):
            self._once("route", f"{route.from_rack} -> {route.to_rack}", f"routes[{i}]")
            self._check_path(route.links, f"routes[{i}].links")
        for i, path in enumerate(self._settings.paths):
            self._once("path", f"{path.src} -> {path.dst}", f"paths[{i}]")
            self._check_path(path.links, f"paths[{i}].links")

    def _check_nic(self, host: str, nic: NicSettings, at: str) -> None:
        self._once(f"NIC of {host}", nic.name, f"{at}.name")
        self._known("link", nic.up, self._links, f"{at}.up")
        self._known("link", nic.down, self._links, f"{at}.down")
        if nic.up == nic.down:
            raise ConfigError(self._source, f"{at}.down", "must be another link than `up`")
        for k, address in enumerate(nic.addresses):
            self._once("address", address, f"{at}.addresses[{k}]")

    def _check_path(self, names: tuple[str, ...], field: str) -> None:
        before: set[str] = set()
        for k, name in enumerate(names):
            self._known("link", name, self._links, f"{field}[{k}]")
            if name in before:
                raise ConfigError(
                    self._source, f"{field}[{k}]", f'a path crosses "{name}" twice; name each once'
                )
            before.add(name)

    def _once(self, kind: str, name: str, field: str) -> None:
        first = self._first.setdefault((kind, name), field)
        if first != field:
            problem = f'{kind} "{name}" is already at `{first}`; name each once'
            raise ConfigError(self._source, field, problem)

    def _known(self, kind: str, name: str, names: Collection[str], field: str) -> None:
        if name in names:
            return
        problem = f'no {kind} is called "{name}"; {one_of(name, names)}'
        raise ConfigError(self._source, field, problem)


def remarks(settings: TopologySettings) -> list[str]:
    """What a sound topology says, and perhaps does not mean: a sentence each."""
    racks = dict.fromkeys(nic.rack for host in settings.hosts for nic in host.nics if nic.rack)
    routed = dict.fromkeys((route.from_rack, route.to_rack) for route in settings.routes)
    empty = [r for r in dict.fromkeys(chain.from_iterable(routed)) if r not in racks]
    said = []
    if empty:
        said.append(f"no host is in these racks, so no flow takes their routes: {some(empty)}")
    used = sum(a in racks and b in racks and a != b for a, b in routed)
    without = len(racks) * (len(racks) - 1) - used
    if without:
        pairs = ((a, b) for a in racks for b in racks if a != b and (a, b) not in routed)
        shown = [f"{a} -> {b}" for a, b in islice(pairs, LISTED + 1)]
        said.append(
            f"{without} pairs of racks have no route, so flows between them are never paced: "
            f"{some(shown)}"
        )
    return said
