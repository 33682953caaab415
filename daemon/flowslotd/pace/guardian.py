# SPDX-License-Identifier: Apache-2.0
"""Undoes in the kernel what would outlive a dead daemon.

Run as a script of its own, standard library only, so that it stays small:

    python -I -S guardian.py PIPE TABLE STRUCT_OPS

PIPE is the reading end of a pipe. Only the daemon holds the other end, so the pipe ends with the
daemon.
TABLE is a memfd that lists what is to be undone, or -1: `HEADER`, and then `Row`s. When the daemon
is gone, all of it is undone. When the daemon lets the deadline pass, only flows are let go (sockets
and classes), and devices stay set up. Then `freed` counts up, which tells a daemon that was asleep.
What is listed after that (`listed` counts) is let go, too.
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
ROW = struct.Struct("=iiQQiii")
UNLIMITED = 2**64 - 1
LOOK_MS = 500
"""A deadline that is brought forward is noticed so late at most."""
SOCKET, CLASSES, FILTER, TSO_RTT_LOG, QUEUE_LENGTH = 1, 2, 3, 4, 5
"""Kinds of rows, in the order in which they are undone: sockets before the classes that they are
in. SOCKET: a socket's option, which was `value`. CLASSES: classes of HTB that bear the number
`value`. FILTER: the filter of EDT that bears it. TSO_RTT_LOG: a sysctl, which was `value`.
QUEUE_LENGTH: a device's txqueuelen, which was `value`: the kernel turns 0 into 1000 when a root
qdisc is added."""


class Row(NamedTuple):
    """A change, in the order of `ROW`."""

    kind: int
    """0: the row is empty."""
    place: int
    """The index of a device; the process that has the socket."""
    value: int
    cookie: int = 0
    """Of the socket, as all that follows."""
    fd: int = 0
    option: int = 0
    size: int = 0
    """Bytes of the option."""


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

DELQDISC = 37
_SETLINK, _IFLA_TXQLEN = 19, 13
_DELTCLASS, _GETTCLASS, _DELTFILTER, _GETTFILTER = 41, 42, 45, 46
_NLM_REQUEST, NLM_ACK, _NLM_DUMP = 1, 4, 0x300
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
        its = sock.getsockopt(socket.SOL_SOCKET, _SO_COOKIE, 8)
        if int.from_bytes(its, sys.byteorder) != cookie:
            raise OSError(116, "another socket by now")  # ESTALE
        yield sock


def set_option(sock: socket.socket, option: int, size: int, value: int) -> None:
    """Set a socket option of so many bytes."""
    sock.setsockopt(socket.SOL_SOCKET, option, value.to_bytes(size, sys.byteorder))


# -- traffic control --------------------------------------------------------------------------


class Found(NamedTuple):
    """An object of traffic control, as in struct tcmsg."""

    device: int
    handle: int
    parent: int
    info: int
    attributes: bytes


def message(kind: int, flags: int, body: bytes, seq: int = 1) -> bytes:
    """A request to rtnetlink."""
    return struct.pack("=IHHII", 16 + len(body), kind, _NLM_REQUEST | flags, seq, 0) + body


def messages(received: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Kind, sequence number and body of each message of the kernel's."""
    at = 0
    while at + 16 <= len(received):
        size, kind, _, seq = struct.unpack_from("=IHHI", received, at)
        yield kind, seq, received[at + 16 : at + size]
        at += (size + 3) & ~3


def tcmsg(device: int, handle: int, parent: int, info: int = 0) -> bytes:
    """What requests about traffic control begin with."""
    return struct.pack("=BxxxiIII", 0, device, handle, parent, info)


def remove(kind: int, device: int, handle: int, parent: int, info: int = 0) -> int:
    """Remove one object of traffic control. Returns the kernel's errno."""
    _, answer = next(answers(kind, NLM_ACK, tcmsg(device, handle, parent, info)))
    return -int(struct.unpack_from("=i", answer)[0])


