# SPDX-License-Identifier: Apache-2.0
"""Who a flow is, as a record says, and whether that can be believed."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from ipaddress import ip_address
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from flowslot.model.topology import Topology
from flowslot.model.topology_file import normal_ip
from flowslot_shm.layout import Role, Transport, address
from flowslot_shm.reader import RecordReader

Rows = NDArray[np.intp]
Owns = Callable[[int, int, int], bool | None]
"""(pid, fd, cookie) -> whether that process holds that socket; None: cannot tell."""


class Source(Protocol):
    """A registered job process; `pid` as the kernel tells it."""

    @property
    def id(self) -> int:
        """Tells registrations apart."""
        ...

    @property
    def pid(self) -> int:
        """The process, 0: not visible."""
        ...

    @property
    def reader(self) -> RecordReader:
        """Its record."""
        ...


@dataclass(slots=True)
class FlowInfo:
    """What does not change while a flow lives; for reports and for joins."""

    cookie: int
    job: str
    source: int
    pid: int
    fd: int
    src: str
    sport: int
    dst: str
    dport: int
    rank: int
    peer: int
    channel: int
    role: Role
    path: tuple[int, ...] = ()
    owned: bool | None = None
    protocol: str = "tcp"
    """As in `Traits`."""
    note: str = ""
    row: int = -1
    """In the flow table; -1: none."""


NO_FLOW = FlowInfo(0, "", 0, 0, -1, "", 0, "", 0, -1, -1, -1, Role.UNKNOWN)
"""Of a row that is free."""


PROTOCOLS = {Transport.TCP: "tcp", Transport.UDP: "udp"}


def place(info: FlowInfo, topology: Topology, host: str) -> None:
    """Find the flow's path; `note` says so when it does not leave from this host."""
    if topology.host_of(info.src) not in (None, host):
        info.note = f"{info.src} is not an address of this host"
    elif topology.host_of(info.dst) == host or ip_address(info.dst).is_loopback:
        info.note = "stays on this host"
    else:
        info.path = topology.path(info.src, info.dst) or ()


class Ended(IntEnum):
    """What ends as the kernel sees the last bytes of flows acknowledged."""

    FLOWS = 0
    """These alone: others of their jobs go on beside them."""
    PATH = 1
    """All that a job sends on a path."""
    JOB = 2
    """All that a job sends from here."""


class Binding:
    """Which slots of a record are which rows."""

    def __init__(self) -> None:
        self.cookies = np.zeros(0, np.uint64)
        self.slots: Rows = np.zeros(0, np.intp)
        self.rows: Rows = np.zeros(0, np.intp)
        self.refused: list[FlowInfo] = []
        self.opened = -1  # as the reader counts
        self.quiet = False
        self.calm = False  # quiet, or idle: looked at less often
        self.looked = 0  # in which slot
        self.seen = 0  # when, be it in a slot or between


def describe(slot: np.void, source: Source) -> FlowInfo:
    """The identity in one SLOT; `note` says why it cannot be paced, if that is plain already."""
    family = int(slot["family"])
    info = FlowInfo(
        cookie=int(slot["sock_cookie"]),
        job=bytes(slot["job"]).decode("ascii", "replace"),
        source=source.id,
        pid=source.pid,
        fd=int(slot["fd"]),
        src=_address(family, slot["src"]),
        sport=int(slot["sport"]),
        dst=_address(family, slot["dst"]),
        dport=int(slot["dport"]),
        rank=int(slot["rank"]),
        peer=int(slot["peer"]),
        channel=int(slot["channel"]),
        role=Role(int(slot["role"])),
        protocol=PROTOCOLS.get(Transport(int(slot["transport"])), ""),
    )
    if slot["transport"] not in PROTOCOLS:
        info.note = "neither TCP nor UDP: its progress is seen, but it cannot be paced"
    elif not info.job:
        info.note = "no job was named"
    elif info.role == Role.RECEIVE:
        info.note = "only receives"
    elif not (info.src and info.dst):
        info.note = "no addresses were reported"
    return info


def _address(family: int, raw: np.void) -> str:
    text = address(family, raw.tobytes())
    return normal_ip(text) if text else ""
