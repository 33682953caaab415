# SPDX-License-Identifier: Apache-2.0
"""Inserts what patches insert: `apply.py [--force] FOLDER PATCH...`.

The patches are unified diffs without context that only insert, all of them against the same files:
so any of them can be applied, alone (`patch -p1` does that too) or together. Files that are not
those of `source.sha256` (of another version, or patched already) are refused, unless forced.
"""

import hashlib
import re
import sys
from pathlib import Path

KNOWN = Path(__file__).with_name("source.sha256")

HUNK = re.compile(r"@@ -(\d+),0 \+\d+(?:,(\d+))? @@")
Insertions = dict[str, list[tuple[int, list[str]]]]
"""By file: after which of its lines which are inserted."""


def read(patch: str, found: Insertions) -> None:
    """Add what a patch inserts. Raises ValueError."""
    lines = iter(patch.splitlines())
    name = ""
    for line in lines:
        if line.startswith("+++ "):
            name = line[4:].split("\t")[0].partition("/")[2]
        elif line.startswith("@@"):
            hunk = HUNK.match(line)
            if hunk is None:
                raise ValueError(f"{name}: {line}: a hunk that does more than insert")
            added = [line[1:] for _, line in zip(range(int(hunk[2] or 1)), lines, strict=False)]
            if len(added) != int(hunk[2] or 1):
                raise ValueError(f"{name}: the patch ends within a hunk")
            found.setdefault(name, []).append((int(hunk[1]), added))


def merged(text: str, name: str, hunks: list[tuple[int, list[str]]]) -> str:
    """A file with insertions. Raises ValueError."""
    lines = text.split("\n")
    for after, added in sorted(hunks, key=lambda hunk: hunk[0], reverse=True):
        if after >= len(lines):
            raise ValueError(f"{name} has no line {after}: the patch is for another source")
        lines[after:after] = added
    return "\n".join(lines)


def source(folder: Path, name: str, forced: bool) -> str:
    """A file that is to be patched. Raises ValueError: it is not what the patches are for."""
    data = (folder / name).read_bytes()
    known = dict(line.split()[::-1] for line in KNOWN.read_text().splitlines())
    if not forced and known.get(name) != hashlib.sha256(data).hexdigest():
        raise ValueError(
            f"{name} is another version than the patches are for, or patched already; --force "
            "inserts at the same lines all the same: look at the result"
        )
    return data.decode()


def main() -> int:
    """Exit status."""
    forced = sys.argv[1:2] == ["--force"]
    folder, *patches = map(Path, sys.argv[1 + forced :])
    found: Insertions = {}
    try:
        for patch in patches:
            read(patch.read_text(), found)
        new = {
            name: merged(source(folder, name, forced), name, hunks) for name, hunks in found.items()
        }
    except (OSError, ValueError) as error:
        print(f"pslite: {error}", file=sys.stderr)
        return 1
    for name, text in new.items():
        (folder / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
