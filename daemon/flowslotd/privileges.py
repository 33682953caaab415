# SPDX-License-Identifier: Apache-2.0
"""Which capabilities this process has."""

import re
from collections.abc import Iterable
from pathlib import Path

_BITS = {
    "CAP_DAC_READ_SEARCH": 2,
    "CAP_NET_ADMIN": 12,
    "CAP_SYS_PTRACE": 19,
    "CAP_PERFMON": 38,
    "CAP_BPF": 39,
}  # fmt: skip


def lacking(names: Iterable[str]) -> list[str]:
    """Those of these capabilities that are not effective. Raises OSError."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    effective = int(re.findall(r"^CapEff:\s*(\w+)", status, re.MULTILINE)[0], 16)
    return [name for name in names if not effective >> _BITS[name] & 1]
