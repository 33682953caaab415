# SPDX-License-Identifier: Apache-2.0
"""The layout of the progress record and of the registration messages, as in `flowslot_shm.h`.

A record is a header of 64 bytes and then slots of 256 bytes, one per socket, each with a single
writer. `tests/shm` compiles the C header and compares every offset with these types.
All integers have the host's byte order: a record never leaves its host.
"""

import ctypes
import ipaddress
import os
import platform
import struct
from collections.abc import Callable
from enum import IntEnum

import numpy as np

MAGIC = b"flowslot"
VERSION = 1
DEFAULT_PATH = "/run/flowslot/register.sock"
PATH_VARIABLE = "FLOWSLOT_SOCKET"
MAX_SLOTS = 4096
JOB_BYTES = 32  # with the closing NUL
NOT_KNOWN = 1
CHANNELS = 1024
"""Of a communicator, at most: those of a process's other communicators begin at multiples of it."""
REASON_BYTES = 232


class State(IntEnum):
    """What a slot holds. ACTIVE: bytes of this iteration are ready and not yet done."""

    FREE = 0
    IDLE = 1
    ACTIVE = 2


class Role(IntEnum):
    """What a flow does in its job's communication pattern."""

    UNKNOWN = 0
    RING = 1
    PUSH = 2  # worker to parameter server
    PULL = 3  # parameter server to worker
    RECEIVE = 4  # this end only receives: its socket is left alone


class Collective(IntEnum):
    """What a flow's bytes are part of. 0 or any other number in a slot: it is not known."""

    BROADCAST = 1
    REDUCE = 2
    ALL_GATHER = 3
    REDUCE_SCATTER = 4
    ALL_REDUCE = 5
    SEND = 6  # from one rank to another


class Transport(IntEnum):
    """How a flow's bytes travel. TCP is paced, UDP where the back end can; the progress of the
    others is shown."""

    UNKNOWN = 0
    TCP = 1
    RDMA = 2
    UDP = 3


class Message(IntEnum):
    """Type of a registration message; BEGIN and END are the doorbells."""

    REGISTER = 1
    REPLY = 2
    BEGIN = 3
    END = 4


class Quiet(IntEnum):
    """Which doorbells the daemon has no use for. ENDS: the kernel tells it of ends."""

    NONE = 0
    ALL = 1
    ENDS = 2


HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("version", "u4"),
        ("slots", "u4"),
        ("pid", "i4"),  # as the job sees itself: in a container not the host's number
        ("quiet", "u4"),  # Quiet, set by the daemon; any other value: as ALL
        ("start_ns", "u8"),  # CLOCK_REALTIME
        ("reserved", "V32"),
    ]
)

SLOT = np.dtype(
    [
        ("seq", "u4"),  # seqlock: odd while it is being written
        ("state", "u2"),
        ("role", "u2"),
        ("family", "u1"),  # AF_INET, AF_INET6, or 0: no addresses
        ("transport", "u1"),
        ("reserved0", "u2"),
        ("sport", "u2"),
        ("dport", "u2"),
        ("src", "V16"),  # network order; IPv4 in the first four bytes, the rest zero
        ("dst", "V16"),
        ("sock_cookie", "u8"),  # SO_COOKIE: joins the slot with inet_diag and BPF
        ("job", "S32"),
        ("rank", "i4"),
        ("peer", "i4"),
        ("channel", "i4"),
        ("fd", "i4"),  # the socket's number inside the job's process
        ("iteration", "u8"),
        ("ready", "u8"),  # bytes of this iteration: ready to be sent,
        ("posted", "u8"),  # handed to the transport,
        ("done", "u8"),  # and completed by it
        ("iteration_total", "u8"),  # expected in this iteration; 0: unknown
        ("t_iteration_start_ns", "u8"),  # CLOCK_MONOTONIC
        ("t_update_ns", "u8"),
        ("phases", "u8"),  # iterations so far that had bytes to send; 0: an older library
        ("collective", "u4"),  # Collective: the last one that is known
        ("reserved1", "u4"),
        # From one iteration to the next, by who looks from outside; 0: to be learnt by the reader,
        # NOT_KNOWN: and not yet to be learnt by anybody.
        ("period_ns", "u8"),
        ("reserved", "V72"),
    ]
)

# First in every message; `type` is a Message.
_PREFIX = [("magic", "S8"), ("version", "u2"), ("type", "u2")]
REGISTER = np.dtype([*_PREFIX, ("rank", "i4"), ("slots", "u4"), ("job", "S32"), ("reserved", "u4")])
REPLY = np.dtype([*_PREFIX, ("status", "i4"), ("cc", "S16"), ("reason", "S232")])
DOORBELL = np.dtype([*_PREFIX, ("slot", "u4")])
PACKED_DOORBELL = struct.Struct("=8sHHI")  # the same, faster for a single one


def record_bytes(slots: int) -> int:
    """Size of a record with `slots` slots, in bytes; never a multiple of a huge page."""
    return HEADER.itemsize + slots * SLOT.itemsize


def offset(field: str, within: np.dtype[np.void] = SLOT) -> int:
    """Offset of a field within a slot, or within another structure, in bytes."""
    fields = within.fields
    assert fields is not None
    return int(fields[field][1])


def address(family: int, raw: bytes) -> str:
    """Text of a slot's `src` or `dst`; empty when the slot holds no address."""
    if family == 2:
        return str(ipaddress.IPv4Address(raw[:4]))
    if family == 10:
        return str(ipaddress.IPv6Address(raw[:16]))
    return ""


def plain_text(text: str | bytes, size: int) -> bytes:
    """`text` as it may stand in a record: visible ASCII, under `size` bytes.

    What is longer, or has other characters ('_' takes their places), ends with a hash (FNV-1a) of
    the whole: names of jobs often begin alike.
    """
    raw = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
    plain = bytes(c if 0x21 <= c <= 0x7E else ord("_") for c in raw)
    if plain == raw and len(raw) < size:
        return raw
    code = 2166136261
    for byte in raw:
        code = (code ^ byte) * 16777619 & 0xFFFFFFFF
    end = b"-%08x" % code
    return plain[: size - 1 - len(end)] + end


def default_path() -> str:
    """The registration socket: $FLOWSLOT_SOCKET, else the system's."""
    return os.environ.get(PATH_VARIABLE) or DEFAULT_PATH


def hardware_fence() -> Callable[[], object]:
    """A full memory fence from libatomic; raises OSError where that library is missing."""
    thread_fence = ctypes.CDLL("libatomic.so.1").atomic_thread_fence
    return lambda: thread_fence(5)  # memory_order_seq_cst


def _nothing() -> None:
    pass


# The seqlock needs load-load and store-store order. x86-64 never reorders either; elsewhere ask.
fence = _nothing if platform.machine() in ("x86_64", "AMD64") else hardware_fence()
