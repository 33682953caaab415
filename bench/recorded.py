# SPDX-License-Identifier: Apache-2.0
"""What was measured, as tables: `python -m bench.recorded [NAME ...]`.

The data is in results.toml. Pages of docs/ (PAGES) show some of its tables: a comment
`<!-- table: NAME -->`, then the table. `--write` renews the tables that stand there.
"""

import argparse
import re
import tomllib
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results.toml")
DOCS = Path(__file__).parents[1] / "docs"
PAGES = (DOCS / "evaluation.md", DOCS / "papers.md")
SHOWN = re.compile(r"<!-- table: ([\w-]+) -->\n(?:\|.*\n)*")


def read() -> dict[str, dict[str, Any]]:
    """The sets by their names. ValueError: one of them is incomplete, or there twice."""
    sets: dict[str, dict[str, Any]] = {}
    for one in tomllib.loads(RESULTS.read_text())["set"]:
        name = one["name"]
        if name in sets:
            raise ValueError(f"{name}: is there twice")
        for field in ("title", "command", "when", "columns", "rows"):
            if not one.get(field):
                raise ValueError(f"{name}: needs `{field}`")
        for row in one["rows"]:
            if len(row) != len(one["columns"]):
                raise ValueError(f"{name}: {row[0]} needs {len(one['columns'])} columns")
        sets[name] = one
    return sets


def table(one: dict[str, Any]) -> str:
    """A set's rows as a table of Markdown."""
    lines = [one["columns"], ["---"] * len(one["columns"]), *one["rows"]]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def described(one: dict[str, Any]) -> str:
    """A set with all that is known of it."""
    head = f"{one['name']}: {one['title']}\n{one['when']}, {one['command']}\n"
    note = f"{one['note']}\n" if "note" in one else ""
    return f"{head}\n{table(one)}{note}"


def renewed(text: str, sets: dict[str, dict[str, Any]]) -> str:
    """The text with its tables as they are in `sets`. ValueError: no set has such a name."""

    def renew(found: re.Match[str]) -> str:
        name = found[1]
        if name not in sets:
            raise ValueError(f"no set is called {name}")
        return f"<!-- table: {name} -->\n{table(sets[name])}"

    return SHOWN.sub(renew, text)


def main() -> None:
    sets = read()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of: {', '.join(sets)}")
    parser.add_argument("--write", action="store_true", help="renew the tables in docs/")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in sets]
    if unknown:
        parser.error(f"no set is called {unknown[0]}; must be one of: {', '.join(sets)}")
    if options.write:
        for page in PAGES:
            page.write_text(renewed(page.read_text(), sets))
    else:
        print("\n".join(described(sets[name]) for name in options.names or sets))


if __name__ == "__main__":
    main()
