# SPDX-License-Identifier: Apache-2.0
"""The reader against writers in a hurry, dead writers and hostile ones."""

import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from registering import Registrar

from flowslot_shm.client import JobClient
from flowslot_shm.layout import HEADER, MAGIC, SLOT, VERSION, Role, State, Transport, record_bytes
from flowslot_shm.reader import RecordError, RecordReader
from flowslot_shm.slot_check import MAX_BYTES, MAX_COUNT, Fault
from flowslot_shm.writer import FlowWriter, Record

from .conftest import SEALS, SLOTS, CJob


def put(record: Record, index: int, **fields: object) -> None:
    """Write a slot as a hostile job may: any content, but a fresh even sequence number."""
    raw = record.slot(index)
    slot = np.frombuffer(raw, SLOT)[0].copy()
    for name, value in {"state": State.IDLE, **fields}.items():
        slot[name] = value
    slot["seq"] = (int(slot["seq"]) | 1) + 1
    raw[:] = slot.tobytes()


def faults(reader: RecordReader) -> list[int]:
    """What had to be repaired since the last call."""
    found: list[int] = reader.faults.tolist()
    reader.faults[:] = 0
    return found


def check_sane(slots: NDArray[np.void]) -> None:
    """What every snapshot promises, whatever the record holds."""
    counts = [slots[name] for name in ("done", "posted", "ready")]
    assert all((low <= high).all() for low, high in pairwise(counts))
    total = slots["iteration_total"]
    assert ((total == 0) | (total >= slots["ready"])).all()
    assert (np.maximum(total, slots["ready"]) <= MAX_BYTES).all()
    assert (slots["iteration"] <= MAX_COUNT).all()
    assert (slots["t_iteration_start_ns"] <= slots["t_update_ns"]).all()
    assert (slots["t_update_ns"] <= MAX_COUNT).all()
    assert (slots["state"] <= max(State)).all()
    assert (slots["role"] <= max(Role)).all()
    assert (slots["transport"] <= max(Transport)).all()
    assert np.isin(slots["family"], (0, 2, 10)).all()
    assert (slots["fd"] >= -1).all()
    for name in slots["job"]:
        assert len(name) < 32
        assert all(0x21 <= c <= 0x7E for c in name)
    assert not slots[slots["state"] == State.FREE].tobytes().strip(b"\0")


# ---- torn reads


def check_stress(reader: RecordReader, writes: Callable[[], bool]) -> None:
    """Snapshots of a flow whose writer keeps ready : posted : done at 3 : 2 : 1."""
    distinct = last = 0
    while distinct < 60:
        assert writes(), "the writer has ended"
        slot = reader.snapshot()[0]
        done = int(slot["done"])
        assert (slot["ready"], slot["posted"]) == (3 * done, 2 * done)
        assert done >= last
        distinct += done > last
        last = done
    assert not reader.faults.any()


@pytest.fixture
def stressed(
    start_daemon: Callable[..., Registrar], c_job: Callable[..., CJob]
) -> tuple[RecordReader, Callable[[], bool]]:
    """Reads the record of a C process that writes as fast as it can; and whether it still does."""
    daemon = start_daemon()
    job = c_job(daemon.server.path)
    job("flow 0 - 0 0 -")
    job("stress 0")
    return daemon.record.reader, lambda: job.process.poll() is None


def test_never_a_mix_from_a_c_process(stressed: Any) -> None:
    check_stress(*stressed)


def test_without_the_second_look_the_stress_would_show_a_mix(stressed: Any) -> None:
    """The stress is strong enough: a reader that ignores seq does see mixes."""
    reader, writes = stressed
    looks = (reader._live[:1].copy().view(SLOT)[0, 0] for _ in iter(writes, False))
    assert any((s["ready"], s["posted"]) != (3 * s["done"], 2 * s["done"]) for s in looks)


