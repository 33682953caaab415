# SPDX-License-Identifier: Apache-2.0
"""What a run could leave behind on the host, outside of its own namespaces and directories."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

PATIENCE_S = 20.0
"""The kernel frees programs and maps when nobody can be running or reading them any more."""
TOOL = shutil.which("bpftool", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
SETTINGS = ("/proc/sys/net/ipv4/*", "/proc/sys/net/core/*", "/proc/sys/net/bridge/*")
DEVICES = ("/sys/class/net/*/queues/rx-*/rps_*", "/sys/class/net/*/queues/tx-*/xps_cpus")
LIST = "tcp_available_congestion_control"
"""Not a setting; a module that was loaded for a flow is there to stay."""


class Host:
    """The host as it was when this was made; `left` says what has come or changed since then."""

    def __init__(self) -> None:
        self._before = look()
        self._bpf = bpf()
        self._before_us = set(processes())

    def left(self) -> dict[str, list[str]]:
        """By kind, what differs from the beginning: empty when nothing is left."""
        left = {"BPF": self._left_bpf()}
        for kind, now in look().items():
            before = self._before[kind]
            left[kind] = [f"+ {it}" for it in sorted(now - before)]
            left[kind] += [f"- {it}" for it in sorted(before - now)]
        return {kind: things for kind, things in left.items() if things}

    def _left_bpf(self) -> list[str]:
        """New programs, maps and links that stay. What programs that are not ours have is theirs,
        and what processes have that ran before."""
        left = bpf() - self._bpf
        end = time.monotonic() + PATIENCE_S
        while left and time.monotonic() < end:
            others = {p for p, ours in processes().items() if p in self._before_us or not ours}
            theirs = held_by(others - {os.getpid()})
            left -= {thing for thing in left if thing[:2] in theirs}
            time.sleep(0.1)
            left &= bpf()
        return sorted(" ".join(thing) for thing in left)


BPFFS = Path("/sys/fs/bpf")
OTHERS_PINS = {
    str(BPFFS / n) for n in ["ip", "xdp", "tc", "tc/globals", "maps.debug", "progs.debug"]
}
"""The kernel's and iproute2's, as soon as a filter is loaded or the file system is mounted."""


def look() -> dict[str, set[str]]:
    """Queueing discipline, pins, shared memory and settings."""
    shown = subprocess.run(["tc", "qdisc", "show"], check=True, capture_output=True, text=True)
    return {
        "qdiscs": set(shown.stdout.splitlines()),
        "pins": {str(path) for path in BPFFS.rglob("*")} - OTHERS_PINS,
        "shared memory": {str(path) for path in Path("/dev/shm").rglob("*")},
        "settings": set(settings()),
    }


def settings() -> Iterator[str]:
    """`file = value` of all that a network's tuning would change."""
    for pattern in (*SETTINGS, *DEVICES):
        for path in Path("/").glob(pattern[1:]):
            with contextlib.suppress(OSError):  # a folder, or for writing only
                words = path.read_text().split()
                # Those of daemons: they come and go with them, and have BPF programs.
                words = [word for word in words if not word.startswith("fs_")]
                if path.name != LIST:
                    yield f"{path} = {' '.join(words)}"


def bpf() -> set[tuple[str, str, str]]:
    """(kind, number, name) of all programs, maps and links in the kernel; numbers are never used
    again. Nothing without bpftool."""
    kinds = ("prog", "map", "link") if TOOL else ()
    return {
        (kind, str(it["id"]), str(it.get("name", it.get("type"))))
        for kind in kinds
        for it in listed(kind)
    }


def listed(kind: str) -> list[dict[str, object]]:
    """What bpftool shows. It gives up when something goes away while it looks."""
    for _ in range(10):
        shown = subprocess.run([str(TOOL), "-j", kind, "show"], check=False, capture_output=True)
        if shown.returncode == 0:
            return list(json.loads(shown.stdout or b"[]"))
    raise AssertionError(f"bpftool does not show: {shown.stdout!r} {shown.stderr!r}")


def processes() -> dict[int, bool]:
    """All that live; whether they are ours, by their command line."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found[int(path.parent.name)] = b"flowslot" in path.read_bytes()
    return found


def held_by(pids: set[int]) -> set[tuple[str, str]]:
    """(kind, number) of what these processes have open."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/fdinfo").iterdir():
                text = entry.read_text()
                found.update(re.findall(r"^(prog|map|link)_id:\s*(\d+)$", text, re.MULTILINE))
    return found
