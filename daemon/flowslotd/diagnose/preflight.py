# SPDX-License-Identifier: Apache-2.0
"""What enforcement would change on this host: `flowslot preflight`."""

import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from flowslot.model.topology_file import split_endpoint
from flowslot.policy import registry
from flowslot_proto.endpoints import why_only_here
from flowslotd.config import Config
from flowslotd.diagnose.diagnosis import Diagnosis, verdict
from flowslotd.diagnose.probe import kernel
from flowslotd.machine import Machine
from flowslotd.pace import devices, edt, guardian, htb
from flowslotd.pace.attached import GUARDED
from flowslotd.pace.pacer import PacingError
from flowslotd.pace.select import TRAITS

LEFT = (
    "modules of the kernel that were loaded for it (sch_*, cls_bpf)",
    "of connections that were paced: that TCP paces them; with bpf, their shortest timeout",
    "the sockets' files, when it is killed",
    "when daemon and guardian process are both killed: the sysctl; and, until the next daemon that "
    "uses the device or the flow, qdiscs, classes, filters and the rates of flows",
)


@dataclass(frozen=True, slots=True)
class Change:
    """`where`: a device, `sysctl`, `sockets`, `kernel`, `files` or `network`."""

    where: str
    what: str
    when: str
    """The change would be made then. `never`: nothing changes, and `what` says why."""


def changes(config: Config, backend: str) -> list[Change]:
    """All that a daemon with this configuration would change. Raises PacingError or OSError when
    the host cannot be looked at."""
    settings = config.settings
    found = list(_files_and_network(config))
    if not settings.model_copy(update={"mode": "enforce"}).enforces(registry.get(settings.policy)):
        return found
    if backend in {"edt", "htb"}:
        found += _devices(config, backend)
    if backend in TRAITS:
        changes = TRAITS[backend].changes
        if any(where == "sysctl" for where, _ in changes):
            found += _sysctls(settings.pacing.sysctls)
        when = {"sockets": "while a flow is paced", "kernel": "at its start"}
        found += [Change(where, what, when[where]) for where, what in changes if where in when]
    if backend == "bpf" and settings.unpatched.pslite:
        what = "those of ps-lite processes that do not register are made to select it, too"
        found.append(Change("sockets", what, "as soon as they are found"))
    if backend == "bpf" and kernel().status != "ok":  # before Linux 6.4
        found.append(Change(*GUARDED, "at its start"))
    return found


def _files_and_network(config: Config) -> Iterator[Change]:
    settings, topology = config.settings, config.topology
    yield Change("files", f"sockets below {settings.runtime_dir}", "at its start")
    if settings.use_switch:
        for switch in topology.switches.values():
            yield Change(
                "network", f"a connection to {switch.name}, {switch.address}", "at its start"
            )
    for endpoint in config.listens:
        yield Change("network", f"UDP port {endpoint} for other daemons", "at its start")


def _devices(config: Config, backend: str) -> Iterator[Change]:
    named = config.settings.pacing.devices
    found = list({one.index: one for one in map(devices.named, named)}.values())
    strange = set[int]()
    if not named:
        likely = devices.indices(config.addresses)
        ways = {device for _, device in Machine(config.topology, config.settings.host).ways()}
        strange = ways - likely
        found = [device for device in devices.every() if device.index in likely | strange]
    changes_to = edt.changes_to if backend == "edt" else htb.changes_to
    when = "at its start" if named else "when a flow leaves by it"
    refused = "the daemon would not start" if named else "nothing, and flows there are not paced"
    for device in found:
        try:
            if device.index in strange:
                raise devices.unaddressed(device.name)
            changes = changes_to(device, number=0)
        except PacingError as error:
            yield Change(device.name, f"{refused}: {error}", "never")
            continue
        for what in changes:
            yield Change(device.name, what, when)


def _sysctls(allowed: bool) -> Iterator[Change]:
    name = "net.ipv4." + Path(guardian.SYSCTL).name
    try:
        value = Path(guardian.SYSCTL).read_text().strip()
    except OSError:
        yield Change("sysctl", f"{name} is not there: nothing", "never")
        return
    if not allowed:
        yield Change("sysctl", f"{name} stays {value}: pacing.sysctls is off", "never")
    elif value == "0":
        yield Change("sysctl", f"{name} is 0 already: nothing", "never")
    else:
        yield Change("sysctl", f"{name}: {value} becomes 0", "at its start")


def doubts(config: Config) -> list[str]:
    """What on this machine is not as the configuration says. Raises OSError."""
    machine = Machine(config.topology, config.settings.host)
    names = list[str]()
    for endpoint in config.listens:
        host, port = split_endpoint(endpoint)
        with suppress(OSError, UnicodeError):
            found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
            names.append(why_only_here(endpoint, [str(one[4][0]) for one in found]))
    known = [*machine.doubts(str(config.file)), *filter(None, names)]
    return known + list(map(str, machine.strays()))


def table(
    config: Config, found: Diagnosis, changes: list[Change], wrong: Sequence[str] = ()
) -> str:
    """For people. `wrong`: see `doubts`."""
    mode = config.settings.mode
    lines = [verdict(found), *(f"Beware: {text}" for text in wrong)]
    if mode == "observe":
        lines.append(
            f"{config.file} says mode = observe: none of this is done before it is enforce."
        )
    width = max((len(change.where) for change in changes), default=0)
    lines.append("")
    for change in changes:
        when = "" if change.when == "never" else f" ({change.when})"
        lines.append(f"{change.where:{width}}  {change.what}{when}")
    lines += [
        "",
        "All of it is undone when the daemon ends, killed or not, but for:",
    ]
    lines += [f"- {what}" for what in LEFT]
    return "\n".join(lines)
