# SPDX-License-Identifier: Apache-2.0
"""The registration server and honest jobs: their lives, their limits, and its socket."""

import asyncio
import os
import resource
import socket
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import uvloop
from registering import (
    CC,
    answer,
    connect,
    is_well,
    open_fds,
    own_record,
    register,
    send,
    serving,
)
from waiting import until

from flowslot_proto.unix_socket import AlreadyRunning
from flowslot_shm.client import JobClient
from flowslot_shm.layout import Message, Role
from flowslot_shm.writer import Record as OwnRecord
from flowslotd.observe.registration import Limits


@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run])
def test_life_of_a_job(runner: Callable[[Awaitable[None]], None], path: Path) -> None:
    async def life() -> None:
        async with serving(path) as (server, seen):
            assert stat.S_IMODE(path.stat().st_mode) == 0o666
            before = open_fds()
            job = JobClient(str(path), "resnet50", rank=2, slots=4)
            await until(job.poll)
            assert job.congestion_control == CC
            (record,) = seen.registered
            assert server.records == {record.id: record}
            identity = (record.job, record.rank, record.pid, record.uid)
            assert identity == ("resnet50", 2, os.getpid(), os.getuid())
            job.flow(None, peer=1, channel=0, role=Role.RING).ready(10)
            await until(lambda: seen.bells)
            assert seen.bells == [(record.id, 0, Message.BEGIN)]
            other = JobClient(str(path), "bert", rank=0, slots=1)
            await until(other.poll)
            job.close()
            await until(lambda: seen.left)
            assert seen.left == [record]
            assert [r.job for r in server.records.values()] == ["bert"]
            assert not record.reader.snapshot()["state"].any()
            other.close()
            await until(lambda: len(seen.left) == 2)
            seen.registered.clear()
            del record
            assert open_fds() == before
        assert not path.exists()

    runner(life())


async def test_limits(path: Path) -> None:
    limits = Limits(connections_per_uid=2, slots=8, seconds_to_register=0.05)
    async with serving(path, limits) as (server, _):
        jobs = [JobClient(str(path), "job", rank=r, slots=8) for r in range(3)]
        await until(lambda: jobs[0].poll() and jobs[1].poll() and server.refused)
        await until(lambda: not jobs[2].poll() and jobs[2].reason)
        assert jobs[2].reason == "connections: at most 2 for one user"
        jobs[0].close()
        await until(lambda: len(server.records) == 1)
        with connect(path) as silent:
            assert b"must be sent within" in (await answer(silent))["reason"]
            assert await answer(silent) == {}
        await is_well(path)
        for job in jobs[1:]:
            job.close()


async def test_out_of_descriptors(path: Path) -> None:
    """Neither an endless loop nor an end: jobs wait, and are served when there is room."""
    async with serving(path) as (server, _):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        job = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with own_record() as fd, job:
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
            try:
                job.connect(str(path))
                send(job, register(), fd)
                for _ in range(20):
                    await asyncio.sleep(0.001)
                assert not server.records
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert (await answer(job))["status"] == 0


async def test_a_process_that_dies_is_gone_even_if_its_child_lives(path: Path) -> None:
    async with serving(path) as (server, seen):
        read, write = os.pipe()
        parent = os.fork()
        if parent == 0:  # only system calls from here on, and never back into pytest
            try:
                record = OwnRecord(4)
                sock = connect(path)
                send(sock, register(), record.fd)
                sock.recv(1024)
                os.close(write)
                if os.fork() == 0:
                    os.read(read, 1)  # holds the connection until the test lets go
                else:
                    os.kill(os.getpid(), 9)
            finally:
                os._exit(0)
        os.close(read)
        try:
            await until(lambda: seen.left)
            assert seen.left[0].pid == parent
            assert not server.records
        finally:
            os.close(write)
            os.waitpid(parent, 0)


async def test_a_stale_socket_is_replaced_and_a_live_one_is_not(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(path))
        dead.listen()
    assert path.exists()
    async with serving(path):
        await is_well(path)
        with pytest.raises(AlreadyRunning, match="another process answers on"):
            async with serving(path):
                pass
        await is_well(path)
    path.write_text("precious")
    with pytest.raises(OSError, match="exists and is not a socket"):
        async with serving(path):
            pass
    assert path.read_text() == "precious"


async def test_a_socket_that_is_no_longer_ours_is_left_alone(path: Path) -> None:
    async with serving(path):
        path.unlink()
        path.write_text("another's")
    assert path.read_text() == "another's"


async def test_an_impossible_path_names_it() -> None:
    with pytest.raises(OSError, match=r"/nonexistent/register\.sock"):
        async with serving(Path("/nonexistent/register.sock")):
            pass
