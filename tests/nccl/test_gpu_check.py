# SPDX-License-Identifier: Apache-2.0
"""The check on a real GPU, as far as it goes without one: it is skipped, and reads records."""

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from waiting import settle

SCRIPT = Path(__file__).parents[2] / "nccl_patch" / "gpu_check.py"


@pytest.fixture(scope="module")
def gpu_check() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_without_a_gpu_it_says_that_it_is_skipped(gpu_check: Any) -> None:
    if not gpu_check.Cuda().absent:
        pytest.skip("there is a GPU: make gpu-check")
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("gpu-check: skipped, there is no GPU: ")


def test_it_reads_what_ranks_report(
    gpu_check: Any, pair: Callable[..., Any], tmp_path: Path
) -> None:
    path = str(tmp_path / "register.sock")
    registrar = gpu_check.Registrar(path)
    settings = {"FLOWSLOT_SOCKET": path, "NCCL_SOCKET_NTHREADS": "2", "NCCL_NSOCKS_PERTHREAD": "2"}
    expected = 2 * 8 * 1_000_000  # both ends send
    values = {"size": 1_000_000, "tell": 1, "rest": 1500}
    pool = ThreadPoolExecutor(1)
    run = pool.submit(pair, 12, settings, **values)
    settle(lambda: len(registrar.records) == 2 and len(registrar.flows()) == 8)
    gpu_check.check_record(registrar, expected)
    with pytest.raises(gpu_check.Failed, match="expected 15999999 bytes"):
        gpu_check.check_record(registrar, expected - 1, seconds=0.1)
    run.result()
    registrar.close()
