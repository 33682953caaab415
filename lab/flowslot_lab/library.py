# SPDX-License-Identifier: Apache-2.0
"""What jobs have in common whose communication is a C library's."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path

BUILT = Path(__file__).parents[2] / "build"
"""What `make setup` has built."""


class NotBuilt(OSError):
    """The library is not there, or cannot be loaded."""


class LibraryClock:
    """Waits as a `Loop` does, but has nothing to do meanwhile: the library moves what is to be
    moved by itself, or when it is asked to. `trace`: (monotonic ns, bytes received)."""

    def __init__(self, file: str) -> None:
        """`file`: in `build/`. Raises NotBuilt."""
        try:
            self.lib = ctypes.CDLL(str(BUILT / file))
        except OSError as error:
            raise NotBuilt(f"{error}; `make setup` builds it") from None
        self.tracing = True
        self.trace: list[tuple[int, int]] = []

    def sleep_until(self, at_ns: int) -> None:
        """Compute."""
        while (left := at_ns - time.monotonic_ns()) > 0:
            time.sleep(left / 1e9)
        self.mark()

    def mark(self) -> None:
        """A point of the trace here and now, after those of what has arrived."""
        if self.tracing:
            self.trace += self.arrived()
            self.trace.append((time.monotonic_ns(), self.trace[-1][1] if self.trace else 0))

    def arrived(self) -> list[tuple[int, int]]:
        """Points of the trace since the last call."""
        raise NotImplementedError
