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

RECORD = np.dtype([("ns", "i8"), ("ready", "i8"), ("posted", "i8")])
"""CLOCK_MONOTONIC; bytes that may be sent, and that the kernel has, over all time. A record whose
`ready` is BEGIN begins a phase, of `posted` bytes."""
BEGIN = -1
_PACK = struct.Struct("=qqq")
_SO_COOKIE, _WSCALE_AT = 57, 6  # in struct tcp_info


class FlowLog:
    """Of one socket."""

    def __init__(self, path: Path, sock: socket.socket) -> None:
        """Begins the file. Raises OSError."""
        self._path = path
        self._records: list[bytes] = []
        (src, sport), (dst, dport) = sock.getsockname(), sock.getpeername()
        cookie = struct.unpack("=Q", sock.getsockopt(socket.SOL_SOCKET, _SO_COOKIE, 8))[0]
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _WSCALE_AT + 1)
        head = [src, dst, sport, dport, cookie, info[_WSCALE_AT] & 15]
        path.write_text(json.dumps(head) + "\n")

    def begin(self, total: int) -> None:
        """A phase of so many bytes is ready to begin."""
        now = time.monotonic_ns()
        with self._path.open("ab") as file:
            file.write(b"".join(self._records))
        self._records = [_PACK.pack(now, BEGIN, total)]

    def note(self, ready: int, posted: int) -> None:
        """So many bytes, over all time."""
        self._records.append(_PACK.pack(time.monotonic_ns(), ready, posted))


class Logged(NamedTuple):
    """What such a file says. The windows in its acknowledgements count 2**`scale` bytes; `records`
    are RECORD[N]."""

    src: str
    dst: str
    sport: int
    dport: int
    cookie: int
    scale: int
    records: npt.NDArray[np.void]


def read(path: Path) -> Logged:
    """Read a file, but for what is written right now."""
    head, _, body = path.read_bytes().partition(b"\n")
    whole = len(body) // RECORD.itemsize * RECORD.itemsize
    src, dst, sport, dport, cookie, scale = json.loads(head)
    return Logged(src, dst, sport, dport, cookie, scale, np.frombuffer(body[:whole], RECORD))
