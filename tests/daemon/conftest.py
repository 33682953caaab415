# SPDX-License-Identifier: Apache-2.0
"""Real progress records (sealed memfds) with addresses of our choice."""

import asyncio
import inspect
import ipaddress
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flowslot.model.topology import Topology, parse_topology
from flowslot_shm import writer
from flowslot_shm.layout import SLOT, Message, Role, State, Transport
from flowslot_shm.reader import RecordReader
from flowslot_shm.writer import FlowWriter, Record

sys.path.insert(0, str(Path(__file__).parent))
sys.path += [str(Path(__file__).parents[1] / room) for room in ("helpers", "switchemu", "core")]

from seen import at

TOPOLOGY = "".join(
    f"""
[[hosts]]
name = "h{i}"
nics = [{{ name = "eth0", addresses = ["10.78.0.{i}"], up = "h{i}->s1", down = "s1->h{i}" }}]
[[links]]
name = "h{i}->s1"
capacity_gbps = 0.4
[[links]]
name = "s1->h{i}"
capacity_gbps = {0.2 if i == 2 else 0.4}
"""
    for i in (1, 2, 3)
)
HELD = '[[switches]]\nname = "s1"\naddress = "127.0.0.1:7400"\n' + TOPOLOGY.replace(
    "capacity_gbps", 'switch = "s1"\ncapacity_gbps'
)
"""The same, of which a switch process holds all links."""
ELSEWHERE = "10.78.0.3"


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Tests that are coroutines run in an event loop of their own: by `run` of their module, if
    there is one."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    run = getattr(pyfuncitem.module, "run", asyncio.run)
    run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What jobs take for the time: `clock.ns`."""
    clock = SimpleNamespace(ns=at(0))
    fake = SimpleNamespace(monotonic_ns=lambda: clock.ns, time_ns=lambda: clock.ns)
    monkeypatch.setattr(writer, "time", fake)
    return clock


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
