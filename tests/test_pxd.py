# SPDX-License-Identifier: Apache-2.0
"""The compiler knows rows by C structs, which are written from the dtypes that declare them."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def gen_pxd(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    import gen_pxd

    return gen_pxd


def test_structs_are_fresh() -> None:
    command = [sys.executable, SCRIPTS / "gen_pxd.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_struct_is_its_dtype(gen_pxd) -> None:
    dtype = np.dtype([("flow", "u8"), ("far", "?"), ("rate", "f8", (4,)), ("size", "i4")])
    fields = "    uint64_t flow\n    uint8_t far\n    double rate[4]\n    int32_t size\n"
    assert gen_pxd.struct("Row", dtype) == f"cdef packed struct Row:\n{fields}"


@pytest.mark.parametrize(
    ("dtype", "why"),
    [
        (np.dtype([("far", "?"), ("rate", "f8")], align=True), "begins at 8, not at 1"),
        (np.dtype([("name", "S4")]), "Row.name: |S4 has no C type here"),
        (np.dtype("f8"), "must be a packed dtype with fields"),
    ],
)
def test_what_c_would_see_otherwise_is_refused(gen_pxd, dtype, why: str) -> None:
    with pytest.raises(ValueError) as raised:
        gen_pxd.struct("Row", dtype)
    assert why in str(raised.value)


def test_a_changed_row_is_written_anew_and_no_struct_is_written_by_hand(gen_pxd) -> None:
    head, end = "# struct Entry from flowslotd.pace.pacer:ENTRY\n", "# end\n"
    stale = f"{head}cdef packed struct Entry:\n    double cookie\n{end}"
    fresh = gen_pxd.generated(stale)
    assert "    uint64_t cookie\n" in fresh and "double cookie" not in fresh
    assert gen_pxd.generated(fresh) == fresh
    with pytest.raises(ValueError, match="a struct without"):
        gen_pxd.generated(stale.removeprefix(head))
