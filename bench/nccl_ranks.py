# SPDX-License-Identifier: Apache-2.0
"""Ranks of nccl-harness (nccl_patch/harness) as processes, and what they found."""

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NCCL_PATCH = Path(__file__).parents[1] / "nccl_patch"
BUILD = Path(__file__).parents[1] / "build"
HARNESS, PLUGIN = "harness", "plugin"
LOOPBACK = "127.0.0.1"


def build(part: str, sanitize: str = "") -> Path:
    """`HARNESS` or `PLUGIN`, up to date: the folder that it is in."""
    command = ["make", "-s", "-C", str(NCCL_PATCH / part), f"SANITIZE={sanitize}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}:\n{done.stderr}")
    return BUILD / (f"nccl-{sanitize}" if sanitize else "nccl")


def free_port(host: str = LOOPBACK) -> int:
    """A TCP port that nobody has at the moment."""
    with socket.create_server((host, 0)) as free:
        return int(free.getsockname()[1])


OTHERS = ("NCCL_", "FLOWSLOT_")
"""Settings of whoever starts ranks are not theirs."""
ALONE = {
    "NCCL_SOCKET_IFNAME": "=lo",
    "NCCL_IB_DISABLE": "1",
    "FLOWSLOT_SOCKET": "/nonexistent/register.sock",
}


@dataclass(frozen=True)
class Found:
    """Of one rank. `report`: its line of JSON, empty where it was killed; `fault`: the line before,
    where it played one; `said`: stderr."""

    status: int
    report: dict[str, Any]
    fault: dict[str, Any]
    said: str


@dataclass(frozen=True)
class Ranks:
    """`plugin`: of all; `others`: by rank, another one. `before`: by rank, what its command begins
    with (a namespace)."""

    plugin: Path
    harness: Path
    ranks: int = 2
    environment: Mapping[str, str] | None = None
    others: Mapping[int, Path] | None = None
    before: Sequence[Sequence[str]] = ()
    root: str = LOOPBACK

    def start(
        self, options: Sequence[object], each: Mapping[int, Sequence[object]] | None = None
    ) -> "list[subprocess.Popen[str]]":
        """`options` of nccl-harness, of all; `each`: more of them, by rank."""
        meeting = f"{self.root}:{free_port() if self.root == LOOPBACK else 29400}"
        environment = {k: v for k, v in os.environ.items() if not k.startswith(OTHERS)}
        environment |= ALONE | dict(self.environment or {})
        started = []
        for rank in range(self.ranks):
            plugin = (self.others or {}).get(rank, self.plugin)
            command = [*(self.before[rank] if self.before else ()), self.harness]
            command += ["--plugin", plugin, "--rank", rank, "--ranks", self.ranks]
            command += ["--root", meeting, *options, *(each or {}).get(rank, ())]
            started.append(
                subprocess.Popen(
                    [str(word) for word in command],
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        return started

    def run(
        self,
        options: Sequence[object],
        each: Mapping[int, Sequence[object]] | None = None,
        seconds: float = 90.0,
    ) -> list[Found]:
        """By rank. Whoever has been stopped is killed as soon as the others have ended.

        TimeoutError: a rank does not end within `seconds`.
        """
        started = self.start(options, each)
        end = time.monotonic() + seconds
        try:
            while not all(_over(process) for process in started):
                if time.monotonic() > end:
                    raise TimeoutError(f"ranks do not end: {options}")
                time.sleep(0.005)
        finally:
            for process in started:
                if process.poll() is None:
                    process.send_signal(signal.SIGKILL)
            found = [_found(process) for process in started]
        return found


def _over(process: "subprocess.Popen[str]") -> bool:
    """It has ended, or it has been stopped and will say no more."""
    if process.poll() is not None:
        return True
    try:
        state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state == "T"


def _found(process: "subprocess.Popen[str]") -> Found:
    out, said = process.communicate()
    lines: list[dict[str, Any]] = [json.loads(line) for line in out.splitlines()]
    none: dict[str, Any] = {}
    fault = next((line for line in lines if "fault" in line), none)
    report = next((line for line in lines if "fault" not in line), none)
    return Found(process.returncode, report, fault, said)
