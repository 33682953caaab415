# SPDX-License-Identifier: Apache-2.0
"""Compiled modules as their source says."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch


def plain(module: ModuleType, *imported: tuple[str, ModuleType]) -> Any:
    """The source of a module, interpreted; `imported`: what it gets by these names."""
    source = Path(module.__file__).with_name(f"{module.__name__.rpartition('.')[2]}.py")
    spec = importlib.util.spec_from_file_location("plain_loops", source)
    made = importlib.util.module_from_spec(spec)
    with patch.dict(sys.modules, imported):
        spec.loader.exec_module(made)
    return made