def test_never_a_mix_from_a_python_thread() -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # many switches in the middle of a write
    client = JobClient("/nonexistent", "job", rank=0, slots=1)
    assert client._record is not None
    flow = client.flow(None, 0, 0)
    stop = threading.Event()

    def write() -> None:
        flow.begin(1)
        while not stop.is_set():
            flow.advance(ready=3, posted=2, done=1)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        check_stress(RecordReader(client._record.fd), thread.is_alive)
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()
        client.close()


def test_a_slot_that_stays_odd_keeps_its_last_good_value_and_is_reported(record: Record) -> None:
    reader = RecordReader(record.fd)
    put(record, 1, ready=10, job=b"good")
    put(record, 2, ready=20)
    reader.snapshot()
    put(record, 1, ready=99, job=b"bad")
    put(record, 2, ready=21)
    record.slot(1)[0] |= 1  # its writer dies here
    record.slot(0)[0] |= 1
    for _ in range(3):
        slots = reader.snapshot()
        assert slots["ready"].tolist() == [0, 10, 21, 0]
        assert slots["job"][1] == b"good"
        assert reader.torn.tolist() == [0, 1]
    put(record, 1, ready=100)
    assert reader.snapshot()["ready"][1] == 100
    assert reader.torn.tolist() == [0]


# ---- hostile content


@pytest.mark.parametrize(
    ("wrong", "right", "fault"),
    [
        ({"state": 7}, {"state": State.FREE}, Fault.STATE),
        ({"role": 99}, {"role": Role.UNKNOWN}, Fault.STATE),
        ({"transport": 99}, {"transport": Transport.UNKNOWN}, Fault.STATE),
        ({"family": 1}, {"family": 0}, Fault.STATE),
        ({"fd": -7}, {"fd": -1}, Fault.RANGE),
        ({"ready": 2**64 - 1}, {"ready": MAX_BYTES}, Fault.RANGE),
        ({"iteration": 2**64 - 1}, {"iteration": MAX_COUNT}, Fault.RANGE),
        ({"period_ns": 2**51}, {"period_ns": 0}, Fault.RANGE),
        ({"t_update_ns": 2**63}, {"t_update_ns": MAX_COUNT}, Fault.RANGE),
        ({"posted": 5, "ready": 3}, {"posted": 5, "ready": 5}, Fault.ORDER),
        ({"done": 5, "posted": 3, "ready": 9}, {"done": 3, "posted": 3}, Fault.ORDER),
        ({"ready": 9, "iteration_total": 5}, {"iteration_total": 9}, Fault.ORDER),
        ({"t_iteration_start_ns": 9}, {"t_iteration_start_ns": 0}, Fault.ORDER),
        ({"job": b"a\x1b[31m\xff b"}, {"job": b"a_[31m__b"}, Fault.TEXT),
        ({"job": b"x" * 32}, {"job": b"x" * 31}, Fault.TEXT),
    ],
)
def test_a_wrong_value_is_repaired_and_counted(
    record: Record, wrong: dict[str, object], right: dict[str, object], fault: Fault
) -> None:
    reader = RecordReader(record.fd)
    put(record, 1, **wrong)
    put(record, 2, ready=1, job=b"fine")
    for expected in (fault, 0, 0):  # the same content is judged once
        slots = reader.snapshot()
        check_sane(slots)
        assert {name: slots[1][name] for name in right} == right
        assert faults(reader) == [0, expected, 0, 0]
    assert slots[2]["job"] == b"fine"


