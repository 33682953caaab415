# SPDX-License-Identifier: Apache-2.0
"""Stock NCCL, out of the wheels nvidia-nccl-cu12: headers and libnccl.so.2, in a cache folder
outside the repository.

`$FLOWSLOT_NCCL_WHEELS` names that folder (default ~/.cache/flowslot/nccl). A wheel has 165 to 270
MB: what is not there is fetched only with `FLOWSLOT_NCCL_DOWNLOAD=1`, one at a time, from the
registry that pip is configured for.
"""

import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("FLOWSLOT_NCCL_WHEELS") or Path.home() / ".cache/flowslot/nccl")
NEWEST = "2.32.3"


@dataclass(frozen=True)
class Stock:
    version: str
    folder: Path

    @property
    def include(self) -> Path:
        return self.folder / "nvidia/nccl/include"

    @property
    def library(self) -> Path:
        return self.folder / "nvidia/nccl/lib/libnccl.so.2"


def stock(version: str) -> Stock:
    """Skips the test where it cannot be had."""
    found = Stock(version, CACHE / version)
    if not found.library.exists():
        name = f"nvidia-nccl-cu12=={version}"
        if os.environ.get("FLOWSLOT_NCCL_DOWNLOAD") != "1":
            pytest.skip(f"{name} is not in {CACHE}; FLOWSLOT_NCCL_DOWNLOAD=1 fetches it")
        _fetch(name, found.folder)
    return found


def _fetch(name: str, to: Path) -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch]
        done = subprocess.run([*pip, name], capture_output=True, text=True, check=False)
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode != 0 or not wheels:
            pytest.skip(f"{name} cannot be had: {done.stderr.strip().splitlines()[-1:]}")
        whole = Path(scratch) / "whole"
        with zipfile.ZipFile(wheels[0]) as wheel:
            kept = [n for n in wheel.namelist() if n.startswith("nvidia/nccl/")]
            wheel.extractall(whole, kept)
        whole.rename(to)
