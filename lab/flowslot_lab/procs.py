# SPDX-License-Identifier: Apache-2.0
"""Processes of a run: started in a host's network namespace, named in the journal,
and never able to outlive the lab."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

from flowslot_lab.processors import of_the_programs
from flowslot_lab.state import RunState, kill, start_time

_NICE = "-10"  # as in the systemd units
_IF_WE_LIVE = 'test "$PPID" = "$0" && exec "$@"'
"""For a shell that has just asked to die with us: we may have died before it asked."""


class Process:
    """A started process, with its start time so that it is never confused with another."""

    def __init__(self, name: str, popen: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self.popen = popen
        self.pid = popen.pid
        self.log = log
        self.started = start_time(popen.pid) or 0

    def signal(self, sig: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        if self.popen.poll() is None:
            kill(self.pid, self.started, sig)

    def tail(self, lines: int = 12) -> str:
        """The end of its standard error, for error messages."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.strip().splitlines()[-lines:])

    def cpu_s(self) -> float:
        """Processor time used so far, user and system, in seconds; 0 when it has ended."""
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{self.pid}/stat").read_text()
            fields = text.rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / 100.0
        return 0.0


def start(
    state: RunState,
    name: str,
    netns: str | None,
    command: Sequence[str],
    *,
    urgent: bool = False,
    pipes: bool = False,
    environment: Mapping[str, str] | None = None,
) -> Process:
    """Start `command` in a network namespace (None: the lab's own).

    `nsenter` and not `ip netns exec`: the latter remounts /sys and hides bpffs.
    The process gets SIGKILL when the lab dies, whatever the lab died of, and does not see
    the terminal's Ctrl-C: the lab ends it in order. `urgent`: it need not wait for the others, nor
    for the network. `environment`: variables besides the lab's own.
    """
    log = state.folder / f"{name}.log"
    argv = ["setpriv", "--pdeathsig", "KILL", "sh", "-c", _IF_WE_LIVE, str(os.getpid()), *command]
    if urgent:
        cpus = ",".join(map(str, of_the_programs()))
        argv = ["nice", "-n", _NICE, "taskset", "--cpu-list", cpus, *argv]
    if netns is not None:
        argv = ["nsenter", f"--net=/run/netns/{netns}", *argv]
    pipe: int | IO[bytes] = subprocess.PIPE
    with log.open("ab") as err:
        popen = subprocess.Popen(
            argv,
            stdin=pipe if pipes else subprocess.DEVNULL,
            stdout=pipe if pipes else err,
            stderr=err,
            env=os.environ | dict(environment or {}),
            start_new_session=True,
        )
    process = Process(name, popen, log)
    state.note("process", process.pid, process.started, name)
    return process


def stop(processes: Iterable[Process], *, grace_s: float = 0.0) -> None:
    """End processes: SIGTERM and a grace period first where one is given, then SIGKILL."""
    everyone = list(processes)
    if grace_s > 0:
        for process in everyone:
            process.signal(signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while any(p.popen.poll() is None for p in everyone) and time.monotonic() < deadline:
            time.sleep(0.01)
    for process in everyone:
        process.signal(signal.SIGKILL)
    for process in everyone:
        process.popen.wait()
        for stream in (process.popen.stdin, process.popen.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def venv_program(name: str, module: str) -> list[str]:
    """The console script beside this interpreter, or the module run by this interpreter."""
    script = Path(sys.executable).with_name(name)
    return [str(script)] if script.exists() else [sys.executable, "-m", module]
