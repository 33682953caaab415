# SPDX-License-Identifier: Apache-2.0
"""Writes the C structs in `.pxd` files from the NumPy dtypes that declare them.

    gen_pxd.py            brings all up to date
    gen_pxd.py --check    names those that are not, and fails

In a `.pxd`, two comments enclose a struct. The first says where its dtype is, MODULE:NAME:

    # struct Row from flowslot.arbiter.ledger:ROW
    # end
"""

import re
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import FileFinder, SourceFileLoader
from pathlib import Path

import numpy as np

from rooms import ROOT, packages

BLOCK = re.compile(r"^# struct (\w+) from ([\w.]+):(\w+)\n(.*?)^# end$", re.M | re.S)
STRUCT = re.compile(r"^cdef (?:packed )?struct ", re.M)
TYPES = {
    **{f"{sign}int{bits}": f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    "bool": "uint8_t",
    "float32": "float",
    "float64": "double",
}


def struct(name: str, dtype: np.dtype[np.void]) -> str:
    """The packed struct. Raises ValueError where C has no equal, or NumPy leaves gaps."""
    fields, end = [], 0
    for field in dtype.names or ():
        kind, offset = dtype.fields[field][:2]
        base, shape = kind.subdtype or (kind, ())
        if base.name not in TYPES:
            raise ValueError(f"{name}.{field}: {base} has no C type here: use one of {list(TYPES)}")
        if offset != end:
            raise ValueError(f"{name}.{field}: begins at {offset}, not at {end}: pack the dtype")
        end += kind.itemsize
        fields.append(f"    {TYPES[base.name]} {field}{''.join(f'[{size}]' for size in shape)}\n")
    if not fields or end != dtype.itemsize:
        raise ValueError(f"{name}: must be a packed dtype with fields, got {dtype}")
    return f"cdef packed struct {name}:\n{''.join(fields)}"


def generated(text: str) -> str:
    """A `.pxd` with its structs as their dtypes are now."""

    def block(found: re.Match[str]) -> str:
        name, module, constant = found.group(1, 2, 3)
        head = found[0].partition("\n")[0]
        return f"{head}\n{struct(name, getattr(import_module(module), constant))}# end"

    if STRUCT.search(BLOCK.sub("", text)):
        raise ValueError(
            "a struct without `# struct NAME from MODULE:DTYPE` above and `# end` below"
        )
    return BLOCK.sub(block, text)


def from_sources_only(folders: Sequence[Path]) -> None:
    """Import what is in these from `.py` files: compiled modules may be stale, or not there."""

    def hook(path: str) -> FileFinder:
        if not any(Path(path).is_relative_to(folder) for folder in folders):
            raise ImportError
        return FileFinder(path, (SourceFileLoader, [".py"]))

    sys.path[:0] = [str(folder) for folder in folders]
    sys.path_hooks.insert(0, hook)
    sys.path_importer_cache.clear()


def main(check: bool) -> int:
    """Exit status 1: some were not fresh, or could not be made."""
    folders = sorted({ROOT / package.parent for package in packages()})
    from_sources_only(folders)
    status = 0
    for path in sorted(found for folder in folders for found in folder.rglob("*.pxd")):
        name, old = path.relative_to(ROOT), path.read_text()
        try:
            new = generated(old)
        except (ValueError, ImportError, AttributeError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            status = 1
            continue
        if new == old:
            continue
        if check:
            print(f"{name}: not as its dtypes say; run `make pxd`", file=sys.stderr)
            status = 1
        else:
            path.write_text(new)
            print(f"{name}: written")
    return status


if __name__ == "__main__":
    sys.exit(main(check=sys.argv[1:] == ["--check"]))
