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
ENUMS = (layout.State, layout.Role, layout.Transport, layout.Message)
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
