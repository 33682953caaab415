# SPDX-License-Identifier: Apache-2.0
"""Real progress records (sealed memfds) with addresses of our choice."""

import ipaddress
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowslot.model.topology import Topology, parse_topology
from flowslot_shm.layout import SLOT, Message, Role, State, Transport
from flowslot_shm.reader import RecordReader
from flowslot_shm.writer import FlowWriter, Record

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "helpers"))

TOPOLOGY = """
[[hosts]]
name = "h1"
  [[hosts.nics]]
  name = "eth0"
  addresses = ["10.78.0.1"]
  up = "h1->s1"
  down = "s1->h1"
[[hosts]]
name = "h2"
  [[hosts.nics]]
  name = "eth0"
  addresses = ["10.78.0.2"]
  up = "h2->s1"
  down = "s1->h2"
[[links]]
name = "h1->s1"
capacity_gbps = 0.4
[[links]]
name = "s1->h1"
capacity_gbps = 0.4
[[links]]
name = "h2->s1"
capacity_gbps = 0.4
[[links]]
name = "s1->h2"
capacity_gbps = 0.2
[[hosts]]
name = "h3"
  [[hosts.nics]]
  name = "eth0"
  addresses = ["10.78.0.3"]
  up = "h3->s1"
  down = "s1->h3"
[[links]]
name = "h3->s1"
capacity_gbps = 0.4
[[links]]
name = "s1->h3"
capacity_gbps = 0.4
"""
ELSEWHERE = "10.78.0.3"


@pytest.fixture
def topology() -> Topology:
    return parse_topology(TOPOLOGY, "topology.toml")


class Bells:
    """Collects doorbells; the `Owner` of writers."""

    def __init__(self) -> None:
        self.rung: list[tuple[Message, int]] = []

    def poll(self) -> bool:
        return True

    def ring(self, kind: Message, slot: int) -> None:
        self.rung.append((kind, slot))

    def release(self, slot: int) -> None:
        pass


@dataclass
class Job:
    """A job process: its record as the daemon reads it, and writers of its flows."""

    id: int
    pid: int
    name: str
    reader: RecordReader
    record: Record

    def flow(
        self,
        slot: int,
        cookie: int,
        *,
        src: str = "10.78.0.1",
        dst: str = "10.78.0.2",
        role: Role = Role.RING,
        transport: Transport = Transport.TCP,
    ) -> FlowWriter:
        content = np.zeros(1, SLOT)
        content["state"], content["role"], content["transport"] = State.IDLE, role, transport
        content["family"], content["job"], content["fd"] = 2, self.name.encode(), slot
        content["sock_cookie"] = cookie
        for end, text in (("src", src), ("dst", dst)):
            content[end] = ipaddress.ip_address(text).packed.ljust(16, b"\0")
        writer = FlowWriter(self.record.slot(slot), slot, Bells())
        writer.open(content.tobytes()[4:])
        return writer


@pytest.fixture
def make_job() -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def make(name: str = "train", pid: int = 4242, slots: int = 8) -> Job:
        record = Record(slots)
        fd = os.dup(record.fd)
        jobs.append(Job(len(jobs) + 1, pid, name, RecordReader(fd), record))
        os.close(fd)
        return jobs[-1]

    yield make
    for job in jobs:
        job.reader.close()
        job.record.close()


@pytest.fixture
def job(make_job: Callable[..., Job]) -> Job:
    return make_job()


@pytest.fixture
def flow(job: Job) -> FlowWriter:
    """Flow 7, in the job's first slot."""
    return job.flow(0, cookie=7)


@pytest.fixture
def seen(topology: Topology) -> Any:
    """See seen.py, which is found only from here on."""
    from seen import Seen

    return Seen(topology)


@pytest.fixture
def room(topology: Topology, make_job: Callable[..., Job]) -> Any:
    """See suppressed.py."""
    from suppressed import Room

    return Room(topology, make_job)


@pytest.fixture
def write(tmp_path):
    def write(text, topology=TOPOLOGY):
        (tmp_path / "topology.toml").write_text(topology)
        (tmp_path / "flowslotd.toml").write_text(text)
        return tmp_path / "flowslotd.toml"

    return write


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of a socket where jobs register."""
    return tmp_path / "register.sock"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def watching(stack: ExitStack) -> Any:
    """See passive.py, which is found only from here on."""
    from passive import Watching

    watching = Watching()
    stack.callback(watching.close)
    return watching
