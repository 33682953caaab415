# SPDX-License-Identifier: Apache-2.0
"""Real ps-lite jobs on loopback."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from registering import starting  # noqa: F401

from flowslot_shm.layout import State

ROOT = Path(__file__).parents[2]
BUILT = ROOT / "build" / "pslite"
TOTALS = re.compile(
    r"flowslot: node (\d+) to (\d+): iteration (\d+), ready (\d+), posted (\d+), done (\d+)"
)
SCHEDULER = "127.0.0.1"


@dataclass
class PsJob:
    """A scheduler, servers and workers of one of ps-lite's test programs."""

    program: str
    arguments: tuple[object, ...]
    servers: int = 2
    workers: int = 2
    variant: str = "flowslot-calm"
    environment: dict[str, str] = field(default_factory=dict)
    of_workers: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        with socket.create_server((SCHEDULER, 0)) as free:
            self.port = free.getsockname()[1]
        self._processes: list[subprocess.Popen[str]] = []
        self.said: list[str] = []

    def __enter__(self) -> "PsJob":
        base = os.environ | {
            "DMLC_NUM_SERVER": str(self.servers),
            "DMLC_NUM_WORKER": str(self.workers),
            "DMLC_PS_ROOT_URI": SCHEDULER,
            "DMLC_PS_ROOT_PORT": str(self.port),
            "DMLC_NODE_HOST": SCHEDULER,
            "DMLC_INTERFACE": "lo",
            "FLOWSLOT_SOCKET": "/nonexistent/register.sock",
            "FLOWSLOT_TOTALS": "1",
        }
        command = [str(BUILT / self.variant / "tests" / self.program), *map(str, self.arguments)]
        roles = ["scheduler", *["server"] * self.servers, *["worker"] * self.workers]
        for role in roles:
            more = self.of_workers if role == "worker" else {}
            process = subprocess.Popen(
                command,
                env=base | self.environment | more | {"DMLC_ROLE": role},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            self._processes.append(process)
        return self

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def wait(self) -> list[int]:
        """Exit statuses of scheduler, servers and workers, killed where one failed, as the others
        would wait for it, or after 90 s; `said` is what each said."""
        readers = [
            threading.Thread(target=lambda p=process: self.said.append(p.communicate()[0]))
            for process in self._processes
        ]
        for reader in readers:
            reader.start()
        until = time.monotonic() + 90
        while any(reader.is_alive() for reader in readers) and time.monotonic() < until:
            if any(process.poll() for process in self._processes):
                break
            time.sleep(0.05)
        for process in self._processes:
            process.kill()
        for reader in readers:
            reader.join(10)
        return [process.poll() for process in self._processes]  # type: ignore[misc]

    def says(self, text: str) -> bool:
        """Whether the last worker says so before it ends."""
        stdout = self._processes[-1].stdout
        assert stdout is not None
        return any(text in line for line in stdout)

    def sockets(self, named: str = "") -> set[tuple[int, int]]:
        """Both ports of its TCP connections, or of those under one congestion control."""
        shown = subprocess.run(
            ["ss", "-tinpHO", "state", "established"], capture_output=True, text=True, check=True
        )
        found = set()
        for line in shown.stdout.splitlines():
            ours = any(f"pid={pid}," in line for pid in self.pids)
            if ours and named in ("", line.rpartition("))")[2].split()[0]):
                here, there = map(int, re.findall(r"\S+:(\d+)\s", line)[:2])
                found.add((here, there))
        return found

    def ended(self) -> list[int]:
        """Exit statuses of those that have ended by themselves."""
        statuses = [process.poll() for process in self._processes]
        return [status for status in statuses if status not in (None, -signal.SIGKILL)]

    def totals(self) -> dict[tuple[int, int], tuple[int, int, int, int]]:
        """By node and peer: the last iteration's number; bytes ready, posted, done in all."""
        found = {}
        for text in self.said:
            for line in TOTALS.finditer(text):
                node, peer, *numbers = map(int, line.groups())
                found[node, peer] = (numbers[0], numbers[1], numbers[2], numbers[3])
        return found

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


NODE = Path(__file__).with_name("training_node.py")
NODE_KEYS, NODE_VALUE = 8, 250_000


def training(variant: str, compute_s: float, **more: Any) -> PsJob:
    """A job that computes and exchanges all its keys in turn."""
    library = BUILT / variant / "libpslite_job.so"
    arguments = (NODE, library, NODE_KEYS, NODE_VALUE, compute_s)
    return PsJob(sys.executable, arguments, variant=variant, **more)


def used(keeper: Any) -> list[Any]:
    """Slots that are not free, in all records of a registration server or of passive sources."""
    snapshots = [record.reader.snapshot() for record in list(keeper.records.values())]
    return [slot for snap in snapshots for slot in snap if slot["state"] != State.FREE]


def pairs(slots: Iterable[Any], one: str = "sport", other: str = "dport") -> set[tuple[int, int]]:
    """What each says under two names."""
    return {(int(slot[one]), int(slot[other])) for slot in slots}
