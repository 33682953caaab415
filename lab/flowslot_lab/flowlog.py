# SPDX-License-Identifier: Apache-2.0
"""What a sender of a job writes down for a budget: when bytes were ready, and when they were handed
to the kernel.

A file for each flow: a line of JSON that says which it is, then RECORDs. They are kept in memory
and written when the next phase begins, so that writing does not delay a phase's bytes.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

RECORD = np.dtype([("ns", "i8"), ("ready", "i8"), ("posted", "i8"), ("closed_us", "i8")])
"""CLOCK_MONOTONIC; bytes that may be sent, and that the kernel has, over all time. A record whose
`ready` is BEGIN begins a phase: of `posted` bytes, when the receiver's window has been closed for
`closed_us` in all."""
BEGIN = -1
_PACK = struct.Struct("=qqqq")
_SO_COOKIE, _RWND_LIMITED_AT = 57, 176  # in struct tcp_info


class FlowLog:
    """Of one socket."""

    def __init__(self, path: Path, sock: socket.socket) -> None:
        """Begins the file. Raises OSError."""
        self._path, self._sock = path, sock
        self._records: list[bytes] = []
        (src, sport), (dst, dport) = sock.getsockname(), sock.getpeername()
        cookie = struct.unpack("=Q", sock.getsockopt(socket.SOL_SOCKET, _SO_COOKIE, 8))[0]
        path.write_text(json.dumps([src, dst, sport, dport, cookie]) + "\n")

    def begin(self, total: int) -> None:
        """A phase of so many bytes is ready to begin."""
        now = time.monotonic_ns()
        with self._path.open("ab") as file:
            file.write(b"".join(self._records))
        info = self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        closed_us = struct.unpack_from("=Q", info, _RWND_LIMITED_AT)[0]
        self._records = [_PACK.pack(now, BEGIN, total, closed_us)]

    def note(self, ready: int, posted: int) -> None:
        """So many bytes, over all time."""
        self._records.append(_PACK.pack(time.monotonic_ns(), ready, posted, 0))


class Logged(NamedTuple):
    """What such a file says; `records` are RECORD[N]."""

    src: str
    dst: str
    sport: int
    dport: int
    cookie: int
    records: npt.NDArray[np.void]


def read(path: Path) -> Logged:
    """Read a file, but for what is written right now."""
    head, _, body = path.read_bytes().partition(b"\n")
    whole = len(body) // RECORD.itemsize * RECORD.itemsize
    src, dst, sport, dport, cookie = json.loads(head)
    return Logged(src, dst, sport, dport, cookie, np.frombuffer(body[:whole], RECORD))
