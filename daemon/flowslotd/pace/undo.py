# SPDX-License-Identifier: Apache-2.0
"""The table of what is to be undone when the daemon dies or lets its deadline pass.

The daemon writes the table, a guardian process (guardian.py) reads it. A change is listed before it
is made.
"""

import mmap
import os
import struct
from contextlib import suppress

from flowslotd.pace import guardian
from flowslotd.pace.guard import Guard
from flowslotd.pace.pacer import PacingError

SOCKETS = 4096
_ROWS = guardian.HEADER.size + guardian.CHANGES * guardian.CHANGE.size


class UndoTable:
    """Open from `open` to `close`, with a guardian that is replaced when it dies."""

    def __init__(self) -> None:
        self._memory = -1
        self._table: mmap.mmap | None = None
        self.guard: Guard | None = None
        self._keep: tuple[int, ...] = ()
        self._freed = self._listed = 0
        self._rows: dict[int, int] = {}
        self._free_rows: list[int] = []
        self._changes: dict[tuple[int, int], int] = {}
        self._free_changes: list[int] = []

    def open(self, keep: tuple[int, ...]) -> None:
        """Start the guardian, which also holds the descriptors `keep` until all is undone."""
        self._keep = keep
        self._memory = os.memfd_create("flowslot-guardian", os.MFD_CLOEXEC)
        os.truncate(self._memory, _ROWS + SOCKETS * guardian.ROW.size)
        self._table = mmap.mmap(self._memory, 0)
        self._free_rows = list(range(SOCKETS - 1, -1, -1))
        self._free_changes = list(range(guardian.CHANGES - 1, -1, -1))
        self._rows.clear()
        self._changes.clear()
        self._freed = self._listed = 0
        self.guard = Guard(table=self._memory, keep=self._keep)

    def close(self) -> None:
        """The guardian undoes what is still listed, and ends. Harmless when not open."""
        undone = self.guard is not None and self.guard.close()
        self.guard = None
        if self._table is not None:
            if not undone:  # the guardian was killed
                guardian.free_all(self._table)
            self._table.close()
            self._table = None
        if self._memory >= 0:
            os.close(self._memory)
            self._memory = -1

    def refresh(self, deadline_ns: int) -> bool:
        """The guardian lets all flows go after this time (CLOCK_MONOTONIC). Returns whether it has
        done so since the last call."""
        if self._table is None:
            return False
        if self.guard is not None and not self.guard.alive():
            guard, self.guard = self.guard, None
            guard.close()
        if self.guard is None:
            with suppress(OSError):  # no new process now: the next call tries again
                self.guard = Guard(table=self._memory, keep=self._keep)
        struct.pack_into("=Q", self._table, 0, deadline_ns)
        freed = int(struct.unpack_from("=Q", self._table, 8)[0])
        was_late, self._freed = freed != self._freed, freed
        return was_late

    def list_socket(self, cookie: int, pid: int, fd: int, option: tuple[int, int, int]) -> None:
        """`option`: the number, size and value that the socket gets back. Raises PacingError when
        the table is full."""
        assert self._table is not None
        row = self._rows.get(cookie)
        if row is None:
            if not self._free_rows:
                raise PacingError(f"{SOCKETS} flows are paced already")
            row = self._rows[cookie] = self._free_rows.pop()
        guardian.ROW.pack_into(
            self._table, _ROWS + row * guardian.ROW.size, cookie, pid, fd, *option
        )
        self.look_again()

    def look_again(self) -> None:
        """If the deadline has passed, have the guardian read the table once more."""
        if self._table is not None:
            self._listed += 1
            struct.pack_into("=Q", self._table, 16, self._listed)

    def free_socket(self, cookie: int) -> None:
        """Give a socket its option back now, if it is listed. A closed socket is passed over."""
        row = self._rows.get(cookie)
        if row is not None and self._table is not None:
            offset = _ROWS + row * guardian.ROW.size
            guardian.free_socket(guardian.ROW.unpack_from(self._table, offset))
            self.strike_socket(cookie)

    def strike_socket(self, cookie: int) -> None:
        """Take a socket off the table: nothing is to be undone."""
        row = self._rows.pop(cookie, None)
        if row is not None and self._table is not None:
            struct.pack_into("=Q", self._table, _ROWS + row * guardian.ROW.size, 0)
            self._free_rows.append(row)

    def list_change(self, change: int, device: int, value: int) -> None:
        """`change`: guardian.CLASSES or another kind. Raises PacingError when the table is full."""
        assert self._table is not None
        key = change, device
        row = self._changes.get(key)
        if row is None:
            if not self._free_changes:
                raise PacingError(f"{guardian.CHANGES} changes of devices are the most")
            row = self._changes[key] = self._free_changes.pop()
        offset = guardian.HEADER.size + row * guardian.CHANGE.size
        guardian.CHANGE.pack_into(self._table, offset, change, device, value)

    def strike_change(self, change: int, device: int) -> None:
        """Take a change off the table: the device is as it was."""
        row = self._changes.pop((change, device), None)
        if row is not None and self._table is not None:
            offset = guardian.HEADER.size + row * guardian.CHANGE.size
            guardian.CHANGE.pack_into(self._table, offset, 0, 0, 0)
            self._free_changes.append(row)
