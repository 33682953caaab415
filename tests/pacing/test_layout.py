# SPDX-License-Identifier: Apache-2.0
"""The Python view of the shared tables is the C header's."""

import subprocess
from pathlib import Path

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


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_offsets_and_sizes_are_those_of_the_header(tmp_path: Path, compiler: str) -> None:
    kinds = {kind.upper(): number for number, kind in layout.KINDS.items()}
    constants = {**layout.Mode.__members__, **kinds, "EDT_SLOTS": edt.SLOTS}
    facts = [f"FS_{name} == {int(value)}" for name, value in constants.items()]
    for name, dtype in TYPES.items():
        # Packed, so that no member of the header is missing where sizes and offsets are the same.
        assert not dtype.isalignedstruct
        facts.append(f"sizeof(struct {name}) == {dtype.itemsize}")
        for field, (kind, offset, *_) in dtype.fields.items():
            facts.append(f"offsetof(struct {name}, {field}) == {offset}")
            facts.append(f"sizeof(((struct {name} *)0)->{field}) == {kind.itemsize}")
    headers = "<stddef.h>", f'"{BPF}/flowslot.h"', "<linux/types.h>", f'"{BPF}/edt.h"'
    source = [f"#include {header}" for header in headers]
    program = tmp_path / "facts.c"
    program.write_text("\n".join(source + [f'_Static_assert({it}, "{it}");' for it in facts]))
    subprocess.run([compiler, "-fsyntax-only", str(program)], check=True)
