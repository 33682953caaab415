# SPDX-License-Identifier: Apache-2.0
"""Which capabilities this process has, as the kernel takes them."""

import os
import re
from collections.abc import Iterable
from pathlib import Path

_ADMIN = 21
_BITS = {
    "CAP_DAC_READ_SEARCH": 2,
    "CAP_NET_ADMIN": 12,
    "CAP_SYS_PTRACE": 19,
    "CAP_PERFMON": 38,
    "CAP_BPF": 39,
}  # fmt: skip


_FIRST_ONLY = "CAP_PERFMON", "CAP_BPF"
"""Of no use in a user namespace, but for the first one: the kernel asks that one for them.
CAP_SYS_ADMIN has them included."""
_FIRST_NAMESPACE = 0xEFFFFFFD
"""The number of the first user namespace: PROC_USER_INIT_INO."""


def lacking(names: Iterable[str]) -> list[str]:
    """Those of these that this process cannot use. Raises OSError: the kernel does not tell."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    told = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    if told is None:
        raise OSError("/proc/self/status has no CapEff")
    effective = int(told[1], 16)
    if effective >> _ADMIN & 1:
        effective |= sum(1 << _BITS[name] for name in _FIRST_ONLY)
    if in_user_namespace():
        effective &= ~sum(1 << _BITS[name] for name in _FIRST_ONLY)
    return [name for name in names if not effective >> _BITS[name] & 1]


def in_user_namespace() -> bool:
    """Whether this process's user namespace is another than the first, as in rootless containers:
    its capabilities count only for what belongs to that namespace."""
    try:
        return os.stat("/proc/self/ns/user").st_ino != _FIRST_NAMESPACE
    except FileNotFoundError:  # a kernel without user namespaces
        return False
