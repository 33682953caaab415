# SPDX-License-Identifier: Apache-2.0
"""The Python view of the shared tables is the C header's."""

import subprocess
from pathlib import Path

import numpy as np
import pytest

from flowslotd.pace import edt, layout

BPF = Path(__file__).parents[2] / "bpf"
TYPES = {
    "fs_ctl": layout.CTL,
    "fs_stat": layout.STAT,
    "fs_event": layout.EVENT,
    "fs_edt_ctl": edt.CTL,
    "fs_edt_stat": edt.STAT,
}


def fields(name: str, dtype: np.dtype) -> list[str]:
    """Packed, so that no member of the header is missing where sizes and offsets are the same."""
    assert not dtype.isalignedstruct
    lines = [f"{name} {dtype.itemsize}"]
    for field in dtype.names:
        kind, offset = dtype.fields[field][:2]
        lines.append(f"{name}.{field} {offset} {kind.itemsize}")
    return lines


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_offsets_and_sizes_are_those_of_the_header(tmp_path: Path, compiler: str) -> None:
    headers = "<stdio.h>", "<stddef.h>", f'"{BPF}/flowslot.h"', "<linux/types.h>", f'"{BPF}/edt.h"'
    source = [f"#include {header}" for header in headers] + ["int main(void) {"]
    for name, dtype in TYPES.items():
        source.append(f'printf("{name} %zu\\n", sizeof(struct {name}));')
        for field in dtype.names:
            member = f"((struct {name} *)0)->{field}"
            source.append(
                f'printf("{name}.{field} %zu %zu\\n", offsetof(struct {name}, {field}), '
                f"sizeof({member}));"
            )
    modes = layout.Mode.__members__
    kinds = {kind.upper(): number for number, kind in layout.KINDS.items()}
    for constant in [*modes, *kinds]:
        source.append(f'printf("FS_{constant} %d\\n", (int)FS_{constant});')
    source.append('printf("FS_EDT_SLOTS %d\\n", FS_EDT_SLOTS);')
    source.append("return 0; }")
    program = tmp_path / "print.c"
    program.write_text("\n".join(source))
    subprocess.run([compiler, str(program), "-o", str(tmp_path / "print")], check=True)
    printed = subprocess.run([tmp_path / "print"], check=True, capture_output=True, text=True)
    want = [line for name, dtype in TYPES.items() for line in fields(name, dtype)]
    want += [f"FS_{key} {int(value)}" for key, value in [*modes.items(), *kinds.items()]]
    want.append(f"FS_EDT_SLOTS {edt.SLOTS}")
    assert printed.stdout.split("\n")[:-1] == want
