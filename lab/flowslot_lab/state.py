# SPDX-License-Identifier: Apache-2.0
"""What a lab run has made, written down before it is made.

Every run owns a directory `/run/flowslot-lab/<id>/`. Its `journal` names the owner
(process id and start time, so that a recycled id is not mistaken for it), then each
network namespace and process of the run. A run that was killed cannot clean up after
itself: the next start reads the journals of dead owners and removes exactly what they
name. A live run is never touched.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/run/flowslot-lab")
NETNS = Path("/run/netns")
_GONE_TIMEOUT_S = 3.0


def start_time(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None when it is gone or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def kill(pid: int, started: int, sig: signal.Signals) -> bool:
    """Signal the process only if it is still the one that was started then."""
    if start_time(pid) != started:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, sig)
    return True


class RunState:
    """Directory and journal of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.id = path.name
        self.folder = path
        """Files of the measurement in progress; see `begin`."""
        self._begun = 0

    @classmethod
    def create(cls, root: Path = ROOT) -> RunState:
        """A new run owned by this process. The directory appears complete or not at all."""
        root.mkdir(parents=True, exist_ok=True)
        while True:
            name = secrets.token_hex(3)
            fresh = root / f".new-{os.getpid()}-{name}"
            fresh.mkdir(mode=0o755)
            started = start_time(os.getpid())
            (fresh / "journal").write_text(f"owner {os.getpid()} {started}\n")
            try:
                fresh.rename(root / name)
            except OSError:
                shutil.rmtree(fresh)
                continue
            return cls(root / name)

    def begin(self, label: str) -> None:
        """A new measurement: its files go to a folder of their own."""
        self._begun += 1
        self.folder = self.path / f"{self._begun:02d}-{label}"
        self.folder.mkdir()

    def note(self, kind: str, *values: object) -> None:
        """Append one line, complete on return: the thing named may be made only after it."""
        line = " ".join([kind, *(str(value) for value in values)]) + "\n"
        fd = os.open(self.path / "journal", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(fd, line.encode())
        finally:
            os.close(fd)

    def entries(self) -> Iterator[list[str]]:
        """The journal's complete lines, split in words."""
        try:
            text = (self.path / "journal").read_text()
        except FileNotFoundError:
            return
        for line in text.split("\n")[:-1]:
            yield line.split(" ")

    def alive(self) -> bool:
        """Whether the owner still runs."""
        return any(
            kind == "owner" and start_time(int(rest[0])) == int(rest[1])
            for kind, *rest in self.entries()
        )

    def clean(self) -> list[str]:
        """Remove everything the journal names, then the directory; returns what was removed."""
        entries = list(self.entries())
        processes = [(int(r[0]), int(r[1])) for kind, *r in entries if kind == "process"]
        spaces = [rest[0] for kind, *rest in entries if kind == "netns"]
        removed = [f"process {p}" for p, s in processes if kill(p, s, signal.SIGKILL)]
        # A process between fork and its journal line can only be found by its namespace.
        for space in spaces:
            removed += [f"process {pid}" for pid in _kill_members(space)]
        _wait_gone(processes)
        for space in spaces:
            if remove_netns(space):
                removed.append(f"network namespace {space}")
        for name in [rest[0] for kind, *rest in entries if kind == "struct_ops"]:
            if unregister(name):
                removed.append(f"congestion control {name}")
        shutil.rmtree(self.path, ignore_errors=True)
        return removed


def _kill_members(space: str) -> list[int]:
    try:
        inode = (NETNS / space).stat().st_ino
    except FileNotFoundError:
        return []
    if inode == Path("/proc/self/ns/net").stat().st_ino:
        return []
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            if (entry / "ns/net").stat().st_ino == inode:
                os.kill(int(entry.name), signal.SIGKILL)
                members.append(int(entry.name))
    return members


def _wait_gone(processes: list[tuple[int, int]]) -> None:
    deadline = time.monotonic() + _GONE_TIMEOUT_S
    while any(start_time(p) == s for p, s in processes) and time.monotonic() < deadline:
        time.sleep(0.01)


def remove_netns(name: str) -> bool:
    """Delete a named network namespace and all that lives in it; False when there was none."""
    if not (NETNS / name).exists():
        return False
    # Connections of killed processes would live on until the kernel's next try, and what they use.
    reset = ["ip", "netns", "exec", name, "ss", "-K", "-tnH"]
    subprocess.run(reset, capture_output=True, check=False)
    done = subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    # A mount point whose namespace never came to be is a plain file.
    (NETNS / name).unlink(missing_ok=True)
    return done.returncode == 0


def unregister(name: str) -> bool:
    """Take a registration of struct_ops back, by its map's name; False when there was none."""
    command = ["bpftool", "struct_ops", "unregister", "name", name]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def clean_dead(root: Path = ROOT) -> list[str]:
    """Clean up after every run whose owner died; returns what was removed, run by run."""
    removed = []
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        match = re.fullmatch(r"(?:\.new-(\d+)-)?[0-9a-f]{6}", path.name)
        if match is None or (match[1] and start_time(int(match[1])) is not None):
            continue
        state = RunState(path)
        if not state.alive():
            removed += [f"{item} (run {state.id})" for item in state.clean()]
    return removed
