# SPDX-License-Identifier: Apache-2.0
"""Lets the tests here import their helper modules."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "helpers"))
