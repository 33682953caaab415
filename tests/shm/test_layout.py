# SPDX-License-Identifier: Apache-2.0
"""The C header and the NumPy types describe the same bytes, for every compiler there is."""

import itertools
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from flowslot_shm import layout

SHM = Path(__file__).parents[2] / "shm"
STRUCTS = ("header", "slot", "register", "reply", "doorbell")
ENUMS = (layout.State, layout.Role, layout.Collective, layout.Transport, layout.Message)
COMPILERS = [
    ("gcc", "-std=c99", "c"),
    ("g++", "-std=c++11", "cpp"),
    ("clang", "-std=c99", "c"),
    ("clang++", "-std=c++11", "cpp"),
]


@pytest.mark.parametrize(("compiler", "standard", "suffix"), COMPILERS)
def test_header_and_dtype_agree(compiler: str, standard: str, suffix: str, tmp_path: Path) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler}")
    lines, expected = [], []
    for name in STRUCTS:
        struct, dtype = f"struct flowslot_{name}", getattr(layout, name.upper())
        lines.append(f'P("{name} %u\\n", (unsigned)sizeof({struct}));')
        expected.append(f"{name} {dtype.itemsize}")
        for field, (kind, offset) in dtype.fields.items():
            lines.append(
                f'P("{name}.{field} %u %u\\n", (unsigned)offsetof({struct}, {field}),'
                f" (unsigned)sizeof((({struct} *)0)->{field}));"
            )
            expected.append(f"{name}.{field} {offset} {kind.itemsize}")
    for member in itertools.chain(*ENUMS):
        name = "NO_TRANSPORT" if member is layout.Transport.UNKNOWN else member.name
        lines.append(f'P("{name} %d\\n", FLOWSLOT_{name});')
        expected.append(f"{name} {int(member)}")
    lines.append('P("%s %s %d\\n", FLOWSLOT_MAGIC, FLOWSLOT_DEFAULT_PATH, FLOWSLOT_VERSION);')
    expected.append(f"{layout.MAGIC.decode()} {layout.DEFAULT_PATH} {layout.VERSION}")
    source = tmp_path / f"layout.{suffix}"
    body = "\n    ".join(lines)
    source.write_text(
        '#include "flowslot_shm.h"\n#include <stdio.h>\n#define P printf\n'
        f"int main(void) {{\n    {body}\n    return 0;\n}}\n"
    )
    flags = ["-Wall", "-Wextra", "-Werror", "-pedantic", f"-I{SHM}"]
    program = tmp_path / "layout"
    subprocess.run([compiler, standard, *flags, source, "-o", program], check=True)
    printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    assert printed.splitlines() == expected


NAMES = """
#include "flowslot_shm.h"
#include <stdio.h>
int main(int argc, char **argv) {
    static struct flowslot job;
    for (int i = 1; i < argc; i++) {
        flowslot_open(&job, "/nonexistent", argv[i], 0, 1);
        printf("%s\\n", job.job);
        flowslot_close(&job);
    }
    return 0;
}
"""
SEED = "mixtral-8x7b-sft-2031-02-03-lr3e-5-run"
ALIKE = [
    *("run", "run-1", "a" * 30, "a" * 31, "a" * 32, "a" * 33, "a" * 300),
    *(f"{SEED}{n}" for n in range(12)),
    *("\u8bad\u7ec3\u7532", "\u8bad\u7ec3\u4e59", "lr 0.1", "lr_0.1", "lr\t0.1", "b\x7f"),
    *("x" * n + "\u00e9" for n in (20, 21, 22, 29, 30, 31)),
]
"""Names that are easily taken for each other when they are cut, or replaced in part."""


@pytest.mark.parametrize(("compiler", "standard", "suffix"), COMPILERS[:2])
def test_jobs_of_different_names_are_different_jobs(
    compiler: str, standard: str, suffix: str, tmp_path: Path
) -> None:
    """And have the same names in C and in Python."""
    source, program = tmp_path / f"names.{suffix}", tmp_path / "names"
    source.write_text(NAMES)
    flags = ["-Wall", "-Wextra", "-Werror", f"-I{SHM}"]
    subprocess.run([compiler, standard, *flags, source, "-o", program], check=True)
    printed = subprocess.run([program, *ALIKE], check=True, capture_output=True).stdout
    names = printed.splitlines()
    assert names == [layout.plain_text(name, layout.JOB_BYTES) for name in ALIKE]
    assert len(set(names)) == len(ALIKE)
    assert all(len(name) <= 31 and name.isascii() for name in names)
    kept = [name for name in ALIKE if name.encode() in names]
    assert kept == ["run", "run-1", "a" * 30, "a" * 31, "lr_0.1"], "the others say so at their ends"
    for name in names:
        assert layout.plain_text(name, layout.JOB_BYTES) == name, "as it comes to the daemon"


def test_packed_doorbell_is_the_doorbell() -> None:
    raw = layout.PACKED_DOORBELL.pack(layout.MAGIC, layout.VERSION, layout.Message.END, 7)
    bell = np.frombuffer(raw, layout.DOORBELL)[0]
    assert bell.item() == (layout.MAGIC, layout.VERSION, layout.Message.END, 7)


def test_hardware_fence_is_there_where_it_would_be_needed() -> None:
    layout.hardware_fence()()


def test_addresses() -> None:
    assert layout.address(2, bytes([10, 0, 0, 1]) + bytes(12)) == "10.0.0.1"
    assert layout.address(10, bytes(15) + b"\1") == "::1"
    assert layout.address(0, bytes(16)) == ""