def test_counters_do_not_fall_within_an_iteration(record: Record) -> None:
    reader = RecordReader(record.fd)
    flow: dict[str, object] = {"sock_cookie": 5, "iteration": 3}
    put(record, 0, **flow, ready=10, posted=8, done=6)
    reader.snapshot()
    put(record, 0, **flow, ready=9, posted=9, done=1)
    assert reader.snapshot()[0][["ready", "posted", "done"]].item() == (10, 9, 6)
    assert faults(reader)[0] == Fault.BACKWARD
    for cookie, iteration, ready, fault in (
        (5, 4, 1, 0),
        (5, 2, 1, 0),  # back to a checkpoint
        (6, 2, 9, 0),  # another socket: another flow
        (0, 2, 9, 0),
        (0, 2, 1, 0),  # without a cookie it may be another one, too
    ):
        put(record, 0, sock_cookie=cookie, iteration=iteration, ready=ready, posted=0, done=0)
        assert reader.snapshot()[0]["ready"] == ready
        assert faults(reader)[0] == fault


def test_what_changes_without_a_write_is_not_seen(record: Record) -> None:
    reader = RecordReader(record.fd)
    put(record, 0, ready=10)
    before = reader.snapshot()
    record.slot(0)[112:120] = bytes([255] * 8)
    assert reader.snapshot().tobytes() == before.tobytes()


@settings(max_examples=150, deadline=None)
@given(st.lists(hnp.arrays(np.uint8, (SLOTS, SLOT.itemsize)), min_size=1, max_size=4))
def test_random_bytes_never_raise(pictures: list[NDArray[np.uint8]]) -> None:
    record = Record(SLOTS)
    try:
        reader = RecordReader(record.fd)
        for picture in pictures:
            for index in range(SLOTS):
                record.slot(index)[:] = picture[index].tobytes()
            check_sane(reader.snapshot())
            assert reader.torn.tolist() == np.flatnonzero(picture[:, 0] & 1).tolist()
        reader.close()
        assert not reader.snapshot()["state"].any()
    finally:
        record.close()


edges = st.sampled_from([0, 1, 2, 3, MAX_BYTES, MAX_BYTES + 1, MAX_COUNT, MAX_COUNT + 1, 2**64 - 1])
numbers = ("iteration", "ready", "posted", "done", "iteration_total")
times = ("t_iteration_start_ns", "t_update_ns")
wild = st.fixed_dictionaries(
    {
        "state": st.sampled_from([0, 1, 2, 2, 2, 3]),
        "role": st.sampled_from([1, 1, 1, 2, 99]),
        "sock_cookie": st.sampled_from([0, 7, 7, 7, 8]),
        "fd": st.sampled_from([3, 3, 3, -5]),
        **{name: st.one_of(st.integers(0, 5), edges) for name in numbers + times},
    }
)


@settings(max_examples=300, deadline=None)
@given(st.lists(wild, min_size=2, max_size=12))
def test_lies_keep_the_promises(lies: list[dict[str, object]]) -> None:
    record = Record(SLOTS)
    try:
        reader = RecordReader(record.fd)
        last = reader.snapshot()[0]
        for lie in lies:
            put(record, 0, **lie)
            slots = reader.snapshot()
            check_sane(slots)
            slot, keys = slots[0], ("sock_cookie", "iteration")
            if slot["sock_cookie"] and all(slot[key] == last[key] for key in keys):
                assert all(slot[n] >= last[n] for n in ("ready", "posted", "done"))
            last = slot
    finally:
        record.close()


# ---- records that are none


