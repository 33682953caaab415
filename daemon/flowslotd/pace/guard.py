# SPDX-License-Identifier: Apache-2.0
"""The daemon's side of its guardian (guardian.py)."""

import os
import signal
import subprocess
import sys

from flowslotd.pace import guardian

DEAF = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGABRT)
"""What a service manager sends to all processes of a service; SIGABRT: the watchdog."""


class Guard:
    """A guardian process, and the pipe whose end says that this daemon is gone."""

    def __init__(self, table: int = -1, struct_ops: int = -1, keep: tuple[int, ...] = ()) -> None:
        """`keep`: descriptors that the guardian holds as long as it lives."""
        reading, self._pipe = os.pipe()
        files = (reading, table, struct_ops)
        # The child has this mask too: no signal ends the guardian, not even while it starts.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, DEAF)
        try:
            self._process = subprocess.Popen(
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

    @property
    def pid(self) -> int:
        """The guardian's process id."""
        return self._process.pid

    def alive(self) -> bool:
        """Whether the guardian still runs."""
        return self._process.poll() is None

    def close(self) -> bool:
        """Let the guardian clean up and end. False: it could not."""
        os.close(self._pipe)
        return self._process.wait() == 0
