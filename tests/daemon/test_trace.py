# SPDX-License-Identifier: Apache-2.0
"""The daemon's trace: a ring of records in a file."""

import math
from pathlib import Path

import numpy as np
import pytest

from flowslot.protocol.grants import Granted
from flowslotd.trace import ASKED, GRANTED, HEADER, IN_FORCE, MAGIC, RECORD, Trace


def read(path: Path) -> tuple[int, list[tuple[int, float, int]]]:
    data = path.read_bytes()
    magic, capacity, written = np.frombuffer(data, HEADER, 1)[0].tolist()
    records = np.frombuffer(data, RECORD, capacity, HEADER.itemsize)
    assert magic == MAGIC
    return written, [tuple(one) for one in records[["id", "rate", "kind"]].tolist()]


def test_records_are_kept_in_a_ring(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "t", capacity=4)
    trace.asked([(7, 100.0)])
    trace.granted([Granted(7, 5.0, 6.0)])
    trace.in_force([(8, 2.0), (9, 3.0)])
    assert read(tmp_path / "t") == (
        4,
        [(7, 100.0, ASKED), (7, 5.0, GRANTED), (8, 2.0, IN_FORCE), (9, 3.0, IN_FORCE)],
    )
    trace.let_go([9])
    written, records = read(tmp_path / "t")
    assert written == 5 and records[0][0] == 9 and math.isnan(records[0][1])
    assert records[1:] == [(7, 5.0, GRANTED), (8, 2.0, IN_FORCE), (9, 3.0, IN_FORCE)]


def test_times_are_of_the_monotonic_clock(tmp_path: Path) -> None:
    import time

    before = time.monotonic_ns()
    Trace(tmp_path / "t", capacity=4).asked([(1, 1.0)])
    ns = np.frombuffer((tmp_path / "t").read_bytes(), RECORD, 1, HEADER.itemsize)["ns"][0]
    assert before <= ns <= time.monotonic_ns()


def test_a_link_in_the_place_of_the_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("keep")
    (tmp_path / "t").symlink_to(tmp_path / "other")
    with pytest.raises(OSError):
        Trace(tmp_path / "t")
    assert (tmp_path / "other").read_text() == "keep"
