# SPDX-License-Identifier: Apache-2.0
"""Records of all TCP packets where a link ends, from bpf/tap.bpf.c."""

from __future__ import annotations

import ctypes
import json
import mmap
import os

import numpy as np
import numpy.typing as npt

from flowslot_lab.net import Port
from flowslot_lab.rivals import OBJECTS
from flowslot_lab.tools import LabError, run

RECORD = np.dtype(
    [
        ("ns", "u8"),  # CLOCK_MONOTONIC
        ("seq", "u4"),
        ("ack", "u4"),
        ("sport", "u2"),
        ("dport", "u2"),
        ("src", "u1"),  # last bytes of the addresses
        ("dst", "u1"),
        ("len", "u2"),  # payload
        ("window", "u2"),  # as on the wire
        ("syn", "u2"),  # 1: a connection's first packet in this direction
        ("unused", "u4"),
    ]
)
CAPACITY = 1 << 17
_MARGIN = 256
"""Newer records may be half written."""
_OBJECT = OBJECTS / "tap.bpf.o"
Records = npt.NDArray[np.void]


class Tap:
    """At the device where a link ends; gone with its namespace."""

    def __init__(self, end: Port) -> None:
        """Raises LabError."""
        if not _OBJECT.exists():
            raise LabError(f"{_OBJECT} is missing: build it with `make -C bpf`")
        on = ["dev", end.device]
        run(["tc", "-n", end.space, "qdisc", "replace", *on, "clsact"])
        inside = ["nsenter", f"--net=/run/netns/{end.space}"]
        add = ["tc", "filter", "add", *on, "ingress", "bpf", "da", "obj", str(_OBJECT)]
        run([*inside, *add, "sec", "tc/tap"])
        shown = json.loads(run(["tc", "-n", end.space, "-j", "filter", "show", *on, "ingress"]))
        program = next(
            one["options"]["prog"]["id"] for one in shown if "prog" in one.get("options", {})
        )
        about = json.loads(run(["bpftool", "-j", "prog", "show", "id", str(program)]))
        maps = {
            json.loads(run(["bpftool", "-j", "map", "show", "id", str(number)]))["name"]: number
            for number in about["map_ids"]
        }
        self._records = np.frombuffer(
            _mapped(maps["tap_records"], CAPACITY * RECORD.itemsize), RECORD, CAPACITY
        )
        self._written = np.frombuffer(_mapped(maps["tap_written"], mmap.PAGESIZE), "u8", 1)
        self._read = 0
        self._kept: list[Records] = []

    def drain(self, *, end: bool = False) -> None:
        """Keep what was recorded since. `end`: nothing is being written. LabError: too late."""
        until = int(self._written[0]) - (0 if end else _MARGIN)
        if until <= self._read:
            return
        at = np.arange(self._read, until) % CAPACITY
        self._kept.append(self._records[at])
        if int(self._written[0]) - self._read > CAPACITY:
            raise LabError("a link's records were overwritten before the lab could read them")
        self._read = until

    def records(self) -> Records:
        """All of them, in the order of time."""
        every = np.concatenate(self._kept) if self._kept else np.zeros(0, RECORD)
        return every[np.argsort(every["ns"], kind="stable")]


def _mapped(number: int, size: int) -> mmap.mmap:
    """The memory of a BPF map, by its number."""
    fd = ctypes.CDLL("libbpf.so.1", use_errno=True).bpf_map_get_fd_by_id(number)
    if fd < 0:
        raise LabError(f"BPF map {number} cannot be opened: {os.strerror(ctypes.get_errno())}")
    try:
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        return mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
    finally:
        os.close(fd)
