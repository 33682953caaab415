# SPDX-License-Identifier: Apache-2.0
"""The rooms of the house: a folder at the top that holds packages named `flowslot*` is one.

No tool keeps a list of them. The build hook asks `packages`; set-up, `make clean`, mypy and ruff
find them by the same pattern. A new room takes one decision, its layer in pyproject.toml's import
rules, and those fail until it is made.

    rooms.py    prints import-linter's configuration: pyproject.toml with the packages filled in
"""

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def packages(root: Path = ROOT) -> list[Path]:
    """Folders of all packages, relative to `root`."""
    return sorted(found.parent.relative_to(root) for found in root.glob("*/flowslot*/__init__.py"))


def import_rules() -> str:
    """TOML. Raises ValueError, which says what to change, when a package has no layer."""
    text = (ROOT / "pyproject.toml").read_text()
    names = [package.name for package in packages()]
    contracts = tomllib.loads(text)["tool"]["importlinter"]["contracts"]
    layers = [layer for contract in contracts for layer in contract.get("layers", ())]
    placed = {name.strip() for layer in layers for name in layer.split("|")}
    placed = {name for name in placed if "." not in name}  # others are inside one package
    for name in sorted(placed.symmetric_difference(names)):
        what = "has no such package: remove it" if name in placed else "needs it, in its layer"
        raise ValueError(f"{name}: `layers` of pyproject.toml's import rules {what}")
    return text.replace("[tool.importlinter]\n", f"[tool.importlinter]\nroot_packages = {names}\n")


if __name__ == "__main__":
    try:
        print(import_rules())
    except ValueError as error:
        sys.exit(str(error))
