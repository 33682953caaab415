# SPDX-License-Identifier: Apache-2.0
"""`quiet`: the daemon has no use for doorbells, and a job, in C or in Python, rings none."""

import fcntl
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from waiting import settle

from flowslot_shm.layout import HEADER, Quiet
from flowslot_shm.reader import RecordReader
from flowslot_shm.writer import Record

from .conftest import AT, SEALS, Ear, StartJob, registered, word

F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; not in Python's fcntl
SINCE_6_7 = pytest.mark.skipif(
    tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) < (6, 7),
    reason="before Linux 6.7 a record with F_SEAL_WRITE cannot be shared at all",
)


def test_no_datagram_leaves_a_quiet_job(start_job: StartJob, tmp_path: Path) -> None:
    job, ear = start_job(), Ear(tmp_path / "register.sock")
    assert ear.accept(job) == 0
    reader = RecordReader(ear.fd)
    job("flow 0 - 0 0 -")
    job("begin 0 1 0")
    for quiet, rings in ((Quiet.ALL, 0), (Quiet.NONE, 20), (Quiet.ENDS, 10), (Quiet.NONE, 20)):
        reader.set_quiet(quiet)
        done = int(reader.snapshot()[0]["done"])
        job("flip 0 10")
        assert reader.snapshot()[0]["done"] == done + 10, "the record goes on"
        assert ear.heard() == rings
    os.pwrite(ear.fd, b"\0\0\0\x80", AT)  # any value but 0
    job("flip 0 10")
    job("close 0")
    assert ear.heard() == 0
    reader.close()
    os.close(ear.fd)
    ear.die()


def test_a_flag_does_not_outlive_its_daemon(start_job: StartJob, tmp_path: Path) -> None:
    path = tmp_path / "register.sock"
    job, first = start_job(), Ear(path)
    first.accept(job)
    reader = RecordReader(first.fd)
    reader.set_quiet(Quiet.ALL)
    assert word(first.fd) == 1
    first.die()
    settle(lambda: not registered(job))
    assert word(first.fd) == 0, "cleared on leaving"
    reader.set_quiet(Quiet.NONE)
    reader.set_quiet(Quiet.ALL)  # a daemon that took long to die
    second = Ear(path)
    assert second.accept(job) == 0, "cleared before registering"
    job("flow 0 - 0 0 -")
    job("begin 0 1 0")
    job("flip 0 1")
    assert second.heard() == 2
    reader.close()
    for fd in (first.fd, second.fd):
        os.close(fd)
    second.die()


# ---- the daemon's side of the word


def test_the_caller_may_close_its_descriptor_and_close_drops_the_mapping(record: Record) -> None:
    def held() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text()
        return maps.count("memfd:flowslot"), len(os.listdir("/proc/self/fd"))

    before = held()
    fd = os.dup(record.fd)
    reader = RecordReader(fd)
    os.close(fd)
    reader.set_quiet(Quiet.ALL)
    assert (record.quiet, word(record.fd)) == (Quiet.ALL, 1)
    assert not reader._live.flags.writeable, "the slots cannot be written by mistake"
    reader.close()
    assert held() == before
    reader.set_quiet(Quiet.NONE)
    assert word(record.fd) == 1


def test_what_the_job_scribbles_on_the_word_changes_nothing(record: Record) -> None:
    reader = RecordReader(record.fd)
    reader.set_quiet(Quiet.ALL)
    for scribble in (b"\xff\xff\xff\xff", b"\0\0\0\0"):
        os.pwrite(record.fd, scribble, AT)
        reader.set_quiet(Quiet.ALL)  # as before: not written again, whatever is there now
        assert os.pread(record.fd, 4, AT) == scribble
        assert not reader.snapshot()["state"].any()
        assert not reader.faults.any()
    os.pwrite(record.fd, b"\xff\xff\xff\xff", AT)
    header = os.pread(record.fd, HEADER.itemsize, 0)
    reader.set_quiet(Quiet.NONE)
    cleared = header[:AT] + bytes(4) + header[AT + 4 :]
    assert os.pread(record.fd, HEADER.itemsize, 0) == cleared, "the word and nothing else"
    os.pwrite(record.fd, b"\x07", AT)
    late = RecordReader(record.fd)  # registered with a flag that was there before
    late.set_quiet(Quiet.NONE)
    assert word(record.fd) == 0


def sealed(record: Record, seal: int) -> int:
    """A copy that nobody can map for writing any more."""
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, os.pread(record.fd, 1 << 16, 0))
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS | seal)
    return fd


@pytest.mark.parametrize(
    "make",
    [
        partial(sealed, seal=F_SEAL_FUTURE_WRITE),
        pytest.param(partial(sealed, seal=fcntl.F_SEAL_WRITE), marks=SINCE_6_7),
        lambda record: os.open(f"/proc/self/fd/{record.fd}", os.O_RDONLY),
    ],
    ids=["sealed", "F_SEAL_WRITE", "read-only"],
)
def test_a_record_that_cannot_be_written_is_left_alone_and_read(
    make: Callable[[Record], int], record: Record
) -> None:
    record.slot(1)[4] = 1
    record.slot(1)[0] = 2
    fd = make(record)
    reader = RecordReader(fd)
    for quiet in (Quiet.ALL, Quiet.ENDS, Quiet.NONE, Quiet.ALL):
        reader.set_quiet(quiet)
        assert word(fd) == 0
        assert reader.snapshot()["state"].tolist() == [0, 1, 0, 0]
    reader.close()
    os.close(fd)
