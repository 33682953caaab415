# SPDX-License-Identifier: Apache-2.0
"""Lets all tests import the modules in helpers/."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "helpers"))
