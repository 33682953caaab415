# SPDX-License-Identifier: Apache-2.0
"""How many files this process may have open, as a bound on connections that others make.

gRPC accepts connections as fast as they come, whatever else waits. What finds no room waits in the
kernel, which costs nothing. Files that Python itself opens (a module that it imports late, say)
never lack room.
"""

import contextlib
import os
import resource
import sys
import threading
from collections.abc import Iterator


class FileLimit:
    """The soft limit RLIMIT_NOFILE. In any thread."""

    def __init__(self) -> None:
        self._most: int | None = None
        self._lock = threading.RLock()
        self._hooked = False

    def set(self, most: int | None) -> None:
        """From now on, until Python opens a file. None: as many as there may be."""
        with self._lock:
            if most is not None and not self._hooked:
                self._hooked = True
                sys.addaudithook(self._on_event)
            self._most = most
            self._apply(most)

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """For now there is room; for one thread after the other."""
        with self._lock:
            self._apply(None)
            try:
                yield
            finally:
                self._apply(self._most)

    def reached(self) -> bool:
        """No more can be opened, or there is no limit any more."""
        if self._most is None:
            return True
        try:
            os.close(os.dup(2))
        except OSError:
            return True
        return False

    def _apply(self, most: int | None) -> None:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        soft = hard if most is None else min(most, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    def _on_event(self, event: str, _: object) -> None:
        """See Python's table of audit events."""
        if event == "open" and self._most is not None:
            self.set(None)
