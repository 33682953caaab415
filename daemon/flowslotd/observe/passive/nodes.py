# SPDX-License-Identifier: Apache-2.0
"""Is a process a node of a ps-lite job? Its environment says so. Pure.

Any user can start a process with any environment, so nothing in it is trusted: what is not
plausible is no node.
"""

from typing import NamedTuple

from flowslot_shm.layout import JOB_BYTES, Role, plain_text

MAX_ENVIRONMENT = 1 << 20
"""Bytes that are looked at; what begins behind them does not count."""
_ROLES = {b"worker": Role.PUSH, b"server": Role.PULL}


class Node(NamedTuple):
    """A worker or a server."""

    job: bytes
    """As the patch names it: `FLOWSLOT_JOB`, or else after the scheduler's address and port."""
    role: Role
    scheduler_port: int


def node_of(environment: bytes) -> Node | None:
    """The node whose environment this is (NAME=VALUE, each ended by a NUL); None: there is none."""
    if b"DMLC_ROLE=" not in environment:
        return None  # nearly all processes
    variables: dict[bytes, bytes] = {}
    for line in environment[:MAX_ENVIRONMENT].split(b"\0"):
        name, _, value = line.partition(b"=")
        variables.setdefault(name, value)  # the first one counts, as for getenv()
    role = _ROLES.get(variables.get(b"DMLC_ROLE", b""))
    uri, port = (variables.get(b"DMLC_PS_ROOT_" + name, b"") for name in (b"URI", b"PORT"))
    number = int(port) if port.isdigit() and len(port) <= 5 else 0
    if role is None or not 1 <= number <= 65535:
        return None
    job = variables.get(b"FLOWSLOT_JOB") or _short(b"pslite-" + uri + b"-" + port)
    return Node(plain_text(job, JOB_BYTES), role, number)


def _short(name: bytes) -> bytes:
    """One that is too long ends with a hash (FNV-1a) of the whole: others begin alike."""
    if len(name) < JOB_BYTES:
        return name
    code = 2166136261
    for byte in name:
        code = (code ^ byte) * 16777619 & 0xFFFFFFFF
    end = b"-%08x" % code
    return name[: JOB_BYTES - 1 - len(end)] + end
