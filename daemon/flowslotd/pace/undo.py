# SPDX-License-Identifier: Apache-2.0
"""The daemon's side of its guardian (guardian.py): the process, and the table of what it undoes
when the daemon dies or lets its deadline pass. A change is listed before it is made.
"""

import mmap
import os
import signal
import struct
import subprocess
import sys
from contextlib import suppress

from flowslotd.pace import guardian
from flowslotd.pace.guardian import HEADER, ROW, SOCKET, Row
from flowslotd.pace.pacer import PacingError

ROWS = 4096 + 128
"""Sockets, and what is changed on devices."""
DEAF = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGABRT)
"""What a service manager sends to all processes of a service; SIGABRT: the watchdog."""


class Guardian:
    """The guardian process, and the pipe whose end says that this daemon is gone."""

    def __init__(self, table: int = -1, struct_ops: int = -1, keep: tuple[int, ...] = ()) -> None:
        """`keep`: descriptors that the guardian holds as long as it lives."""
        reading, self._pipe = os.pipe()
        files = (reading, table, struct_ops)
        # The child has this mask too: no signal ends the guardian, not even while it starts.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, DEAF)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", guardian.__file__, *map(str, files)],
                pass_fds=[fd for fd in (*files, *keep) if fd >= 0],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        except BaseException:
            os.close(self._pipe)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.close(reading)

    def close(self) -> bool:
        """Let the guardian clean up and end. False: it could not."""
        os.close(self._pipe)
        return self.process.wait() == 0


class UndoTable:
    """Open from `open` to `close`, with a guardian that is replaced when it dies."""

    def __init__(self) -> None:
        self._memory = -1
        self._table: mmap.mmap | None = None
        self.guardian: Guardian | None = None
        self._keep: tuple[int, ...] = ()
        self._rows: dict[tuple[int, int], int] = {}
        """Where they are in the table, by kind and cookie or device."""
        self._free: list[int] = []

    def open(self, keep: tuple[int, ...]) -> None:
        """Start the guardian, which also holds the descriptors `keep` until all is undone."""
        self._keep = keep
        self._rows, self._freed, self._listed = {}, 0, 0
        self._memory = os.memfd_create("flowslot-guardian", os.MFD_CLOEXEC)
        os.truncate(self._memory, HEADER.size + ROWS * ROW.size)
        self._table = mmap.mmap(self._memory, 0)
        self._free = [HEADER.size + row * ROW.size for row in reversed(range(ROWS))]
        self.guardian = Guardian(table=self._memory, keep=self._keep)

    def close(self) -> None:
        """The guardian undoes what is still listed, and ends. Harmless when not open."""
        undone = self.guardian is not None and self.guardian.close()
        self.guardian = None
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
        if self.guardian is not None and self.guardian.process.poll() is not None:
            self.guardian.close()
            self.guardian = None
        if self.guardian is None:
            with suppress(OSError):  # no new process now: the next call tries again
                self.guardian = Guardian(table=self._memory, keep=self._keep)
        struct.pack_into("=Q", self._table, 0, deadline_ns)
        freed = int(struct.unpack_from("=Q", self._table, 8)[0])
        was_late, self._freed = freed != self._freed, freed
        return was_late

    def list(self, row: Row) -> None:
        """Take the place of the row about the same socket, or the same kind of change of the same
        device, if there is one. Raises PacingError when the table is full."""
        assert self._table is not None
        key = row.kind, row.cookie or row.place
        if key not in self._rows:
            if not self._free:
                raise PacingError(f"{ROWS} changes of flows and devices are the most")
            self._rows[key] = self._free.pop()
        ROW.pack_into(self._table, self._rows[key], *row)
        if row.kind == SOCKET:
            self.look_again()

    def look_again(self) -> None:
        """If the deadline has passed, have the guardian read the table once more."""
        if self._table is not None:
            self._listed += 1
            struct.pack_into("=Q", self._table, 16, self._listed)

    def undo(self, kind: int, which: int) -> None:
        """Undo now what is listed, if it is, and strike it. `which`: the cookie of a socket, or the
        index of a device. What is gone already is passed over."""
        offset = self._rows.pop((kind, which), None)
        if offset is not None and self._table is not None:
            with suppress(OSError, ValueError):
                guardian.undo(Row(*ROW.unpack_from(self._table, offset)))
            struct.pack_into("=i", self._table, offset, 0)
            self._free.append(offset)
