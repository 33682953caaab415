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
    """What does not change while a flow lives, but for its part in the job; for reports and for
    joins."""

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

    def correct(self, said: "FlowInfo") -> None:
        """What a record says of the flow by now. Ranks may become known only after it has begun to
        send; all else is as it was when the flow was admitted."""
        if not said.note:
            self.rank, self.peer, self.channel = said.rank, said.peer, said.channel
            self.role = said.role


NO_FLOW = FlowInfo(0, "", 0, 0, -1, "", 0, "", 0, -1, -1, -1, Role.UNKNOWN)
"""Of a row that is free."""
PROTOCOLS = {Transport.TCP: "tcp", Transport.UDP: "udp"}