def memfd(content: bytes, seals: int = SEALS) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, content)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def content(
    magic: bytes = MAGIC, version: int = VERSION, slots: int = 2, size: int | None = None
) -> bytes:
    header = np.zeros(1, HEADER)
    header["magic"], header["version"], header["slots"] = magic, version, slots
    size = record_bytes(2) if size is None else size
    return header.tobytes().ljust(size, b"\0")[:size]


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: os.open("/etc/passwd", os.O_RDONLY), "`record`: must be a memfd"),
        (lambda: os.pipe()[0], "`record`: must be a memfd"),
        (lambda: memfd(content(), 0), "`seals`: must include F_SEAL_SHRINK, F_SEAL_GROW"),
        (lambda: memfd(content(), SEALS & ~fcntl.F_SEAL_GROW), "missing F_SEAL_GROW"),
        (lambda: memfd(b""), "`size`: must be at least 64 bytes, got 0"),
        (lambda: memfd(content(size=63)), "`size`: must be at least 64 bytes, got 63"),
        (lambda: memfd(content(magic=b"?lowslot")), "`magic`: must be b'flowslot', got b'?lowsl"),
        (lambda: memfd(content(version=2)), "`version`: must be 1, got 2"),
        (lambda: memfd(content(slots=0)), "`slots`: must be 1 to 4096, got 0"),
        (lambda: memfd(content(slots=2**32 - 1)), "`slots`: must be 1 to 4096, got 4294967295"),
        (lambda: memfd(content(slots=3)), "`size`: must be 832 bytes for 3 slots, got 576"),
        (lambda: memfd(content(slots=1)), "`size`: must be 320 bytes for 1 slots, got 576"),
    ],
)
def test_a_bad_record_is_refused_by_name(make: Callable[[], int], error: str) -> None:
    fd = make()
    with pytest.raises(RecordError) as caught:
        RecordReader(fd)
    assert error in str(caught.value)
    os.close(fd)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400), st.booleans(), st.integers(0, 0xF))
def test_random_memfds_are_refused_or_sound(raw: bytes, headed: bool, seals: int) -> None:
    fd = memfd((content(slots=1, size=64) if headed else b"") + raw, seals)
    try:
        check_sane(RecordReader(fd).snapshot())
    except RecordError as error:
        assert error.field in str(error)
    finally:
        os.close(fd)


def test_opened_changes_when_a_flow_comes_goes_or_becomes_another(record: Record) -> None:
    reader = RecordReader(record.fd)
    for fields, news in (
        ({}, 0),
        ({"ready": 10}, 1),
        ({"sock_cookie": 7, "ready": 10}, 1),
        ({"sock_cookie": 7, "ready": 11}, 0),  # progress is no new flow
        ({"sock_cookie": 9, "posted": 5, "ready": 4}, 1),
        ({"sock_cookie": 9, "rank": 1}, 1),
        ({"sock_cookie": 9, "rank": 1, "peer": 2}, 1),
        ({"sock_cookie": 9, "rank": 1, "peer": 2, "channel": 3}, 1),
        ({"sock_cookie": 9, "rank": 1, "peer": 2, "channel": 3, "role": Role.RING}, 1),
        ({"sock_cookie": 9, "state": State.FREE}, 1),
        ({"sock_cookie": 0, "rank": 1}, 1),  # of no socket
        ({"sock_cookie": 0, "rank": 1, "ready": 13}, 0),
    ):
        before = reader.opened
        if fields:
            put(record, 0, **fields)
        reader.look()
        assert reader.opened == before + news


@pytest.mark.parametrize("size", [0, 64, record_bytes(SLOTS) + 1])
def test_a_record_cannot_change_its_size(record: Record, size: int) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(record.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(record.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_a_punched_hole_reads_as_free_slots(record: Record) -> None:
    reader = RecordReader(record.fd)
    put(record, 0, ready=10)
    assert reader.snapshot()[0]["ready"] == 10
    length = str(record_bytes(SLOTS))
    subprocess.run(
        ["fallocate", "--punch-hole", "--length", length, f"/proc/{os.getpid()}/fd/{record.fd}"],
        check=True,
    )
    assert not reader.snapshot()["state"].any()


def test_a_flow_without_a_slot_does_nothing() -> None:
    class Nobody:
        def poll(self) -> bool:
            return False

        def ring(self, kind: object, slot: int) -> None:
            raise AssertionError

        def release(self, slot: int) -> None:
            raise AssertionError

    flow = FlowWriter(None, -1, Nobody())
    flow.begin(1, 2)
    flow.ready(1)
    flow.done(1)
    flow.close()
