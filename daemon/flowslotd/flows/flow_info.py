# SPDX-License-Identifier: Apache-2.0
"""Who a flow is, and where news of it comes from."""

from dataclasses import dataclass
from typing import Protocol

from flowslot_shm.layout import Role, Transport
from flowslot_shm.reader import RecordReader


class Source(Protocol):
    """A registered job process: its record. `id` tells registrations apart; `pid` is the kernel's
    word, 0: not visible."""

    id: int
    pid: int
    reader: RecordReader


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
