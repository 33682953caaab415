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
    """Those of these that are not effective. Raises OSError: the kernel does not tell."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    told = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    if told is None:
        raise OSError("/proc/self/status has no CapEff")
    effective = int(told[1], 16)
    return [name for name in names if not effective >> _BITS[name] & 1]
