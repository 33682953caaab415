# SPDX-License-Identifier: Apache-2.0
"""Undoes in the kernel what would outlive a dead daemon.

Run as a script of its own, standard library only, so that it stays small:

    python -I -S guardian.py PIPE TABLE STRUCT_OPS

PIPE is the reading end of a pipe. Only the daemon holds the other end, so the pipe ends with the
daemon.
TABLE is a memfd that lists what is to be undone, or -1: `HEADER`, CHANGES times `CHANGE`, and then
`ROW`s. When the daemon is gone, all of it is undone. When the daemon lets the deadline pass, only
flows are let go (sockets and classes), and devices stay set up. Then `freed` counts up, which tells
a daemon that was asleep. What is listed after that (`listed` counts) is let go, too.
STRUCT_OPS is a map whose registration is to be removed, or -1.
The guardian is started with those signals blocked that a service manager sends to all processes.
"""

import contextlib
import ctypes
import mmap
import os
import platform
import select
import socket
import struct
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

HEADER = struct.Struct("=QQQ")  # deadline (CLOCK_MONOTONIC, ns), freed, listed
CHANGE = struct.Struct("=iii")  # what was changed (0: empty row), device, value
CHANGES = 128
ROW = struct.Struct("=QiiiIQ")  # cookie (0: empty), pid, fd, socket option, its size, its value
UNLIMITED = 2**64 - 1
LOOK_MS = 500
"""A deadline that is brought forward is noticed so late at most."""
CLASSES, FILTER, TSO_RTT_LOG, QUEUE_LENGTH = 1, 2, 3, 4
"""Kinds of changes. CLASSES: classes of HTB that bear the number `value`. FILTER: the filter of EDT
that bears it. TSO_RTT_LOG: a sysctl, which was `value`. QUEUE_LENGTH: a device's txqueuelen, which
was `value`: the kernel turns 0 into 1000 when a root qdisc is added."""

HTB, FQ = 0xF5100000, 0xF5200000
"""Handles of qdiscs that are ours."""
KEEPER = 0xFFF
"""The minor of the class by which each daemon says that it uses HTB there, even without flows."""
ROOT, CLSACT, CLSACT_ROOT = 0xFFFFFFFF, 0xFFFF0000, 0xFFFFFFF1
INGRESS, EGRESS = 0xFFFFFFF2, 0xFFFFFFF3
FILTER_NAME = "flowslot_edt_"
"""The beginning of our filters' names. The daemon's number follows (one hexadecimal digit), and
`OWN` where flowslot has added clsact."""
OWN = "_clsact"
SYSCTL = "/proc/sys/net/ipv4/tcp_tso_rtt_log"

NEWQDISC, DELQDISC = 36, 37
_SETLINK, _IFLA_TXQLEN = 19, 13
_DELTCLASS, _GETTCLASS, _DELTFILTER, _GETTFILTER = 41, 42, 45, 46
_NLM_REQUEST, _NLM_ACK, _NLM_DUMP, _NLM_CREATE = 1, 4, 0x300, 0x400
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_PIDFD_GETFD = 438  # the same on every architecture
_BPF = {"x86_64": 321, "aarch64": 280}
_MAP_DELETE_ELEM = 3
SO_MAX_PACING_RATE = 47
_SO_COOKIE = 57
_libc = ctypes.CDLL(None, use_errno=True)


# -- sockets ----------------------------------------------------------------------------------


@contextlib.contextmanager
def borrow(pid: int, fd: int, cookie: int) -> Iterator[socket.socket]:
    """Socket `fd` of another process, for a moment.

    Raises OSError: no such process or descriptor, no permission (CAP_SYS_PTRACE), or another socket
    by now (ESTALE).
    """
    pidfd = os.pidfd_open(pid)
    try:
        copy = _libc.syscall(_PIDFD_GETFD, pidfd, fd, 0)
        if copy < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
    finally:
        os.close(pidfd)
    try:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with sock:
        if (
            int.from_bytes(sock.getsockopt(socket.SOL_SOCKET, _SO_COOKIE, 8), sys.byteorder)
            != cookie
        ):
            raise OSError(116, "another socket by now")  # ESTALE
        yield sock


