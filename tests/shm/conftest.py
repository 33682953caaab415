# SPDX-License-Identifier: Apache-2.0
"""The same job twice, in C (flowslot_shm.h) and in Python."""

import fcntl
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from registering import Registrar, starting  # noqa: F401
from waiting import settle

from flowslot_shm.client import JobClient
from flowslot_shm.layout import HEADER, MAGIC, REPLY, VERSION, Message, Role, offset
from flowslot_shm.writer import FlowWriter, Record

SHM = Path(__file__).parents[2] / "shm"
TCP_CONGESTION = 13
SLOTS = 4
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
AT = offset("quiet", HEADER)


def registered(job: "Job") -> bool:
    return job("poll") == "1"


def word(fd: int) -> int:
    return int.from_bytes(os.pread(fd, 4, AT), sys.byteorder)


class Ear:
    """A daemon that accepts one job, and keeps its record and all that it sends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server.bind(str(path))
        self._server.listen()

    def accept(self, job: "Job") -> int:
        """Wait until `job` has registered; the value of `quiet` that came with its REGISTER."""
        self._server.setblocking(False)

        def accepted() -> socket.socket | None:
            job("poll")
            with suppress(BlockingIOError):
                return self._server.accept()[0]

        self._job = settle(accepted)
        _, (self.fd,), _, _ = socket.recv_fds(self._job, 256, 1)
        came = word(self.fd)
        reply = np.zeros(1, REPLY)
        reply["magic"], reply["version"], reply["type"] = MAGIC, VERSION, Message.REPLY
        self._job.send(reply.tobytes())
        settle(lambda: registered(job))
        self._job.setblocking(False)
        return came

    def heard(self) -> int:
        """Datagrams since the last call."""
        for n in range(1000):
            try:
                assert self._job.recv(64)
            except BlockingIOError:
                return n
        raise AssertionError("no end")

    def die(self) -> None:
        self._job.close()
        self._server.close()
        self._path.unlink()


class PythonJob:
    """Drives JobClient with the commands of driver.c."""

    def __init__(self, path: str, slots: int) -> None:
        self.client = JobClient(path, "resnet50", rank=3, slots=slots)
        self.flows: dict[int, FlowWriter] = {}
        self.sockets: dict[int, socket.socket] = {}

    def __call__(self, command: str) -> str:
        word, *args = command.split()
        if word in ("poll", "reason", "leave"):
            client = self.client
            actions = {"poll": client.poll, "reason": lambda: client.reason, "leave": client.close}
            result = actions[word]()
            return str(int(result)) if isinstance(result, bool) else str(result or "")
        if word == "flow":
            return self._flow(*args)
        f = int(args[0])
        if word == "cc":
            raw = self.sockets[f].getsockopt(socket.IPPROTO_TCP, TCP_CONGESTION, 16)
            return raw.split(b"\0")[0].decode()
        if word == "flip":
            for _ in range(int(args[1])):
                self.flows[f].ready(1)
                self.flows[f].done(1)
        else:
            getattr(self.flows[f], word)(*map(int, args[1:]))
        return ""

    def _flow(self, number: str, host: str, port: str, role: str, cc: str) -> str:
        f, sock = int(number), None
        if int(port):
            kind = socket.SOCK_DGRAM if cc == "udp" else socket.SOCK_STREAM
            sock = self.sockets[f] = socket.socket(socket.AF_INET, kind)
            if cc not in ("-", "udp"):
                sock.setsockopt(socket.IPPROTO_TCP, TCP_CONGESTION, cc.encode())
            sock.connect((host, int(port)))
        self.flows[f] = self.client.flow(sock, f + 100, f, Role(int(role)))
        return "0" if self.flows[f].index >= 0 else "-1"

    def close(self) -> None:
        self.client.close()
        for sock in self.sockets.values():
            sock.close()


class CJob:
    """The process of driver.c, perhaps within `wrapper` (unshare ...)."""

    def __init__(self, program: Path, path: str, slots: int, wrapper: tuple[str, ...] = ()) -> None:
        command = [*wrapper, str(program), path, "resnet50", "3", str(slots)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __call__(self, command: str) -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer.endswith("\n"), f"the C job died on {command!r}"
        assert "!" not in answer and "?" not in answer, answer
        return answer.rstrip("\n")

    def close(self) -> None:
        self.process.communicate(timeout=30)


Job = PythonJob | CJob
StartJob = Callable[..., Job]


@pytest.fixture
def record() -> Iterator[Record]:
    record = Record(SLOTS)
    yield record
    record.close()


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("driver") / "driver"
    source = Path(__file__).with_name("driver.c")
    flags = ["-std=c99", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-pedantic"]
    subprocess.run(["gcc", *flags, f"-I{SHM}", source, "-o", program], check=True)
    return program


@pytest.fixture(params=["c", "python"])
def start_job(request: pytest.FixtureRequest, driver: Path, tmp_path: Path) -> Iterator[StartJob]:
    make = partial(CJob, driver) if request.param == "c" else PythonJob
    here = str(tmp_path / "register.sock")
    with ExitStack() as jobs:
        yield lambda path=here, slots=8: jobs.enter_context(closing(make(path, slots)))


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory that all users may enter."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.fixture
def c_job(driver: Path, shared: Path) -> Iterator[Callable[..., CJob]]:
    """A registered C job within a wrapper command; all users may run its program."""
    program = Path(shutil.copy(driver, shared))
    with ExitStack() as jobs:

        def start(path: object, wrapper: tuple[str, ...] = ()) -> CJob:
            job = jobs.enter_context(closing(CJob(program, str(path), 8, wrapper)))
            settle(lambda: registered(job))
            return job

        yield start


@pytest.fixture
def pair(start_daemon: Callable[..., Registrar], start_job: StartJob) -> tuple[Registrar, Job]:
    """A daemon, and a job that has registered there."""
    daemon, job = start_daemon(), start_job()
    settle(lambda: registered(job))
    return daemon, job


@pytest.fixture
def port() -> Iterator[int]:
    """A TCP port on 127.0.0.1 that takes connections."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as server:
        yield server.getsockname()[1]
