# SPDX-License-Identifier: Apache-2.0
"""What an operator has enlisted: a process, or all processes of a control group."""

import os
import re
import select
import weakref
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from flowslot.model.errors import ConfigError
from flowslot_shm.layout import JOB_BYTES, Role, plain_text
from flowslotd.observe.passive.nodes import MAX_ENVIRONMENT, Node, own_name, variables_of

MAX_TARGETS = 256
MAX_GROUPS = 1024
"""Control groups below one."""
_MOUNTS = Path("/proc/self/mounts")
_PROCESSES = "cgroup.procs"
_MAX_PROCESSES_BYTES = 1 << 16


class Target:
    """`name`: the process's number, or the group's folder. `job`: of all its processes; b"": each
    process's own $FLOWSLOT_JOB, and `otherwise` where that is not set.

    The process, or the group, is held by a descriptor: another one that gets the same number, or
    the same path, is not the one that was meant. It is closed with the last reference, on whatever
    thread that is.
    """

    def __init__(self, kind: str, name: str, job: str, otherwise: str, fd: int) -> None:
        """Takes over the descriptor."""
        self._fd = fd
        weakref.finalize(self, os.close, fd)
        self.kind, self.name = kind, name
        self.job, self._otherwise = plain_text(job, JOB_BYTES), plain_text(otherwise, JOB_BYTES)

    @classmethod
    def process(cls, pid: int, job: str = "") -> "Target":
        """Raises ConfigError: there is no such process, or it is not to be had."""
        try:
            return cls("pid", str(pid), job, f"pid-{pid}", os.pidfd_open(pid))
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or "must be the number of a process"
            raise ConfigError("enlist", "pid", f"no process {pid}: {why}") from None

    @classmethod
    def group(cls, path: str, job: str = "") -> "Target":
        """Raises ConfigError: there is no such control group."""
        folder = folder_of("enlist", path)
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError("enlist", "cgroup", f"{path!r}: {error.strerror}") from None
        return cls("cgroup", str(folder), job, folder.name, fd)

    @property
    def what(self) -> tuple[str, str]:
        """Its kind (`pid` or `cgroup`) and its name."""
        return self.kind, self.name

    def alive(self) -> bool:
        """The process has not ended; the group is still there."""
        if self.kind == "pid":
            return not ended(self._fd)
        with suppress(OSError):
            os.stat(_PROCESSES, dir_fd=self._fd)
            return True
        return False

    def pids(self) -> Iterator[int]:
        """Its processes, as of now."""
        if self.kind == "pid":
            if self.alive():
                yield int(self.name)
            return
        with suppress(OSError):
            for _, _, files, fd in islice(os.fwalk(".", dir_fd=self._fd), MAX_GROUPS):
                if _PROCESSES in files:
                    yield from _read(fd)

    def node(self, pid: int) -> Node:
        """One of its processes, as a node of a job."""
        job = self.job
        if not job:
            with suppress(OSError):
                job = own_name(variables_of(environment(pid)))
        return Node(job or self._otherwise, Role.UNKNOWN, 0)


def ended(pidfd: int) -> bool:
    """Whether the process has."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def environment(pid: int) -> bytes:
    """Raises OSError: the process has ended, or belongs to somebody else."""
    with open(f"/proc/{pid}/environ", "rb", buffering=0) as file:
        return file.read(MAX_ENVIRONMENT) or b""


def folder_of(command: str, path: str) -> Path:
    """The folder of the control group that an operator calls so. Raises ConfigError: there is none,
    or it has all processes of the host."""
    for folder in _folders(path):
        with suppress(OSError, ValueError):
            if (folder / _PROCESSES).exists() and not folder.is_mount():
                return folder
    raise ConfigError(
        command,
        "cgroup",
        f"{path!r} is no control group: must be the path of a folder with {_PROCESSES}, from / on "
        "or from where cgroup2 is mounted, and not that place itself",
    )


def _folders(path: str) -> Iterator[Path]:
    if path.startswith("/"):
        yield Path(os.path.normpath(path))
    with suppress(OSError):
        for line in _MOUNTS.read_text(errors="surrogateescape").splitlines():
            _, where, kind, *_ = line.split(" ")
            if kind == "cgroup2":
                mount = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), where)
                yield Path(os.path.normpath(f"{mount}/{path}"))


def _read(folder: int) -> Iterator[int]:
    """The processes of one group; none while it is being removed."""
    with suppress(OSError):
        fd = os.open(_PROCESSES, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
        try:
            text = os.read(fd, _MAX_PROCESSES_BYTES)
        finally:
            os.close(fd)
        # 0: of another PID namespace.
        yield from (int(line) for line in text.split() if line.isdigit() and line != b"0")
