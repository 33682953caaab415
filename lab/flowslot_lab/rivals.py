# SPDX-License-Identifier: Apache-2.0
"""TCP as it comes, and as somebody would tune it who has an incast problem: what we are measured
against. Some need more than a setting: programs in the kernel, from bpf/."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from flowslot_lab.tools import LabError, run
from flowslot_scenario.results import STOCK

FIRST_QUEUE, QUEUES = 0x10, 256
"""Minor of the first, and how many: of a port with a queue for each flow, as in bpf/port.bpf.c."""
PROTECTED_TOS = 0xB8
"""DSCP EF."""
_PROTECTED, OTHERS = 2, 3
"""Minors of a port's two classes."""
MARKED_PART, LEAST_MARKED = 0.25, 6_000
"""A switch's port marks packets while its queue is longer than this part of its buffer, and than so
many bytes."""
NEVER = 2**32 - 1
OBJECTS = Path(__file__).parents[2] / "bpf"
_MLTCP = "mltcp.bpf.o"
OWN = {
    "dctcp": ("dctcp.bpf.o", "dctcp_ops"),
    "mltcp_reno": (_MLTCP, "mltcp_reno"),
    "mltcp_cubic": (_MLTCP, "mltcp_cubic"),
}
"""Congestion controls from bpf/: the object, and what it calls this one and its registration."""
_MLTCP_COUNTS = "mltcp_counts"
_MARK_ABOVE, _DROP_ABOVE = 0xF1075107, 0xF1075108


class Rival(NamedTuple):
    """How connections between hosts behave without us."""

    congestion_control: str
    """Of the kernel, or of `OWN`."""
    rto_min_ms: int | None = None
    """Least retransmission timeout, of the route; None: as the scenario has it, or the kernel's
    200 ms."""
    fair_queues: bool = False
    """A switch's port serves flows in turns, from one shared buffer."""
    priority: bool = False
    """Every port sends packets of protected jobs first. Each of its two queues has the whole
    buffer."""

    @property
    def learns(self) -> bool:
        """What an iteration is: MLTCP."""
        return OWN.get(self.congestion_control, ("", ""))[0] == _MLTCP


CUBIC = Rival("cubic")
RIVALS = {name: Rival(name) for name in STOCK} | {
    # Lost tails of a burst wait for the timeout: the first thing to tune against incast.
    "cubic+rto5": Rival("cubic", rto_min_ms=5),
    "reno+rto5": Rival("reno", rto_min_ms=5),
    "dctcp": Rival("dctcp", rto_min_ms=5),
    "cubic+fq": Rival("cubic", rto_min_ms=5, fair_queues=True),
    "prio": Rival("cubic", rto_min_ms=5, priority=True),
    "mltcp": Rival("mltcp_reno"),
    "mltcp-cubic": Rival("mltcp_cubic"),
}


def queues(rival: Rival, device: str, rate: str, burst: int, queue: str) -> list[str]:
    """Lines for `tc`: what is below class 1:1 of a port's HTB, which has this rate and burst.
    `queue`: each queue's discipline."""
    lines = []
    for minor, prio in _classes(rival):
        lines += [
            f"class add dev {device} parent 1:1 classid 1:{minor:x} htb rate 8kbit ceil {rate} "
            f"burst 1514 cburst {burst} quantum 1514 prio {prio}",
            f"qdisc add dev {device} parent 1:{minor:x} {queue}",
        ]
    if rival.priority:
        match = f"u32 match ip dsfield {PROTECTED_TOS:#x} 0xfc classid 1:{_PROTECTED:x}"
        lines.append(f"filter add dev {device} parent 1: protocol ip prio 1 {match}")
    return lines


def _classes(rival: Rival) -> list[tuple[int, int]]:
    """Minors and priorities."""
    if rival.priority:
        return [(_PROTECTED, 0), (OTHERS, 1)]
    return [(FIRST_QUEUE + k, 0) for k in range(QUEUES)]


def sent(space: str, device: str) -> dict[int, int]:
    """Bytes that each class of a port has sent, by its minor. LabError."""
    shown = run(["tc", "-n", space, "-s", "class", "show", "dev", device])
    found = re.findall(r"^class htb 1:([0-9a-f]+) .*\n Sent (\d+) bytes", shown, re.M)
    return {int(minor, 16): int(count) for minor, count in found}


def in_queues(space: str, device: str) -> tuple[int, int]:
    """How many flows' queues a port has used, and the bytes that it has sent ahead. LabError."""
    by_class = sent(space, device)
    used = sum(count > 0 for minor, count in by_class.items() if minor >= FIRST_QUEUE)
    return used, by_class.get(_PROTECTED, 0)


def filled_object(name: str, folder: Path, changes: Iterable[tuple[bytes, bytes]]) -> Path:
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


def unique(name: str, of: str) -> str:
    """What a run of the lab calls what an object of bpf/ calls so: names are the whole host's."""
    return f"fl{of}{name}"[: len(name)]


def registrations(congestion_control: str, of: str) -> list[str]:
    """What the kernel calls the struct_ops that `register` makes in a run of the lab."""
    found = OWN.get(congestion_control, ("", ""))[0]
    return [unique(name, of) for file, name in OWN.values() if file == found]


def register(congestion_control: str, of: str, folder: Path) -> str:
    """All congestion controls of its object. Returns the name of this one. Raises LabError."""
    found, wanted = OWN[congestion_control]
    names = [name for file, name in OWN.values() if file == found]
    if found == _MLTCP:
        names.append(_MLTCP_COUNTS)
    changes = [(name.encode(), unique(name, of).encode()) for name in names]
    run(["bpftool", "struct_ops", "register", str(filled_object(found, folder, changes))])
    return unique(wanted, of)


def learnt(of: str) -> int:
    """How many iterations began whose bytes MLTCP knew, in a run of the lab. Raises LabError."""
    name = unique(_MLTCP_COUNTS, of)
    maps = [
        one for one in json.loads(run(["bpftool", "-j", "map", "show"])) if name == one.get("name")
    ]
    if not maps:
        raise LabError(f"the kernel has no map {name}")
    newest = max(one["id"] for one in maps)  # the kernel may not have freed an earlier run's yet
    entries = json.loads(run(["bpftool", "-j", "map", "dump", "id", str(newest)]))
    return sum(int(entry["formatted"]["value"]) for entry in entries)


def port_program(folder: Path, buffer: int, *, marks: bool) -> Path:
    """An object for a port with a buffer of so many bytes. `marks`: for ECN, and the port's own
    queue drops what does not fit. Else: all its queues together hold no more."""
    above = max(round(buffer * MARKED_PART), LEAST_MARKED) if marks else NEVER
    most = NEVER if marks else buffer
    numbers = ((_MARK_ABOVE, above), (_DROP_ABOVE, most))
    changes = [(a.to_bytes(4, sys.byteorder), b.to_bytes(4, sys.byteorder)) for a, b in numbers]
    return filled_object("port.bpf.o", folder, changes)


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