def set_option(sock: socket.socket, option: int, size: int, value: int) -> None:
    """Set a socket option of so many bytes."""
    sock.setsockopt(socket.SOL_SOCKET, option, value.to_bytes(size, sys.byteorder))


def free_socket(row: tuple[int, ...]) -> None:
    """Give a socket its option back, as a `ROW` says. A closed socket is passed over."""
    cookie, pid, fd, option, size, value = row
    if cookie:
        with contextlib.suppress(OSError), borrow(pid, fd, cookie) as sock:
            set_option(sock, option, size, value)


def free_sockets(table: mmap.mmap) -> None:
    """Give every socket in the table its option back."""
    for offset in range(HEADER.size + CHANGES * CHANGE.size, len(table) - ROW.size + 1, ROW.size):
        free_socket(ROW.unpack_from(table, offset))


# -- traffic control --------------------------------------------------------------------------


class Found(NamedTuple):
    """An object of traffic control, as in struct tcmsg."""

    device: int
    handle: int
    parent: int
    info: int
    attributes: bytes


@contextlib.contextmanager
def _asked(kind: int, flags: int, body: bytes) -> Iterator[socket.socket]:
    head = struct.pack("=IHHII", 16 + len(body), kind, _NLM_REQUEST | flags, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as rtnetlink:
        rtnetlink.settimeout(5)
        rtnetlink.send(head + body)
        yield rtnetlink


def _tcmsg(device: int, handle: int, parent: int, info: int) -> bytes:
    return struct.pack("=BxxxiIII", 0, device, handle, parent, info)


def ask(
    kind: int, device: int, handle: int, parent: int, info: int = 0, *, create: bytes = b""
) -> int:
    """Make one request about traffic control. `create`: attributes of a new qdisc. Returns the
    kernel's errno."""
    flags, body = _NLM_ACK | (_NLM_CREATE if create else 0), _tcmsg(device, handle, parent, info)
    body += create
    with _asked(kind, flags, body) as rtnetlink:
        answer = rtnetlink.recv(4096)
    return -int(struct.unpack_from("=i", answer, 16)[0])


def dump(kind: int, device: int, parent: int = 0) -> list[Found]:
    """All objects of a kind. Nothing where the kernel refuses. Raises OSError."""
    found: list[Found] = []
    with _asked(kind, _NLM_DUMP, _tcmsg(device, 0, parent, 0)) as rtnetlink:
        while True:
            answer = rtnetlink.recv(1 << 17)
            at = 0
            while at + 16 <= len(answer):
                size, type_ = struct.unpack_from("=IH", answer, at)
                if type_ in (_NLMSG_ERROR, _NLMSG_DONE):
                    return found
                device_, handle, above, info = struct.unpack_from("=iIII", answer, at + 20)
                attributes = answer[at + 36 : at + size]
                found.append(Found(device_, handle, above, info, attributes))
                at += (size + 3) & ~3


def classes(device: int) -> list[Found]:
    """The classes of our HTB. Raises OSError."""
    found = dump(_GETTCLASS, device)
    return [one for one in found if one.handle >> 16 == HTB >> 16 and one.device == device]


def filters(device: int, parent: int) -> list[Found]:
    """Filters at one side of clsact: each program once, and each priority once with handle 0.
    Raises OSError."""
    return [one for one in dump(_GETTFILTER, device, parent) if one.device == device]


def empty_htb(device: int, number: int) -> None:
    """Remove the classes of one daemon's flows. Raises OSError."""
    for one in classes(device):
        if one.handle >> 12 & 15 == number and one.handle & 0xFFF != KEEPER:
            ask(_DELTCLASS, device, one.handle, one.parent)


def remove_classes(device: int, number: int) -> None:
    """Remove the classes of one daemon. The last daemon's take the qdisc along. Raises OSError."""
    empty_htb(device, number)
    ask(_DELTCLASS, device, HTB | number << 12 | KEEPER, HTB)
    if not classes(device):
        ask(DELQDISC, device, HTB, ROOT)


def remove_filter(device: int, number: int) -> None:
    """Remove the filter of one daemon. The last takes along fq, if it is ours, and clsact, if it is
    ours and not used otherwise. Raises OSError."""
    name = f"{FILTER_NAME}{number:x}".encode()
    ours = [one for one in filters(device, EGRESS) if name in one.attributes]
    for one in ours:
        ask(_DELTFILTER, device, one.handle, EGRESS, one.info)
    left = filters(device, EGRESS)
    if not any(FILTER_NAME.encode() in one.attributes for one in left):
        ask(DELQDISC, device, FQ, ROOT)
    if any(OWN.encode() in one.attributes for one in ours):
        remove_clsact(device)


def remove_clsact(device: int) -> None:
    """Remove clsact unless it has filters. Raises OSError."""
    if not filters(device, EGRESS) and not filters(device, INGRESS):
        ask(DELQDISC, device, CLSACT, CLSACT_ROOT)


def set_queue_length(device: int, value: int) -> None:
    """Set a device's txqueuelen, in packets. Raises OSError."""
    body = struct.pack("=BxHiII", 0, 0, device, 0, 0)
    body += struct.pack("=HHI", 8, _IFLA_TXQLEN, value)
    with _asked(_SETLINK, _NLM_ACK, body) as rtnetlink:
        rtnetlink.recv(4096)


def restore_sysctl(value: int) -> None:
    """Set the sysctl back, unless it was changed meanwhile. Raises OSError and ValueError."""
    with open(SYSCTL, "r+") as file:
        if int(file.read()) == 0:
            file.seek(0)
            file.write(str(value))


def undo_change(change: int, device: int, value: int) -> None:
    """Undo one row of the table. Raises OSError and ValueError."""
    if change == CLASSES:
        remove_classes(device, value)
    elif change == FILTER:
        remove_filter(device, value)
    elif change == TSO_RTT_LOG:
        restore_sysctl(value)
    elif change == QUEUE_LENGTH:
        set_queue_length(device, value)


# -- all of it --------------------------------------------------------------------------------


def changes(table: mmap.mmap) -> Iterator[tuple[int, int, int]]:
    """The rows about devices and sysctls."""
    for k in range(CHANGES):
        change, device, value = CHANGE.unpack_from(table, HEADER.size + k * CHANGE.size)
        yield change, device, value


def free_all(table: mmap.mmap) -> None:
    """Undo everything in the table: sockets before the classes that they are in. What is gone
    already is passed over."""
    free_sockets(table)
    for row in changes(table):
        with contextlib.suppress(OSError, ValueError):
            undo_change(*row)


def free_flows(table: mmap.mmap) -> None:
    """Let all flows go, and count `freed` up."""
    free_sockets(table)
    for change, device, number in changes(table):
        if change == CLASSES:
            with contextlib.suppress(OSError):
                empty_htb(device, number)
    _, freed, _ = HEADER.unpack_from(table)
    struct.pack_into("=Q", table, 8, freed + 1)


def unregister(struct_ops: int) -> None:
    """Remove the registration of a struct_ops map."""
    number = _BPF.get(platform.machine())
    key = ctypes.c_uint32(0)
    attributes = struct.pack("=I4xQQQ", struct_ops, ctypes.addressof(key), 0, 0)
    if number is not None:
        _libc.syscall(number, _MAP_DELETE_ELEM, attributes, len(attributes))


def wait(pipe: int, table: mmap.mmap | None) -> None:
    """Return when the daemon is gone. Let all flows go each time it lets the deadline pass."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    late = 0, 0
    while True:
        timeout = None
        if table is not None:
            deadline, _, listed = HEADER.unpack_from(table)
            left = deadline - time.monotonic_ns()
            if left <= 0 and (deadline, listed) != late:
                late = deadline, listed
                free_flows(table)
            timeout = 20 if left <= 0 else min(left // 1_000_000 + 1, LOOK_MS)
        if poll.poll(timeout):
            return


def main() -> None:
    """Guard until the daemon is gone, then clean up."""
    pipe, table_fd, struct_ops = map(int, sys.argv[1:4])
    table = mmap.mmap(table_fd, 0) if table_fd >= 0 else None
    wait(pipe, table)
    if table is not None:
        free_all(table)
    if struct_ops >= 0:
        unregister(struct_ops)


if __name__ == "__main__":
    main()
