# SPDX-License-Identifier: Apache-2.0
"""Inserts what patches insert: `apply.py FOLDER PATCH...`.

The patches are unified diffs without context that only insert, all of them against the same files:
so any of them can be applied, alone (`patch -p1` does that too) or together.
"""

import re
import sys
from pathlib import Path

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


def main() -> int:
    """Exit status."""
    folder, *patches = map(Path, sys.argv[1:])
    found: Insertions = {}
    try:
        for patch in patches:
            read(patch.read_text(), found)
        new = {
            name: merged((folder / name).read_text(), name, hunks) for name, hunks in found.items()
        }
    except (OSError, ValueError) as error:
        print(f"pslite: {error}", file=sys.stderr)
        return 1
    for name, text in new.items():
        (folder / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
