# SPDX-License-Identifier: Apache-2.0
"""Running the system's own tools."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence


class LabError(Exception):
    """The lab itself could not do something (a command failed, a process did not answer)."""


def run(command: Sequence[str], stdin: str = "") -> str:
    """Run a tool; LabError with its message when it fails."""
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LabError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout
