# SPDX-License-Identifier: Apache-2.0
"""For measurements: when demands were made, grants came, and rates were written.

A file of fixed size, a ring of records that the daemon writes by mmap, once its configuration names
one. Layout, in this machine's byte order: HEADER, then RECORD[capacity]. Number n, from 0, of all
that were ever written is at n modulo capacity.
"""

import math
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from flowslot.protocol.grants import Granted
from flowslotd.clock import monotonic

ASKED, GRANTED, IN_FORCE = 1, 2, 3
"""`kind` of a record. Of ASKED and GRANTED, `id` is an aggregate's (the socket cookie of one of its
flows); of IN_FORCE a flow's socket cookie."""
HEADER = np.dtype([("magic", "S8"), ("capacity", "u8"), ("written", "u8")])
RECORD = np.dtype([("ns", "i8"), ("id", "u8"), ("rate", "f8"), ("kind", "u8")])
"""`ns`: CLOCK_MONOTONIC. `rate`: payload bytes/s; NaN: let go; of ASKED, the bytes that remain."""
MAGIC = b"fs-trace"
CAPACITY = 1 << 18


class Trace:
    """Writes such a file, anew."""

    def __init__(self, path: Path, capacity: int = CAPACITY) -> None:
        """Raises OSError."""
        size = HEADER.itemsize + capacity * RECORD.itemsize
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(fd, 0, size)  # a disk that is full says so now
            memory = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        self._header = np.frombuffer(memory, HEADER, 1)
        self._records = np.frombuffer(memory, RECORD, capacity, HEADER.itemsize)
        self._header[0] = MAGIC, capacity, 0
        self._written = 0

    def asked(self, demands: Iterable[tuple[int, float]]) -> None:
        """Demands for these aggregates have been made: (id, bytes that remain)."""
        self._add(ASKED, demands)

    def granted(self, grants: Iterable[Granted]) -> None:
        """These grants have come."""
        self._add(GRANTED, ((grant.flow, grant.rate) for grant in grants))

    def in_force(self, rates: Iterable[tuple[int, float]]) -> None:
        """The kernel has these rates: (socket cookie, payload bytes/s)."""
        self._add(IN_FORCE, rates)

    def let_go(self, flows: Iterable[int]) -> None:
        """The kernel paces these flows no longer."""
        self._add(IN_FORCE, ((flow, math.nan) for flow in flows))

    def _add(self, kind: int, what: Iterable[tuple[int, float]]) -> None:
        now = monotonic()
        for number, value in what:
            self._records[self._written % len(self._records)] = now, number, value, kind
            self._written += 1
        self._header["written"] = self._written