def answers(kind: int, flags: int, body: bytes) -> Iterator[tuple[int, bytes]]:
    """Kind and body of the kernel's answers to one request, up to an end or an error. Raises
    OSError."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as rtnetlink:
        rtnetlink.settimeout(5)
        rtnetlink.send(message(kind, flags, body))
        while True:
            for type_, _, one in messages(rtnetlink.recv(1 << 17)):
                yield type_, one
                if type_ in (_NLMSG_ERROR, _NLMSG_DONE):
                    return


def dump(kind: int, body: bytes) -> list[bytes]:
    """All objects of a kind, as in the kernel's messages. Nothing where the kernel refuses. Raises
    OSError."""
    found = answers(kind, _NLM_DUMP, body)
    return [one for type_, one in found if type_ not in (_NLMSG_ERROR, _NLMSG_DONE)]


def found(kind: int, device: int = 0, parent: int = 0) -> list[Found]:
    """All objects of traffic control of a kind. Raises OSError."""
    return [
        Found._make((*struct.unpack_from("=iIII", one, 4), one[20:]))
        for one in dump(kind, tcmsg(device, 0, parent))
    ]


def classes(device: int) -> list[Found]:
    """The classes of our HTB. Raises OSError."""
    ours = found(_GETTCLASS, device)
    return [one for one in ours if one.handle >> 16 == HTB >> 16 and one.device == device]


def filters(device: int, parent: int) -> list[Found]:
    """Filters at one side of clsact: each program once, and each priority once with handle 0.
    Raises OSError."""
    return [one for one in found(_GETTFILTER, device, parent) if one.device == device]


def empty_htb(device: int, number: int) -> None:
    """Remove the classes of one daemon's flows. Raises OSError."""
    for one in classes(device):
        if one.handle >> 12 & 15 == number and one.handle & 0xFFF != KEEPER:
            remove(_DELTCLASS, device, one.handle, one.parent)


def remove_classes(device: int, number: int) -> None:
    """Remove the classes of one daemon. The last daemon's take the qdisc along. Raises OSError."""
    empty_htb(device, number)
    remove(_DELTCLASS, device, HTB | number << 12 | KEEPER, HTB)
    if not classes(device):
        remove(DELQDISC, device, HTB, ROOT)


def remove_filter(device: int, number: int) -> None:
    """Remove the filter of one daemon. The last takes along fq, if it is ours, and clsact, if it is
    ours and not used otherwise. Raises OSError."""
    name = f"{FILTER_NAME}{number:x}".encode()
    ours = [one for one in filters(device, EGRESS) if name in one.attributes]
    for one in ours:
        remove(_DELTFILTER, device, one.handle, EGRESS, one.info)
    left = filters(device, EGRESS)
    if not any(FILTER_NAME.encode() in one.attributes for one in left):
        remove(DELQDISC, device, FQ, ROOT)
    if any(OWN.encode() in one.attributes for one in ours):
        remove_clsact(device)


def remove_clsact(device: int) -> None:
    """Remove clsact unless it has filters. Raises OSError."""
    if not filters(device, EGRESS) and not filters(device, INGRESS):
        remove(DELQDISC, device, CLSACT, CLSACT_ROOT)


def set_queue_length(device: int, value: int) -> None:
    """Set a device's txqueuelen, in packets. Raises OSError."""
    body = struct.pack("=BxHiII", 0, 0, device, 0, 0)
    body += struct.pack("=HHI", 8, _IFLA_TXQLEN, value)
    next(answers(_SETLINK, NLM_ACK, body))


def restore_sysctl(value: int) -> None:
    """Set the sysctl back, unless it was changed meanwhile. Raises OSError and ValueError."""
    with open(SYSCTL, "r+") as file:
        if int(file.read()) == 0:
            file.seek(0)
            file.write(str(value))


def undo(row: Row) -> None:
    """Undo a change. Raises OSError and ValueError, also when it is gone already."""
    kind, place, value, cookie, fd, option, size = row
    if kind == SOCKET:
        with borrow(place, fd, cookie) as sock:
            set_option(sock, option, size, value)
    elif kind == CLASSES:
        remove_classes(place, value)
    elif kind == FILTER:
        remove_filter(place, value)
    elif kind == TSO_RTT_LOG:
        restore_sysctl(value)
    elif kind == QUEUE_LENGTH:
        set_queue_length(place, value)


# -- all of it --------------------------------------------------------------------------------


def rows(table: mmap.mmap) -> list[Row]:
    """All that is listed, in the order of kinds."""
    offsets = range(HEADER.size, len(table) - ROW.size + 1, ROW.size)
    listed = (Row(*ROW.unpack_from(table, offset)) for offset in offsets)
    return sorted((row for row in listed if row.kind), key=lambda row: row.kind)


def free_all(table: mmap.mmap) -> None:
    """Undo everything in the table."""
    for row in rows(table):
        with contextlib.suppress(OSError, ValueError):
            undo(row)


def free_flows(table: mmap.mmap) -> None:
    """Let all flows go, and count `freed` up."""
    for row in rows(table):
        with contextlib.suppress(OSError):
            if row.kind == SOCKET:
                undo(row)
            elif row.kind == CLASSES:
                empty_htb(row.place, row.value)
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
