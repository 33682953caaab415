# SPDX-License-Identifier: Apache-2.0
"""TCP as it comes, and as somebody would tune it who has an incast problem: what we are measured
against. Some need more than a setting: programs in the kernel, from bpf/."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from flowslot_lab.tools import LabError, run
from flowslot_scenario.results import STOCK

FIRST_QUEUE, QUEUES = 0x10, 256
"""Minor of the first, and how many: of a port with a queue for each flow, as in bpf/port.bpf.c."""
MARKED_PART, LEAST_MARKED = 0.25, 6_000
"""A switch's port marks packets while its queue is longer than this part of its buffer, and than so
many bytes."""
NEVER = 2**32 - 1
OBJECTS = Path(__file__).parents[2] / "bpf"
_NAME, _STRUCT_OPS = b"fs_placeholder_", b"dctcp_ops"
_MARK_ABOVE, _DROP_ABOVE = 0xF1075107, 0xF1075108


class Rival(NamedTuple):
    """How connections between hosts behave without us."""

    congestion_control: str
    """`dctcp`: the lab's own."""
    rto_min_ms: int | None = None
    """Least retransmission timeout, of the route; None: as the scenario has it, or the kernel's
    200 ms."""
    fair_queues: bool = False
    """A switch's port serves flows in turns, from one shared buffer."""


CUBIC = Rival("cubic")
RIVALS = {name: Rival(name) for name in STOCK} | {
    # Lost tails of a burst wait for the timeout: the first thing to tune against incast.
    "cubic+rto5": Rival("cubic", rto_min_ms=5),
    "reno+rto5": Rival("reno", rto_min_ms=5),
    "dctcp": Rival("dctcp", rto_min_ms=5),
    "cubic+fq": Rival("cubic", rto_min_ms=5, fair_queues=True),
}


def _object(name: str, folder: Path, changes: Iterable[tuple[bytes, bytes]]) -> Path:
    """A compiled program with its placeholders filled in. Raises LabError."""
    file = OBJECTS / name
    if not file.exists():
        raise LabError(f"{file} is missing: build it with `make -C bpf`")
    data = file.read_bytes()
    for placeholder, value in changes:
        assert placeholder in data and len(placeholder) == len(value), placeholder
        data = data.replace(placeholder, value)
    made = folder / name
    made.write_bytes(data)
    return made


def registration(of: str) -> str:
    """What the kernel calls the struct_ops of DCTCP of a run of the lab."""
    return f"fl{of}d"


def register_dctcp(of: str, folder: Path) -> str:
    """Returns the congestion control's name. Raises LabError."""
    name = f"fl{of}_dctcp"
    changes = [
        (_NAME, name.encode().ljust(len(_NAME), b"\0")),
        (_STRUCT_OPS, registration(of).encode()),
    ]
    run(["bpftool", "struct_ops", "register", str(_object("dctcp.bpf.o", folder, changes))])
    return name


def port_program(folder: Path, buffer: int, *, marks: bool) -> Path:
    """An object for a port with a buffer of so many bytes. `marks`: for ECN, and the port's own
    queue drops what does not fit. Else: all its queues together hold no more."""
    above = max(round(buffer * MARKED_PART), LEAST_MARKED) if marks else NEVER
    most = NEVER if marks else buffer
    numbers = ((_MARK_ABOVE, above), (_DROP_ABOVE, most))
    changes = [(a.to_bytes(4, sys.byteorder), b.to_bytes(4, sys.byteorder)) for a, b in numbers]
    return _object("port.bpf.o", folder, changes)


def marked(space: str) -> tuple[int, int]:
    """Packets in a network namespace that met a long queue: marked, and those that could not be.
    Raises LabError."""
    shown = run(["nsenter", f"--net=/run/netns/{space}", "bpftool", "-j", "net", "show"])
    programs = [one["id"] for net in json.loads(shown) for one in net.get("tc", ()) if "id" in one]
    counts = [0, 0]
    for program in programs:
        about = json.loads(run(["bpftool", "-j", "prog", "show", "id", str(program)]))
        for number in about.get("map_ids", ()):
            of = json.loads(run(["bpftool", "-j", "map", "show", "id", str(number)]))
            if of.get("name") == "mark_counts":
                for entry in json.loads(run(["bpftool", "-j", "map", "dump", "id", str(number)])):
                    counts[entry["formatted"]["key"]] += entry["formatted"]["value"]
    return counts[0], counts[1]
