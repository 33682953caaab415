# SPDX-License-Identifier: Apache-2.0
"""Which slots of a job's record are which flows, and who these are, as the record says.

A hostile record could claim another job's socket and have that one slowed down. So the socket is
borrowed for a look at its cookie.
"""

import os
from collections.abc import Callable
from errno import ENOTSOCK
from ipaddress import ip_address

import numpy as np

from flowslot.model.topology import Topology
from flowslot.model.topology_file import normal_ip
from flowslot_shm.layout import Role, Transport, address
from flowslot_shm.writer import cookie_of
from flowslotd import sockets
from flowslotd.flows.flow_info import PROTOCOLS, FlowInfo, Source
from flowslotd.flows.rows import Rows
from flowslotd.observe.passive.nodes import at_home

Owns = Callable[[int, int, int], bool | None]
"""(pid, fd, cookie) -> whether that process holds that socket; None: cannot tell."""


class Binding:
    """Which slots of a record are which rows."""

    def __init__(self) -> None:
        self.cookies = np.zeros(0, np.uint64)
        self.slots: Rows = np.zeros(0, np.intp)
        self.rows: Rows = np.zeros(0, np.intp)
        self.refused: list[FlowInfo] = []
        self.opened = -1  # as the reader counts
        self.rarely = False  # to be looked at: nobody waits for news, or it is idle
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


def place(info: FlowInfo, topology: Topology, host: str, nic: str = "") -> None:
    """Find the flow's path, and its job's one name; `note` says so when it does not leave from this
    host. `nic`: see `Topology.path`."""
    info.job = at_home(info.job, topology, host)
    if topology.host_of(info.src) not in (None, host):
        info.note = f"{info.src} is not an address of this host"
    elif topology.host_of(info.dst) == host or ip_address(info.dst).is_loopback:
        info.note = "stays on this host"
    else:
        info.path = topology.path(info.src, info.dst, nic) or ()


def holds_socket(pid: int, fd: int, cookie: int) -> bool | None:
    """Whether descriptor `fd` of process `pid` is the socket with this SO_COOKIE.

    None: it cannot be told (no descriptor reported, no CAP_SYS_PTRACE, the process is gone).
    """
    if pid <= 0 or fd < 0:
        return None
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return None
    try:
        with sockets.borrow(pidfd, fd) as sock:
            return cookie_of(sock) == cookie != 0
    except OSError as error:
        return False if error.errno == ENOTSOCK else None
    finally:
        os.close(pidfd)


def _address(family: int, raw: np.void) -> str:
    text = address(family, raw.tobytes())
    return normal_ip(text) if text else ""
