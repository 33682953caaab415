# SPDX-License-Identifier: Apache-2.0
"""Shared by the tests of scenario files."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "helpers"))
