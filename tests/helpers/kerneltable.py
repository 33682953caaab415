# SPDX-License-Identifier: Apache-2.0
"""A daemon's tables in the kernel, read through their memory, whether that daemon lives or not."""

import contextlib
import ctypes
import json
import mmap
import os
import re
import subprocess
import time
from pathlib import Path

import numpy as np

from flowslotd.pace import layout
from flowslotd.pace.guardian import UNLIMITED
from flowslotd.pace.layout import Mode

SLOT_NS = 60_000_000
"""Default of the daemon's configuration."""


class KernelTable:
    """What the daemon wants of its flows (`fs_ctl`) and what the kernel does (`fs_stat`).

    The mappings keep both maps alive until `close`.
    """

    def __init__(self, daemon: int) -> None:
        self._ctl = shared(daemon, "fs_ctl", layout.CTL)
        self._stat = shared(daemon, "fs_stat", layout.STAT)

    def close(self) -> None:
        del self._ctl, self._stat

    def modes(self) -> set[Mode]:
        """Modes of the live flows, as of their last transmission."""
        return {Mode(mode) for mode in self._stat["mode"][self._stat["cookie"] != 0]}

    def unpaced(self) -> bool:
        """All live flows are ordinary TCP, and the kernel paces none of them for us."""
        live = self._stat["cookie"] != 0
        return self.modes() == {Mode.OPEN} and bool((self._stat["rate"][live] == UNLIMITED).all())

    def deadlines(self, *, reserved: bool = False) -> list[int]:
        """CLOCK_MONOTONIC: until when entries hold that a flow has or had; only those that make it
        `reserved`, if asked for."""
        # The daemon makes an entry `guaranteed` or not before it moves its deadline.
        until, guaranteed = self._ctl["deadline_ns"].copy(), self._ctl["guaranteed"].copy()
        wanted = (until != 0) & (guaranteed != 0) if reserved else until != 0
        return [int(deadline) for deadline in until[wanted]]

    def in_force(self) -> int:
        """A moment at which an entry of a live flow is in force: now. 0: there is none."""
        live = (self._stat["cookie"] != 0) & (self._stat["cookie"] == self._ctl["cookie"])
        now = time.monotonic_ns()
        return now if bool((self._ctl["deadline_ns"][live] > now).any()) else 0


def shared(daemon: int, name: str, dtype: np.dtype) -> np.ndarray:
    """The memory of a map of this daemon."""
    for entry in Path(f"/proc/{daemon}/fdinfo").iterdir():
        text = ""
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            text = entry.read_text()
        number = re.search(r"^map_id:\s*(\d+)$", text, re.MULTILINE)
        if number and map_name(number[1]) == name:
            fd = ctypes.CDLL("libbpf.so.1").bpf_map_get_fd_by_id(int(number[1]))
            assert fd >= 0, name
            size = layout.SLOTS * dtype.itemsize
            memory = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
            os.close(fd)
            return np.frombuffer(memory, dtype)
    raise AssertionError(f"the daemon has no {name} in the kernel")


def map_name(number: str) -> str:
    command = ["bpftool", "-j", "map", "show", "id", number]
    shown = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return str(shown.get("name"))
