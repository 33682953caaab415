# SPDX-License-Identifier: Apache-2.0
"""The patches insert, and nothing else, wherever they are applied."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[2]
PATCHES = HERE / "pslite_patch"
SOURCE = HERE / "build" / "pslite" / "source"
NAMES = ("flowslot.patch", "calm.patch", "start.patch")


def apply(to: Path, *patches: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PATCHES / "apply.py"), str(to), *map(str, patches)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def files(folder: Path) -> dict[str, list[str]]:
    names = ("src/zmq_van.h", "include/ps/kv_app.h", "src/van.cc")
    return {name: (folder / name).read_text().split("\n") for name in names}


@pytest.mark.parametrize("names", [NAMES, NAMES[:1], NAMES[1:], NAMES[2:]])
def test_what_was_there_is_there_still(tmp_path: Path, names: tuple[str, ...]) -> None:
    shutil.copytree(SOURCE, tmp_path / "ps-lite")
    done = apply(tmp_path / "ps-lite", *(PATCHES / name for name in names))
    assert done.returncode == 0, done.stderr
    added = 0
    for name, before in files(SOURCE).items():
        rest = iter(files(tmp_path / "ps-lite")[name])
        assert all(line in rest for line in before)  # in this order
        added += len(files(tmp_path / "ps-lite")[name]) - len(before)
    texts = [(PATCHES / name).read_text().splitlines() for name in names]
    kinds = ("+", "@@", "---", "diff")  # nothing is quoted
    assert all(line.startswith(kinds) for text in texts for line in text)
    assert added == sum(line[0] == "+" and line[:3] != "+++" for text in texts for line in text)


@pytest.mark.parametrize("name", NAMES)
def test_one_alone_is_what_patch_makes_of_it(tmp_path: Path, name: str) -> None:
    if shutil.which("patch") is None:
        pytest.skip("there is no patch(1)")
    for folder in ("ours", "theirs"):
        shutil.copytree(SOURCE, tmp_path / folder)
    assert apply(tmp_path / "ours", PATCHES / name).returncode == 0
    with (PATCHES / name).open() as text:
        subprocess.run(["patch", "-p1", "-s"], cwd=tmp_path / "theirs", stdin=text, check=True)
    assert files(tmp_path / "ours") == files(tmp_path / "theirs")


@pytest.mark.parametrize(
    ("hunk", "problem"),
    [
        ("@@ -3,1 +3,1 @@\n-x\n+y\n", "a hunk that does more than insert"),
        ("@@ -99999,0 +100000 @@\n+y\n", "src/zmq_van.h has no line 99999"),
        ("@@ -3,0 +4,2 @@\n+y\n", "src/zmq_van.h: the patch ends within a hunk"),
    ],
)
def test_a_patch_for_another_source_is_refused(tmp_path: Path, hunk: str, problem: str) -> None:
    shutil.copytree(SOURCE, tmp_path / "ps-lite")
    before = files(tmp_path / "ps-lite")
    patch = tmp_path / "other.patch"
    patch.write_text(f"--- a/src/zmq_van.h\n+++ b/src/zmq_van.h\n{hunk}")
    done = apply(tmp_path / "ps-lite", PATCHES / "flowslot.patch", patch)
    assert done.returncode == 1
    assert problem in done.stderr and "Traceback" not in done.stderr
    assert files(tmp_path / "ps-lite") == before


@pytest.mark.parametrize("name", NAMES)
def test_another_version_is_refused_unless_forced(tmp_path: Path, name: str) -> None:
    shutil.copytree(SOURCE, tmp_path / "ps-lite")
    assert apply(tmp_path / "ps-lite", PATCHES / name).returncode == 0
    before = files(tmp_path / "ps-lite")
    again = apply(tmp_path / "ps-lite", PATCHES / name)
    assert again.returncode == 1
    assert "another version than the patches are for, or patched already" in again.stderr
    assert files(tmp_path / "ps-lite") == before
    forced = apply(Path("--force"), tmp_path / "ps-lite", PATCHES / name)
    assert forced.returncode == 0, forced.stderr
    assert files(tmp_path / "ps-lite") != before
